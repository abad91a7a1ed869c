"""Profile our model in the workloads of `speed.py`.

python -m scripts.benchmarks.profile_steps --output_dir outputs/profile

The table divides the time of a run without profiling into kinds of torch operations, by their self
time in torch's profiler, and the remainder: Python and the overhead of each operation. Results are
medians over several runs. Each workload has its own process. Writes profile.json and profile.md.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile
from transformers.hf_argparser import HfArg

from scripts.benchmarks.peers import SIZES
from scripts.benchmarks.speed import DEFAULT_WORKLOADS, OURS, WORKLOADS, BenchmarkArguments, prepare
from scripts.benchmarks.turns import in_own_process, settle, timed
from scripts.reports import expect_known, markdown, read_options, write

KINDS = {  # matched by parts of an operation's name, in this order
    "loss, log-probabilities": ("FusedLinear", "softmax", "exp_", "amax", "logsumexp"),
    "attention": ("scaled_dot_product", "bmm"),  # all fused
    "matrix products": ("mm", "mkldnn_linear", "linear_backward"),
    "layer normalization": ("layer_norm",),
    "dropout": ("random_", "MaskedScale"),
    "optimizer": ("Optimizer.step", "addcdiv", "addcmul", "lerp", "sqrt"),
    "choice of tokens": ("topk", "argmax", "sort"),
    "copies and casts": ("copy_", "::cat", "index_select", "embedding", "fill_", "zero_"),
    "sums, views, everything else": ("",),
}
REST = "Python"


@dataclass
class ProfileArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    workloads: list[str] = HfArg(
        default_factory=DEFAULT_WORKLOADS.copy,
        help="Default: all, except T2 on CPUs without bfloat16 instructions.",
    )
    runs: int = HfArg(default=5, help="Runs with the profiler, and as many without.")
    tokens: int = HfArg(default=2000, help="Target tokens per training batch.")

    def __post_init__(self) -> None:
        expect_known("sizes", self.sizes, SIZES)
        expect_known("workloads", self.workloads, WORKLOADS)
        if self.runs < 1:
            raise ValueError(f"--runs {self.runs}: expected a positive number")


def main() -> None:
    arguments = read_options(ProfileArguments, __doc__)
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
    """The fraction of time of each kind of operation, and of the remainder."""
    settle()
    run = prepare(BenchmarkArguments(tokens=tokens), OURS, size, workload)
    run()
    seconds, profiled = [], []
    for _ in range(runs):
        seconds.append(timed(run))
        profiled.append(operations(run))
    total = statistics.median(seconds)
    found = {kind: statistics.median(one[kind] for one in profiled) / total for kind in KINDS}
    return {**found, REST: max(0.0, 1 - sum(found.values()))}


def operations(run: Callable[[], None]) -> Counter[str]:
    """The self time of each kind of torch operation in seconds."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    seconds: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for operation in profiler.key_averages():
        kind = next(k for k, names in KINDS.items() if any(n in operation.key for n in names))
        seconds[kind] += operation.self_cpu_time_total / 1e6
    return seconds


if __name__ == "__main__":
    main()
