"""Train on small tasks with the defaults of `vanilla-transformer train`: is any seed stuck?

python -m scripts.benchmarks.out_of_the_box --data FOLDER --output_dir outputs/out_of_the_box
python -m scripts.benchmarks.out_of_the_box --tasks scan reverse --output_dir outputs/symbols

Every run is the command `vanilla-transformer train` with `--preset tiny`, the text, a seed and the
number of updates. All other options depend on the text
(`vanilla_transformer/training/defaults.py`). The table shows exact match on the test set, greedy
search, and BLEU for Multi30k. Finished runs are kept in results.json, so that an interrupted
command can be repeated. The table is written to out_of_the_box.md. `--data` contains `multi30k/tok`
and `sigmorphon2020_g2p`; without it, their tasks are left out.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from scripts.benchmarks.tasks import Task, g2p, multi30k, phrases, scan, symbols, write_side
from scripts.commands import cpu_seconds, train
from scripts.reports import Results, expect_known, markdown, read_options, spread

TASKS: dict[str, Callable[[], Task]] = {
    "scan": scan,
    "reverse": lambda: symbols(lambda row: row[::-1]),
    "sort": lambda: symbols(sorted),
    **{f"phrases_{lang}": lambda lang=lang: phrases(lang) for lang in ("de", "es", "fr")},
}


@dataclass
class OutOfTheBoxArguments:
    output_dir: str = HfArg(help="Folder for results.json and out_of_the_box.md.")
    data: str | None = HfArg(default=None, help="Folder with Multi30k and G2P.")
    tasks: list[str] | None = HfArg(default=None, help="Default: all.")
    max_steps: int = HfArg(default=3000, help="Updates per run.")
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds.")
    options: str = HfArg(default="", help="More options of `train`, as one string.")


def main() -> None:
    arguments = read_options(OutOfTheBoxArguments, __doc__)
    tasks = dict(TASKS)
    if arguments.data is not None:
        data = Path(arguments.data)
        tasks["multi30k"] = lambda: multi30k(data / "multi30k/tok")
        for language in ("fre", "hun", "kor"):
            tasks[f"g2p_{language}"] = lambda language=language: g2p(
                language, data / "sigmorphon2020_g2p"
            )
    expect_known("tasks", arguments.tasks or (), tasks)
    rows = arguments.tasks or list(tasks)
    results = Results(arguments, "max_steps", "options")
    runs = [(row, seed) for seed in arguments.seeds for row in rows]
    for row, seed in tqdm(runs, desc="Training", unit="run"):
        with tempfile.TemporaryDirectory() as scratch:
            results.run(row, seed, partial(run, tasks[row], Path(scratch), seed, arguments))
        table = to_markdown({row: results.of(row, arguments.seeds) for row in rows})
        results.write("out_of_the_box", table)
    print(table)


def run(
    task: Callable[[], Task], scratch: Path, seed: int, arguments: OutOfTheBoxArguments
) -> dict[str, float]:
    """Train and test a model with the commands, in new processes."""
    files = [
        f"--{split}_{side}={write_side(scratch / f'{split}.{side}', pairs, place)}"
        for split, pairs in task()._asdict().items()
        for place, side in enumerate(("source", "target"))
    ]
    before = cpu_seconds()
    process = train(
        [
            "--preset=tiny", *files, f"--output_dir={scratch / 'model'}", f"--seed={seed}",
            f"--max_steps={arguments.max_steps}", "--save_strategy=no",
            "--per_device_eval_batch_size=64", *arguments.options.split(),
        ]
    )  # fmt: skip
    scores = json.loads(process.stdout.splitlines()[-1])
    ignores = process.stderr.count("the decoder ignores its source")
    minutes = (cpu_seconds() - before) / 60
    kept = ("exact_match", "bleu", "chrf")
    return {**{name: scores[name] for name in kept}, "ignores": ignores, "cpu_minutes": minutes}


def to_markdown(rows: dict[str, list[dict]]) -> str:
    """A table with a row per task: the score of each seed, and in how many runs the decoder still
    ignored its source when it was first checked."""
    table = []
    for row, runs in rows.items():
        if runs:
            name = "bleu" if row == "multi30k" else "exact_match"
            scores = [run[name] for run in runs]
            each = ", ".join(f"{score:.1f}" for score in scores)
            stuck = sum(run["ignores"] > 0 for run in runs)
            table.append([row, name, each, spread(scores, 1), f"{stuck} of {len(runs)}"])
    return markdown(
        ["task", "score", "seeds", "mean", "ignores the source after 500 updates"], table
    )


if __name__ == "__main__":
    main()
