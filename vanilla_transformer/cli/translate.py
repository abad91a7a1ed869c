r"""Translate a file or standard input, a line at a time, into a file or standard output.

    python scripts/translate.py --model outputs/phrases --input in.txt --output out.txt
    accelerate launch --num_processes 8 scripts/translate.py --model outputs/phrases \
        --input in.txt --output out.txt
    echo "The train leaves at 3:30 PM." | python scripts/translate.py --model outputs/phrases

Lines keep their order; a blank line stays blank. Lines that arrive together are translated
together, and none waits for a later one: a terminal is answered line by line. From file to file,
any number of processes share the work, and the same command resumes after a stop: with the same
model, in whatever folder, while other weights are refused. With --n_best each line becomes several,
the best first, as "number ||| translation ||| score": lines count from 0, and the score is the
translation's log-probability over the length penalty.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import HfArgumentParser

from ..data.text_files import open_output, read_arrived
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import fingerprint, transform_file
from ..inference.translation import translate, translate_n_best


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

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens", "n_best", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive integer")

    def how(self) -> dict[str, Any]:
        """What a translation depends on, for `translate`."""
        names = ("num_beams", "max_new_tokens", "n_best", "batch_size")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def main() -> None:
    parser = HfArgumentParser((TranslateArguments, LoadingArguments))
    arguments, loading = parser.parse_args_into_dataclasses()
    state = PartialState(cpu=loading.device == "cpu")
    model, tokenizer = loading.load(arguments.model)
    how = arguments.how()

    def work(lines: Iterable[str], first: int = 0) -> Iterator[str]:
        if arguments.n_best is None:
            yield from map(one_line, translate(lines, model, tokenizer, **how))
            return
        for number, hypotheses in enumerate(
            translate_n_best(lines, model, tokenizer, **how), first
        ):
            for text, score in hypotheses:
                yield f"{number} ||| {one_line(text)} ||| {score:.6f}"

    list(work([]))  # what can't be is refused before the output is touched
    if arguments.input is not None and arguments.output is not None:
        transform_file(
            work,
            arguments.input,
            arguments.output,
            settings={**how, **fingerprint(model, tokenizer)},
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
        source = sys.stdin.buffer
        if arguments.input is not None:
            source = files.enter_context(Path(arguments.input).open("rb"))
        target = files.enter_context(open_output(arguments.output))
        first = 0
        for lines in read_arrived(source, arguments.input or "standard input"):
            for line in work(lines, first):
                print(line, file=target, flush=True)
            first += len(lines)


def one_line(text: str) -> str:
    """A line break inside a translation would shift all later lines."""
    return " ".join(text.splitlines())


if __name__ == "__main__":
    main()
