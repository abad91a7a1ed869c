"""Extreme sizes and numbers: results are finite, or there is one clear error."""

import pytest
import torch
from conftest import random_ids, small_config

from vanilla_transformer import VanillaTransformerForConditionalGeneration

LAYERS = 50


def new_model(**fields):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config(**fields))


def tiny(**fields):
    """One layer of each, two wide."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    return new_model(d_model=2, encoder_ffn_dim=2, decoder_ffn_dim=2, **sizes, **fields)


def assert_trains(model, source, target):
    """Loss, and each gradient, are finite, and not all gradients 0."""
    loss = model.train()(input_ids=source, labels=target).loss
    loss.backward()
    assert loss.isfinite()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_left_padding_where_half_precision_is_the_default(dtype, attention):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = new_model(attn_implementation=attention).train()
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        ids = random_ids(2, 4)
        model(
            input_ids=ids, attention_mask=mask, labels=ids, decoder_attention_mask=mask
        ).loss.backward()
    finally:
        torch.set_default_dtype(before)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_layers(norm_position, dtype):
    model = new_model(
        encoder_layers=LAYERS, decoder_layers=LAYERS, norm_position=norm_position, dropout=0.0
    ).to(dtype)
    assert_trains(model, random_ids(2, 6), random_ids(2, 5))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_near_the_maximum_of_half_precision(dtype, attention):
    """Queries and keys whose products come near the largest number, 65504 in float16."""
    model = new_model(attn_implementation=attention).to(dtype).eval()
    for stack in (model.model.encoder, model.model.decoder):
        for layer in stack.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.data *= 60
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    source = random_ids(2, 5)
    outputs = model(input_ids=source, attention_mask=mask, decoder_input_ids=random_ids(2, 4))
    assert outputs.logits.isfinite().all()
    largest = outputs.encoder_last_hidden_state.abs().max()
    assert largest < torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_source_of_only_padding_in_half_precision(dtype, attention):
    model = new_model(attn_implementation=attention).to(dtype).eval()
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    logits = model(
        input_ids=random_ids(2, 3), attention_mask=mask, decoder_input_ids=random_ids(2, 4)
    ).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_source_of_five_thousand_tokens_and_of_one(dtype):
    model = tiny(dropout=0.0).to(dtype)
    for length in (5000, 1):
        source = random_ids(1, length)
        assert_trains(model, source, random_ids(1, 3))
        sequences = model.eval().generate(source, max_new_tokens=3)
        assert 2 <= sequences.shape[1] <= 4


def test_very_long_and_short_sequences_in_one_batch():
    model = tiny(dropout=0.0).eval()
    source, mask = random_ids(2, 5000), torch.ones(2, 5000, dtype=torch.long)
    mask[1, 1:] = 0
    target = random_ids(2, 3)
    together = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    alone = model(input_ids=source[1:, :1], decoder_input_ids=target[1:]).logits
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vocab_size", [4, 1_000_000])
def test_a_vocabulary_of_four_and_of_a_million(vocab_size):
    model = tiny(vocab_size=vocab_size, dropout=0.0)
    source = torch.tensor([[3, vocab_size - 1, 3]])
    assert_trains(model, source, torch.tensor([[vocab_size - 1, 2]]))
    for beams in (1, 2):
        sequences = model.eval().generate(source, num_beams=beams, max_new_tokens=3)
        assert ((sequences >= 0) & (sequences < vocab_size)).all()


def test_a_vocabulary_of_only_special_tokens_works_and_of_one_token_is_refused():
    assert_trains(tiny(vocab_size=3), torch.tensor([[1, 2]]), torch.tensor([[2]]))
    with pytest.raises(Exception, match="is outside the vocabulary: expected 0 <= id < 1"):
        tiny(vocab_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_five_hundred_layers(norm_position):
    model = new_model(encoder_layers=500, decoder_layers=500, norm_position=norm_position)
    assert_trains(model, random_ids(1, 3), random_ids(1, 3))
