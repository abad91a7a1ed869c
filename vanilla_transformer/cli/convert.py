r"""Convert a checkpoint of another toolkit to a model folder, or back.

    vanilla-transformer convert checkpoint_best.pt --output_dir outputs/converted
    vanilla-transformer convert opus-mt-folder --output_dir outputs/marian --check sample.en
    vanilla-transformer convert outputs/converted --to fairseq --output_dir outputs/fairseq

The command recognizes the format, and executes nothing in a checkpoint. Put the vocabularies next
to the checkpoint, or pass them as options. See docs/conversion/README.md.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from ..conversion import convert, convert_back, find_format
from ..conversion.check import check
from ..conversion.core import ConversionOptions
from .parser import CommandParser


@dataclass
class ConvertArguments:
    output_dir: str = HfArg(help="A new or empty folder.")
    to: str | None = HfArg(
        default=None,
        help="Convert a converted model back to the format that it came from: fairseq, fsmt or "
        "hf_marian.",
    )
    check: str | None = HfArg(
        default=None,
        help="Translate and score the lines of this file with the toolkit, if it is installed, "
        "and with the converted model.",
    )
    max_shard_size: str = HfArg(default="5GB", help="The largest size of a file of weights.")

    def __post_init__(self) -> None:
        if self.check is not None and not Path(self.check).is_file():
            raise FileNotFoundError(f"check={self.check!r}: expected a file")
        if self.check is not None and self.to is not None:
            raise ValueError(f"check={self.check!r} and to={self.to!r}: expected one of them")
        if self.to is not None and self.max_shard_size != ConvertArguments.max_shard_size:
            raise ValueError(
                f"max_shard_size={self.max_shard_size!r} has no effect with to={self.to!r}"
            )


def main() -> None:
    parser = CommandParser(
        [ConvertArguments, ConversionOptions],
        description=__doc__,
        usage="%(prog)s PATH --output_dir DIR [options]",
    )
    parser.add_argument("path", metavar="PATH", help="The checkpoint: a file or a folder.")
    arguments, options, rest = parser.parse_args_into_dataclasses()
    if arguments.to is not None:
        options.expect_none(f"to={arguments.to!r}")
        output = convert_back(rest.path, arguments.output_dir, arguments.to)
    else:
        output = convert(
            rest.path,
            arguments.output_dir,
            options=options,
            max_shard_size=arguments.max_shard_size,
        )
    print(f"The converted model is in {output}")
    if arguments.check is not None:
        module = find_format(Path(rest.path), options.format)
        print(check(rest.path, output, arguments.check, module, options))
