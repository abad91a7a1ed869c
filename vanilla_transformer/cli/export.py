r"""Export a model for another engine, or for a class of transformers.

    vanilla-transformer export outputs/mine --to ctranslate2 --output_dir outputs/ct2 \
        --quantization int8 --check test.en
    vanilla-transformer export outputs/mine --to transformers.js --output_dir outputs/page

translate, back-translate, evaluate, score, serve and demo accept a folder for ctranslate2 or onnx
in place of a model. The targets:
    ctranslate2      a compiled engine for CPUs and NVIDIA GPUs
    marian           MarianMTModel of transformers, for post-norm models
    pegasus          PegasusForConditionalGeneration of transformers, for pre-norm models
    onnx             graphs for ONNX Runtime
    transformers.js  a page that translates in the browser

If a target does not support a model, the error names the field. See docs/export.md.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from ..export import TARGETS, export
from ..export.check import check
from .parser import CommandParser


@dataclass
class ExportArguments:
    to: str = HfArg(help=f"One of {', '.join(TARGETS)}.")
    output_dir: str = HfArg(help="A new or empty folder.")
    quantization: str | None = HfArg(
        default=None, help="Type of the weights, such as int8. Default: float32."
    )
    check: str | None = HfArg(
        default=None,
        help="Translate the lines of this file with the model and the export, and print how many "
        "translations are equal, the difference of scores, speed and size.",
    )

    def __post_init__(self) -> None:
        if self.check is not None and not Path(self.check).is_file():
            raise FileNotFoundError(f"check={self.check!r}: expected a file")


def main() -> None:
    parser = CommandParser(
        ExportArguments,
        description=__doc__,
        usage="%(prog)s MODEL --to TARGET --output_dir DIR [options]",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="A model folder, from train, average or convert."
    )
    arguments, rest = parser.parse_args_into_dataclasses()
    output = export(rest.model, arguments.output_dir, arguments.to, arguments.quantization)
    print(f"The exported model is in {output}")
    if arguments.check is not None:
        print(check(rest.model, output, arguments.check))
