"""Measure this package on one NVIDIA GPU.

python -m scripts.benchmarks.gpu --output_dir outputs/gpu --data FOLDER --g2p_data FOLDER
python -m scripts.benchmarks.gpu --output_dir outputs/gpu --parts training decoding
python -m scripts.benchmarks.gpu --output_dir outputs/gpu --parts training --only "big .*compiled"
python -m scripts.benchmarks.gpu --output_dir outputs/dry --dry_run

There are four parts. tests runs `pytest -m gpu`. training measures tokens per second, MFU and
memory at base and big, and the loss alone. decoding measures greedy and beam search. recipes trains
the paper's base model for some time. It also trains and scores models on Multi30k, if `--data`
contains it (train.en, train.de, test_2016_flickr.en and test_2016_flickr.de, lower-cased and
tokenized), and on the first language of SIGMORPHON 2020, if `--g2p_data` contains it
(LANG_train.tsv and LANG_test.tsv).

Together they take 25 minutes at most. If something can't be measured, its row has the reason: an
error, a package that is not installed, or the end of a part's time. `--dry_run` does a little of
everything on a CPU. Each part writes NAME.json and NAME.md after each of its rows; recipes also
writes speeds.json, for `vanilla-transformer plan --speeds`.
"""

import os
import re
import time
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.hf_argparser import HfArg

from scripts.benchmarks.gpu.cells import Cell, Worker, describe, measure_all
from scripts.benchmarks.gpu.multi30k import expect_multi30k
from scripts.benchmarks.gpu.plan import DRY_RUN, Plan
from scripts.benchmarks.gpu.timing import environment
from scripts.benchmarks.sigmorphon import languages_of
from scripts.reports import expect_known, markdown, read_options, save
from vanilla_transformer.training.speeds import write_speeds

PARTS = ("tests", "training", "decoding", "recipes")


@dataclass
class GPUArguments:
    output_dir: str = HfArg(help="Folder for the files, two for each part.")
    parts: list[str] = field(default_factory=lambda: list(PARTS))
    data: str | None = HfArg(default=None, help="Folder with Multi30k.")
    g2p_data: str | None = HfArg(default=None, help="Folder with the words of SIGMORPHON 2020.")
    only: str | None = HfArg(
        default=None, help="Measure only rows whose labels, joined by spaces, match this pattern."
    )
    limit_s: float | None = HfArg(
        default=None, help="Seconds that each part may take. Default: its own limit."
    )
    dry_run: bool = HfArg(default=False, help="Run everything in a tiny form, on a CPU.")

    def __post_init__(self) -> None:
        expect_known("parts", self.parts, PARTS)
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(
                f"--only {self.only}: expected a regular expression: {error}"
            ) from None
        if self.limit_s is not None and self.limit_s <= 0:
            raise ValueError(f"--limit_s {self.limit_s}: expected a positive number")
        if self.data is not None:
            expect_multi30k(self.data)
        if self.g2p_data is not None and not languages_of(self.g2p_data):
            raise ValueError(f"--g2p_data {self.g2p_data}: expected a file LANG_train.tsv in it")
        if not (self.dry_run or torch.cuda.is_available()):
            raise ValueError("--dry_run is not given: expected an NVIDIA GPU that torch can use")

    def plan(self) -> Plan:
        settings = DRY_RUN if self.dry_run else {}
        plan = Plan(data=self.data, g2p_data=self.g2p_data, **settings)
        if self.limit_s is None:
            return plan
        return replace(plan, limits=dict.fromkeys(PARTS, self.limit_s))


def main() -> None:
    arguments = read_options(GPUArguments, __doc__)
    # For the processes of the cells. On several GPUs, transformers' trainer would use all.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    plan, worker = arguments.plan(), Worker()
    try:
        for name in arguments.parts:
            print(run_part(name, plan, worker, arguments.output_dir, arguments.only), flush=True)
            if name == "tests":  # they change global state of their process
                worker.stop()
    finally:
        worker.stop()


def run_part(
    name: str, plan: Plan, worker: Worker, output_dir: str, only: str | None = None
) -> str:
    """Measure a part, or only the rows with this pattern in their labels, and return its report."""
    begin, limit = time.monotonic(), plan.limits[name]
    result: dict[str, Any] = {"part": name, "dry_run": plan.is_dry, "limit_s": limit}
    report = ""

    def keep(rows: list[dict[str, Any]]) -> None:
        nonlocal report
        labelled = [row for row in rows if part.LABELS[0] in row]
        result.update(seconds=time.monotonic() - begin, rows=rows, goals=part.goals(labelled))
        if speeds := [row["speed"] for row in rows if "speed" in row]:
            write_speeds(Path(output_dir, "speeds.json"), speeds)
        report = to_markdown(result, part)
        save(output_dir, name, result, report)

    part = load(name)
    try:
        result["environment"] = worker.measure(Cell({}, environment, (plan,)), limit)
        cells = [cell for cell in part.cells(plan, worker) if re.search(only or "", cell.name)]
        if not cells:
            raise ValueError(f"--only {only}: in the labels of no row")
    except Exception as error:
        keep([{"reason": describe(error)}])
    else:
        further = [] if plan.is_dry else [Worker() for _ in range(1, getattr(part, "WORKERS", 1))]
        try:
            measure_all(cells, [worker, *further], limit - (time.monotonic() - begin), keep)
        finally:
            for one in further:
                one.stop()
    return report


def load(name: str) -> Any:
    """The module of a part or, if it can't be imported, one whose cells have the reason."""
    try:
        return import_module(f"scripts.benchmarks.gpu.{name}")
    except ImportError as error:
        reason = describe(error)

    def cells(*args: Any) -> None:
        raise RuntimeError(reason)

    return SimpleNamespace(cells=cells, goals=lambda rows: [], LABELS=("",), COLUMNS={}, NOTES="")


def to_markdown(result: dict[str, Any], part: Any) -> str:
    """A description of part and device, a table of the rows, and one of the goals."""
    where = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    warning = "A dry run: the figures mean nothing. " if result["dry_run"] else ""
    title = f"# {result['part']}\n\n{warning}{result['seconds']:.0f} s on {where}."
    rows = result["rows"]
    shown = [name for name in part.COLUMNS if any(row.get(name) is not None for row in rows)]
    table = [
        [row.get(name) for name in part.LABELS]
        + [formatted(row.get(name), part.COLUMNS[name]) for name in shown]
        + [(row.get("reason") or row.get("stopped", "")).replace("|", "\\|")]
        for row in rows
    ]
    texts = [title, markdown([*part.LABELS, *shown, "reason"], table), part.NOTES]
    if result["goals"]:
        verdicts = {True: "reached", False: "not reached", None: "not measured"}
        met = [
            [
                one["goal"],
                one["wanted"],
                formatted(one["found"], "{:.2f}"),
                verdicts[one["reached"]],
            ]
            for one in result["goals"]
        ]
        texts.append(markdown(["goal", "wanted", "found", ""], met))
    return "\n\n".join(texts)


def formatted(value: Any, style: str) -> str | None:
    return None if value is None else style.format(value)


if __name__ == "__main__":
    main()
