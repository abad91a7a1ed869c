"""SIGTERM and Ctrl-C: the step is finished, a checkpoint written, and training ends."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptionCallback(TrainerCallback):
    """Ends training in order when a signal asks for it; the same signal once more ends it at once.

    Of several processes each may be sent the signal or only one: all stop after the same step.

    Attributes:
        received: The signal that was met, if any.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the signals over, which only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a checkpoint, and for no evaluation before it."""
        if self._is_met(args):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the signals back."""
        self._give_back()

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

    def _is_met(self, args: TrainingArguments) -> bool:
        if args.world_size > 1:
            met = torch.tensor(int(self.received is not None), device=args.device)
            if int(reduce(met, "sum")) and self.received is None:
                self.received = signal.SIGTERM  # another process was sent one
        return self.received is not None
