"""Resuming: finds the checkpoint, and compares its options and text with those of the run."""

import json
import logging
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import (
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from .. import model
from ..data.tokenizer_options import TokenizerArguments
from .arguments import SCHEDULES_BY_METRIC, ModelArguments, TranslationTrainingArguments
from .checkpoints import checkpoints_by_step, find_defect, last_complete_checkpoint, state_of
from .defaults import TextSize
from .distributed import (
    FULL_OPTIMIZER,
    SHARDED_OPTIMIZER,
    expect_in_all_processes,
    run_on_main_process,
    saves_shards,
    uses_fsdp,
)

logger = logging.getLogger(__name__)

OPTIMIZER = (
    "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "optim",
    "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs",
)  # fmt: skip
VALIDATION = "the validation text"
SCORING = ("generation_kwargs", "generation_max_length", "bleu_tokenize")
CARD = "README.md"
CODE = Path(model.__file__).parent  # each model has a copy
FILES = {"tokenizer_name", "sentencepiece_model", "bpe_codes"}  # files may have moved


def find_checkpoint(arguments: Seq2SeqTrainingArguments) -> str | None:
    """The checkpoint to resume from, or `None` to start a new training.

    `resume_from_checkpoint` is a checkpoint's folder, "true" for the newest complete checkpoint in
    `output_dir`, or "auto" for the same if there is one. The main process decides for all.

    Raises:
        FileNotFoundError: The checkpoint does not exist, or not all processes can see it.
        ValueError: The checkpoint is damaged (the message names the file), or holds no optimizer
            state that this run can load.
        FileExistsError: `output_dir` is a file, or holds a model that would be overwritten.
    """
    output_dir, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    layout = _optimizer_layout(arguments)
    found = run_on_main_process(lambda: _find_checkpoint(output_dir, wanted, layout))
    if found is not None:
        expect_in_all_processes(found, Path(found).is_dir())
    return found


def _find_checkpoint(output_dir: Path, wanted: str | None, layout: str) -> str | None:
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"output_dir={output_dir} is a file: expected a folder")
    mode = str(wanted).lower()
    if mode in ("auto", "true"):
        newest = last_complete_checkpoint(output_dir)
        if newest is None and mode == "true":
            raise FileNotFoundError(f"{output_dir}: no checkpoint to resume from")
        if newest is not None:
            return _expect_optimizer_state(newest, layout)
    elif wanted is not None:
        if not Path(wanted, TRAINER_STATE_NAME).is_file():
            raise FileNotFoundError(f"resume_from_checkpoint={wanted}: not a trainer's checkpoint")
        defect = find_defect(wanted)
        if defect is not None:
            raise ValueError(f"resume_from_checkpoint={wanted}: {defect}")
        _expect_optimizer_state(Path(wanted), layout)
        if Path(wanted).resolve().parent != output_dir.resolve():
            _expect_free(output_dir)
        else:
            _warn_of_later_checkpoints(output_dir, wanted)
        return str(wanted)
    _expect_free(output_dir)
    return None


def _warn_of_later_checkpoints(output_dir: Path, wanted: str) -> None:
    resumed = state_of(wanted).global_step
    if later := [step for step in checkpoints_by_step(output_dir) if step > resumed]:
        logger.warning(
            "Training resumes at step %d, and %s holds later checkpoints, of steps %s: move them, "
            'or --resume_from_checkpoint "auto" continues from the last of them',
            resumed, output_dir, ", ".join(map(str, later)),
        )  # fmt: skip


def _expect_free(output_dir: Path) -> None:
    if checkpoints_by_step(output_dir) or (output_dir / "config.json").exists():
        raise FileExistsError(
            f"output_dir={output_dir} already holds a model: choose another folder, or resume its "
            "training with --resume_from_checkpoint true"
        )
    for name in (CARD, *(file.name for file in CODE.glob("[!_]*.py"))):
        if _is_users(output_dir / name):
            raise FileExistsError(
                f"output_dir={output_dir} holds {name}, which training would replace: move it, or "
                "choose another folder"
            )


def _is_users(file: Path) -> bool:
    """Whether a file that training would overwrite has content from the user. A card without text
    comes with a new repository, and the model's code with a saved tokenizer."""
    if not file.exists():
        return False
    if file.name == CARD:
        return bool(ModelCard.load(file, ignore_metadata_errors=True).text.strip())
    return file.read_bytes() != (CODE / file.name).read_bytes()


# Ways to save an optimizer's state, and the file or folder by which a checkpoint shows each.
OPTIMIZER_LAYOUTS = {
    "DeepSpeed": "global_step*",
    "FSDP with SHARDED_STATE_DICT": SHARDED_OPTIMIZER,
    "FSDP with FULL_STATE_DICT": FULL_OPTIMIZER,
    "one process or DDP": OPTIMIZER_NAME,
}


def _optimizer_layout(arguments: Seq2SeqTrainingArguments) -> str:
    if arguments.deepspeed_plugin is not None:
        return "DeepSpeed"
    if saves_shards():
        return "FSDP with SHARDED_STATE_DICT"
    return "FSDP with FULL_STATE_DICT" if uses_fsdp() else "one process or DDP"


