"""The configuration: the paper's numbers, and an error for each invalid value."""

import json
import math

import pytest
from conftest import small_config
from huggingface_hub.errors import StrictDataclassError

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model.configuration_vanilla_transformer import PRESETS

SEQ2SEQ = VanillaTransformerForConditionalGeneration


def test_the_defaults_are_the_papers_base_model():
    config = VanillaTransformerConfig()
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim) == (512, 2048, 2048)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
    assert (config.dropout, config.label_smoothing) == (0.1, 0.1)
    assert (config.attention_dropout, config.activation_dropout) == (0, 0)
    assert config.norm_position == "post"
    assert config.position_encoding == "sinusoidal"
    assert config.activation_function == "relu"
    assert config.scale_embedding
    assert config.tie_word_embeddings
    assert config.shares_embeddings


def test_what_the_paper_leaves_open_has_the_defaults_of_the_fidelity_page():
    config = VanillaTransformerConfig()
    assert not config.attention_bias
    assert config.initializer == "depth_scaled"
    assert config.layer_norm_eps == 1e-6
    assert config.decoder_start_token_id == config.bos_token_id == 1


def test_transformers_attribute_names_are_aliases_of_ours():
    config = VanillaTransformerConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 2, 4)


@pytest.mark.parametrize("decoder_vocab_size", [None, 70])
def test_each_stack_has_a_text_config_of_its_own(decoder_vocab_size):
    config = VanillaTransformerConfig(
        vocab_size=50,
        decoder_vocab_size=decoder_vocab_size,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=8,
    )
    decoder = config.get_text_config(decoder=True)
    assert (decoder.num_hidden_layers, decoder.num_attention_heads) == (3, 8)
    assert decoder.vocab_size == (decoder_vocab_size or 50)
    assert config.get_text_config(encoder=True).num_hidden_layers == 2
    assert config.get_text_config() is config
    assert config.decoder_vocab_size == decoder_vocab_size


def test_it_is_the_same_after_saving_and_loading(tmp_path):
    config = VanillaTransformerConfig.from_preset("B-dk16", vocab_size=99, norm_position="pre")
    config.save_pretrained(tmp_path)
    assert VanillaTransformerConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 16


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_changes_what_its_row_says_and_nothing_else(name):
    base, preset = VanillaTransformerConfig(), VanillaTransformerConfig.from_preset(name)
    changed = {
        field
        for field in VanillaTransformerConfig.__dataclass_fields__
        if getattr(base, field) != getattr(preset, field)
    }
    named = {k for k, v in PRESETS[name].items() if getattr(base, k) != v}
    assert changed - {"head_dim"} == named - {"head_dim"}
    d_k = preset.d_model // preset.encoder_attention_heads
    assert preset.head_dim == PRESETS[name].get("head_dim", d_k)


def test_a_preset_takes_overrides():
    config = VanillaTransformerConfig.from_preset("big", dropout=0.1, vocab_size=100)
    assert (config.d_model, config.dropout, config.vocab_size) == (1024, 0.1, 100)


def test_the_heads_of_a_preset_adapt_to_a_different_d_model():
    config = VanillaTransformerConfig.from_preset("tiny", d_model=256)
    assert (config.head_dim, config.encoder_attention_heads) == (64, 4)
    assert VanillaTransformerConfig.from_preset("big", d_model=512).head_dim == 32
    assert VanillaTransformerConfig.from_preset("B-dk16", d_model=256).head_dim == 16


