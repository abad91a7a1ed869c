"""Print the log-probability and the number of tokens of given translations.

    vanilla-transformer score --model outputs/phrases --source test.en --target test.de

Prints a line for each pair, with a tab between the two. The logarithm is natural. The end of the
sentence counts as a token, and so does the target language token of NLLB or mBART. Label smoothing
has no effect.
"""

import sys
from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from ..data.paths import is_no_file
from ..data.text_files import expect_inputs, expect_output, expect_parallel, open_output, read_file
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import new_file
from ..inference.scoring import score_pairs
from .parser import CommandParser
from .processes import expect_one_process


@dataclass
class ScoreArguments:
    model: list[str] = HfArg(
        help="Folder or Hub name of a sequence-to-sequence model, or an exported folder. Several "
        "models are an ensemble."
    )
    source: str = HfArg(help="File of source sentences.")
    target: str = HfArg(help="File of their translations.")
    output: str | None = HfArg(default=None, help="File for the scores. Default: standard output.")
    max_tokens: int = HfArg(
        default=2048, help="Maximum number of tokens in a batch, on either side, with padding."
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: expected a positive number")
        expect_inputs(source=self.source, target=self.target)
        expect_parallel(self.source, self.target)
        expect_output(self.output, source=self.source, target=self.target)


def main() -> None:
    parser = CommandParser(
        (ScoreArguments, LoadingArguments),
        description=__doc__,
        usage="%(prog)s --model FOLDER --source FILE --target FILE [options]",
    )
    arguments, loading = parser.parse_args_into_dataclasses()
    expect_one_process()
    scores = score_pairs(
        zip(read_file(arguments.source), read_file(arguments.target), strict=True),
        *loading.load(arguments.model),
        max_tokens=arguments.max_tokens,
        show_progress=sys.stderr.isatty(),
    )
    lines = (f"{score.log_probability:.6f}\t{score.tokens}\n" for score in scores)
    if arguments.output is None or is_no_file(arguments.output):
        with open_output(arguments.output) as stream:
            stream.writelines(lines)
    else:
        with new_file(arguments.output) as file:
            file.writelines(line.encode() for line in lines)
