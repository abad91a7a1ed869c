"""SIGTERM and Ctrl-C: the step is finished, a checkpoint written, and training ends."""

import logging
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate.utils import reduce
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptibleTrainer(Trainer):
    """For any trainer: `class Mine(InterruptibleTrainer, Seq2SeqTrainer)`.

    A signal ends training in order, an evaluation at once; the same signal once more ends all at
    once. Of several processes each may be sent the signal or only one: all stop after the same
    step. An evaluation that was cut short, or not begun, is made when training is resumed; a run
    that had reached its last step makes no more.

    transformers' `enable_jit_checkpoint`, which waits for three seconds, knows SIGTERM alone and
    lets each process stop where it is, is not needed besides.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.interruption = _InterruptionCallback(self)
        self.add_callback(self.interruption)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """As the trainer's (5.17 to 5.23), which keeps the checkpoint to resume from to itself."""
        *_, self._resumed, _ = args
        trained = super()._init_training_state(*args)
        self._first_step = self.state.global_step
        return trained

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As the trainer's (5.17 to 5.23), which asks only after a step whether it was the last."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`; training goes on with the random numbers that it would have had
        without, be this evaluation made now or later."""
        device = self.args.device
        devices = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type):
                return super().evaluate(*args, **kwargs)
        except _InterruptedError:
            if self.state.global_step > self._first_step:
                self._save_checkpoint(self.model, trial=None)
            self._exit()

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple:
        """As `Trainer.prediction_step`, unless training is to end."""
        if self.is_in_train and self.interruption.is_met():
            raise _InterruptedError
        return super().prediction_step(*args, **kwargs)

    def make_up_for_evaluation(self) -> None:
        """Evaluate the checkpoint that training is resumed from; it may be the best one."""
        if self._determine_best_metric(self.evaluate(), trial=None):
            self.state.best_model_checkpoint = self._resumed

    def exit_if_interrupted(self) -> None:
        """End the program, with the exit code of a signal, where one has ended the training."""
        if self.interruption.received is not None:
            self._exit()

    def _exit(self) -> NoReturn:
        received = self.interruption.received
        assert received is not None
        logger.warning(
            "Stopped by %s at step %d; --resume_from_checkpoint true goes on from there",
            received.name,
            self.state.global_step,
        )
        self.accelerator.end_training()  # for the exit code to be this one, not torch's abort
        raise SystemExit(128 + received)


class _InterruptedError(Exception):
    """Leads out of an evaluation."""


class _InterruptionCallback(TrainerCallback):
    """Takes the signals while training lasts.

    Attributes:
        received: The signal that was met, if any.
    """

    def __init__(self, trainer: InterruptibleTrainer):
        self.trainer = trainer
        self.received: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the signals over, which only a main thread can, and evaluate what was left out."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        if _lacks_evaluation(args, state):
            self.trainer.make_up_for_evaluation()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a checkpoint, and for no evaluation before it."""
        if self.is_met():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The loop takes its end for that of an epoch, where the checkpoint has been written."""
        if self.received is not None:
            control.should_save = control.should_evaluate = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the signals back."""
        self._give_back()

    def is_met(self) -> bool:
        """Whether any process has received a signal; to be asked by all of them."""
        args = self.trainer.args
        if args.world_size > 1:
            met = torch.tensor(int(self.received is not None), device=args.device)
            if int(reduce(met, "sum")) and self.received is None:
                self.received = signal.SIGTERM  # another process was sent one
        return self.received is not None

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == number:
            self._give_back()
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.received = signal.Signals(number)
        logger.warning("%s: training ends with a checkpoint after this step", self.received.name)


def _lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that training is resumed from was to be evaluated, and was not."""
    at_end = state.global_step >= state.max_steps
    if args.eval_strategy == "steps":
        done = state.global_step
        due = at_end or done % state.eval_steps == 0
    else:
        done = state.epoch or 0
        due = args.eval_strategy == "epoch" and (at_end or done == int(done))
    evaluated = any(
        log["step"] == state.global_step and any(name.startswith("eval_") for name in log)
        for log in state.log_history
    )
    return due and done >= args.eval_delay and state.global_step > 0 and not evaluated
