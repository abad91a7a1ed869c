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
from vanilla_transformer.text import expect_parallel, read_file


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
        expect_parallel(self.source, self.target)


def main() -> None:
    (arguments,) = HfArgumentParser(ScoreArguments).parse_args_into_dataclasses()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model, **options).to(device)
    pairs = zip(read_file(arguments.source), read_file(arguments.target), strict=True)
    with ExitStack() as files:
        output = sys.stdout
        if arguments.output is not None:
            output = files.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        scores = score_pairs(
            pairs,
            model,
            tokenizer,
            max_tokens=arguments.max_tokens,
            show_progress=sys.stderr.isatty(),
        )
        for score in scores:
            output.write(f"{score.log_probability:.6f}\t{score.tokens}\n")


if __name__ == "__main__":
    main()