def _expect_optimizer_state(checkpoint: Path, layout: str) -> str:
    held = [name for name, file in OPTIMIZER_LAYOUTS.items() if any(checkpoint.glob(file))]
    if layout not in held:
        holds = f"the optimizer state of {held[0]}" if held else "no optimizer state"
        advice = "--model_name_or_path trains its weights with a new optimizer"
        if held and "SHARDED" in held[0]:
            advice = f"`accelerate merge-weights` gathers its weights, and {advice}"
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} holds {holds}, expected that of {layout}; "
            f"{advice}"
        )
    return str(checkpoint)


class OptionsCallback(TrainerCallback, ExportableState):
    """Saves options in the trainer's state, and with it in each checkpoint; a resumed training uses
    the new values of those that may change.

    Args:
        options: The result of `fixed_options`.
        text: The size of the training text; None if it is a stream.
        scoring: The result of `scoring_options`.
    """

    def __init__(
        self,
        options: dict[str, Any],
        text: dict[str, int] | None = None,
        scoring: dict[str, Any] | None = None,
    ) -> None:
        self.arguments = {"options": options, "text": text, "scoring": scoring}

    def state(self) -> dict[str, Any]:
        """The options and the size, in the form that `TrainerState.stateful_callbacks` has."""
        return {"args": self.arguments, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log, evaluate and save as often as the options say. `Trainer` (5.17 to 5.24) would use
        the intervals in the checkpoint."""
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
    return json.loads(json.dumps({**tokenizer, **optimizer}, default=str))


def expect_same_options(checkpoint: str | Path, options: dict[str, Any]) -> None:
    """Raise a ValueError if a checkpoint was trained with other values of these options. One that
    was saved without them is not checked. The schedule may change unless the old or the new one
    follows a metric, as its state contains its settings."""
    saved = _saved(checkpoint, "options") or {}
    schedules = {each.get("lr_scheduler_type") for each in (saved, options)}
    for name, before in saved.items():
        if name.startswith("lr_scheduler_") and not schedules & set(SCHEDULES_BY_METRIC):
            continue
        if name in options and options[name] != before:
            raise ValueError(
                f"{name}={options[name]!r}: expected {before!r}, as in {checkpoint}, from which "
                "training resumes; --model_name_or_path trains its weights with other options"
            )


def warn_of_another_text(checkpoint: str | Path, text: dict[str, int] | None) -> None:
    """Log a warning if a checkpoint was trained on a text of a different size: epochs, and defaults
    that depend on the text, change in the middle of the training."""
    before = _saved(checkpoint, "text")
    if before and text and _in_words(before) != _in_words(text):
        logger.warning(
            "The training text has %s, but that of %s had %s: training resumes with the new text",
            _in_words(text), checkpoint, _in_words(before),
        )  # fmt: skip


def scoring_options(trainer: Trainer) -> dict[str, Any]:
    """What the scores of an evaluation depend on besides the model, as JSON values: the size of the
    validation text, and options."""
    size = None if trainer.eval_dataset is None else TextSize.of(trainer.eval_dataset)
    return {
        VALIDATION: size and size._asdict(),
        "generation_num_beams": trainer.model.generation_config.num_beams,
        **{name: getattr(trainer.args, name) for name in SCORING},
    }


def find_outdated_scores(checkpoint: str | Path, scoring: dict[str, Any]) -> set[str]:
    """The names of a checkpoint's scores that can't be compared with those of this run. If there
    are any, a warning says why."""
    before = _saved(checkpoint, "scoring") or {}
    changed = [name for name in before if before[name] != scoring.get(name)]
    history = state_of(checkpoint).log_history
    scores = {name for log in history for name in log if name.startswith("eval_")}
    if VALIDATION not in changed:
        scores = scores & {"eval_bleu"} if changed == ["bleu_tokenize"] else scores - {"eval_loss"}
    if not changed or not scores:
        return set()
    logger.warning(
        "The scores up to %s can't be compared with those to come, and choose no best checkpoint: "
        "these differ: %s",
        checkpoint, ", ".join(changed),
    )  # fmt: skip
    return scores


def _saved(checkpoint: str | Path, name: str) -> dict[str, Any] | None:
    """What an `OptionsCallback` has saved under this name."""
    saved: Any = state_of(checkpoint).stateful_callbacks.get(OptionsCallback.__name__, {})
    return saved.get("args", {}).get(name)


def _in_words(text: dict[str, int]) -> str:
    source, target = text["source_tokens"], text["target_tokens"]
    return f"{text['pairs']:,} pairs, {source:,} source and {target:,} target tokens"


def _name_files(option: str, value: Any) -> Any:
    """The names of files without their folders; other values unchanged."""
    if option not in FILES or value is None:
        return value
    paths: Iterable[str] = [value] if isinstance(value, str) else value
    return [Path(path).name for path in paths]
