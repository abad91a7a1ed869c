"""Score a model, or existing translations, against references. Prints one line of JSON.

vanilla-transformer evaluate --model outputs/multi30k --source test.en --target test.de
vanilla-transformer evaluate --predictions out.de --target test.de --tokenize none --lowercase
"""

import json
import sys
from dataclasses import dataclass, field

from ..data.text_files import expect_parallel, read_file
from ..inference.loading import LoadingArguments
from ..inference.metrics import score_translations
from ..inference.translation import translate
from .parser import CommandParser


@dataclass
class EvaluateArguments:
    target: str = field(metadata={"help": "File of reference translations."})
    model: str | None = field(default=None, metadata={"help": "Model that translates --source."})
    source: str | None = field(default=None, metadata={"help": "File to translate."})
    predictions: str | None = field(
        default=None, metadata={"help": "File of existing translations."}
    )
    num_beams: int | None = field(
        default=None, metadata={"help": "Beam size. Default: the model's own."}
    )
    batch_size: int = field(default=32, metadata={"help": "Lines decoded together."})
    tokenize: str | None = field(
        default=None, metadata={"help": "sacreBLEU's tokenizer. Default: 13a."}
    )
    lowercase: bool = field(default=False, metadata={"help": "Ignore case in BLEU and chrF."})

    def __post_init__(self) -> None:
        if (self.predictions is None) == (self.model is None or self.source is None):
            raise ValueError("expected either --predictions, or --model and --source")


def main() -> None:
    parser = CommandParser((EvaluateArguments, LoadingArguments), description=__doc__)
    arguments, loading = parser.parse_args_into_dataclasses()
    references = list(read_file(arguments.target))
    if arguments.predictions is not None:
        predictions = list(read_file(arguments.predictions))
    else:
        expect_parallel(arguments.source, arguments.target)
        predictions = list(
            translate(
                read_file(arguments.source),
                *loading.load(arguments.model),
                batch_size=arguments.batch_size,
                show_progress=sys.stderr.isatty(),
                **({} if arguments.num_beams is None else {"num_beams": arguments.num_beams}),
            )
        )
    scores = score_translations(
        predictions, references, tokenize=arguments.tokenize, lowercase=arguments.lowercase
    )
    print(json.dumps(scores))
