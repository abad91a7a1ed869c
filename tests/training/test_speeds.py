"""The measurement from which `plan` estimates a training on a device that this machine lacks."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.speeds import measurement_key, nearest_speed

KEY = {
    "device": "NVIDIA H200", "shape": "base", "vocabulary": 500, "precision": "bf16", "batch": 4000,
    "attention": "sdpa", "options": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    config = VanillaTransformerConfig(
        vocab_size=500, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    return VanillaTransformerForConditionalGeneration(config)


def row(speed=100.0, **changes):
    return {**KEY, "target_tokens_per_second": speed, "gib": 1.0, **changes}


def test_the_same_measurement_is_taken_as_it_is(model):
    rows = [row(batch=4100), row(50.0), row(vocabulary=501)]
    assert nearest_speed(rows, KEY, model) == rows[1]


def test_the_nearest_batch_counts_by_its_ratio(model):
    rows = [row(batch=1000), row(batch=8000), row(batch=40_000)]
    assert nearest_speed(rows, KEY, model) == rows[1]


def test_the_speed_follows_the_weights_of_another_vocabulary(model):
    """A token takes as long as the products with all weights, and twice the vocabulary has 500
    times d_model more."""
    found = nearest_speed([row(vocabulary=1000)], KEY, model)
    weights = model.num_parameters()
    expected = 100 * (weights + 500 * 16) / weights
    assert found["target_tokens_per_second"] == pytest.approx(expected)
    assert found["vocabulary"] == 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "A100"}, {"shape": "big"}, {"precision": "fp32"}, {"batch": -64},
        {"attention": "eager"}, {"options": ["R-Drop"]},
    ],
)  # fmt: skip
def test_what_was_measured_with_something_else_does_not_count(model, changes):
    assert nearest_speed([row(**changes)], KEY, model) is None


def test_products_that_torch_may_round_have_a_speed_of_their_own(model, tmp_path):
    found = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            for options in ({}, {"bf16": True}):
                arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
                found.append(measurement_key(model, arguments)["precision"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["fp32", "bf16", "fp32 (medium)", "bf16"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"r_drop_alpha": 5.0}, ["R-Drop"]),
        (
            {"gradient_checkpointing": True, "torch_compile": True},
            ["gradient checkpointing", "torch.compile"],
        ),
    ],
)
def test_what_changes_the_speed_is_part_of_the_key(given, expected, model, tmp_path):
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **given)
    key = measurement_key(model, arguments)
    assert (key["options"], key["attention"]) == (expected, "sdpa")
    assert torch.backends.cpu.get_cpu_capability() in key["device"]
