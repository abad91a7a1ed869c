"""CTranslate2 computes the same as the exported model."""

import pytest
import torch
from conftest import ragged, small_config
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from vanilla_transformer.export import export
from vanilla_transformer.export.to_ctranslate2 import vocabularies
from vanilla_transformer.inference.engines import load
from vanilla_transformer.inference.scoring import token_scores

pytest.importorskip("ctranslate2", reason="needs vanilla-transformer[export]")

CONFIGS = {
    "the paper's": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm decoder": {"decoder_norm_position": "pre"},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 40},
    "pre-norm, learned": {
        "norm_position": "pre",
        "position_encoding": "learned",
        "max_position_embeddings": 40,
    },
    "narrow keys": {"head_dim": 5, "value_head_dim": 8},
    "narrow values": {"head_dim": 8, "value_head_dim": 3},
    "wide heads": {"head_dim": 30, "value_head_dim": 32},
    "biases": {"attention_bias": True, "lm_head_bias": True, "value_head_dim": 4},
    "untied": {"tie_word_embeddings": False},
    "epsilon": {"layer_norm_eps": 1e-2},
    "unscaled": {"scale_embedding": False},
    "tensor2tensor": {"sinusoid_frequencies": "tensor2tensor", "position_offset": 2},
    "last norm of the encoder": {"final_layer_norm": "encoder"},
    "no last norms": {"norm_position": "pre", "final_layer_norm": "none"},
    "norm of embeddings": {"embedding_layer_norm": True},
    "padded vocabulary": {"vocab_size": 312},
    **{
        name: {"activation_function": name}
        for name in ("gelu", "gelu_new", "gelu_fast", "quick_gelu", "silu", "tanh", "sigmoid")
    },
}
BATCH = ragged(7, 4, 1)
LONGEST = {"max_new_tokens": 12}


def trimmed(ids, pad=0):
    """Rows of ids without padding."""
    return [[number for number in row if number != pad] for row in ids.tolist()]


def expect_equal(model, engine, **options):
    """Ids and scores of beam search, for sources of several lengths."""
    ids, mask = BATCH
    options |= {"output_scores": True, "return_dict_in_generate": True}
    options.setdefault("num_beams", 4)
    options.setdefault("num_return_sequences", options["num_beams"])
    expected, found = (
        each.generate(input_ids=ids, attention_mask=mask, **options) for each in (model, engine)
    )
    assert trimmed(found.sequences) == trimmed(expected.sequences)
    scores = found.sequences_scores, expected.sequences_scores
    torch.testing.assert_close(*scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_configuration_is_expressed(exported, config):
    model, folder = exported("ctranslate2", **config)
    engine = load(folder)
    ids, mask = BATCH
    greedy = [
        each.generate(input_ids=ids, attention_mask=mask, **LONGEST) for each in (model, engine)
    ]
    assert trimmed(greedy[0]) == trimmed(greedy[1])
    expect_equal(model, engine, early_stopping=True, **LONGEST)


def test_tokens_that_a_model_suppresses_are_suppressed_by_default(saved, tmp_path, caplog):
    """As in models of fairseq, Marian and JoeyNMT, with beam search."""
    model, folder = saved()
    options = {"num_beams": 4, "suppress_tokens": [1, 5], "min_new_tokens": 2}
    model.generation_config.update(**options, forced_eos_token_id=2)
    model.save_pretrained(folder)
    engine = load(export(folder, tmp_path / "out", "ctranslate2"))
    assert "min_new_tokens, suppress_tokens: CTranslate2 normalizes again" in caplog.text
    ids, mask = BATCH
    expected = model.generate(ids, attention_mask=mask, renormalize_logits=True, **LONGEST)
    found = engine.generate(input_ids=ids, attention_mask=mask, **LONGEST)
    assert trimmed(found) == trimmed(expected)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sequence_bias", [[[5], -1.0]], "sequence_bias"),
        ("eos_token_id", None, "eos_token_id=None"),  # `generate()` would not end at the config's
    ],
)
def test_options_that_the_engine_lacks_stop_the_export(saved, tmp_path, option, value, message):
    model, folder = saved()
    setattr(model.generation_config, option, value)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=f"config.json: {message}: CTranslate2 can't"):
        export(folder, tmp_path / "out", "ctranslate2")
    assert not (tmp_path / "out").exists()


