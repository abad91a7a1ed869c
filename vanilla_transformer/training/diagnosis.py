"""Callbacks that warn if training goes wrong without an error."""

import logging
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..model.pipelines import evaluation_mode

logger = logging.getLogger(__name__)


class SourceUseCallback(TrainerCallback):
    """Warns if the decoder still ignores its source after 500, 1,000, 2,000, ... updates.

    If the learning rate is too high, the decoder of a post-norm model may for a long time, or
    forever, predict the next token from the previous target tokens alone, while the loss falls as
    if the model were learning. The test compares the loss of 64 training pairs with their loss when
    the sources are exchanged, which is far higher if the decoder reads its source.
    """

    FIRST_STEP = 500
    PAIRS = 64
    LEAST_GAIN = 0.05  # nats per token
    LEAST_RATIO = 1.5  # of the losses; in a long target, only one word may depend on the source

    def __init__(self) -> None:
        self.passed = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare the losses at these steps. All processes do, as the model may be sharded."""
        times, rest = divmod(state.global_step, self.FIRST_STEP)
        is_due = rest == 0 and times > 0 and times & (times - 1) == 0
        if self.passed or not is_due:
            return
        inputs = self._sample(kwargs["train_dataloader"], args)
        if inputs is None:
            return
        own, exchanged = _losses(kwargs["model"], inputs)
        self.passed = exchanged - own >= self.LEAST_GAIN or exchanged >= self.LEAST_RATIO * own
        if not self.passed and state.is_world_process_zero:
            logger.warning(
                "After %d updates the decoder ignores its source: the loss is %.3f, and %.3f with "
                "the sources of other targets. If this warning comes again, start over with a "
                "lower learning_rate (now %s), more warmup_steps (now %s) or larger batches",
                state.global_step, own, exchanged, args.learning_rate, args.warmup_steps,
            )  # fmt: skip

    def _sample(self, dataloader: Any, args: TrainingArguments) -> dict[str, Any] | None:
        """A batch of random training pairs with different sources; None for a stream, or if there
        are not two."""
        dataset: Any = getattr(dataloader, "dataset", None)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return None
        size = len(dataset)
        places = np.random.default_rng(args.seed).permutation(size)[: self.PAIRS].tolist()
        pairs = {tuple(pair["input_ids"]): pair for pair in (dataset[place] for place in places)}
        if len(pairs) < 2:
            return None
        batch = dataloader.collate_fn(list(pairs.values()))
        return {name: value.to(args.device) for name, value in batch.items()}


@torch.no_grad()
def _losses(model: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """The loss of a batch, and its loss with each source replaced by that of another target."""
    exchanged = {name: inputs[name].roll(1, 0) for name in ("input_ids", "attention_mask")}
    with evaluation_mode(model):
        return model(**inputs).loss.item(), model(**{**inputs, **exchanged}).loss.item()


class LossGapCallback(TrainerCallback):
    """Warns once if the loss of an evaluation is far above the training loss in the log."""

    FACTOR, LEAST = 1.5, 0.05  # nats per token

    def __init__(self) -> None:
        self.warned = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare both losses."""
        logged = [entry for entry in state.log_history if "loss" in entry]
        evaluated = kwargs["metrics"].get("eval_loss")
        if self.warned or not logged or evaluated is None or not state.is_world_process_zero:
            return
        has_two_passes = getattr(args, "r_drop_alpha", 0) and logged[-1]["step"] > args.r_drop_start
        trained = logged[-1]["loss"] / (2 if has_two_passes else 1)
        if evaluated > max(self.FACTOR * trained, trained + self.LEAST):
            self.warned = True
            cause = "the model overfits, or the evaluation data is different"
            if args.train_sampling_strategy != "random":
                cause += (
                    ", or the logged loss is misleading, because train_sampling_strategy="
                    f"{args.train_sampling_strategy} makes batches that aren't random "
                    "(--max_tokens shuffles batches of similar length)"
                )
            logger.warning(
                "At step %d the evaluation loss is %.3f, but the training loss in the log is %.3f: "
                "%s", state.global_step, evaluated, trained, cause,
            )  # fmt: skip
