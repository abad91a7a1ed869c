"""Score a model, or translations already made, against references: one JSON line.

python scripts/evaluate.py --model outputs/multi30k --source test.en --target test.de
python scripts/evaluate.py --predictions out.de --target test.de --tokenize none --lowercase
"""

import json
import sys
from dataclasses import dataclass, field

from transformers import HfArgumentParser

from ..data.text_files import expect_parallel, read_file
from ..inference.loading import LoadingArguments
from ..inference.metrics import score_translations
from ..inference.translation import translate


@dataclass
class EvaluateArguments:
    target: str = field(metadata={"help": "Reference translations, a line each."})
    model: str | None = field(default=None, metadata={"help": "Model to translate --source with."})
    source: str | None = field(default=None, metadata={"help": "Lines to translate."})
    predictions: str | None = field(default=None, metadata={"help": "Translations already made."})
    num_beams: int | None = field(default=None, metadata={"help": "Default: the model's own."})
    batch_size: int = field(default=32, metadata={"help": "Lines decoded together."})
    tokenize: str | None = field(default=None, metadata={"help": "sacreBLEU's; default: 13a."})
    lowercase: bool = field(default=False, metadata={"help": "Ignore case in BLEU and chrF."})

    def __post_init__(self) -> None:
        if (self.predictions is None) == (self.model is None or self.source is None):
            raise ValueError("expected either --predictions, or --model and --source")


def main() -> None:
    parser = HfArgumentParser((EvaluateArguments, LoadingArguments))
    arguments, loading = parser.parse_args_into_dataclasses()
    references = list(read_file(arguments.target))
    if arguments.predictions is not None:
        predictions = list(read_file(arguments.predictions))
    else:
        expect_parallel(arguments.source, arguments.target)
        predictions = translate_with(arguments, loading)
    scores = score_translations(
        predictions, references, tokenize=arguments.tokenize, lowercase=arguments.lowercase
    )
    print(json.dumps(scores))


def translate_with(arguments: EvaluateArguments, loading: LoadingArguments) -> list[str]:
    """The model's translations of the sources."""
    generation = {} if arguments.num_beams is None else {"num_beams": arguments.num_beams}
    return list(
        translate(
            read_file(arguments.source),
            *loading.load(arguments.model),
            batch_size=arguments.batch_size,
            show_progress=sys.stderr.isatty(),
            **generation,
        )
    )


if __name__ == "__main__":
    main()
