"""How much faster several processes train than one, each with one thread of a CPU of its own.

python scripts/benchmark_scaling.py --output_dir outputs/scaling

A step is forward, backward and AdamW in float32 over batches of similar lengths, as T1 of
benchmark.py. Several processes (DistributedDataParallel over gloo) each have batches of their own,
as many tokens as one process alone. Beside them run as many that have nothing to do with each
other: what these lose is lost to the memory and the caches that they share, not to DDP. All take
turns; the figure is the ratio of target tokens a second, by medians over rounds. Writes
scaling.json and scaling.md.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel
from transformers import HfArgumentParser

from scripts.benchmarks.peers import PEERS, SIZES
from scripts.benchmarks.speed import training, training_batches
from scripts.benchmarks.turns import Runner, speeds, take_turns
from scripts.reports import expect_known, markdown, write

ALONE = "1 process"


@dataclass
class ScalingArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the two files."})
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    processes: int = field(default=2, metadata={"help": "As many CPUs should be free."})
    tokens: int = field(
        default=3000,
        metadata={"help": "Target tokens of a process's batch; the paper's: 25,000 over 8."},
    )
    rounds: int = field(default=5, metadata={"help": "Turns of each setting."})

    def __post_init__(self) -> None:
        expect_known("sizes", self.sizes, SIZES)
        for name in ("processes", "tokens", "rounds"):
            least = 2 if name == "processes" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: expected {least} at least")


def main() -> None:
    (arguments,) = HfArgumentParser(ScalingArguments).parse_args_into_dataclasses()
    results = [{"size": size, **race(arguments, size)} for size in arguments.sizes]
    header = ["size", *results[0]["speeds"], "target tokens a second of 1 process"]
    rows = [
        (
            result["size"],
            *(f"{speed:.2f}" for speed in result["speeds"].values()),
            f"{result['tokens_per_second']:.0f}",
        )
        for result in results
    ]
    write(arguments.output_dir, "scaling", results, markdown(header, rows))


def race(arguments: ScalingArguments, size: str) -> dict[str, Any]:
    """Seconds of all settings in each round, and the speeds of the many."""
    port = get_free_port()
    several = {
        f"{arguments.processes} processes": (arguments.processes, port),
        f"{arguments.processes} that do not talk": (1, port),
    }
    alone = Runner(threads=1, seed=0)
    alone.prepare(prepare, size, arguments.tokens, 0).result()
    teams = {name: [Runner(1, rank) for rank in range(arguments.processes)] for name in several}
    for name, team in teams.items():
        begun = [
            runner.prepare(prepare, size, arguments.tokens, rank, *several[name])
            for rank, runner in enumerate(team)
        ]
        for preparation in begun:
            preparation.result()
    together = {name: partial(slowest, team) for name, team in teams.items()}
    seconds = take_turns({ALONE: alone.run, **together}, arguments.rounds, ALONE, size)
    for runner in chain([alone], *teams.values()):
        runner.stop()
    ratios = speeds(seconds, ALONE)
    rate = target_tokens(size, arguments.tokens) / statistics.median(seconds[ALONE])
    return {
        "speeds": {name: arguments.processes * ratios[name] for name in teams},
        "tokens_per_second": rate,
        "seconds": seconds,
    }


def slowest(team: list[Runner]) -> float:
    """Seconds until the last of several that begin together has done its work."""
    return max(seconds.result() for seconds in [runner.begin() for runner in team])


def prepare(
    size: str, tokens: int, rank: int, processes: int = 1, port: int = 0
) -> Callable[[], None]:
    """The steps of one process."""
    model: torch.nn.Module = PEERS["vanilla_transformer"](SIZES[size])
    if processes > 1:
        distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes
        )
        model = DistributedDataParallel(model)
    return training(model, training_batches(SIZES[size], tokens, seed=0), narrow=False)


def target_tokens(size: str, tokens: int) -> int:
    return sum(
        int((batch["labels"] >= 0).sum()) for batch in training_batches(SIZES[size], tokens, 0)
    )


if __name__ == "__main__":
    main()
