"""Compare the peak memory of training and beam search with that of other libraries.

python -m scripts.benchmarks.memory --output_dir outputs/benchmark
python -m scripts.benchmarks.memory --peers vanilla_transformer marian --size tiny

train is a step (forward, backward, AdamW) in float32 with 4,000 target tokens. beam is beam search
with 4 beams for 32 sources of 100 tokens, 32 new tokens each. Every result comes from its own
process: the peak resident memory, minus the resident memory before the model is built. Freed memory
is returned to the system at once, so that only memory in use counts; with `--keep_freed` glibc
keeps it, as it does by default. Writes memory.json and memory.md.
"""

import os
from dataclasses import dataclass, field

import torch
from transformers.hf_argparser import HfArg

from scripts.benchmarks.peers import PAD, PEERS, SIZES
from scripts.benchmarks.speed import (
    BEAMS,
    REFERENCE,
    SOURCES,
    generation,
    padded,
    to_markdown,
    training,
)
from scripts.benchmarks.turns import in_own_process, peak_memory, resident_memory, settle
from scripts.reports import expect_known, read_options, write

WORKLOADS = ("train", "beam")
TOKENS, LENGTH, SOURCE_LENGTH = 4000, 40, 100


@dataclass
class MemoryArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    size: str = HfArg(default="base", help=f"One of {', '.join(SIZES)}.")
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    keep_freed: bool = HfArg(default=False, help="Also count freed memory that malloc keeps.")

    def __post_init__(self) -> None:
        expect_known("size", [self.size], SIZES)
        expect_known("peers", self.peers, PEERS)
        if REFERENCE not in self.peers:
            self.peers.append(REFERENCE)


def main() -> None:
    arguments = read_options(MemoryArguments, __doc__)
    if not arguments.keep_freed:  # read by new processes
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # bytes
    results = []
    for workload in WORKLOADS:
        peaks = {
            name: in_own_process(measure, name, arguments.size, workload)
            for name in arguments.peers
            if (name, workload) != ("torch", "beam")  # it has no cache
        }
        ratios = {name: peak / peaks[REFERENCE] for name, peak in peaks.items()}
        results.append(
            {"size": arguments.size, "workload": workload, "ratios": ratios, "mebibytes": peaks}
        )
    write(arguments.output_dir, "memory", results, to_markdown(results))


def measure(name: str, size: str, workload: str) -> float:
    """Peak memory in mebibytes, above that before the model is built."""
    settle()
    before = resident_memory()
    model = PEERS[name](SIZES[size])
    count, length = (TOKENS // LENGTH, LENGTH) if workload == "train" else (SOURCES, SOURCE_LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = padded(torch.full((count,), length), SIZES[size].vocab_size, PAD, generator)
    if workload == "train":
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        # the first step creates the optimizer's state
        training(model, [batch, batch], autocast=False)()
    else:
        generation(model, ids, BEAMS)()
    return peak_memory() - before


if __name__ == "__main__":
    main()
