"""The importance of heads, and models without the least important ones."""

from copy import deepcopy

import pytest
import torch
from conftest import seq2seq, small_config
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, BartConfig

from vanilla_transformer.analysis import heads
from vanilla_transformer.analysis.attention import (
    attention_modules,
    expect_both_stacks,
    read_batches,
)
from vanilla_transformer.analysis.heads import (
    analyze_heads,
    expect_prunable,
    masked_heads,
    most_important,
    prune_heads,
)

PAIRS = [("a house by the lake", "ein Haus am See"), ("deep", "tief"), ("the lake", "der See")]
SIX = {"encoder_attention_heads": 3, "decoder_attention_heads": 4, "head_dim": 6}


@pytest.fixture(scope="module")
def model(tokenizer):
    options = {**SIX, "value_head_dim": 5, "attention_bias": True, "attn_implementation": "eager"}
    return seq2seq(vocab_size=len(tokenizer), **options).eval()


@pytest.fixture(scope="module")
def report(model, tokenizer):
    return analyze_heads(PAIRS, model, tokenizer)


def loss_of(model, tokenizer, pair):
    inputs = tokenizer(pair[0], text_target=pair[1], return_tensors="pt")
    logits = model(**inputs).logits
    return F.cross_entropy(logits[0], inputs["labels"][0], reduction="sum")


def test_importance_is_the_derivative_of_the_loss_by_the_head_mask(model, tokenizer, report):
    """Its mean absolute value over the pairs, computed here as a difference of two masks close to
    1."""
    tokens = sum(len(tokenizer(text_target=target)["input_ids"]) for _, target in PAIRS)
    model.double()
    try:
        for kind, layer, head in (("encoder", 1, 2), ("decoder", 0, 3), ("cross", 2, 0)):
            slopes = []
            for pair in PAIRS:
                losses = []
                for factor in (1 - 1e-4, 1 + 1e-4):
                    masks = {
                        name: torch.ones_like(values, dtype=torch.float64)
                        for name, values in report.importance.items()
                    }
                    masks[kind][layer, head] = factor
                    with masked_heads(model, masks), torch.no_grad():
                        losses.append(loss_of(model, tokenizer, pair))
                slopes.append(abs(losses[1] - losses[0]).item() / 2e-4)
            measured = report.importance[kind][layer, head].item()
            assert measured == pytest.approx(sum(slopes) / tokens, rel=1e-3)
        losses = [loss_of(model, tokenizer, pair).item() for pair in PAIRS]
        assert report.loss == pytest.approx(sum(losses) / tokens, rel=1e-5)
    finally:
        model.float()


def test_confidence_is_the_mean_of_the_largest_weights(model, tokenizer, report):
    largest = []
    for source, target in PAIRS:
        inputs = tokenizer(source, text_target=target, return_tensors="pt")
        weights = model(**inputs, output_attentions=True).cross_attentions[1][0, 2]
        largest += weights.amax(-1).tolist()
    assert report.confidence["cross"][1, 2].item() == pytest.approx(sum(largest) / len(largest))
    assert {kind: tuple(values.shape) for kind, values in report.confidence.items()} == {
        "encoder": (2, 3), "decoder": (3, 4), "cross": (3, 4),
    }  # fmt: skip


def test_sums_of_a_bfloat16_model_are_not_rounded(model, tokenizer):
    rounded = deepcopy(model).bfloat16()
    pairs = [("a house by the lake is deep", "ein Haus am See ist tief")] * 40
    report = analyze_heads(pairs, rounded, tokenizer, max_tokens=4000)
    inputs = tokenizer(pairs[0][0], text_target=pairs[0][1], return_tensors="pt")
    attentions = rounded(**inputs, output_attentions=True).encoder_attentions
    expected = torch.cat(attentions).float().amax(-1).mean(-1)
    torch.testing.assert_close(report.confidence["encoder"], expected, rtol=1e-6, atol=1e-6)


