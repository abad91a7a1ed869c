"""What a checkpoint tells of its run: options that a resumed training can't change, and the size
of the text."""

import json
import logging
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..data.tokenizer_options import TokenizerArguments
from .arguments import ModelArguments, TranslationTrainingArguments

logger = logging.getLogger(__name__)

OPTIMIZER = (
    "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "optim"
)  # fmt: skip
FILES = {"tokenizer_name", "sentencepiece_model", "bpe_codes"}  # which may have moved


class OptionsCallback(TrainerCallback, ExportableState):
    """Saves options in the trainer's state, and with it in each checkpoint; a resumed training
    takes those that may change.

    Args:
        options: The result of `fixed_options`.
        text: The size of the training text; None if it is a stream.
    """

    def __init__(self, options: dict[str, Any], text: dict[str, int] | None = None) -> None:
        self.options, self.text = options, text

    def state(self) -> dict[str, Any]:
        """The options and the size, as `TrainerState.stateful_callbacks` holds them."""
        return {"args": {"options": self.options, "text": self.text}, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log, evaluate and save as often as the options say. `Trainer` (5.17 to 5.24) resumes with
        the numbers of steps in the checkpoint."""
        state.compute_steps(args, state.max_steps)


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
    for name, before in (_saved(checkpoint, "options") or {}).items():
        if name in options and options[name] != before:
            raise ValueError(
                f"{name}={options[name]!r}: expected {before!r}, as in {checkpoint}, from which "
                "training resumes; --model_name_or_path trains its weights with other options"
            )


def warn_of_another_text(checkpoint: str | Path, text: dict[str, int] | None) -> None:
    """Log a warning if a checkpoint was trained on a text of a different size: epochs, and the
    defaults that follow from the text, change in the middle of the training."""
    before = _saved(checkpoint, "text")
    if before and text and _in_words(before) != _in_words(text):
        logger.warning(
            "The training text has %s, but that of %s had %s: training resumes with the new text",
            _in_words(text), checkpoint, _in_words(before),
        )  # fmt: skip


def _saved(checkpoint: str | Path, name: str) -> dict[str, Any] | None:
    """What an `OptionsCallback` has saved under this name."""
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    saved: Any = state.stateful_callbacks.get(OptionsCallback.__name__, {})
    found: dict[str, Any] | None = saved.get("args", {}).get(name)
    return found


def _in_words(text: dict[str, int]) -> str:
    source, target = text["source_tokens"], text["target_tokens"]
    return f"{text['pairs']:,} pairs, {source:,} source and {target:,} target tokens"


def _name_files(option: str, value: Any) -> Any:
    """The names of files without their folders; other values as they are."""
    if option not in FILES or value is None:
        return value
    paths: Iterable[str] = [value] if isinstance(value, str) else value
    return [Path(path).name for path in paths]
