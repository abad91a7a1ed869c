"""Warnings about trainings that go wrong without an error."""

import pytest
import torch
from conftest import small_trainer
from transformers import TrainerControl, TrainerState

from vanilla_transformer.training import diagnosis
from vanilla_transformer.training.diagnosis import LossGapCallback, SourceUseCallback

IGNORES = "the decoder ignores its source"


@pytest.fixture
def trainer(tokenizer, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer)
    sources = torch.arange(12)[:, None] + torch.arange(4, 7)
    trainer.train_dataset = [
        {"input_ids": [*source, 2], "labels": [*source, 2]} for source in sources.tolist()
    ]
    return trainer


def step_of(trainer, callback, step):
    state = TrainerState(global_step=step, is_world_process_zero=True)
    callback.on_step_end(
        trainer.args,
        state,
        TrainerControl(),
        model=trainer.model,
        train_dataloader=trainer.get_train_dataloader(),
    )


def ignore_the_source(trainer):
    for layer in trainer.model.model.decoder.layers:
        torch.nn.init.zeros_(layer.encoder_attn.out_proj.weight)


def test_a_decoder_that_ignores_its_source_is_reported(trainer, caplog):
    ignore_the_source(trainer)
    step_of(trainer, SourceUseCallback(), 500)
    (message,) = [text for text in caplog.messages if IGNORES in text]
    assert message.startswith("After 500 updates")
    assert f"learning_rate (now {trainer.args.learning_rate})" in message


def test_a_decoder_that_uses_its_source_is_not_reported(trainer, caplog):
    """It copies by position: the encoder's state is added to the state that predicts a token."""
    optimizer = torch.optim.Adam(trainer.model.parameters(), 5e-3)
    batch = trainer.data_collator(list(trainer.train_dataset))
    for _ in range(60):
        trainer.model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    callback = SourceUseCallback()
    step_of(trainer, callback, 500)
    assert callback.passed
    assert not [text for text in caplog.messages if IGNORES in text]


@pytest.mark.parametrize(
    ("own", "exchanged", "warns"),
    [(2.0, 2.04, 1), (2.0, 2.06, 0), (0.0009, 0.034, 0), (0.03, 0.031, 1)],
)
def test_a_source_that_decides_one_word_of_a_long_target_is_used(
    trainer, caplog, monkeypatch, own, exchanged, warns
):
    """The loss is the mean over a target's tokens, most of which can be nearly certain."""
    monkeypatch.setattr(diagnosis, "_losses", lambda model, inputs: (own, exchanged))
    step_of(trainer, SourceUseCallback(), 500)
    assert sum(IGNORES in text for text in caplog.messages) == warns


@pytest.mark.parametrize(
    ("step", "warns"), [(499, 0), (500, 1), (750, 0), (1000, 1), (1500, 0), (2000, 1)]
)
def test_the_check_runs_at_500_updates_and_each_time_they_have_doubled(
    trainer, caplog, step, warns
):
    ignore_the_source(trainer)
    step_of(trainer, SourceUseCallback(), step)
    assert sum(IGNORES in text for text in caplog.messages) == warns


def test_the_check_does_not_change_the_training(trainer):
    trainer.model.train()
    random = torch.get_rng_state()
    step_of(trainer, SourceUseCallback(), 500)
    assert trainer.model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(weight.grad is None for weight in trainer.model.parameters())


def test_a_single_source_cannot_be_exchanged(trainer, caplog):
    trainer.train_dataset = trainer.train_dataset[:1] * 4
    ignore_the_source(trainer)
    step_of(trainer, SourceUseCallback(), 500)
    assert not caplog.messages


def evaluated(args, training_loss, evaluation_loss, callback=None):
    state = TrainerState(global_step=10, is_world_process_zero=True)
    state.log_history = [{"loss": 3.0, "step": 5}, {"loss": training_loss, "step": 10}]
    callback = callback or LossGapCallback()
    callback.on_evaluate(args, state, TrainerControl(), metrics={"eval_loss": evaluation_loss})
    return callback


@pytest.mark.parametrize(
    ("training_loss", "evaluation_loss", "warns"),
    [
        (0.044, 0.192, True),
        (0.095, 0.089, False),
        (0.010, 0.016, False),
        (2.0, 2.9, False),
        (2.0, 3.1, True),
    ],
)
def test_inconsistent_losses_are_reported(trainer, caplog, training_loss, evaluation_loss, warns):
    callback = evaluated(trainer.args, training_loss, evaluation_loss)
    assert callback.warned == warns
    assert bool(caplog.messages) == warns
    if warns:
        assert f"evaluation loss is {evaluation_loss:.3f}" in caplog.text
        assert f"training loss in the log is {training_loss:.3f}" in caplog.text
    evaluated(trainer.args, training_loss, evaluation_loss, callback)
    assert len(caplog.messages) == warns  # it warns once


@pytest.mark.parametrize(("start", "warns"), [(0, True), (9, True), (10, False)])
def test_the_summed_loss_of_r_drop_is_not_reported(trainer, start, warns):
    trainer.args.r_drop_alpha, trainer.args.r_drop_start = 5.0, start
    assert evaluated(trainer.args, 6.0, 5.0).warned == warns


def test_batches_sorted_by_length_are_reported_as_a_cause(trainer, caplog):
    trainer.args.train_sampling_strategy = "group_by_length"
    evaluated(trainer.args, 0.044, 0.192)
    assert "train_sampling_strategy=group_by_length" in caplog.text
