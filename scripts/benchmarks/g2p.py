"""Grapheme to phoneme in several languages (SIGMORPHON 2020, shared task 1).

python -m scripts.benchmarks.g2p --data FOLDER --output_dir outputs/g2p
python -m scripts.benchmarks.g2p --data FOLDER --languages fre kor --output_dir outputs/g2p

FOLDER contains LANG_train.tsv, LANG_dev.tsv and LANG_test.tsv: a word, a tab and its phones, with
spaces between them. Every run is the command `vanilla-transformer train --config g2p` with a
language and a seed; `--options` adds to it. The model is in the folder LANG-SEED. Finished runs
are kept in results.json, so that an interrupted command can be repeated, and a run resumes from its
last checkpoint. The table, g2p.md, has the word error rate (words with any wrong phone, %) and the
phone error rate (edit distance over the reference's phones, %): the mean and the standard deviation
of the seeds, and the rates of their ensemble if the folder still has the models. Minutes are CPU
time of one training.
"""

import json
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from transformers.hf_argparser import HfArg

from scripts.benchmarks.sigmorphon import PHONES, WORDS, error_rates, languages_of, read
from scripts.benchmarks.tasks import Pairs, write_side
from scripts.commands import cpu_seconds, train
from scripts.reports import Results, markdown, read_options, spread, write_lines
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.translation import translate

SPLITS = {"train": "train", "dev": "validation", "test": "test"}
DEV = "dev WER"
MEASURES = (DEV, WORDS, PHONES)
ENSEMBLE = {"ensemble WER": WORDS, "ensemble PER": PHONES}


@dataclass
class SharedTaskArguments:
    data: str = HfArg(help="Folder with the files of the shared task.")
    output_dir: str = HfArg(help="Folder for models, results.json and table.")
    languages: list[str] | None = HfArg(default=None, help="Default: all in the folder.")
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds.")

    def __post_init__(self) -> None:
        known = languages_of(self.data)
        self.languages = known if self.languages is None else self.languages
        if not known:
            raise ValueError(f"data={self.data}: expected a folder with LANG_train.tsv")
        for language in self.languages:
            if language not in known:
                raise ValueError(f"languages has {language!r}: expected of {', '.join(known)}")


@dataclass
class G2PArguments(SharedTaskArguments):
    config: str = HfArg(default="g2p", help="Recipe of `train`.")
    options: str = HfArg(default="", help="More options of `train`, as one string.")


def main() -> None:
    arguments = read_options(G2PArguments, __doc__)
    results = Results(arguments, "data", "config", "options")
    for seed, language in product(arguments.seeds, arguments.languages):
        results.run(language, seed, partial(run, language, seed, results.folder, arguments))
        write_table(results, arguments)
    for language in arguments.languages:
        models = [results.folder / f"{language}-{seed}" for seed in arguments.seeds]
        if len(models) > 1 and all(map(Path.exists, models)):
            pairs = read(arguments.data, language, "test")
            results.run(language, together(arguments), partial(score, models, pairs))
    print(write_table(results, arguments))


def together(arguments: G2PArguments) -> str:
    """The name of the ensemble of all seeds, in place of a seed."""
    return " ".join(map(str, arguments.seeds))


def write_table(results: Results, arguments: G2PArguments) -> str:
    """Write the scores so far to g2p.md, and return the table."""
    singles, ensembles = (
        {language: results.of(language, seeds) for language in arguments.languages}
        for seeds in (arguments.seeds, [together(arguments)])
    )
    return results.write("g2p", to_markdown(singles, ensembles))


def run(language: str, seed: int, folder: Path, arguments: G2PArguments) -> dict[str, float]:
    """Train a model with the command, in a new process, and score it."""
    rows = {split: read(arguments.data, language, split) for split in SPLITS}
    model = folder / f"{language}-{seed}"
    model.mkdir(exist_ok=True)
    flags = [
        f"--{SPLITS[split]}_{name}={write_side(model / f'{split}.{name}', rows[split], side)}"
        for split in ("train", "dev")
        for side, name in enumerate(("source", "target"))
    ]
    before = cpu_seconds()
    process = train(
        [
            f"--config={arguments.config}", *flags, f"--output_dir={model}", f"--seed={seed}",
            "--resume_from_checkpoint=auto", *arguments.options.split(),
        ],
        log=model / "log.txt",
    )  # fmt: skip
    minutes = (cpu_seconds() - before) / 60
    dev = json.loads(process.stdout.splitlines()[-1])
    scores = score([model], rows["test"])
    return {DEV: 100 - dev["exact_match"], **scores, "cpu_minutes": minutes}


def score(models: list[Path], pairs: Pairs) -> dict[str, float]:
    """Error rates on the test words, with the search of the first model's generation config. The
    predicted phones are written to its folder."""
    words, phones = zip(*pairs, strict=True)
    found = list(translate(words, *LoadingArguments().load(models), batch_size=150))
    name = "test.output" if len(models) == 1 else "ensemble.output"
    write_lines(models[0] / name, found)
    return error_rates(found, phones)


Runs = dict[str, list[dict[str, float]]]


def to_markdown(runs: Runs, ensembles: Runs) -> str:
    """A row for each language with runs, and the means over all of them."""
    columns = {name: (runs, name) for name in MEASURES}
    if any(ensembles.values()):
        columns |= {name: (ensembles, measure) for name, measure in ENSEMBLE.items()}
    languages = [language for language in runs if runs[language]]
    values = {
        name: [[run[measure] for run in source[language]] for language in languages]
        for name, (source, measure) in columns.items()
    }
    table = [
        [language, len(runs[language])]
        + [spread(each[row], 2) if each[row] else None for each in values.values()]
        for row, language in enumerate(languages)
    ]
    means = [
        f"{statistics.mean(map(statistics.mean, each)):.2f}" if all(each) else None
        for each in values.values()
    ]
    table.append(["mean", "", *means])
    return markdown(["language", "seeds", *columns], table)


if __name__ == "__main__":
    main()
