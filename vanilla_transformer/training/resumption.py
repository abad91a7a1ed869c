"""Options that a resumed training can't change, as its checkpoint decides about them."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..data.tokenizer_options import TokenizerArguments
from .arguments import ModelArguments, TranslationTrainingArguments

OPTIMIZER = (
    "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "optim"
)  # fmt: skip
FILES = {"tokenizer_name", "sentencepiece_model", "bpe_codes"}  # which may have moved


class OptionsCallback(TrainerCallback, ExportableState):
    """Saves options in the trainer's state, and with it in each checkpoint.

    Args:
        options: The result of `fixed_options`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def state(self) -> dict[str, Any]:
        """The options, as `TrainerState.stateful_callbacks` holds them."""
        return {"args": {"options": self.options}, "attributes": {}}


def fixed_options(
    model_arguments: ModelArguments, arguments: TranslationTrainingArguments
) -> dict[str, Any]:
    """The options of tokenizer and optimizer, as JSON values."""
    tokenizer = {
        option.name: _name_files(option.name, getattr(model_arguments, option.name))
        for option in fields(TokenizerArguments)
    }
    optimizer = {name: getattr(arguments, name) for name in OPTIMIZER}
    found: dict[str, Any] = json.loads(json.dumps({**tokenizer, **optimizer}, default=str))
    return found


def expect_same_options(checkpoint: str | Path, options: dict[str, Any]) -> None:
    """Raise a ValueError if a checkpoint was trained with others of these options. One that was
    saved without them is not checked."""
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    saved: Any = state.stateful_callbacks.get(OptionsCallback.__name__, {})
    for name, before in saved.get("args", {}).get("options", {}).items():
        if name in options and options[name] != before:
            raise ValueError(
                f"{name}={options[name]!r}: expected {before!r}, as in {checkpoint}, from which "
                "training resumes; --model_name_or_path trains its weights with other options"
            )


def _name_files(option: str, value: Any) -> Any:
    """The names of files without their folders; other values as they are."""
    if option not in FILES or value is None:
        return value
    paths: Iterable[str] = [value] if isinstance(value, str) else value
    return [Path(path).name for path in paths]
