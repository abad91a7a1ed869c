"""Keeps NaN and infinite gradients away from the weights."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.hf_argparser import HfArg

from .distributed import any_process, local_part

logger = logging.getLogger(__name__)

# float16 starts with a loss scale of 2^16 and halves it after each overflow. After this many
# overflows in a row no scale helps.
MAX_OVERFLOWS = 40


@dataclass
class FiniteGradientArguments:
    """The option of `FiniteGradientsCallback`; list this class before `TrainingArguments`.

    Raises:
        ValueError: The number is negative.
    """

    max_skipped_steps: int = HfArg(
        default=0,
        help="Maximum number of consecutive steps to skip, with a warning, because their gradient "
        "is NaN or infinite. One more such step ends training with an error.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of TrainingArguments
        if self.max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps={self.max_skipped_steps}: expected 0 or more")


class FiniteGradientsCallback(TrainerCallback):
    """Skips an optimizer step whose gradient is NaN or infinite. It works with any trainer:
    `trainer.add_callback(FiniteGradientsCallback())`.

    After more than `max_skipped_steps` (an attribute of the arguments, by default 0) in a row it
    raises `FloatingPointError`, which ends training; the weights and the checkpoints are unchanged.
    `Trainer` alone continues with NaN weights, and logs the mean of earlier losses instead. In
    float16 the loss scaler skips such steps; training ends when no scale helps. DeepSpeed updates
    the weights before a callback can skip the step, so training ends one step later.
    """

    def __init__(self) -> None:
        self.skipped = 0  # steps in a row

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the gradient, which is already clipped: clipping does not remove NaN."""
        model = kwargs["model"]
        if not any_process(not _is_finite(model), args):
            self.skipped = 0
            return
        self.skipped += 1
        step = state.global_step + 1
        allowed = getattr(args, "max_skipped_steps", 0)
        if args.fp16 and args.device.type != "cpu":  # where accelerate has a scaler
            allowed = max(allowed, MAX_OVERFLOWS)
        if self.skipped > allowed:
            by_deepspeed = getattr(args, "deepspeed_plugin", None) is not None
            applied = "DeepSpeed has applied it" if by_deepspeed else "the weights are unchanged"
            raise FloatingPointError(
                f"the gradient of step {step} is NaN or infinite, for {self.skipped} steps in a "
                f"row: expected a finite gradient (max_skipped_steps={allowed}); " + applied
            )
        logger.warning("The gradient of step %d is NaN or infinite: the step is skipped", step)
        model.zero_grad(set_to_none=True)


@torch.no_grad()
def _is_finite(model: torch.nn.Module) -> bool:
    """Whether this process's part of all gradients is finite, or of all weights with DeepSpeed,
    which keeps its gradients elsewhere."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([local_part(tensor) for tensor in gradients or parameters])
    return math.isfinite(norm)