def test_two_vocabularies_of_the_same_size_are_distinguished(two_sided):
    # CTranslate2's own library writes these names.
    size = max(len(two_sided), two_sided.target_vocab_size)
    sources, targets = vocabularies(small_config(vocab_size=size), two_sided)
    assert sources[: len(two_sided)] == two_sided.convert_ids_to_tokens(range(len(two_sided)))
    target = two_sided.target_tokenizer
    assert targets[:100] == [target.id_to_token(number) for number in range(100)]
    assert sources != targets


def test_several_ids_of_the_same_token_are_distinguished():
    """The engine finds an id by its token, so each needs a unique name."""
    pieces = [("<pad>", 0.0), ("a", -1.0), ("b", -2.0), ("a", -3.0)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces)))
    (known,) = tokenizer("a").input_ids
    sources, targets = vocabularies(small_config(vocab_size=5), tokenizer)
    assert sources == targets
    assert sources[known] == "a"
    assert len({*sources}) == 5


def test_a_slow_tokenizer_is_supported(saved, tmp_path):
    tokenizer = ByT5Tokenizer(extra_ids=3)
    model, folder = saved(tokenizer, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    engine = load(export(folder, tmp_path / "exported", "ctranslate2"))
    assert engine.sources == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # The scores of a source's third and fourth hypotheses are equal up to rounding.
    expect_equal(model, engine, early_stopping=True, num_return_sequences=2, **LONGEST)


def expect_equal_scores(model, engine, atol):
    ids, mask = BATCH
    labels = torch.tensor([[7, 8, 2], [9, 5, 2], [6, 2, -100]])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    expected = token_scores(model.eval(), {**inputs, "decoder_input_ids": shifted})
    torch.testing.assert_close(engine.token_scores(**inputs), expected, rtol=0, atol=atol)


def test_a_missing_eos_among_several_is_not_the_engines(saved, tmp_path):
    """-1 is customary for none."""
    model, folder = saved()
    model.generation_config.eos_token_id = [-1, 2]
    model.save_pretrained(folder)
    assert load(export(folder, tmp_path / "exported", "ctranslate2")).config.eos_token == "</s>"


def test_the_eos_of_a_given_target_is_scored_if_there_are_several(saved, tmp_path):
    model, folder = saved()
    model.generation_config.eos_token_id = [5, 2]
    model.save_pretrained(folder)
    expect_equal_scores(model, load(export(folder, tmp_path / "exported", "ctranslate2")), 1e-4)


@pytest.mark.parametrize("tie", [True, False])
def test_two_vocabularies_are_expressed(saved, two_sided, tmp_path, tie):
    sizes = {"vocab_size": len(two_sided) + 2, "decoder_vocab_size": two_sided.target_vocab_size}
    model, folder = saved(two_sided, tie_word_embeddings=tie, **sizes)
    engine = load(export(folder, tmp_path / "exported", "ctranslate2"))
    expect_equal(model, engine, early_stopping=True, **LONGEST)


def test_int8_sums_do_not_overflow_on_any_cpu(saved, tmp_path, monkeypatch):
    # Sums of two products overflowed on CPUs without VNNI.
    specs = []
    name = "ctranslate2.specs.transformer_spec.TransformerSpec.save"
    monkeypatch.setattr(name, lambda spec, folder: specs.append(spec))
    model, folder = saved()
    export(folder, tmp_path / "out", "ctranslate2", "int8")
    expected = model.model.decoder.layers[0].ffn.fc1.weight
    linear = specs[0].decoder.layer[0].ffn.linear_0
    found, scale = (torch.tensor(each.numpy()) for each in (linear.weight, linear.weight_scale))
    assert (found.abs().amax(1) == 64).all()
    assert ((found / scale[:, None] - expected).abs() * scale[:, None]).max() <= 0.76


def test_int16_never_becomes_int8(saved, tmp_path, monkeypatch):
    # Few CPUs multiply 16-bit integers, and CTranslate2 uses 8 bits on all others.
    model, folder = saved()
    engine = load(export(folder, tmp_path / "out", "ctranslate2", "int16"))
    assert engine.translator.compute_type in ("int16", "float32")
    known = {"float32", "int8", "int8_float32"}
    monkeypatch.setattr("ctranslate2.get_supported_compute_types", lambda *_: known)
    assert load(tmp_path / "out").translator.compute_type == "float32"
    in_8_bits = load(export(folder, tmp_path / "8", "ctranslate2", "int8"))
    assert in_8_bits.translator.compute_type.startswith("int8")
    assert in_8_bits.dtype == torch.float32
    expect_equal_scores(model, engine, 2e-2)
