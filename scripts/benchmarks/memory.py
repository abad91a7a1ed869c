"""Peak memory of a training step and of beam search, ours against the same model elsewhere.

python scripts/benchmark_memory.py --output_dir outputs/benchmark
python scripts/benchmark_memory.py --peers vanilla_transformer marian --size tiny

train: a step (forward, backward, AdamW) in float32 with 4,000 target tokens. beam: 4 beams over 32
sources of 100 tokens, 32 tokens each. Every figure comes from a process of its own: the highest
resident memory, less what was resident before the model was built. Freed memory goes back at once
there, so that it is memory in use; `--keep_freed` lets glibc keep it, as it does by itself, in
pieces that fit the next tensors or not. Writes memory.json, memory.md.
"""

import os
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser

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
from scripts.reports import expect_known, write

WORKLOADS = ("train", "beam")
TOKENS, LENGTH, SOURCE_LENGTH = 4000, 40, 100


@dataclass
class MemoryArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the two files."})
    size: str = field(default="base", metadata={"help": f"One of {', '.join(SIZES)}."})
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    keep_freed: bool = field(default=False, metadata={"help": "Count what malloc keeps, too."})

    def __post_init__(self) -> None:
        expect_known("size", [self.size], SIZES)
        expect_known("peers", self.peers, PEERS)
        if REFERENCE not in self.peers:
            self.peers.append(REFERENCE)


def main() -> None:
    (arguments,) = HfArgumentParser(MemoryArguments).parse_args_into_dataclasses()
    if not arguments.keep_freed:  # for the processes that are to come
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # bytes
    results = []
    for workload in WORKLOADS:
        peaks = {
            name: in_own_process(measure, name, arguments.size, workload)
            for name in arguments.peers
            if (name, workload) != ("torch", "beam")  # it has no cache to search with
        }
        ratios = {name: peak / peaks[REFERENCE] for name, peak in peaks.items()}
        results.append(
            {"size": arguments.size, "workload": workload, "ratios": ratios, "mebibytes": peaks}
        )
    write(arguments.output_dir, "memory", results, to_markdown(results))


def measure(name: str, size: str, workload: str) -> float:
    """Mebibytes at the highest, above what was there before the model."""
    settle()
    before = resident_memory()
    model = PEERS[name](SIZES[size])
    count, length = (TOKENS // LENGTH, LENGTH) if workload == "train" else (SOURCES, SOURCE_LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = padded(torch.full((count,), length), SIZES[size].vocab_size, PAD, generator)
    if workload == "train":
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        # the optimizer's state comes with the first step
        training(model, [batch, batch], narrow=False)()
    else:
        generation(model, ids, BEAMS)()
    return peak_memory() - before


if __name__ == "__main__":
    main()
