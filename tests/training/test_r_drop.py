"""R-Drop: two passes, two cross-entropies, and half the divergences between them."""

import pytest
import torch
from conftest import as_typed, random_ids, small_config
from datasets import Dataset
from torch.nn import functional as F
from transformers import M2M100Config, M2M100ForConditionalGeneration, MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model import loss
from vanilla_transformer.training import r_drop
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.r_drop import can_fuse_r_drop, fused_r_drop_loss, r_drop_loss
from vanilla_transformer.training.trainer import make_trainer

BATCH, LENGTH, VOCABULARY = 3, 5, 11


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(2 * BATCH, LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def labels():
    labels = random_ids(BATCH, LENGTH, VOCABULARY)
    labels[0, 3:] = -100
    return labels


def by_the_paper(logits, labels, alpha, label_smoothing, items):
    """Equations 2 and 3, summed over tokens and divided by their number."""
    total = 0.0
    for row, position in (labels != -100).nonzero().tolist():
        one, other = (logits[half + row, position].log_softmax(-1) for half in (0, BATCH))
        for log_p in (one, other):
            gold = labels[row, position]
            total -= (1 - label_smoothing) * log_p[gold] + label_smoothing * log_p.mean()
        forward = F.kl_div(other, one, log_target=True, reduction="sum")
        backward = F.kl_div(one, other, log_target=True, reduction="sum")
        total += alpha / 2 * (forward + backward)
    return total / items


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 40])
def test_loss_and_gradient_are_the_papers(logits, labels, label_smoothing, items):
    loss = r_drop_loss(logits, labels, 5.0, label_smoothing, items)
    expected = by_the_paper(logits, labels, 5.0, label_smoothing, items or (labels != -100).sum())
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    (gradient,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-10, rtol=1e-10)


def test_bfloat16_logits_are_summed_in_float32(logits, labels):
    rounded = (20 * logits).bfloat16()
    expected = by_the_paper(rounded.double(), labels, 5.0, 0.1, (labels != -100).sum())
    found = r_drop_loss(rounded, labels, 5.0, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, check_dtype=False)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_logits_loss_and_gradients_are_the_same(labels, label_smoothing, items, dtype):
    torch.manual_seed(0)
    shapes = (2 * BATCH, LENGTH, 8), (VOCABULARY, 8)
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    states, matrix = (value.detach().double().requires_grad_() for value in given)
    options = (labels, 5.0, label_smoothing, items)
    expected = r_drop_loss(states @ matrix.t(), *options)
    loss = fused_r_drop_loss(*given, *options)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    torch.testing.assert_close(loss, expected, **close)
    found = torch.autograd.grad(loss, given)
    wanted = torch.autograd.grad(expected, (states, matrix))
    torch.testing.assert_close(found, wanted, **close)


def test_without_logits_the_loss_in_many_parts_is_the_same(monkeypatch):
    """Several parts, with odd numbers of rows unless both passes are kept together."""
    torch.manual_seed(0)
    monkeypatch.setattr(loss, "_rows_at_a_time", lambda *_: (25, 3))
    states, matrix = torch.randn(2 * 30, 20, 4).double(), torch.randn(40, 4).double()
    labels = torch.randint(40, (30, 20))
    expected = r_drop_loss(states @ matrix.t(), labels, 1.0, 0.1)
    torch.testing.assert_close(fused_r_drop_loss(states, matrix, labels, 1.0, 0.1), expected)


def test_without_labels_the_loss_is_0(labels, logits):
    states, matrix = torch.randn(2 * BATCH, LENGTH, 8), torch.randn(VOCABULARY, 8)
    none = torch.full_like(labels, -100)
    assert fused_r_drop_loss(states, matrix, none, 5.0, 0.1) == 0
    assert r_drop_loss(logits, none, 5.0, 0.1) == 0
    none[0, 0] = 3
    torch.testing.assert_close(
        r_drop_loss(logits, none, 5.0, 0.1), by_the_paper(logits, none, 5.0, 0.1, 1)
    )


def test_a_subclass_that_can_compute_differently_keeps_its_logits():
    class Other(VanillaTransformerForConditionalGeneration):
        pass

    config = small_config()
    assert can_fuse_r_drop(VanillaTransformerForConditionalGeneration(config))
    assert not can_fuse_r_drop(Other(config))


def trainer_for(model, tokenizer, folder, **options):
    arguments = TranslationTrainingArguments(
        output_dir=as_typed(folder), report_to="none", disable_tqdm=True, use_cpu=True, **options
    )
    rows = [{"input_ids": [5, 6, 7, 2], "labels": [8, 9, 2]}, {"input_ids": [9, 2], "labels": [2]}]
    return make_trainer(model, tokenizer, arguments, {"train": Dataset.from_list(rows * 4)})


