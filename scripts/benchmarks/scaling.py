"""Measure how much faster several processes train than one, each on its own CPU.

python -m scripts.benchmarks.scaling --output_dir outputs/scaling

A step is forward, backward and AdamW in float32 over batches of similar lengths, like workload T1
of `speed.py`. With DistributedDataParallel (over gloo) each process has as many tokens as one
process alone. The same number of independent processes runs for comparison: it shows how much speed
is lost to shared memory and caches rather than to DDP. All settings take turns. The result is the
ratio of target tokens per second, by medians over the rounds. Writes scaling.json and scaling.md.
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
from transformers.hf_argparser import HfArg

from scripts.benchmarks.peers import PEERS, SIZES
from scripts.benchmarks.speed import training, training_batches
from scripts.benchmarks.turns import Runner, speeds, take_turns
from scripts.reports import expect_known, markdown, read_options, write

ALONE = "1 process"


@dataclass
class ScalingArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    processes: int = HfArg(default=2, help="Number of processes; as many CPUs should be idle.")
    tokens: int = HfArg(
        default=3000, help="Target tokens per batch and process. The paper: 25,000 over 8."
    )
    rounds: int = HfArg(default=5, help="Runs of each setting after a warm-up.")

    def __post_init__(self) -> None:
        expect_known("sizes", self.sizes, SIZES)
        for name in ("processes", "tokens", "rounds"):
            least = 2 if name == "processes" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: expected at least {least}")


def main() -> None:
    arguments = read_options(ScalingArguments, __doc__)
    results = [{"size": size, **race(arguments, size)} for size in arguments.sizes]
    write(arguments.output_dir, "scaling", results, to_markdown(results))


def to_markdown(results: list[dict[str, Any]]) -> str:
    """A table with a row per size."""
    header = [f"speed, {ALONE} = 1", *results[0]["speeds"], f"target tokens per second of {ALONE}"]
    rows = [
        (
            result["size"],
            *(f"{speed:.2f}" for speed in result["speeds"].values()),
            f"{result['tokens_per_second']:.0f}",
        )
        for result in results
    ]
    return markdown(header, rows)


def race(arguments: ScalingArguments, size: str) -> dict[str, Any]:
    """The seconds of each setting in each round, and the speeds of several processes."""
    port = get_free_port()
    several = {
        f"{arguments.processes} processes": (arguments.processes, port),
        f"{arguments.processes} independent processes": (1, port),
    }
    alone = Runner(threads=1, seed=0)
    alone.prepare(prepare, size, arguments.tokens, 0).result()
    teams = {name: [Runner(1, rank) for rank in range(arguments.processes)] for name in several}
    for name, team in teams.items():
        preparations = [
            runner.prepare(prepare, size, arguments.tokens, rank, *several[name])
            for rank, runner in enumerate(team)
        ]
        for preparation in preparations:
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
    """The seconds until the last of several processes, started together, is done."""
    return max(seconds.result() for seconds in [runner.begin() for runner in team])


def prepare(
    size: str, tokens: int, rank: int, processes: int = 1, port: int = 0
) -> Callable[[], None]:
    """A function that runs the training steps of one process."""
    model: torch.nn.Module = PEERS["vanilla_transformer"](SIZES[size])
    if processes > 1:
        distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes
        )
        model = DistributedDataParallel(model)
    return training(model, training_batches(SIZES[size], tokens, seed=0), autocast=False)


def target_tokens(size: str, tokens: int) -> int:
    return sum(
        int((batch["labels"] >= 0).sum()) for batch in training_batches(SIZES[size], tokens, 0)
    )


if __name__ == "__main__":
    main()
