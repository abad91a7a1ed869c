"""Train on Multi30k, and draw the score on its test set over time.

python -m scripts.benchmarks.multi30k --data FOLDER --output_dir outputs/multi30k
python -m scripts.benchmarks.multi30k --data FOLDER --output_dir outputs/raw --tokenize 13a

FOLDER contains train, val and test_2016_flickr in English (.en) and German (.de). Every run is the
command `vanilla-transformer train --config multi30k_tiny` with a seed; its folder is named after
the seed. It stops at each of `--updates`, and the mean of its last checkpoints, which `train`
saves, translates the test set. `--options` adds to the command, with the seed in place of {seed};
`--processes 2` starts it with torchrun. Finished stages are kept in results.json, so that an
interrupted command can be repeated. The table is written to multi30k.md, the picture to
multi30k.png and multi30k.svg. CPU hours are those of all processes; hours are elapsed time. If a
stage was interrupted, hours are extrapolated from the updates since then.
"""

import math
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure
from transformers.hf_argparser import HfArg

from scripts.commands import cpu_seconds, train
from scripts.reports import Results, markdown, read_options, spread, write_lines
from vanilla_transformer.data.text_files import read_file
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.metrics import score_translations
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.plotting import save
from vanilla_transformer.training.checkpoints import checkpoints_by_step

TEST = "test_2016_flickr"
SPLITS = {"train": "train", "validation": "val"}
METRICS = ("bleu", "chrf")
LITERATURE = 41.02  # Wu et al. (2021), https://aclanthology.org/2021.acl-long.480, table 2


@dataclass
class Multi30kArguments:
    data: str = HfArg(help="Folder with Multi30k, a file for each side of a split.")
    output_dir: str = HfArg(help="Folder for models, results, table and picture.")
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds.")
    updates: list[int] = HfArg(
        default_factory=lambda: [2000, 4000, 6000, 8000, 12_000, 16_000],
        help="When to stop and translate.",
    )
    tokenize: str = HfArg(default="none", help="sacreBLEU's tokenizer.")
    config: str = HfArg(default="multi30k_tiny", help="Recipe of `train`.")
    options: str = HfArg(default="", help="More options of `train`; {seed} is the seed.")
    processes: int = HfArg(default=1, help="Processes that train together.")

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"processes={self.processes}: expected a positive number")
        if self.updates != sorted(set(self.updates)) or self.updates[0] < 1:
            raise ValueError(f"updates={self.updates}: expected positive numbers that rise")
        expect_data(self.data)


def expect_data(folder: str) -> None:
    """Raise a FileNotFoundError unless the folder has both sides of each split."""
    for split in (*SPLITS.values(), TEST):
        for side in ("en", "de"):
            if not (path := Path(folder, f"{split}.{side}")).exists():
                raise FileNotFoundError(f"data={folder}: expected a folder with {path.name}")


def main() -> None:
    arguments = read_options(Multi30kArguments, __doc__)
    results = Results(arguments, "data", "config", "options", "tokenize", "processes")
    # Hours add up over all stages of the folder, also those that this command does not name.
    kept = {int(run["row"]) for run in results.content["runs"]}
    earlier = {stage for stage in kept if stage < arguments.updates[-1]}
    arguments.updates = sorted(earlier.union(arguments.updates))
    for seed, updates in product(arguments.seeds, arguments.updates):
        job = partial(run, results.folder / str(seed), seed, updates, arguments)
        results.run(str(updates), seed, job)
        stages = {n: results.of(str(n), arguments.seeds) for n in arguments.updates}
        stages = {n: runs for n, runs in stages.items() if runs}
        table = results.write("multi30k", to_markdown(stages))
        save(draw(stages, arguments.tokenize), results.folder / "multi30k")
    print(table)


