"""Give the package random input, valid or not, and count wrong results and unclear errors.

python -m scripts.checks.fuzz --output_dir outputs/fuzz
python -m scripts.checks.fuzz --families generation --cases 1000 --seed 1

Hypothesis generates the cases. `fuzz_families.py` defines kinds of input and their properties;
`fuzz_comparisons.py` compares two ways to compute the same numbers. A case is right, is refused
with a clear error, or fails. Each family runs in its own process until its first failure, whose
smallest example is printed. Writes fuzz.json and fuzz.md.
"""

import os
import signal
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from scripts.checks.fuzz_comparisons import COMPARISONS
from scripts.checks.fuzz_families import FAMILIES as KINDS_OF_INPUT
from scripts.reports import expect_known, markdown, read_options, write

FAMILIES = KINDS_OF_INPUT | COMPARISONS
OUTCOMES = ("right", "refused", "failed")
SECONDS = 60  # after this time, a case counts as hanging


@dataclass
class FuzzArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    families: list[str] = field(default_factory=lambda: list(FAMILIES))
    cases: int = HfArg(default=10_000, help="Cases of all families together.")
    seed: int = HfArg(default=0, help="Seed of the cases.")

    def __post_init__(self) -> None:
        expect_known("families", self.families, FAMILIES)
        if self.cases < len(self.families):
            raise ValueError(f"--cases {self.cases}: expected at least one per family")


def main() -> None:
    arguments = read_options(FuzzArguments, __doc__)
    results = {}
    for name, cases in shares(arguments.families, arguments.cases).items():
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                results[name] = process.submit(fuzz, name, cases, arguments.seed).result()
            except BrokenProcessPool:
                results[name] = {"failed": 1, "example": "the process crashed"}
    for name, result in results.items():
        if result.get("example"):
            print(f"{name}: {result['example']}\n")
    write(arguments.output_dir, "fuzz", results, to_markdown(results))


def shares(families: list[str], cases: int) -> dict[str, int]:
    """The number of cases of each family; the first one also gets the remainder."""
    total = sum(FAMILIES[name].share for name in families)
    counts = {name: max(1, cases * FAMILIES[name].share // total) for name in families}
    counts[families[0]] += cases - sum(counts.values())
    return counts


def fuzz(name: str, cases: int, seed: int) -> dict[str, Any]:
    """Count the outcomes of a family's cases, and find the smallest example of a failure."""
    quieten()
    family, counts = FAMILIES[name], Counter()
    example = ""

    @with_seed(seed)
    @settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(family.cases)
    def run(case: Any) -> None:
        nonlocal example
        before = counts["failed"]  # later cases shrink the first failure
        try:
            signal.alarm(SECONDS)
            outcome = family.outcome(case)
        except Exception:
            counts["failed"] = 1
            example = f"{case!r}\n{traceback.format_exc()}"
            raise
        finally:
            signal.alarm(0)
        if not before:
            counts[outcome] += 1
            progress.update()

    with tqdm(total=cases, desc=name, unit="case") as progress:
        try:
            run()
        except Exception as error:
            example = example or repr(error)
    return {**counts, "example": example}


def quieten() -> None:
    """Prepare a process: one thread, no warnings, and an alarm for cases that hang."""
    os.environ.update(TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def hang(*_: object) -> None:
    raise TimeoutError(f"not finished after {SECONDS} seconds")


def to_markdown(results: dict[str, dict[str, Any]]) -> str:
    """A table with a row per family."""
    counted = {
        name: [result.get(outcome, 0) for outcome in OUTCOMES] for name, result in results.items()
    }
    counted["all"] = [sum(column) for column in zip(*counted.values(), strict=True)]
    rows = ([name, sum(counts), *counts] for name, counts in counted.items())
    return markdown(["family", "cases", *OUTCOMES], rows)


if __name__ == "__main__":
    main()
