"""What other toolkits' models have and the paper does not: fields of the configuration."""

import pytest
import torch
from conftest import SMALL, random_ids, seq2seq, small_config
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.modeling_vanilla_transformer import SinusoidalPositions

D_MODEL = SMALL["d_model"]


def logits(model, **inputs):
    with torch.no_grad():
        return model.eval()(
            input_ids=random_ids(3, 7), decoder_input_ids=random_ids(3, 5), **inputs
        ).logits


def positions(**options):
    return SinusoidalPositions(small_config(**options))(torch.arange(9)[None], torch.float64)[0]


def test_tensor2tensors_frequencies_end_at_one_ten_thousandth():
    """`get_timing_signal_1d`: d_model / 2 time scales in geometric order from 1 to 10,000."""
    scales = 10_000.0 ** (torch.arange(D_MODEL // 2, dtype=torch.float64) / (D_MODEL // 2 - 1))
    angles = torch.arange(9)[:, None] / scales
    expected = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    torch.testing.assert_close(positions(sinusoid_frequencies="tensor2tensor"), expected)


def test_an_offset_shifts_the_sinusoids():
    torch.testing.assert_close(positions(position_offset=2)[:-2], positions()[2:])


def test_the_bias_of_the_projection_is_added_to_the_logits():
    plain, biased = seq2seq(), seq2seq(lm_head_bias=True)
    assert not biased.lm_head.bias.any()  # it starts at 0
    biased.load_state_dict(plain.state_dict(), strict=False)
    nn.init.normal_(biased.lm_head.bias)
    torch.testing.assert_close(logits(biased), logits(plain) + biased.lm_head.bias)


def test_the_bias_is_saved_and_resized(tmp_path):
    model = seq2seq(lm_head_bias=True)
    nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.bias, model.lm_head.bias)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    again.resize_token_embeddings(SMALL["vocab_size"] + 3)
    assert torch.equal(again.lm_head.bias[:-3], model.lm_head.bias)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(
    ("choice", "encoder", "decoder"),
    [
        ("both", True, True),
        ("encoder", True, False),
        ("decoder", False, True),
        ("none", False, False),
    ],
)
def test_each_stack_can_end_in_a_layer_norm(norm_position, choice, encoder, decoder):
    model = seq2seq(norm_position=norm_position, final_layer_norm=choice).model
    assert isinstance(model.encoder.layer_norm, nn.LayerNorm) == encoder
    assert isinstance(model.decoder.layer_norm, nn.LayerNorm) == decoder


@pytest.mark.parametrize("encoder", ["post", "pre"])
@pytest.mark.parametrize("decoder", [None, "post", "pre"])
def test_by_default_a_pre_norm_stack_ends_in_a_layer_norm(encoder, decoder):
    model = seq2seq(norm_position=encoder, decoder_norm_position=decoder).model
    assert isinstance(model.encoder.layer_norm, nn.LayerNorm) == (encoder == "pre")
    assert isinstance(model.decoder.layer_norm, nn.LayerNorm) == ((decoder or encoder) == "pre")


def test_an_initial_norm_after_a_post_norm_stack_only_changes_rounding():
    """It normalizes what is already normalized."""
    torch.testing.assert_close(
        logits(seq2seq(final_layer_norm="both")), logits(seq2seq()), atol=1e-4, rtol=1e-4
    )


def test_embedding_plus_position_can_be_normalized():
    encoder = seq2seq(embedding_layer_norm=True).model.encoder.eval()
    nn.init.normal_(encoder.embed_layer_norm.weight)
    states = encoder.embed(random_ids(2, 5), None, None, None)
    plain = encoder.embed_tokens(random_ids(2, 5)) * D_MODEL**0.5
    plain = plain + encoder.embed_positions(torch.arange(5)[None], torch.float32)
    expected = nn.functional.layer_norm(plain, [D_MODEL]) * encoder.embed_layer_norm.weight
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"lm_head_bias": True},
        {"lm_head_bias": True, "tie_word_embeddings": False},
        {"final_layer_norm": "both"},
        {"norm_position": "pre", "final_layer_norm": "encoder"},
        {"decoder_norm_position": "pre"},
        {"embedding_layer_norm": True},
        {"sinusoid_frequencies": "tensor2tensor", "position_offset": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_cache_changes_no_output(options, num_beams):
    model = seq2seq(**options).eval()
    for bias in (model.lm_head.bias,) if model.lm_head.bias is not None else ():
        nn.init.normal_(bias)
    inputs = {"input_ids": random_ids(4, 6), "num_beams": num_beams, "max_new_tokens": 8}
    assert torch.equal(model.generate(**inputs), model.generate(**inputs, use_cache=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinusoid_frequencies": "fairseq"}, "sinusoid_frequencies"),
        ({"position_offset": -1}, "position_offset=-1: expected an integer from 0"),
        ({"final_layer_norm": "post"}, "final_layer_norm"),
        (
            {"d_model": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1,
             "sinusoid_frequencies": "tensor2tensor"},
            "d_model=2 with sinusoid_frequencies='tensor2tensor': expected at least 4",
        ),
    ],
)  # fmt: skip
def test_invalid_options_are_reported(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        small_config(**options)