def test_an_unknown_preset_is_reported():
    with pytest.raises(ValueError, match=r"unknown preset 'huge': expected one of base, A-h1"):
        VanillaTransformerConfig.from_preset("huge")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": -1}, "d_model=-1: expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size=0: expected a positive integer"),
        ({"decoder_vocab_size": 0}, "decoder_vocab_size=0: expected a positive integer"),
        ({"encoder_layers": 0}, "encoder_layers=0: expected a positive integer"),
        ({"head_dim": -4}, "head_dim=-4: expected a positive integer"),
        ({"decoder_ffn_dim": "2048"}, "'decoder_ffn_dim' expected int, got str"),
        ({"d_model": 100}, "d_model=100 is not divisible by encoder_attention_heads=8"),
        ({"decoder_attention_heads": 7}, "not divisible by decoder_attention_heads=7"),
        ({"d_model": 33, "head_dim": 4}, "d_model=33: sinusoidal positions come in pairs"),
        ({"dropout": 1.0}, r"dropout=1.0: expected a number in \[0, 1\)"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1: expected a number in"),
        ({"label_smoothing": 2}, "label_smoothing=2: expected a number in"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0: expected a finite number above 0"),
        ({"layer_norm_eps": math.inf}, "layer_norm_eps=inf: expected a finite number above 0"),
        ({"position_offset": 2**24 + 1}, "position_offset=16777217: .* from 0 to 16777216"),
        ({"norm_position": "middle"}, "'norm_position' expected one of .*'post', 'pre'.*middle"),
        ({"decoder_norm_position": "middle"}, "'decoder_norm_position' .*middle"),
        ({"position_encoding": "rope"}, "'position_encoding' expected one of .*rope"),
        ({"activation_function": "reluu"}, "activation_function='reluu': expected one of gelu"),
        (
            {"vocab_size": 10, "pad_token_id": 10},
            "pad_token_id=10 is outside the vocabulary: .* 10",
        ),
        ({"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\] is outside the vocabulary"),
        (
            {"decoder_vocab_size": 5, "decoder_start_token_id": 6},
            "decoder_start_token_id=6 is outside the vocabulary: expected 0 <= id < 5",
        ),
    ],
)
def test_an_invalid_value_is_reported(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        VanillaTransformerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_layers": -1}, "encoder_layers=-1: expected a positive integer"),
        ({"d_model": 99, "head_dim": None}, "d_model=99"),
        ({"dropout": 3.0}, r"dropout=3.0: expected a number in \[0, 1\)"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected a number in"),
        ({"activation_function": "reluu"}, "activation_function='reluu': expected one of gelu"),
        ({"pad_token_id": 50}, "pad_token_id=50 is outside the vocabulary"),
    ],
)
@pytest.mark.parametrize("cls", [SEQ2SEQ, VanillaTransformerEncoderModel])
def test_no_model_is_made_from_a_configuration_that_became_invalid(cls, fields, message):
    config = small_config()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        cls(config)


def test_an_encoder_alone_keeps_a_start_token_outside_its_vocabulary(tmp_path):
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    config = small_config(decoder_vocab_size=60, decoder_start_token_id=55)
    SEQ2SEQ(config).save_pretrained(whole)
    VanillaTransformerEncoderModel.from_pretrained(whole).save_pretrained(alone)
    saved = VanillaTransformerEncoderModel.from_pretrained(alone).config
    assert (saved.vocab_size, saved.decoder_start_token_id) == (50, 55)


def test_d_k_and_d_v_are_independent():
    config = VanillaTransformerConfig(
        vocab_size=50, d_model=32, head_dim=6, value_head_dim=10, encoder_layers=1, decoder_layers=1
    )
    attention = VanillaTransformerForConditionalGeneration(config).model.decoder.layers[0]
    assert attention.encoder_attn.q_proj.weight.shape == (8 * 6, 32)
    assert attention.encoder_attn.k_proj.weight.shape == (8 * 6, 32)
    assert attention.encoder_attn.v_proj.weight.shape == (8 * 10, 32)
    assert attention.encoder_attn.out_proj.weight.shape == (32, 8 * 10)


@pytest.mark.parametrize(
    ("fields", "d_k"),
    [
        ({"d_model": 256}, 32),
        ({"hidden_size": 256}, 32),
        ({"encoder_attention_heads": 4, "decoder_attention_heads": 4}, 128),
        ({"d_model": 256, "head_dim": 64}, 64),
        ({"head_dim": 64, "d_model": 256}, 64),
        ({"encoder_attention_heads": 4}, None),  # each stack has its own
        ({"dropout": 0.3}, 64),
    ],
)
def test_head_dim_adapts_to_sizes_that_are_changed_on_loading(tmp_path, fields, d_k):
    VanillaTransformerConfig().save_pretrained(tmp_path)
    assert VanillaTransformerConfig.from_pretrained(tmp_path, **fields).head_dim == d_k


@pytest.mark.parametrize(
    ("fields", "d_k"),
    [
        ({"d_model": 256}, 32),
        ({"hidden_size": 256}, 32),
        ({"encoder_attention_heads": 4, "decoder_attention_heads": 4}, 128),
        ({"num_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 1024}, 256),
        ({"d_model": 1020, "encoder_attention_heads": 4, "decoder_attention_heads": 4}, 255),
        ({"d_model": 256, "head_dim": 64}, 64),
        ({"encoder_attention_heads": 4}, None),
    ],
)
def test_head_dim_adapts_to_sizes_that_are_assigned(fields, d_k):
    assigned, updated = VanillaTransformerConfig(), VanillaTransformerConfig()
    for name, value in fields.items():
        setattr(assigned, name, value)
    updated.update(fields)
    assert assigned.head_dim == updated.head_dim == d_k


def test_an_explicit_head_dim_is_kept(tmp_path):
    config = VanillaTransformerConfig(head_dim=16, value_head_dim=64)
    config.save_pretrained(tmp_path)
    assert VanillaTransformerConfig.from_pretrained(tmp_path, d_model=256).head_dim == 16
    config.d_model = 256
    assert config.head_dim == 16
    assert VanillaTransformerConfig(hidden_size=256, head_dim=64).head_dim == 64


def test_aliases_of_a_field_are_applied_before_defaults_are_derived():
    config = VanillaTransformerConfig(hidden_size=64, num_attention_heads=4)
    assert (config.d_model, config.encoder_attention_heads) == (64, 4)
    assert VanillaTransformerConfig(hidden_size=64).head_dim == 8
    assert VanillaTransformerConfig(d_model=64, hidden_size=64).d_model == 64
    with pytest.raises(
        ValueError, match="hidden_size=8 is another name of d_model=16: expected one"
    ):
        VanillaTransformerConfig(d_model=16, hidden_size=8)
