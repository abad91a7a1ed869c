"""Score given translations: a line of log-probability and number of tokens for each pair.

    python scripts/score.py --model outputs/phrases --source test.en --target test.de

The logarithm is natural, the end of the sentence counts, and label smoothing has no part in it.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

import vanilla_transformer  # noqa: F401 - registers the model
from vanilla_transformer.scoring import score_pairs
from vanilla_transformer.text import read_lines


@dataclass
class ScoreArguments:
    model: str = field(metadata={"help": "Folder or Hub name of a sequence-to-sequence model."})
    source: str = field(metadata={"help": "File with a source a line."})
    target: str = field(metadata={"help": "File with a translation a line."})
    output: str | None = field(default=None, metadata={"help": "Default: standard output."})
    max_tokens: int = field(default=2048, metadata={"help": "Of a batch, on either side."})
    device: str | None = field(default=None, metadata={"help": "Default: a GPU if there is one."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code of the model's."})

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"--max_tokens {self.max_tokens}: expected a positive number")
        lines = {}
        for path in (self.source, self.target):
            with Path(path).open("rb") as file:
                lines[path] = sum(1 for _ in read_lines(file, path))
        if lines[self.source] != lines[self.target]:
            raise ValueError(
                f"{self.source} has {lines[self.source]} lines and {self.target} "
                f"{lines[self.target]}: expected as many"
            )


def main() -> None:
    (arguments,) = HfArgumentParser(ScoreArguments).parse_args_into_dataclasses()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model, **options).to(device)
    with ExitStack() as files:
        sides = [
            read_lines(files.enter_context(Path(path).open("rb")), path)
            for path in (arguments.source, arguments.target)
        ]
        output = sys.stdout
        if arguments.output is not None:
            output = files.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        scores = score_pairs(
            zip(*sides, strict=True),
            model,
            tokenizer,
            max_tokens=arguments.max_tokens,
            show_progress=sys.stderr.isatty(),
        )
        for score in scores:
            output.write(f"{score.log_probability:.6f}\t{score.tokens}\n")


if __name__ == "__main__":
    main()
