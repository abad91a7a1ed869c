"""Grapheme to phoneme in several languages (SIGMORPHON 2020, shared task 1).

python -m scripts.benchmarks.g2p --data FOLDER --output_dir outputs/g2p
python -m scripts.benchmarks.g2p --data FOLDER --languages fre kor --output_dir outputs/g2p

FOLDER holds LANG_train.tsv, LANG_dev.tsv and LANG_test.tsv: a word, a tab and its phones, with
spaces between them. Every run is the command `vanilla-transformer train --config g2p` with a
language and a seed; `--options` adds to it. The model stays in the folder LANG-SEED. Finished runs
are kept in results.json, so that an interrupted command can be repeated, and a run resumes from its
last checkpoint. The table, g2p.md, has the word error rate (words with any wrong phone, %) and the
phone error rate (edit distance over the reference's phones, %).
"""

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

from scripts.commands import train
from scripts.reports import Results, markdown, spread
from vanilla_transformer.inference.metrics import score_translations
from vanilla_transformer.inference.translation import translate

SPLITS = {"train": "train", "dev": "validation", "test": "test"}
MEASURES = ("dev WER", "test WER", "test PER")
Rows = list[tuple[str, str]]


@dataclass
class G2PArguments:
    data: str = field(metadata={"help": "Folder with the files of the shared task."})
    output_dir: str = field(metadata={"help": "Folder for models, results.json and g2p.md."})
    languages: list[str] | None = field(
        default=None, metadata={"help": "Default: all that the folder has."}
    )
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds."})
    config: str = field(default="g2p", metadata={"help": "Recipe of `train`."})
    options: str = field(default="", metadata={"help": "Further options of `train`, in one text."})

    def __post_init__(self) -> None:
        known = sorted(
            path.name[: -len("_train.tsv")] for path in Path(self.data).glob("*_train.tsv")
        )
        self.languages = known if self.languages is None else self.languages
        if not known:
            raise ValueError(f"data={self.data}: expected a folder with LANG_train.tsv")
        for language in self.languages:
            if language not in known:
                raise ValueError(f"languages has {language!r}: expected of {', '.join(known)}")


def main() -> None:
    (arguments,) = HfArgumentParser(G2PArguments).parse_args_into_dataclasses()
    folder = Path(arguments.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(arguments, name) for name in ("config", "options")}
    results = Results(folder / "results.json", settings)
    for seed in arguments.seeds:
        for language in arguments.languages:
            if not results.of(language, [seed]):
                results.add(language, seed, run(language, seed, folder, arguments))
            table = to_markdown(
                {row: results.of(row, arguments.seeds) for row in arguments.languages}
            )
            (folder / "g2p.md").write_text(table + "\n", encoding="utf-8")
    print((folder / "g2p.md").read_text(encoding="utf-8"))


def run(language: str, seed: int, folder: Path, arguments: G2PArguments) -> dict[str, float]:
    """Train a model, in a process of its own, as users do, and translate the test words."""
    rows = {split: read(Path(arguments.data, f"{language}_{split}.tsv")) for split in SPLITS}
    model = folder / f"{language}-{seed}"
    model.mkdir(exist_ok=True)
    flags = [
        f"--{SPLITS[split]}_{side}={write(model / f'{split}.{side}', rows[split], place)}"
        for split in ("train", "dev")
        for place, side in enumerate(("source", "target"))
    ]
    started = time.monotonic()
    process = train(
        [
            f"--config={arguments.config}", *flags, f"--output_dir={model}", f"--seed={seed}",
            "--resume_from_checkpoint=auto", *arguments.options.split(),
        ],
        log=model / "log.txt",
    )  # fmt: skip
    minutes = (time.monotonic() - started) / 60
    dev = json.loads(process.stdout.splitlines()[-1])
    found = translate_words(model, [word for word, _ in rows["test"]])
    (model / "test.output").write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    phones = [" ".join(phones.split()) for _, phones in rows["test"]]
    scores = score_translations(found, phones, metrics=("ser", "per"))
    return {
        "dev WER": 100 - dev["exact_match"],
        "test WER": scores["ser"],
        "test PER": scores["per"],
        "minutes": minutes,
    }


def translate_words(folder: Path, words: list[str]) -> list[str]:
    """The phones of each word, as `vanilla-transformer translate` gives them."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return list(translate(words, model, AutoTokenizer.from_pretrained(folder), batch_size=150))


def read(path: Path) -> Rows:
    """Words and their phones."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(word, phones) for word, phones in (line.split("\t") for line in lines)]


def write(path: Path, rows: Rows, place: int) -> Path:
    """One side of the pairs, a line each."""
    path.write_text("".join(f"{row[place]}\n" for row in rows), encoding="utf-8")
    return path


def to_markdown(rows: dict[str, list[dict]]) -> str:
    """A row for each language, with the mean over its seeds and their standard deviation, and the
    mean of all languages."""
    done = {row: runs for row, runs in rows.items() if runs}
    table = [
        [row, len(runs), *(spread([run[name] for run in runs], 2) for name in MEASURES)]
        for row, runs in done.items()
    ]
    means = [
        statistics.mean(statistics.mean(run[name] for run in runs) for runs in done.values())
        for name in MEASURES
    ]
    table.append(["mean", "", *(f"{mean:.2f}" for mean in means)])
    return markdown(["language", "seeds", *MEASURES], table)


if __name__ == "__main__":
    main()
