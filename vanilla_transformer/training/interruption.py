"""SIGTERM, Ctrl-C and a closed terminal end training after the current step, with a checkpoint."""

import logging
import os
import signal
import stat
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from ..data.paths import is_no_longer_read
from .checkpoints import OFF_SCHEDULE, UNSEEN, AtomicCheckpointTrainer, times_evaluated
from .distributed import any_process, end_training

logger = logging.getLogger(__name__)

# Windows has no SIGHUP.
SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class InterruptibleTrainer(AtomicCheckpointTrainer):
    """A mixin for any trainer: `class MyTrainer(InterruptibleTrainer, Seq2SeqTrainer)`.

    After a signal, training saves a checkpoint at the end of the current step and stops; an
    evaluation stops at once. A second SIGTERM or Ctrl-C ends the program immediately. The signal
    may reach one process or several: all of them stop after the same step. When training resumes,
    it first repeats the evaluation that was interrupted. A finished run makes no more steps. A
    checkpoint that was saved only because of a signal is left out of averages, and is deleted
    first.

    This replaces transformers' `enable_jit_checkpoint`, which waits for three seconds, handles only
    SIGTERM, and lets the processes stop at different steps.
    """

    jump = 0.0  # from the epoch in the checkpoint to the one at which `Trainer` resumes

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.interruption = _InterruptionCallback(self)
        self.add_callback(self.interruption)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[Any, ...]:
        """Same as `Trainer.set_initial_training_values`, but with no epochs left if the checkpoint
        is at the last step: `Trainer` would make one more step before it stops. A warning says if
        the number of updates in an epoch has changed, as with different batches."""
        epochs, *others, max_steps = super().set_initial_training_values(args, dataloader)
        state = self.resumed_state()
        if state is not None:
            if self.args.max_steps < 1 and state.num_train_epochs == epochs:
                self._warn_of_other_epochs(state.max_steps, max_steps)
            elif self.args.max_steps > 0 and has_length(dataloader):
                self._warn_of_another_place(state, others[0])
            if has_length(dataloader):
                self.jump = self._epoch_to_resume_at(state, others[0], others[-1])
                self.jump -= state.epoch or 0.0
            epochs = 0 if state.global_step >= max_steps else epochs
        return epochs, *others, max_steps

    def _warn_of_other_epochs(self, before: int, now: int) -> None:
        if before != now:
            logger.warning(
                "%g epochs have %d updates with this text and these batches, but had %d in %s: "
                "training ends after update %d",
                self.args.num_train_epochs, now, before, self.resumed_checkpoint, now,
            )  # fmt: skip

    def _warn_of_another_place(self, state: TrainerState, now: int) -> None:
        if state.epoch and abs(state.epoch * now - state.global_step) >= 1:
            logger.warning(
                "An epoch has %d updates with this text and these batches, but had about %.0f in "
                "%s: training resumes at epoch %.2f instead of %.2f",
                now, state.global_step / state.epoch, self.resumed_checkpoint,
                state.global_step / now, state.epoch,
            )  # fmt: skip

    def _epoch_to_resume_at(self, state: TrainerState, updates: int, batches: int) -> float:
        """Where `Trainer` resumes if an epoch has this number of updates, and of batches, now."""
        epochs, rest = divmod(state.global_step, updates)
        if self.args.ignore_data_skip:
            return epochs
        return epochs + rest * self.args.gradient_accumulation_steps / batches

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `Trainer.train`, but an interrupted evaluation ends the program. The previous
        signal handlers are restored, however training ends, and an earlier signal has no effect: in
        a notebook, the same trainer may go on."""
        self.interruption.received, self.interruption.stops = None, False
        try:
            with suppress(_InterruptedError):  # drops its frames, which refer to the wrapped model
                return super().train(*args, **kwargs)
        finally:
            self.interruption.restore_handlers()
            self.is_in_train = False
        return self._exit()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Same as `Trainer._run_epoch` (5.17 to 5.24), which checks only after a step whether to
        stop, but makes no step if the repeated evaluation has ended training."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Same as `Trainer.log`, but without the summary if an already finished run makes no step:
        its `train_loss` would be 0. The summary of a resumed run is about its own steps."""
        if "train_loss" in logs:
            done = self.state.global_step - self.interruption.first_step
            if not done:
                return
            if not hasattr(self, "_initial_global_step"):
                _summarize(logs, self.state, done)
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Same as `Trainer.evaluate`, but restores the random number generators: training continues
        as if there had been no evaluation."""
        device = self.args.device
        devices = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type):
                return super().evaluate(*args, **kwargs)
        except _InterruptedError:
            if self.state.global_step > self.interruption.first_step:
                self.interruption.note_schedule(self.args, self.state, self.control)
                self._save_checkpoint(self.model, trial=None)
            raise

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple:
        """Same as `Trainer.prediction_step`, unless training must stop."""
        if self.is_in_train and self.interruption.stop_requested():
            raise _InterruptedError
        return super().prediction_step(*args, **kwargs)

    def run_missed_evaluation(self) -> None:
        """Evaluate the checkpoint that training resumes from, which may be the best one, and set
        the learning rate if it depends on evaluations."""
        if self._determine_best_metric(self._evaluate(None, None), trial=None):
            self.state.best_model_checkpoint = self.resumed_checkpoint

    def exit_if_interrupted(self) -> None:
        """Exit with the code of the signal, if any process has received one during training, be it
        after the last step. All of them must call it."""
        if self.interruption.stop_requested():
            self._exit()

    def _exit(self) -> NoReturn:
        received = self.interruption.received
        assert received is not None
        logger.warning(
            "Stopped by %s at step %d; --resume_from_checkpoint true resumes from there",
            received.name,
            self.state.global_step,
        )
        end_training(self)  # otherwise torch may abort with an exit code of its own
        raise SystemExit(128 + received)


class _InterruptedError(Exception):
    """Raised to leave an evaluation."""


class _InterruptionCallback(TrainerCallback):
    """Handles the signals during training.

    Attributes:
        received: The signal that was received, if any.
        first_step: The step at which training started or resumed.
        stops: Whether all processes have agreed to stop after a step.
    """

    def __init__(self, trainer: InterruptibleTrainer):
        self.trainer = trainer
        self.received: signal.Signals | None = None
        self.first_step = 0
        self.stops = False
        self._handlers: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install the handlers, which only a main thread can do, and repeat an interrupted
        evaluation. With `auto_find_batch_size`, training begins several times."""
        self.first_step = state.global_step
        state.stateful_callbacks.pop(OFF_SCHEDULE, None)
        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._receive)
                for number in SIGNALS
                if not _ignored_on_purpose(number)
            }
        if _missed_evaluation(args, state):
            self.trainer.run_missed_evaluation()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note if training resumes at another epoch than that of the checkpoint."""
        jump, self.trainer.jump = self.trainer.jump, 0.0
        if abs(jump) > 1e-6:
            before = state.stateful_callbacks.get(UNSEEN, {}).get("epochs", 0.0)
            state.stateful_callbacks[UNSEEN] = {"epochs": before + jump}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a checkpoint, and no evaluation before it."""
        if self.stop_requested():
            self.stops = True
            self.note_schedule(args, state, control)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called when the loop stops, even within an epoch, after the checkpoint is saved. A signal
        since the last step, which other processes may not have received, stops the evaluation that
        is due, or training after the next step."""
        if self.stops:
            control.should_save = control.should_evaluate = False

    def note_schedule(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Note in the state, and so in the checkpoint, if only a signal has caused it: no save is
        due at this step, or soon at the end of the epoch or of the run."""
        at_end = state.global_step >= state.max_steps or state.epoch == int(state.epoch or 0)
        if not control.should_save and not (args.save_strategy == "epoch" and at_end):
            state.stateful_callbacks[OFF_SCHEDULE] = {}

    def stop_requested(self) -> bool:
        """Whether any process has received a signal. All of them must call it."""
        if any_process(self.received is not None, self.trainer.args) and self.received is None:
            self.received = signal.SIGTERM  # another process has received one
        return self.received is not None

    def restore_handlers(self) -> None:
        """Restore those from before training."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received == number, signal.Signals(number)
        if self.received.name == "SIGHUP":
            _leave_closed_terminal()  # the shell and the system may both send the signal
        elif again:
            self.restore_handlers()
            raise KeyboardInterrupt(self.received.name)
        logger.warning(
            "%s: training saves a checkpoint after this step and stops", self.received.name
        )


def _ignored_on_purpose(number: signal.Signals) -> bool:
    """Whether `nohup` has started the program, which goes on when the terminal is closed."""
    return number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN


def _leave_closed_terminal() -> None:
    """Discard what would be written to it, or to a program that ends with it, such as `tee`. Each
    write would fail, also that of the progress bar."""
    for stream in (1, 2):
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                is_closed = not os.isatty(stream)
            else:  # the reader may take a moment to end
                is_closed = is_no_longer_read(stream, milliseconds=1000)
            if is_closed:
                os.dup2(nowhere.fileno(), stream)


def _summarize(logs: dict[str, float], state: TrainerState, done: int) -> None:
    """Relate a summary to the steps `done` since resuming. transformers 5.17 and some later
    versions divide their losses by the number of all steps, and that number by their time."""
    logs["train_loss"] *= state.global_step / done
    for name in {"train_samples_per_second", "train_steps_per_second"} & logs.keys():
        logs[name] *= done / state.max_steps


def _missed_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that training resumes from still lacks the evaluation that was due."""
    at_end = state.global_step >= state.max_steps
    if args.eval_strategy == "steps":
        done = state.global_step
        due = at_end or done % state.eval_steps == 0
    else:
        done = state.epoch or 0
        due = args.eval_strategy == "epoch" and (at_end or done == int(done))
    may_be_due = due and done >= args.eval_delay and state.global_step > 0
    return may_be_due and not times_evaluated(state)
