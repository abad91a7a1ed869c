"""The plain path, `attn_implementation="eager"`, and the fast one give the same.

The plain path runs the equations of the model file, transformers' caches and beam search, and a
loss of logits.
"""

import pytest
import torch
from conftest import random_ids, small_config

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model import (
    attention,
    decoding_steps,
    generation,
    modeling_vanilla_transformer,
    packing,
    running_rows,
)

CLASSES = [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]
VARIANTS = [
    {},
    {"norm_position": "pre"},
    {"decoder_norm_position": "pre"},
    {"position_encoding": "learned"},
    {"decoder_vocab_size": 61},
    {"tie_word_embeddings": False},
    {"attention_bias": True, "head_dim": 6, "value_head_dim": 10},
    {"lm_head_bias": True, "final_layer_norm": "encoder", "embedding_layer_norm": True},
    {"sinusoid_frequencies": "tensor2tensor", "position_offset": 2},
]


def both(cls=VanillaTransformerForConditionalGeneration, **options):
    """The same model, fast and plain."""
    models = []
    for name in ("sdpa", "eager"):
        torch.manual_seed(0)
        models.append(cls(small_config(dropout=0.0, attn_implementation=name, **options)))
    return models


def batch():
    """Padded sources and targets."""
    ids, labels, mask = random_ids(5, 13), random_ids(5, 9, seed=1), torch.ones(5, 13).long()
    for row, length in enumerate((13, 2, 7, 3, 1)):
        mask[row, length:] = 0
    labels[1, 4:] = labels[3, 6:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def for_causal(inputs):
    return {"input_ids": inputs["labels"].clamp(min=4), "labels": inputs["labels"]}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_loss_and_gradients(cls, options):
    if cls is VanillaTransformerForCausalLM and "decoder_vocab_size" in options:
        pytest.skip("a language model has one vocabulary")
    results = []
    for model in both(cls, **options):
        inputs = (
            batch() if cls is VanillaTransformerForConditionalGeneration else for_causal(batch())
        )
        model.train()(**inputs).loss.backward()
        results.append([model(**inputs).loss, *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_logits(options):
    results = []
    for model in both(**options):
        with torch.no_grad():
            results.append(model.eval()(**batch()).logits)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_logits_after_the_scaling_of_attention_has_changed():
    """As in an experiment without the division by the root of d_k."""
    results = []
    for model in both():
        before = model.eval()(**batch()).logits
        for module in model.modules():
            if hasattr(module, "scaling"):
                module.scaling = 1.0
        results.append(model(**batch()).logits)
        assert (results[-1] - before).abs().max() > 0.01
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", VARIANTS[:4], ids=str)
@pytest.mark.parametrize(
    "decoding",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
        {"num_beams": 3, "length_penalty_type": "gnmt", "length_penalty": 0.6},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 2, "max_new_tokens": None},
    ],
    ids=str,
)
def test_generation(options, decoding):
    inputs, results = batch(), []
    del inputs["labels"]
    for model in both(**options):
        torch.manual_seed(1)
        results.append(model.eval().generate(**inputs, **{"max_new_tokens": 8, **decoding}))
    assert results[0].tolist() == results[1].tolist()


def test_the_plain_path_uses_no_fast_path(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a fast path")

    monkeypatch.setattr(modeling_vanilla_transformer, "fused_linear_cross_entropy", refuse)
    monkeypatch.setattr(generation, "generation_cache", refuse)
    monkeypatch.setattr(decoding_steps, "BestTokens", refuse)
    monkeypatch.setattr(running_rows, "RunningRows", refuse)
    monkeypatch.setattr(decoding_steps, "LARGE", 0)
    monkeypatch.setattr(decoding_steps, "project", refuse)
    monkeypatch.setattr(decoding_steps, "decode", refuse)
    for name in ("sdpa_attention", "flash_or_flex_attention"):
        monkeypatch.setattr(attention, name, refuse)
    for name in ("PackedRows", "RowsByLength"):
        monkeypatch.setattr(packing, name, refuse)
    _, plain = both()
    plain.train()(**batch()).loss.backward()
    inputs = batch()
    del inputs["labels"]
    plain.eval().generate(**inputs, num_beams=3, max_new_tokens=4)
    plain.generate(**inputs, max_new_tokens=4)
    fast, _ = both()
    with pytest.raises(AssertionError, match="a fast path"):
        fast.eval().generate(**inputs, num_beams=3, max_new_tokens=4)
