r"""Translate a file or standard input, a line at a time, into a file or standard output.

    python scripts/translate.py --model outputs/phrases --input in.txt --output out.txt
    accelerate launch --num_processes 8 scripts/translate.py --model outputs/phrases \
        --input in.txt --output out.txt
    echo "The train leaves at 3:30 PM." | python scripts/translate.py --model outputs/phrases

Lines keep their order; a blank line stays blank. From file to file, any number of processes share
the work, and the same command resumes after a stop: with the same model, in whatever folder, while
other weights are refused. With --n_best each line becomes several, the best first, as "number |||
translation ||| score": lines count from 0, and the score is the translation's log-probability over
the length penalty.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

import vanilla_transformer  # noqa: F401 - registers the model
from vanilla_transformer.bulk import fingerprint, transform_file
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
    state = PartialState(cpu=arguments.device == "cpu" or not torch.accelerator.is_available())
    options = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        arguments.model, attn_implementation=arguments.attn_implementation, **options
    ).to(arguments.device or state.device)
    generation = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    how: dict[str, Any] = {
        "batch_size": arguments.batch_size,
        **{name: value for name, value in generation.items() if value is not None},
    }

    def work(lines: Iterable[str], first: int = 0) -> Iterator[str]:
        if arguments.n_best is None:
            yield from map(one_line, translate(lines, model, tokenizer, **how))
            return
        lists = translate_n_best(lines, model, tokenizer, arguments.n_best, **how)
        for number, hypotheses in enumerate(lists, first):
            for text, score in hypotheses:
                yield f"{number} ||| {one_line(text)} ||| {score:.6f}"

    if arguments.input is not None and arguments.output is not None:
        paths = ("model", "input", "output")
        options = {k: v for k, v in dataclasses.asdict(arguments).items() if k not in paths}
        transform_file(
            work,
            arguments.input,
            arguments.output,
            settings={**options, **fingerprint(model, tokenizer)},
            process_index=state.process_index,
            num_processes=state.num_processes,
            wait_for_everyone=state.wait_for_everyone,
            show_progress=state.is_main_process and sys.stderr.isatty(),
        )
        state.destroy_process_group()
        return
    if state.num_processes > 1:
        raise ValueError(f"{state.num_processes} processes: expected both --input and --output")
    with ExitStack() as files:
        source, target = sys.stdin.buffer, sys.stdout
        if arguments.input is not None:
            source = files.enter_context(Path(arguments.input).open("rb"))
        if arguments.output is not None:
            target = files.enter_context(Path(arguments.output).open("w", encoding="utf-8"))
        for line in work(read_lines(source, arguments.input or "standard input")):
            target.write(line + "\n")


def one_line(text: str) -> str:
    """A line break inside a translation would shift all later lines."""
    return " ".join(text.splitlines())


if __name__ == "__main__":
    main()