def test_the_batch_size_does_not_change_the_measurements(model, tokenizer, report):
    alone = analyze_heads(PAIRS, model, tokenizer, max_tokens=1)
    for kind, values in report.importance.items():
        torch.testing.assert_close(alone.importance[kind], values)
        torch.testing.assert_close(alone.confidence[kind], report.confidence[kind])
    assert alone.loss == pytest.approx(report.loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_importance_is_measured_where_gradients_are_switched_off(model, tokenizer, report, mode):
    with mode():
        found = analyze_heads(PAIRS, model, tokenizer)
    torch.testing.assert_close(found, report)


def test_heads_of_a_model_with_adapters_are_those_of_the_merged_model(model, tokenizer):
    peft = pytest.importorskip("peft")
    lora = {"target_modules": ["q_proj", "v_proj", "out_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **lora)
    adapted = peft.get_peft_model(deepcopy(model), config)
    found = analyze_heads(PAIRS, adapted, tokenizer)
    expected = analyze_heads(PAIRS, adapted.merge_and_unload(), tokenizer)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for kind, values in expected.importance.items():
        torch.testing.assert_close(found.importance[kind], values, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.confidence[kind], expected.confidence[kind])


def test_heads_of_another_model_are_refused(tokenizer):
    config = BartConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1)
    bart = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="is of type bart: expected vanilla_transformer"):
        analyze_heads(PAIRS, bart, tokenizer)


def test_measurements_are_on_the_cpu_whatever_the_default_device(
    model, tokenizer, report, monkeypatch
):
    batches = list(read_batches(PAIRS, model, tokenizer))
    monkeypatch.setattr(heads, "read_batches", lambda *args: (batch for batch in batches))
    with torch.device("meta"):
        found = analyze_heads(PAIRS, model, tokenizer)
    torch.testing.assert_close(found, report)


def test_inputs_without_attention_weights_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="the text is empty: expected one pair of sentences"):
        analyze_heads([], model, tokenizer)
    for config in (BartConfig(), small_config(is_encoder_decoder=False)):
        with pytest.raises(ValueError, match="expected vanilla_transformer, with an encoder and a"):
            expect_both_stacks(config)
    with pytest.raises(ValueError, match="attn_implementation='sdpa': expected 'eager'"):
        next(read_batches(PAIRS, seq2seq(attn_implementation="sdpa"), tokenizer))


# ---------------------------------------------------------------- Pruning


def test_each_layer_keeps_its_most_important_heads(model, report):
    masks = most_important(model.config, report.importance, 0.5)
    for kind, kept in (("encoder", 1), ("decoder", 2), ("cross", 2)):
        for mask, values in zip(masks[kind], report.importance[kind], strict=True):
            assert mask.sum() == kept
            assert values[mask].min() > values[~mask].max()


def test_a_pruned_model_equals_the_model_with_masked_heads(model, report, tokenizer, tmp_path):
    masks = most_important(model.config, report.importance, 0.3)
    prune_heads(model, masks).save_pretrained(tmp_path)
    pruned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    config = pruned.config
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 3)
    assert (config.head_dim, config.value_head_dim) == (6, 5)
    assert pruned.num_parameters() < model.num_parameters()
    inputs = tokenizer(
        [source for source, _ in PAIRS],
        text_target=[target for _, target in PAIRS],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        with masked_heads(model, masks):
            expected = model(**inputs).logits
        torch.testing.assert_close(pruned(**inputs).logits, expected)
        assert not torch.allclose(model(**inputs).logits, expected, atol=1e-3)
    assert [len(layers) for layers in attention_modules(pruned).values()] == [2, 3, 3]


def test_pruning_keeps_generation_settings_and_precision(model, report):
    masks = most_important(model.config, report.importance, 0.3)
    model.generation_config.num_beams = 3
    pruned = prune_heads(deepcopy(model).bfloat16(), masks)
    assert pruned.generation_config.num_beams == 3
    assert (pruned.dtype, pruned.training) == (torch.bfloat16, False)


@pytest.mark.parametrize(
    ("options", "share", "message"),
    [
        (SIX, 0.0, "prune=0.0: expected a share of the heads between 0 and 1"),
        (SIX, 1.0, "prune=1.0: expected a share of the heads between 0 and 1"),
        (SIX, -0.1, "prune=-0.1: expected a share of the heads between 0 and 1"),
        (SIX, 0.1, "prune=0.1: removes none of 3 and 4 heads"),
        ({}, 0.5, "heads of encoder and decoder differ in width"),
    ],
)
def test_impossible_pruning_is_refused(options, share, message):
    with pytest.raises(ValueError, match=message):
        expect_prunable(small_config(**options), share)


def test_each_layer_keeps_at_least_one_head():
    assert expect_prunable(small_config(**SIX), 0.99) == {"encoder": 1, "decoder": 1}
