"""Callbacks of a training: early stopping, epochs of BPE-dropout, seeds, TensorBoard and curves."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from ..data.bpe_dropout import BPEDropoutDataset
from .checkpoints import AtomicCheckpointTrainer, times_evaluated

logger = logging.getLogger(__name__)


class ResumableEarlyStoppingCallback(EarlyStoppingCallback):
    """Early stopping that, after resuming, keeps its count of evaluations without an
    improvement, and logs when it ends training."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the number from the state that the trainer has loaded."""
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = evaluations_without_gain(state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the first evaluation of a step only: with `eval_on_start`, a resumed training
        repeats that of its checkpoint."""
        if times_evaluated(state) > 1:
            return
        super().on_evaluate(args, state, control, **kwargs)
        count = self.early_stopping_patience_counter
        if count >= self.early_stopping_patience and state.is_world_process_zero:
            logger.info(
                "training stops early at step %d: %d evaluations without a better %s than %.4g",
                state.global_step, count, args.metric_for_best_model, state.best_metric,
            )  # fmt: skip


def evaluations_without_gain(state: TrainerState) -> int:
    """How many evaluations in a row were no better, up to a checkpoint with this state."""
    saved = state.stateful_callbacks.get(ResumableEarlyStoppingCallback.__name__)
    return saved["attributes"]["early_stopping_patience_counter"] if saved else 0


class EpochCallback(TrainerCallback):
    """Tells a `BPEDropoutDataset`, which differs from epoch to epoch, which epoch begins.
    accelerate does not do so if it skips the batches before a checkpoint."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch before its first batch is made."""
        dataset = getattr(kwargs["train_dataloader"], "dataset", None)
        if isinstance(dataset, BPEDropoutDataset):
            dataset.set_epoch(int(state.epoch or 0))


class OwnDropoutCallback(TrainerCallback):
    """Lets processes with different batches draw different dropout masks. `Trainer` (5.17 to 5.24)
    gives all the same seed, and on GPUs batches of similar size would get the same masks.

    Args:
        share: The index of this process among those with different batches.
    """

    def __init__(self, share: int) -> None:
        self.share = share

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the first process, the CPU's seed, from which accelerate shuffles, and what models
        draw on the CPU for GPUs, such as the layers to drop, as they are."""
        if self.share == 0:
            return
        if args.device.type == "cpu":
            for _ in range(self.share):
                torch.rand(1_000_000)  # moves on, far from the masks of the others
        else:
            torch.get_device_module(args.device).manual_seed(args.seed + self.share)


class ResilientTensorBoardCallback(TensorBoardCallback):
    """Continues with a new file of events if someone deletes the old one during training."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the logs, and if that fails, to a new file."""
        try:
            super().on_log(args, state, control, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's events are lost (%s): they continue in a new file", error)
            self.tb_writer = None
            super().on_log(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the file, if it still exists."""
        try:
            super().on_train_end(args, state, control, **kwargs)
        except OSError as error:
            logger.warning("TensorBoard's last events are lost (%s)", error)


class CurvesCallback(TrainerCallback):
    """Plots loss and scores over steps to `curves.png` in the output folder: at the end of
    training, and after an evaluation, but at most once a minute and not during an upload."""

    INTERVAL = 60.0  # seconds

    def __init__(self, trainer: AtomicCheckpointTrainer) -> None:
        self.trainer = trainer
        self.last_plot = time.monotonic()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plot the newest scores."""
        waited = time.monotonic() - self.last_plot >= self.INTERVAL
        if waited and not self.trainer.is_uploading():
            self.on_train_end(args, state, control)
            self.last_plot = time.monotonic()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plot, on the main process only, if there is a loss or a score. If the file can't be
        written, training continues."""
        if not state.is_world_process_zero:
            return
        from ..plotting import has_curves, plot_curves, save  # matplotlib is slow to import

        if has_curves(state.log_history):
            folder = Path(args.output_dir).resolve()
            try:
                save(plot_curves({folder.name: state.log_history}), folder / "curves.png")
            except OSError as error:
                logger.warning("The curves are not drawn (%s)", error)
