"""Measure the memory and speed of `vanilla-transformer translate` for files of different sizes.

python -m scripts.benchmarks.bulk --output_dir outputs/bulk

A tiny untrained model (one encoder and one decoder layer, 16 dimensions) translates files of random
words with greedy search, at most 8 tokens per line. Each file has its own process, whose peak
resident memory is reported. Writes bulk.json and bulk.md.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from scripts.benchmarks.turns import in_own_process
from scripts.reports import markdown, read_options, write
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenization import train_tokenizer

WORDS = ("train", "leaves", "seven", "night", "house", "lake", "blue", "the", "a", "two", "of")


@dataclass
class BulkArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    lines: list[int] = HfArg(
        default_factory=lambda: [1_000, 10_000, 100_000, 1_000_000],
        help="Numbers of lines, one per file.",
    )
    batch_size: int = HfArg(default=256, help="Lines decoded together.")

    def __post_init__(self) -> None:
        if min(self.lines) < 1 or self.batch_size < 1:
            raise ValueError(
                f"--lines {self.lines} --batch_size {self.batch_size}: expected positive numbers"
            )
        self.lines.sort()  # the table is relative to the shortest file


def main() -> None:
    arguments = read_options(BulkArguments, __doc__)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Path(scratch, "model"))
        for lines in arguments.lines:
            results.append(in_own_process(translate, scratch, lines, arguments.batch_size))
    header = ["lines", "peak, MiB", "relative to the shortest file", "lines per second"]
    rows = []
    for result in results:
        ratio = result["mebibytes"] / results[0]["mebibytes"]
        speed = result["lines"] / result["seconds"]
        rows.append(
            [f"{result['lines']:,}", f"{result['mebibytes']:.0f}", f"{ratio:.2f}", f"{speed:.0f}"]
        )
    write(arguments.output_dir, "bulk", results, markdown(header, rows))


def save_model(folder: Path) -> None:
    tokenizer = train_tokenizer([" ".join(WORDS)] * 9, 300, show_progress=False)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def translate(scratch: str, lines: int, batch_size: int) -> dict[str, float]:
    """Peak memory and seconds of the command, the only child of this process."""
    source, output = Path(scratch, "in.txt"), Path(scratch, "out.txt")
    words = random.Random(0)
    with source.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            file.write(" ".join(words.choices(WORDS, k=words.randint(1, 12))) + "\n")
    flags = {"model": f"{scratch}/model", "source": source, "output": output, "device": "cpu"}
    flags |= {"batch_size": batch_size, "max_new_tokens": 8}
    options = [f"--{name}={value}" for name, value in flags.items()]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vanilla_transformer", "translate", *options], check=True)
    seconds = time.perf_counter() - began
    with output.open(encoding="utf-8") as file:
        assert sum(1 for _ in file) == lines
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    return {"lines": lines, "mebibytes": peak, "seconds": seconds}


if __name__ == "__main__":
    main()
