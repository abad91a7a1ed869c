"""A loss that is NaN or infinite changes no weight: its step is skipped, or training ends."""

import math

import pytest
import torch
from conftest import slow, small_trainer
from transformers import TrainerCallback

from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.checkpoints import checkpoints_by_step
from vanilla_transformer.training.finite_gradients import FiniteGradientsCallback


def poison(trainer, value, steps):
    """Multiply the loss of these steps by NaN or infinity."""
    compute_loss = trainer.compute_loss

    def poisoned(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        return loss * value if trainer.state.global_step + 1 in steps else loss

    trainer.compute_loss = poisoned
    return trainer


class Record(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = [weight.detach().flatten() for weight in model.parameters()]
        self.weights.append(torch.cat(weights).clone())


POISONS = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
CLIPPING = pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])


@POISONS
@CLIPPING
def test_training_ends_before_the_weights_change(tokenizer, tmp_path, value, max_grad_norm):
    record = Record()
    trainer = small_trainer(tmp_path, tokenizer, record, max_grad_norm=max_grad_norm)
    with pytest.raises(FloatingPointError, match=r"the gradient of step 5 is NaN or infinite"):
        poison(trainer, value, {5}).train()
    weights = [weight.detach().flatten() for weight in trainer.model.parameters()]
    assert torch.equal(torch.cat(weights), record.weights[-1])
    assert list(checkpoints_by_step(tmp_path)) == [2, 4]


def test_on_a_cpu_fp16_without_a_scaler_allows_no_overflow(tokenizer, tmp_path):
    """There, accelerate creates no gradient scaler, for which overflows are normal."""
    trainer = small_trainer(tmp_path, tokenizer, fp16=True)
    with pytest.raises(FloatingPointError, match="the gradient of step 3 is NaN or infinite"):
        poison(trainer, math.nan, {3}).train()


@POISONS
@CLIPPING
@pytest.mark.parametrize("accumulation", [1, *slow(3)])
def test_a_step_can_be_skipped(tokenizer, tmp_path, caplog, value, max_grad_norm, accumulation):
    """The optimizer's state is unchanged too: no moment moves a weight."""
    record = Record()
    options = {
        "max_skipped_steps": 1,
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = small_trainer(tmp_path, tokenizer, record, **options)
    poison(trainer, value, {3, 5}).train()
    assert [line for line in caplog.messages if "the step is skipped" in line] != []
    same = [torch.equal(*pair) for pair in zip(record.weights, record.weights[1:], strict=False)]
    assert same == [False, True, False, True, False, False, False]
    assert torch.isfinite(record.weights[-1]).all()


def test_training_ends_after_more_skipped_steps_in_a_row_than_allowed(tokenizer, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer, max_skipped_steps=2)
    with pytest.raises(
        FloatingPointError, match=r"step 7 is NaN or infinite, for 3 steps in a row"
    ):
        poison(trainer, math.nan, {2, 3, 5, 6, 7}).train()


def test_transformers_by_itself_would_continue(tokenizer, tmp_path):
    """The reason for the check: without it the weights become NaN, and the log does not show it."""
    trainer = poison(small_trainer(tmp_path, tokenizer), math.nan, {5})
    trainer.remove_callback(FiniteGradientsCallback)
    trainer.train()
    assert not torch.isfinite(trainer.model.lm_head.weight).all()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert all(map(math.isfinite, losses[:5]))


def test_a_negative_max_skipped_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_skipped_steps=-1: expected 0 or more"):
        TranslationTrainingArguments(str(tmp_path), max_skipped_steps=-1)
