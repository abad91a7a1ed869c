"""Where the time of our model goes in the workloads of scripts/benchmark.py.

python scripts/benchmark_profile.py --output_dir outputs/profile

Shares of the time of a run that nobody watches: of torch's kinds of operations as torch's profiler
finds them, each without those that it calls, and of what is left, which is Python and the way to
the operations. Medians over runs; each workload has a process of its own. Writes profile.json and
profile.md.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile
from transformers import HfArgumentParser

from scripts.benchmarks.peers import SIZES
from scripts.benchmarks.speed import BEARABLE, OURS, WORKLOADS, BenchmarkArguments, prepare
from scripts.benchmarks.turns import in_own_process, settle, timed
from scripts.reports import expect_known, markdown, write

KINDS = {  # by parts of the operations' names, the first that fits
    "loss, log-probabilities": ("FusedLinear", "softmax", "exp_", "amax", "logsumexp"),
    "attention": ("scaled_dot_product", "bmm"),  # fused, in all of these
    "matrix products": ("mm", "mkldnn_linear", "linear_backward"),
    "layer normalisation": ("layer_norm",),
    "dropout": ("random_", "_Masked"),
    "optimizer": ("Optimizer.step", "addcdiv", "addcmul", "lerp", "sqrt"),
    "choice of tokens": ("topk", "argmax", "sort"),
    "copies and casts": ("copy_", "::cat", "index_select", "embedding", "fill_", "zero_"),
    "sums, views and others": ("",),
}
REST = "Python"


@dataclass
class ProfileArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the two files."})
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    workloads: list[str] = field(
        default_factory=BEARABLE.copy,
        metadata={"help": "Default: all, but for T2 on a CPU without bfloat16 products."},
    )
    runs: int = field(default=5, metadata={"help": "Of each kind, watched and not."})
    tokens: int = field(default=2000, metadata={"help": "Target tokens in a training batch."})

    def __post_init__(self) -> None:
        expect_known("sizes", self.sizes, SIZES)
        expect_known("workloads", self.workloads, WORKLOADS)
        if self.runs < 1:
            raise ValueError(f"--runs {self.runs}: expected a positive number")


def main() -> None:
    (arguments,) = HfArgumentParser(ProfileArguments).parse_args_into_dataclasses()
    results = {
        f"{workload} {size}": in_own_process(
            shares, size, workload, arguments.runs, arguments.tokens
        )
        for size in arguments.sizes
        for workload in arguments.workloads
    }
    rows = [
        [kind, *(f"{100 * result[kind]:.0f}%" for result in results.values())]
        for kind in (*KINDS, REST)
    ]
    write(arguments.output_dir, "profile", results, markdown(["", *results], rows))


def shares(size: str, workload: str, runs: int, tokens: int) -> dict[str, float]:
    """Of each kind, and of what is left."""
    settle()
    run = prepare(BenchmarkArguments(tokens=tokens), OURS, size, workload)
    run()
    seconds, watched = [], []
    for _ in range(runs):
        seconds.append(timed(run))
        watched.append(operations(run))
    whole = statistics.median(seconds)
    found = {kind: statistics.median(one[kind] for one in watched) / whole for kind in KINDS}
    return {**found, REST: max(0.0, 1 - sum(found.values()))}


def operations(run: Callable[[], None]) -> Counter[str]:
    """Seconds in each kind of torch's operations, those that they call apart."""
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        run()
    seconds: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for operation in watch.key_averages():
        kind = next(k for k, names in KINDS.items() if any(n in operation.key for n in names))
        seconds[kind] += operation.self_cpu_time_total / 1e6
    return seconds


if __name__ == "__main__":
    main()
