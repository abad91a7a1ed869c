"""Translate a file or standard input, a line at a time, into a file or standard output.

    python scripts/translate.py --model outputs/phrases --input in.txt --output out.txt
    echo "The train leaves at 3:30 PM." | python scripts/translate.py --model outputs/phrases

Lines come out in the order in which they went in; a blank line stays blank. With --n_best each line
becomes several, the best first, as "number ||| translation ||| score": lines count from 0, and the
score is the translation's log-probability over the length penalty.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

import vanilla_transformer  # noqa: F401 - registers the model
from vanilla_transformer.text import read_lines
from vanilla_transformer.translation import translate, translate_n_best


@dataclass
class TranslateArguments:
    model: str = field(metadata={"help": "Folder or Hub name of a sequence-to-sequence model."})
    input: str | None = field(default=None, metadata={"help": "Default: standard input."})
    output: str | None = field(default=None, metadata={"help": "Default: standard output."})
    num_beams: int | None = field(default=None, metadata={"help": "Default: the model's own."})
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Default: the paper's, 50 more than the source has."}
    )
    n_best: int | None = field(
        default=None, metadata={"help": "Write so many hypotheses of the beam, with scores."}
    )
    batch_size: int = field(default=32, metadata={"help": "Lines decoded together."})
    device: str | None = field(default=None, metadata={"help": "Default: a GPU if there is one."})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, ..."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code of the model's."})


def main() -> None:
    (arguments,) = HfArgumentParser(TranslateArguments).parse_args_into_dataclasses()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        arguments.model, attn_implementation=arguments.attn_implementation, **options
    ).to(device)
    generation = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    how: dict[str, Any] = {
        "batch_size": arguments.batch_size,
        "show_progress": sys.stderr.isatty(),
        **{name: value for name, value in generation.items() if value is not None},
    }
    with ExitStack() as files:
        source = sys.stdin.buffer
        if arguments.input is not None:
            source = files.enter_context(Path(arguments.input).open("rb"))
        target = sys.stdout
        if arguments.output is not None:
            target = files.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        lines = read_lines(source, arguments.input or "standard input")
        if arguments.n_best is None:
            for translation in translate(lines, model, tokenizer, **how):
                target.write(one_line(translation) + "\n")
            return
        lists = translate_n_best(lines, model, tokenizer, arguments.n_best, **how)
        for number, hypotheses in enumerate(lists):
            for text, score in hypotheses:
                target.write(f"{number} ||| {one_line(text)} ||| {score:.6f}\n")


def one_line(text: str) -> str:
    """A line break inside a translation would shift all later lines."""
    return " ".join(text.splitlines())


if __name__ == "__main__":
    main()