def inputs_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_training_step_makes_two_passes_with_different_dropout(
    tokenizer, tmp_path, norm_position, attention, monkeypatch
):
    config = small_config(norm_position=norm_position, attn_implementation=attention)
    model = VanillaTransformerForConditionalGeneration(config)
    trainer = trainer_for(model, tokenizer, tmp_path, r_drop_alpha=5.0)
    inputs = inputs_of(trainer)
    model.train()
    fused, name = [], "fused_linear_cross_entropy"
    fuse = getattr(r_drop, name)
    monkeypatch.setattr(r_drop, name, lambda *args: fused.append(1) or fuse(*args))
    torch.manual_seed(1)
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=torch.tensor(20))
    assert len(fused) == (attention == "sdpa")  # the plain path computes logits
    labels = inputs.pop("labels")
    torch.manual_seed(1)
    twice = model(**{name: torch.cat([value, value]) for name, value in inputs.items()}).logits
    assert not torch.equal(*twice.chunk(2))
    torch.testing.assert_close(loss, r_drop_loss(twice, labels, 5.0, 0.1, 20))


def test_without_dropout_the_loss_is_twice_the_plain_loss(tokenizer, tmp_path):
    model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.0))
    trainer = trainer_for(model, tokenizer, tmp_path, r_drop_alpha=5.0)
    plain = trainer_for(model, tokenizer, tmp_path)
    inputs = inputs_of(plain)
    model.train()
    torch.testing.assert_close(
        trainer.compute_loss(model, dict(inputs)), 2 * plain.compute_loss(model, dict(inputs))
    )


def test_evaluation_uses_the_plain_loss(tokenizer, model, tmp_path):
    losses = [
        trainer.compute_loss(model.eval(), inputs_of(trainer_for(model, tokenizer, tmp_path)))
        for trainer in (
            trainer_for(model, tokenizer, tmp_path, r_drop_alpha=5.0),
            trainer_for(model, tokenizer, tmp_path),
        )
    ]
    assert losses[0] == losses[1]


def test_r_drop_starts_at_update_r_drop_start(tokenizer, tmp_path):
    """Without dropout, so that the loss doubles."""
    model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.0))
    options = {"max_steps": 4, "logging_steps": 1, "learning_rate": 0.0, "save_strategy": "no"}
    losses = []
    for given in ({}, {"r_drop_alpha": 5.0, "r_drop_start": 2}):
        trainer = trainer_for(model, tokenizer, tmp_path, **options, **given)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    plain, found = losses
    assert found == pytest.approx([*plain[:2], 2 * plain[2], 2 * plain[3]], rel=1e-4)


def test_accumulated_passes_equal_those_of_one_batch(tokenizer, tmp_path):
    """Without dropout, because two runs would draw different masks. This tests the weight of
    tokens."""
    weights = []
    for size, accumulation in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.0))
        options = {"per_device_train_batch_size": size, "optim": "sgd", "max_steps": 3}
        trainer = trainer_for(
            model,
            tokenizer,
            tmp_path,
            r_drop_alpha=5.0,
            gradient_accumulation_steps=accumulation,
            save_strategy="no",
            **options,
        )
        trainer.train()
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


def test_several_gpus_in_one_process_are_refused_and_without_r_drop_reported(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(TranslationTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="with 2 GPUs in one process: expected a"):
        TranslationTrainingArguments(str(tmp_path), r_drop_alpha=1.0)
    TranslationTrainingArguments(str(tmp_path))
    assert "2 GPUs in one process share each batch through DataParallel" in caplog.text


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [(MarianConfig, MarianMTModel), (M2M100Config, M2M100ForConditionalGeneration)],
)
def test_any_sequence_to_sequence_model_works(config_class, model_class, tokenizer, tmp_path):
    config = config_class(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=2,
    )  # fmt: skip
    options = {"max_steps": 20, "logging_steps": 1, "learning_rate": 1e-2}
    trainer = trainer_for(model_class(config), tokenizer, tmp_path, r_drop_alpha=1.0, **options)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"r_drop_alpha": -1}, "r_drop_alpha=-1: expected 0 or more"),
        (
            {"r_drop_alpha": 1, "r_drop_start": -1},
            "r_drop_start=-1: expected 0 or more",
        ),
        ({"r_drop_start": 9}, "r_drop_start=9: expected r_drop_alpha with it"),
    ],
)
def test_invalid_options_are_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
