"""Peak memory of a training step and of beam search, ours against the same model elsewhere.

python scripts/benchmark_memory.py --output_dir outputs/benchmark
python scripts/benchmark_memory.py --peers vanilla_transformer marian --size tiny

train: a step (forward, backward, AdamW) in float32 with 4,000 target tokens. beam: 4 beams over 32
sources of 100 tokens, 32 tokens each. Every figure comes from a process of its own: the highest
resident memory, less what was resident before the model was built. Freed memory goes back at once
there, so that it is memory in use; `--keep_freed` lets glibc keep it, as it does by itself, in
pieces that fit the next tensors or not. Writes memory.json, memory.md.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from benchmark import BEAMS, NEW_TOKENS, REFERENCE, SOURCES, padded, to_markdown
from benchmark_peers import PEERS, SIZES, Size, training_loss
from transformers import HfArgumentParser
from transformers import logging as transformers_logging

WORKLOADS = ("train", "beam")
TOKENS, LENGTH, SOURCE_LENGTH = 4000, 40, 100


@dataclass
class MemoryArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the two files."})
    size: str = field(default="base", metadata={"help": f"One of {', '.join(SIZES)}."})
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    keep_freed: bool = field(default=False, metadata={"help": "Count what malloc keeps, too."})
    only: str | None = field(
        default=None, metadata={"help": "Measure this workload of the first peer here, and print."}
    )

    def __post_init__(self) -> None:
        for name, values, known in (
            ("size", [self.size], SIZES),
            ("peers", self.peers, PEERS),
            ("only", [self.only or "train"], WORKLOADS),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"--{name} {value}: expected of {', '.join(known)}")
        if self.only is None and REFERENCE not in self.peers:
            self.peers.append(REFERENCE)


def main() -> None:
    (arguments,) = HfArgumentParser(MemoryArguments).parse_args_into_dataclasses()
    if arguments.only is not None:
        print(measure(arguments.peers[0], SIZES[arguments.size], arguments.only))
        return
    results = []
    for workload in WORKLOADS:
        peaks = {
            name: in_its_own_process(name, workload, arguments)
            for name in arguments.peers
            if (name, workload) != ("torch", "beam")  # it has no cache to search with
        }
        ratios = {name: peak / peaks[REFERENCE] for name, peak in peaks.items()}
        results.append(
            {"size": arguments.size, "workload": workload, "ratios": ratios, "mebibytes": peaks}
        )
    table = to_markdown(results)
    print(table)
    if arguments.output_dir is not None:
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.json").write_text(json.dumps(results, indent=2) + "\n")
        (folder / "memory.md").write_text(table + "\n")


def in_its_own_process(name: str, workload: str, arguments: MemoryArguments) -> float:
    flags = ["--peers", name, "--size", arguments.size, "--only", workload]
    at_once = {} if arguments.keep_freed else {"MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes
    output = subprocess.check_output(
        [sys.executable, __file__, *flags], text=True, env=os.environ | at_once
    )
    return float(output.split()[-1])


def measure(name: str, size: Size, workload: str) -> float:
    """Mebibytes at the highest, above what was there before the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers_logging.set_verbosity_error()
    before = psutil.Process().memory_info().rss / 2**20
    model = PEERS[name](size)
    if workload == "train":
        train(model, size)
    else:
        search(model, size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before


def train(model: torch.nn.Module, size: Size) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((TOKENS // LENGTH,), LENGTH)
    ids = padded(lengths, size.vocab_size, 0, generator)
    labels = padded(lengths, size.vocab_size, -100, generator)
    optimizer = torch.optim.AdamW(model.train().parameters())
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    for _ in range(2):  # the optimizer's state comes with the first step
        training_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def search(model: torch.nn.Module, size: Size) -> None:
    lengths = torch.full((SOURCES,), SOURCE_LENGTH)
    ids = padded(lengths, size.vocab_size, 0, torch.Generator().manual_seed(0))
    model.eval().generation_config.eos_token_id = None
    options = {"num_beams": BEAMS, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


if __name__ == "__main__":
    main()
