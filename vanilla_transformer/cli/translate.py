r"""Translate a file or standard input, line by line, to a file or standard output.

    vanilla-transformer translate --model outputs/phrases --source in.txt --output out.txt
    echo "The train leaves at 3:30 PM." | vanilla-transformer translate --model outputs/phrases
    torchrun --nproc_per_node 8 -m vanilla_transformer translate --model outputs/phrases \
        --source in.txt --output out.txt

Lines keep their order, and a blank line stays blank. Lines that arrive together are translated
together, and none waits for a later one, so a terminal gets an answer after each line.

From file to file, any number of processes share the work. Run the same command again to resume
after an interruption. It refuses to resume with other weights, but the model may have moved.

With --n_best, each line becomes several, the best first: "number ||| translation ||| score". Line
numbers start at 0. The score is the translation's log-probability divided by the length penalty.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..data.text_files import open_output, read_arrived
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import fingerprint, transform_file
from ..inference.translation import translate, translate_n_best
from .parser import CommandParser


@dataclass
class TranslateArguments:
    model: str = field(metadata={"help": "Folder or Hub name of a sequence-to-sequence model."})
    source: str | None = field(
        default=None, metadata={"help": "File to translate. Default: standard input."}
    )
    output: str | None = field(
        default=None, metadata={"help": "File for the translations. Default: standard output."}
    )
    num_beams: int | None = field(
        default=None, metadata={"help": "Beam size. Default: the model's own."}
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": "Longest translation, in tokens. Default: the source's length plus 50."},
    )
    n_best: int | None = field(
        default=None, metadata={"help": "Write this many hypotheses of the beam, with scores."}
    )
    batch_size: int = field(default=32, metadata={"help": "Lines decoded together."})

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens", "n_best", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive integer")

    def options(self) -> dict[str, Any]:
        """The options that change a translation, for `translate`."""
        names = ("num_beams", "max_new_tokens", "n_best", "batch_size")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def main() -> None:
    parser = CommandParser((TranslateArguments, LoadingArguments), description=__doc__)
    arguments, loading = parser.parse_args_into_dataclasses()
    state = PartialState(cpu=loading.device == "cpu")
    model, tokenizer = loading.load(arguments.model)
    options = arguments.options()

    def work(lines: Iterable[str], first: int = 0) -> Iterator[str]:
        if arguments.n_best is None:
            yield from map(one_line, translate(lines, model, tokenizer, **options))
            return
        for number, hypotheses in enumerate(
            translate_n_best(lines, model, tokenizer, **options), first
        ):
            for text, score in hypotheses:
                yield f"{number} ||| {one_line(text)} ||| {score:.6f}"

    list(work([]))  # refuses bad options before it touches the output
    if arguments.source is not None and arguments.output is not None:
        transform_file(
            work,
            arguments.source,
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
        raise ValueError(f"{state.num_processes} processes: expected both --source and --output")
    with ExitStack() as files:
        source: Any = sys.stdin.buffer
        if arguments.source is not None:
            source = files.enter_context(Path(arguments.source).open("rb"))
        target = files.enter_context(open_output(arguments.output))
        first = 0
        for lines in read_arrived(source, arguments.source or "standard input"):
            for line in work(lines, first):
                print(line, file=target, flush=True)
            first += len(lines)


def one_line(text: str) -> str:
    """A line break inside a translation would shift all later lines."""
    return " ".join(text.splitlines())
