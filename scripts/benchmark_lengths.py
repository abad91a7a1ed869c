"""Time and peak memory as sentences grow from 32 to 8,192 tokens, and as the batch grows.

python scripts/benchmark_lengths.py --output_dir outputs/lengths

train: a step (forward, backward) over two pairs as long as said, half of the second one padding.
generate: as many tokens as the source has, greedily. In the table are times for each token and
memory above that of the model at rest, both over those of the first column: 1 all along is linear
growth of time; linear growth of memory is as much as the first row grows. Each figure is the median
of several runs in a process of its own. Writes lengths.json, lengths.md and lengths.png.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from benchmark import padded
from benchmark_peers import BOS, PAD, PEERS, SIZES, Size, training_loss
from tqdm.auto import tqdm
from transformers import HfArgumentParser
from transformers import logging as transformers_logging

WORKLOADS = ("train", "generate")
SHORTEST = 32  # tokens
ENOUGH = 30  # seconds: a first run that takes longer is not repeated


@dataclass
class LengthArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the three files."})
    size: str = field(default="tiny", metadata={"help": f"One of {', '.join(SIZES)}."})
    peer: str = field(default="vanilla_transformer", metadata={"help": "Whose model."})
    longest: int = field(default=8192, metadata={"help": "Tokens."})
    largest: int = field(default=512, metadata={"help": "Batch, of sentences of 32 tokens."})
    runs: int = field(default=3, metadata={"help": "Of which the median counts."})
    only: list[str] | None = field(
        default=None, metadata={"help": "Measure this workload, length and batch here, and print."}
    )

    def __post_init__(self) -> None:
        for name, known in (("size", SIZES), ("peer", PEERS)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ValueError(f"--{name} {value}: expected of {', '.join(known)}")
        if self.longest < SHORTEST or self.largest < 2:
            raise ValueError(
                f"--longest {self.longest} --largest {self.largest}: expected at least 32 and 2"
            )


def main() -> None:
    (arguments,) = HfArgumentParser(LengthArguments).parse_args_into_dataclasses()
    if arguments.only is not None:
        workload, length, batch = arguments.only
        print(json.dumps(measure(arguments, workload, int(length), int(batch))))
        return
    series = [
        {"workload": workload, "axis": axis, "points": measure_all(arguments, workload, places)}
        for workload in WORKLOADS
        for axis, places in (
            ("length", [(length, 2) for length in doubling(SHORTEST, arguments.longest)]),
            ("batch", [(SHORTEST, batch) for batch in doubling(2, arguments.largest)]),
        )
    ]
    table = "\n\n".join(to_markdown(series, axis) for axis in ("length", "batch"))
    print(table)
    if arguments.output_dir is not None:
        save(series, table, Path(arguments.output_dir))


def doubling(first: int, last: int) -> list[int]:
    """Powers of 4 times the first, and the last."""
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
        flags = ["--size", arguments.size, "--peer", arguments.peer, "--runs", arguments.runs]
        flags += ["--only", workload, length, batch]
        command = [sys.executable, __file__, *map(str, flags)]
        found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
        points.append({"length": length, "batch": batch, **found})
    return points


def measure(arguments: LengthArguments, workload: str, length: int, batch: int) -> dict[str, float]:
    """Seconds for each token, and mebibytes at the highest above those of the model at rest."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers_logging.set_verbosity_error()
    size = SIZES[arguments.size]
    model = PEERS[arguments.peer](size)
    prepare = training if workload == "train" else generation
    before = psutil.Process().memory_info().rss / 2**20
    run = prepare(model, size, length, batch)
    warm_up = timed(run)
    seconds = [warm_up] if warm_up > ENOUGH else [timed(run) for _ in range(arguments.runs)]
    return {
        "seconds": statistics.median(seconds) / (length * batch),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before,
    }


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def sources(size: Size, length: int, batch: int) -> dict[str, torch.Tensor]:
    """Every other sentence is half as long."""
    lengths = torch.full((batch,), length)
    lengths[1::2] //= 2
    ids = padded(lengths, size.vocab_size, PAD, torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def training(model: torch.nn.Module, size: Size, length: int, batch: int) -> Callable[[], None]:
    inputs = sources(size, length, batch)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    model.train()

    def run() -> None:
        training_loss(model, inputs).backward()
        model.zero_grad()

    return run


def generation(model: torch.nn.Module, size: Size, length: int, batch: int) -> Callable[[], None]:
    inputs = sources(size, length, batch)
    model.eval().generation_config.eos_token_id = None

    def run() -> None:
        output = model.generate(**inputs, do_sample=False, max_new_tokens=length)
        assert output.shape == (batch, length + 1)
        assert (output[:, 0] == BOS).all()

    return run


def to_markdown(series: list[dict], axis: str) -> str:
    """A row for time and one for memory of each workload, a column for each place on the axis."""
    rows = [entry for entry in series if entry["axis"] == axis]
    places = [point[axis] for point in rows[0]["points"]]
    unit = "tokens" if axis == "length" else "sentences"
    lines = [f"| {unit} | " + " | ".join(f"{place:,}" for place in places) + " |"]
    lines.append("|---" * (len(places) + 1) + "|")
    for entry in rows:
        for label, name in (("time for each token", "seconds"), ("memory", "mebibytes")):
            values = [point[name] for point in entry["points"]]
            cells = (f"{value / values[0]:.2f}" for value in values)
            lines.append(f"| {entry['workload']}, {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(series: list[dict], table: str, folder: Path) -> None:
    """lengths.json, lengths.md and lengths.png in the folder."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.json").write_text(json.dumps(series, indent=2) + "\n")
    (folder / "lengths.md").write_text(table + "\n")
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    for column, axis in enumerate(("length", "batch")):
        for row, (name, label) in enumerate(
            (("seconds", "time for each token"), ("mebibytes", "memory"))
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
    figure.savefig(folder / "lengths.png", dpi=120)


if __name__ == "__main__":
    main()