def run(folder: Path, seed: int, updates: int, arguments: Multi30kArguments) -> dict[str, float]:
    """Train up to this number of updates with the command, in a new process, and translate."""
    files = [
        f"--{name}_{place}={Path(arguments.data, f'{split}.{side}').resolve()}"
        for name, split in SPLITS.items()
        for place, side in (("source", "en"), ("target", "de"))
    ]
    options = arguments.options.replace("{seed}", str(seed)).split()
    begin = max((stage for stage in arguments.updates if stage < updates), default=0)
    done = max(checkpoints_by_step(folder), default=begin)
    if done > updates:  # `train` would return the later model
        raise ValueError(
            f"--updates {updates}: {folder} is at update {done}: choose another --output_dir"
        )
    before, started = cpu_seconds(), time.monotonic()
    train(
        [
            f"--config={arguments.config}", *files, f"--output_dir={folder}", f"--seed={seed}",
            f"--max_steps={updates}", "--resume_from_checkpoint=auto", *options,
        ],
        processes=arguments.processes,
    )  # fmt: skip
    seconds = {"cpu_hours": cpu_seconds() - before, "hours": time.monotonic() - started}
    hours = {name: stage_hours(each, begin, done, updates) for name, each in seconds.items()}
    return {**score(folder, Path(arguments.data), arguments.tokenize), **hours}


def stage_hours(seconds: float, begin: int, done: int, updates: int) -> float:
    """Hours from the update `begin` to `updates`, from the seconds since `done`."""
    return seconds / 3600 * (updates - begin) / max(updates - done, 1)


def score(
    folder: Path, data: Path, tokenize: str, source: str = "en", target: str = "de"
) -> dict[str, float]:
    """BLEU and chrF of the model in the folder, with the search of its generation config. Its
    translations are written to test.output there."""
    lines, references = (list(read_file(data / f"{TEST}.{side}")) for side in (source, target))
    found = list(translate(lines, *LoadingArguments().load(folder), batch_size=64))
    write_lines(folder / "test.output", found)
    scores = score_translations(found, references, metrics=METRICS, tokenize=tokenize)
    return {name: scores[name] for name in METRICS}


# ---------------------------------------------------------------- table and picture

Stages = dict[int, list[dict[str, float]]]


def to_markdown(stages: Stages) -> str:
    """A row for each number of updates."""
    every = [run for runs in stages.values() for run in runs]
    times = [name for name in ("cpu_hours", "hours") if all(name in run for run in every)]
    hours = zip(*(hours_so_far(stages, name) for name in times), strict=True)
    rows = [
        [f"{updates:,}", len(runs), *(f"{each:.2f}" for each in so_far)]
        + [spread([run[name] for run in runs], 1) for name in METRICS]
        for (updates, runs), so_far in zip(stages.items(), hours, strict=True)
    ]
    header = ["updates", "seeds", *(name.replace("cpu_", "CPU ") for name in times)]
    return markdown([*header, "BLEU", "chrF"], rows)


def hours_so_far(stages: Stages, name: str) -> list[float]:
    """The mean over the seeds, from the start up to each stage."""
    means = [statistics.mean(run[name] for run in runs) for runs in stages.values()]
    return [math.fsum(means[: stage + 1]) for stage in range(len(means))]


def draw(stages: Stages, tokenize: str) -> Figure:
    """BLEU over hours: the mean of the seeds, and their range. The literature's score is for text
    that is already tokenized."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    hours = hours_so_far(stages, "cpu_hours")
    scores = [[run["bleu"] for run in runs] for runs in stages.values()]
    axes.plot(hours, [statistics.mean(each) for each in scores], marker="o", label="mean of seeds")
    axes.fill_between(hours, list(map(min, scores)), list(map(max, scores)), alpha=0.25)
    if tokenize == "none":
        axes.axhline(LITERATURE, color="gray", linestyle="--", label="Wu et al. (2021)")
    axes.set(xlabel="CPU hours", ylabel="BLEU, test 2016")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
