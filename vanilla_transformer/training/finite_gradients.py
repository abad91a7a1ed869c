"""A loss that is NaN or infinite never reaches the weights."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer

logger = logging.getLogger(__name__)

# A loss scale of 2^16, halved by each step that overflows, is then as small as it can be of use.
OVERFLOWS = 40


@dataclass
class FiniteGradientArguments:
    """What `FiniteGradientTrainer` looks for among its arguments; put it before
    `TrainingArguments`.

    Raises:
        ValueError: The number is negative.
    """

    max_skipped_steps: int = field(
        default=0,
        metadata={
            "help": "Steps in a row that may be left out, with a warning, because their gradient "
            "is NaN or infinite, as by a poisoned batch; one more ends training with an error."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of TrainingArguments
        if self.max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps={self.max_skipped_steps}: expected 0 or more")


class FiniteGradientTrainer(Trainer):
    """For any trainer: `class Mine(FiniteGradientTrainer, Seq2SeqTrainer)`.

    Where the norm of all gradients is NaN or infinite, the optimizer does nothing in that step, or
    training ends, by `max_skipped_steps` of its arguments. Transformers would go on, and by default
    log the mean of earlier losses in place of the lost one. In float16 the loss scaler leaves such
    steps out by itself; training then ends where no scale helps.

    Raises:
        FloatingPointError: From `train`; the checkpoints are those from before.
    """

    _skipped = 0  # in a row

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None:
            return norm  # DeepSpeed, before its first step
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            self._skipped = 0
            return norm
        self._skipped += 1
        step = self.state.global_step + 1
        allowed = getattr(self.args, "max_skipped_steps", 0)
        if self.accelerator.scaler is not None:
            allowed = max(allowed, OVERFLOWS)
        if self._skipped > allowed:
            raise FloatingPointError(
                f"the gradient of step {step} is {value}, that of {self._skipped} steps in a row: "
                f"expected a finite one (max_skipped_steps={allowed}); the weights are as before"
            )
        logger.warning("The gradient of step %d is %s: the step is left out", step, value)
        model.zero_grad(set_to_none=True)
        return norm
