r"""Average the weights of checkpoints, as the paper does with its last 5 (base) or 20 (big).

python scripts/average_checkpoints.py --checkpoints_of outputs/m30k --last 5 --output_dir averaged
python scripts/average_checkpoints.py --checkpoints_of outputs/m30k --steps 3100 6200 \
    --output_dir averaged
python scripts/average_checkpoints.py --models one/model another/model --output_dir averaged

What is written is a model like any other, with the configuration and the tokenizer of the last.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from ..training.averaging import average_checkpoints, find_checkpoints


@dataclass
class AveragingArguments:
    output_dir: str = field(metadata={"help": "Folder for the averaged model."})
    checkpoints_of: str | None = field(
        default=None, metadata={"help": "A training's output_dir, which holds checkpoints."}
    )
    last: int | None = field(default=None, metadata={"help": "So many of its last checkpoints."})
    steps: list[int] | None = field(default=None, metadata={"help": "Or those of these steps."})
    models: list[str] | None = field(default=None, metadata={"help": "Or these folders."})

    def __post_init__(self) -> None:
        if (self.models is None) == (self.checkpoints_of is None):
            raise ValueError("expected one of --models and --checkpoints_of")
        if self.checkpoints_of is not None and (self.last is None) == (self.steps is None):
            raise ValueError("--checkpoints_of: expected one of --last and --steps with it")
        if self.last is not None and self.last < 1:
            raise ValueError(f"--last {self.last}: expected a positive number")
        if Path(self.output_dir, "config.json").exists():
            raise FileExistsError(f"--output_dir {self.output_dir} already holds a model")


def main() -> None:
    (arguments,) = HfArgumentParser(AveragingArguments).parse_args_into_dataclasses()
    folders = arguments.models
    if folders is None:
        folders = find_checkpoints(arguments.checkpoints_of, arguments.last, arguments.steps)
    output = average_checkpoints(folders, arguments.output_dir)
    print(f"The mean of {', '.join(map(str, folders))} is in {output}")


if __name__ == "__main__":
    main()
