"""Measure the gain from back-translation on Multi30k with few pairs.

python -m scripts.benchmarks.back_translation --data FOLDER --output_dir outputs/back_translation

FOLDER contains train, val and test_2016_flickr in English (.en) and German (.de). The first
`--pairs` pairs are the parallel text; of the others, only the German side is used. The command
`vanilla-transformer train --config back_translation` trains three models: the reverse one, German
to English; one on the pairs alone; and one on the pairs and the remaining German text with the
reverse model's translations, which have a tag. Finished runs are kept in results.json, so that an
interrupted command can be repeated. The table, back_translation.md, has the scores on the test set.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from transformers.hf_argparser import HfArg

from scripts.benchmarks.multi30k import METRICS, expect_data, score
from scripts.commands import cpu_seconds, run, train
from scripts.reports import Results, markdown, read_options, write_lines
from vanilla_transformer.data.text_files import read_file

REVERSE, PAIRS, SYNTHETIC = ROWS = ("reverse", "pairs", "back_translation")


@dataclass
class BackTranslationArguments:
    data: str = HfArg(help="Folder with Multi30k, a file for each side of a split.")
    output_dir: str = HfArg(help="Folder for texts, models, results and table.")
    pairs: int = HfArg(default=5000, help="Pairs of parallel text.")
    seed: int = HfArg(default=1, help="Seed of the runs.")
    updates: int = HfArg(default=8000, help="Maximum number of updates of a training.")
    every: int = HfArg(default=250, help="Updates between two evaluations.")
    method: str = HfArg(default="beam", help="Option of `back-translate`.")
    tokenize: str = HfArg(default="none", help="sacreBLEU's tokenizer.")
    options: str = HfArg(default="", help="More options of `train`, as one string.")

    def __post_init__(self) -> None:
        expect_data(self.data)


def main() -> None:
    arguments = read_options(BackTranslationArguments, __doc__)
    # Folders of models have no seed in their names.
    names = ("data", "pairs", "updates", "every", "method", "tokenize", "options", "seed")
    results = Results(arguments, *names)
    folder = results.folder
    split_text(folder, arguments)
    for row in ROWS:
        results.run(row, arguments.seed, partial(train_row, row, folder, arguments))
    runs = {row: results.of(row, [arguments.seed])[0] for row in ROWS}
    print(results.write("back_translation", to_markdown(runs)))


def split_text(folder: Path, arguments: BackTranslationArguments) -> None:
    """Write the pairs, and the German side of the others."""
    for side in ("en", "de"):
        lines = read_file(Path(arguments.data, f"train.{side}"))
        write_lines(folder / f"pairs.{side}", islice(lines, arguments.pairs))
        if side == "de":
            write_lines(folder / "rest.de", lines)


def train_row(row: str, folder: Path, arguments: BackTranslationArguments) -> dict[str, float]:
    """Train the model of a row with the command, in a new process, and score it."""
    data, before = Path(arguments.data).resolve(), cpu_seconds()
    source, target = ("de", "en") if row == REVERSE else ("en", "de")
    corpora = [(folder / f"pairs.{source}", folder / f"pairs.{target}")]
    tags = [] if row == SYNTHETIC else ["--corpus_tags", ""]
    if row == SYNTHETIC:
        corpora.append(back_translate(folder, arguments))
    sources, targets = (map(str, side) for side in zip(*corpora, strict=True))
    train(
        [
            "--config=back_translation", *tags,
            "--train_source", *sources, "--train_target", *targets,
            f"--validation_source={data / f'val.{source}'}",
            f"--validation_target={data / f'val.{target}'}",
            f"--output_dir={folder / row}", f"--seed={arguments.seed}",
            f"--max_steps={arguments.updates}",
            f"--eval_steps={arguments.every}", f"--save_steps={arguments.every}",
            "--resume_from_checkpoint=auto", *arguments.options.split(),
        ],
        log=folder / f"{row}.log",
    )  # fmt: skip
    minutes = (cpu_seconds() - before) / 60
    scores = score(folder / row, data, arguments.tokenize, source, target)
    return {**scores, "cpu_minutes": minutes}


def back_translate(folder: Path, arguments: BackTranslationArguments) -> tuple[Path, Path]:
    """Translate the remaining German text into English. Returns both sides."""
    synthetic, rest = folder / "synthetic.en", folder / "rest.de"
    flags = [f"--model={folder / REVERSE}", f"--source={rest}", f"--output={synthetic}"]
    run("back-translate", [*flags, f"--method={arguments.method}"])
    return synthetic, rest


def to_markdown(runs: dict[str, dict[str, float]]) -> str:
    """A row for each model."""
    table = [
        [row.replace("_", " "), *(f"{runs[row][name]:.1f}" for name in METRICS)] for row in ROWS
    ]
    return markdown(["model", "BLEU", "chrF"], table)


if __name__ == "__main__":
    main()
