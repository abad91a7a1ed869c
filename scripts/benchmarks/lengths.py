"""Measure time and peak memory for sentences of 32 to 8,192 tokens, and for growing batches.

python -m scripts.benchmarks.lengths --output_dir outputs/lengths

train is a step (forward and backward) over two pairs of this length; half of the second is padding.
generate is greedy search for as many tokens as the source has. The table shows the time per token
and the memory above that of the model alone, both relative to the first column: if time grows
linearly, it is 1 in all columns. Each result is the median of several runs in a separate process.
Writes lengths.json, lengths.md and lengths.png.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from scripts.benchmarks.peers import PAD, PEERS, SIZES, Size, training_loss
from scripts.benchmarks.speed import generation, padded
from scripts.benchmarks.turns import in_own_process, peak_memory, resident_memory, settle, timed
from scripts.reports import expect_known, markdown, read_options, write

WORKLOADS = ("train", "generate")
SHORTEST = 32  # tokens
LONG_RUN = 30  # seconds; longer runs are not repeated


@dataclass
class LengthArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the three files.")
    size: str = HfArg(default="tiny", help=f"One of {', '.join(SIZES)}.")
    peer: str = HfArg(default="vanilla_transformer", help=f"One of {', '.join(PEERS)}.")
    longest: int = HfArg(default=8192, help="Tokens of the longest sentence.")
    largest: int = HfArg(default=512, help="Sentences of the largest batch, 32 tokens each.")
    runs: int = HfArg(default=3, help="Runs, of which the median is reported.")

    def __post_init__(self) -> None:
        expect_known("size", [self.size], SIZES)
        expect_known("peer", [self.peer], PEERS)
        if self.longest < SHORTEST or self.largest < 2:
            raise ValueError(
                f"--longest {self.longest} --largest {self.largest}: expected at least 32 and 2"
            )


def main() -> None:
    arguments = read_options(LengthArguments, __doc__)
    series = [
        {"workload": workload, "axis": axis, "points": measure_all(arguments, workload, places)}
        for workload in WORKLOADS
        for axis, places in (
            ("length", [(length, 2) for length in quadrupling(SHORTEST, arguments.longest)]),
            ("batch", [(SHORTEST, batch) for batch in quadrupling(2, arguments.largest)]),
        )
    ]
    table = "\n\n".join(to_markdown(series, axis) for axis in ("length", "batch"))
    write(arguments.output_dir, "lengths", series, table)
    if arguments.output_dir is not None:
        draw(series, Path(arguments.output_dir, "lengths.png"))


def quadrupling(first: int, last: int) -> list[int]:
    """`first` times powers of 4, up to `last`."""
    values = []
    while first < last:
        values.append(first)
        first *= 4
    return [*values, last]


def measure_all(
    arguments: LengthArguments, workload: str, places: list[tuple[int, int]]
) -> list[dict[str, float]]:
    points = []
    for length, batch in tqdm(places, desc=workload, leave=False):
        found = in_own_process(measure, arguments, workload, length, batch)
        points.append({"length": length, "batch": batch, **found})
    return points


def measure(arguments: LengthArguments, workload: str, length: int, batch: int) -> dict[str, float]:
    """The seconds per token, and the peak memory above that of the model alone in mebibytes."""
    settle()
    size = SIZES[arguments.size]
    model = PEERS[arguments.peer](size)
    before = resident_memory()
    ids = sources(size, length, batch)
    run = training(model, ids) if workload == "train" else generation(model, ids, 1, length)
    warm_up = timed(run)
    seconds = [warm_up] if warm_up > LONG_RUN else [timed(run) for _ in range(arguments.runs)]
    return {
        "seconds": statistics.median(seconds) / (length * batch),
        "mebibytes": peak_memory() - before,
    }


def sources(size: Size, length: int, batch: int) -> torch.Tensor:
    """(batch, length) padded ids: every other sentence is half as long."""
    lengths = torch.full((batch,), length)
    lengths[1::2] //= 2
    return padded(lengths, size.vocab_size, PAD, torch.Generator().manual_seed(0))


def training(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """A function that computes the gradient of the loss. There is no optimizer step, as its time
    does not depend on the length."""
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    inputs["labels"] = ids.masked_fill(ids == PAD, -100)
    model.train()

    def run() -> None:
        training_loss(model, inputs).backward()
        model.zero_grad()

    return run


def to_markdown(series: list[dict], axis: str) -> str:
    """A table with two rows per workload, for time and memory, and a column per length or batch."""
    entries = [entry for entry in series if entry["axis"] == axis]
    places = [point[axis] for point in entries[0]["points"]]
    unit = "tokens" if axis == "length" else "sentences"
    rows = []
    for entry in entries:
        for label, name in (("time per token", "seconds"), ("memory", "mebibytes")):
            values = [point[name] for point in entry["points"]]
            ratios = (f"{value / values[0]:.2f}" for value in values)
            rows.append([f"{entry['workload']}, {label}", *ratios])
    return markdown([unit, *(f"{place:,}" for place in places)], rows)


def draw(series: list[dict], path: Path) -> None:
    """A chart of time and memory over lengths and batch sizes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    for column, axis in enumerate(("length", "batch")):
        for row, (name, label) in enumerate(
            (("seconds", "time per token"), ("mebibytes", "memory"))
        ):
            axes = panels[row, column]
            for entry in series:
                if entry["axis"] == axis:
                    points = entry["points"]
                    values = [point[name] / points[0][name] for point in points]
                    places = [point[axis] for point in points]
                    axes.loglog(places, values, marker="o", label=entry["workload"])
            axes.set(xlabel=axis, ylabel=f"{label}, first = 1")
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
