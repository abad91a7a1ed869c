r"""Average the weights of checkpoints, as the paper does with its last 5 (base) or 20 (big).

    vanilla-transformer average --checkpoints_of outputs/mine --last 5 --output_dir averaged
    vanilla-transformer average --checkpoints_of outputs/mine --steps 3100 6200 \
        --output_dir averaged
    vanilla-transformer average --models one/model another/model --output_dir averaged

The output folder is a model, with the configuration and the tokenizer of the last checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from ..inference.ensemble import expect_same_vocabulary
from ..inference.loading import load_tokenizer
from ..training.averaging import average_checkpoints, select_checkpoints
from .parser import CommandParser


@dataclass
class AveragingArguments:
    output_dir: str = HfArg(help="Folder for the averaged model.")
    checkpoints_of: str | None = HfArg(default=None, help="The output_dir of a training run.")
    last: int | None = HfArg(default=None, help="Average this many of the last checkpoints.")
    steps: list[int] | None = HfArg(default=None, help="Average the checkpoints of these steps.")
    models: list[str] | None = HfArg(default=None, help="Average the models in these folders.")

    def __post_init__(self) -> None:
        if (self.models is None) == (self.checkpoints_of is None):
            raise ValueError("expected one of --models and --checkpoints_of")
        chosen = [name for name in ("last", "steps") if getattr(self, name) is not None]
        if self.checkpoints_of is not None and len(chosen) != 1:
            raise ValueError(
                f"checkpoints_of={self.checkpoints_of!r}: expected one of --last and --steps with "
                "it"
            )
        if self.models is not None and chosen:
            raise ValueError(
                f"{chosen[0]}={getattr(self, chosen[0])}: expected --checkpoints_of in place of "
                "--models"
            )
        if self.last is not None and self.last < 1:
            raise ValueError(f"last={self.last}: expected a positive number")


def main() -> None:
    parser = CommandParser(
        AveragingArguments,
        description=__doc__,
        usage="%(prog)s (--checkpoints_of FOLDER --last N | --models FOLDER ...) "
        "--output_dir FOLDER [options]",
    )
    (arguments,) = parser.parse_args_into_dataclasses()
    folders = arguments.models
    if folders is None:
        folders = select_checkpoints(arguments.checkpoints_of, arguments.last, arguments.steps)
    expect_same_tokens(list(map(Path, folders)))
    output = average_checkpoints(folders, arguments.output_dir)
    print(f"The mean of {', '.join(map(str, folders))} is in {output}")


def expect_same_tokens(folders: list[Path]) -> None:
    """Raise a ValueError if an id is a different token in two models. A folder without a
    tokenizer is not checked."""
    known = [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]
    if known:
        expect_same_vocabulary([load_tokenizer(folder) for folder in known], known)
