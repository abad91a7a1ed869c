"""The values that a training from scratch chooses for unset options, and the reasons that it
logs."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, seq2seq
from datasets import Dataset
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.training import defaults
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.defaults import (
    TextSize,
    choose_dropout,
    choose_open_options,
    extend_output_limit,
    tokens_per_update,
)
from vanilla_transformer.training.preparation import expect_texts_to_fit, make_model

MULTI30K = TextSize(29_000, 410_000, 420_000, longest_excess=20, distinct_target_tokens=9000)
WMT = TextSize(
    4_500_000, 120_000_000, 130_000_000, longest_excess=40, distinct_target_tokens=36_000
)
SCAN = TextSize(16_700, 130_000, 240_000, longest_excess=40, distinct_target_tokens=7)
G2P = TextSize(3600, 28_000, 28_000, longest_excess=9, distinct_target_tokens=40)
NAMES = ("max_tokens", "max_steps", "warmup_steps", "learning_rate")


def chosen(tmp_path, size, d_model=128, **options):
    arguments = TranslationTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **options
    )
    choose_open_options(arguments, d_model, size)
    return tuple(getattr(arguments, name) for name in NAMES)


def test_the_papers_data_and_width_give_the_papers_training(tmp_path):
    """Section 5: 25,000 tokens, 100,000 updates, 4,000 of them to warm up, and the peak of
    d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)."""
    max_tokens, max_steps, warmup_steps, rate = chosen(tmp_path, WMT, d_model=512)
    assert max_tokens == pytest.approx(25_000, rel=0.1)
    assert (max_steps, warmup_steps) == (100_000, 4000)
    assert rate == pytest.approx(512**-0.5 * 4000**-0.5, rel=1e-3)


def test_a_small_text_gets_small_batches_and_fewer_updates(tmp_path):
    max_tokens, max_steps, warmup_steps, _ = chosen(tmp_path, MULTI30K)
    assert max_tokens == 1944  # three times the square root of 420,000
    assert max_steps == round(30 * 420_000 / 1944)
    assert warmup_steps == pytest.approx(max_steps / 10, abs=1)


def test_a_schedule_without_warmup_gets_no_warmup_steps(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert chosen(tmp_path, MULTI30K, lr_scheduler_type="constant")[2] == 0
    assert "warmup_steps" not in caplog.text


def test_long_sources_count_like_long_targets(tmp_path):
    """A batch is full when either side is: 30 epochs of summaries are as many as of articles."""
    summaries = MULTI30K._replace(source_tokens=8_000_000, target_tokens=420_000)
    reverse = MULTI30K._replace(source_tokens=420_000, target_tokens=8_000_000)
    assert chosen(tmp_path, summaries) == chosen(tmp_path, reverse)
    max_tokens, max_steps, *_ = chosen(tmp_path, summaries)
    assert max_steps == round(30 * 8_000_000 / max_tokens)


def test_a_model_without_d_model_keeps_the_default_learning_rate(tmp_path):
    """An `EncoderDecoderModel` that is fine-tuned has no d_model, and needs none."""
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True)
    arguments.left_open &= {"max_tokens"}
    before = arguments.learning_rate
    choose_open_options(arguments, None, MULTI30K)
    assert (arguments.max_tokens, arguments.learning_rate) == (1944, before)


@pytest.mark.parametrize(("tokens", "batch"), [(10, 1000), (1_000_000, 3000), (10**9, 25_000)])
def test_the_batch_size_grows_with_the_square_root_of_the_text_size(tokens, batch):
    assert tokens_per_update(MULTI30K._replace(source_tokens=1, target_tokens=tokens)) == batch


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"max_tokens": 4096}, (4096, 3076, 308)),
        ({"max_steps": 500}, (1944, 500, 50)),
        ({"num_train_epochs": 10}, (1944, -1, 216)),
        ({"warmup_steps": 7}, (1944, 6481, 7)),
        ({"gradient_accumulation_steps": 4}, (486, 6481, 649)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_is_set_is_kept(tmp_path, option, expected):
    assert chosen(tmp_path, MULTI30K, **option)[:3] == expected


@pytest.mark.parametrize(
    ("option", "max_steps"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 27_188),
        ({"train_sampling_strategy": "group_by_length"}, 100_000),
    ],
)
def test_batches_of_rows_are_kept(tmp_path, option, max_steps):
    assert chosen(tmp_path, MULTI30K, **option)[:2] == (None, max_steps)  # 30 * 29,000 / 32


def test_batches_of_rows_are_larger_on_several_gpus_of_one_process(tmp_path, monkeypatch):
    """As with `DataParallel`."""
    monkeypatch.setattr(TranslationTrainingArguments, "n_gpu", 4)
    assert chosen(tmp_path, MULTI30K, per_device_train_batch_size=8)[:2] == (None, 27_188)


@pytest.mark.parametrize("option", [{}, {"per_device_train_batch_size": 8}])
def test_a_tiny_text_gets_enough_updates_and_at_least_one_per_epoch(tmp_path, option):
    tiny = TextSize(3, 30, 30, longest_excess=0, distinct_target_tokens=9)
    assert chosen(tmp_path, tiny, **option)[1:3] == (3000, 300)
    assert chosen(tmp_path, tiny, num_train_epochs=50, **option)[1:3] == (-1, 5)


def test_the_size_of_a_stream_is_unknown(tmp_path):
    assert TextSize.of(iter([])) is None
    max_tokens, max_steps, warmup_steps, _ = chosen(tmp_path, None, max_steps=2000)
    assert (max_tokens, max_steps, warmup_steps) == (4096, 2000, 200)


def test_every_choice_is_logged_with_its_reason(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        chosen(tmp_path, MULTI30K)
    for name in NAMES:
        assert any(message.startswith(f"{name}=") for message in caplog.messages), name
    assert "max_tokens=1944: 1944 tokens per update; 420,000 on the longer side of the text" in (
        caplog.messages
    )


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_vnni": True}, False),  # Cascade Lake
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"avx512_f": True, "amx_bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
        ({"neon": True, "bf16": True}, True),
    ],
)
def test_bfloat16_products_need_special_cpu_instructions(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert defaults.has_bfloat16_products() is expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_bfloat16_products_need_onednn_too(monkeypatch):
    """torch for ARM may lack it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    for has_onednn in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda has=has_onednn: has)
        assert defaults.has_bfloat16_products() is has_onednn


def test_bfloat16_support_agrees_with_the_cpu_flags_of_linux():
    listed = Path("/proc/cpuinfo").read_text().split()
    expected = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(listed)
    assert defaults.has_bfloat16_products() is expected


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_precision_that_does_not_suit_the_cpu_is_reported(
    tmp_path, caplog, monkeypatch, has_products, bf16
):
    monkeypatch.setattr(defaults, "has_bfloat16_products", lambda: has_products)
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, bf16=bf16)
    with caplog.at_level(logging.INFO):
        defaults.advise_on_precision(arguments)
    words = {(True, False): "many times slower", (False, True): "--bf16 may train faster"}
    found = [record.message for record in caplog.records if "bfloat16" in record.message]
    assert len(found) == (bf16 != has_products)
    assert not found or words[bf16, has_products] in found[0]


def test_float16_has_no_effect_on_a_cpu(tmp_path, caplog):
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, fp16=True)
    defaults.advise_on_precision(arguments)
    assert "fp16=True has no effect on a CPU: training is in float32" in caplog.messages


def test_there_is_no_advice_about_precision_on_a_gpu(caplog, monkeypatch):
    monkeypatch.setattr(defaults, "has_bfloat16_products", lambda: False)
    gpu = SimpleNamespace(device=torch.device("cuda"), fp16=True, bf16=True)
    with caplog.at_level(logging.INFO):
        defaults.advise_on_precision(gpu)
    assert not caplog.messages


def test_without_chosen_values_transformers_defaults_are_kept(tmp_path):
    """As for a plain `Seq2SeqTrainer`, and for fine-tuning."""
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    values = (arguments.learning_rate, arguments.warmup_steps, arguments.num_train_epochs)
    assert values == (5e-5, 0, 3.0)
    assert (arguments.per_device_train_batch_size, arguments.max_tokens) == (8, None)


@pytest.mark.parametrize(
    ("preset", "tokens", "dropout"),
    [
        ("base", 130_000_000, 0.1),  # WMT 2014 English-German, as in the paper
        ("big", 130_000_000, 0.3),
        ("big", 1_000_000_000, 0.1),  # English-French
        ("tiny", 420_000, 0.3),  # Multi30k, as in Wu et al. (2021)
    ],
)
def test_the_rule_for_dropout_gives_the_published_values(preset, tokens, dropout):
    config = VanillaTransformerConfig.from_preset(preset, vocab_size=37_000)
    assert choose_dropout(config, WMT._replace(target_tokens=tokens)) == dropout


@pytest.mark.parametrize(
    ("size", "dropout", "reason"),
    [
        (SCAN, 0.1, "few target tokens (7) that occur often; 240,000 in the text"),
        (MULTI30K, 0.3, "fewer target tokens than the model has weights; 420,000 in the text"),
        (G2P, 0.3, "fewer target tokens than the model has weights; 28,000 in the text"),
        (WMT, 0.1, "no fewer target tokens than the model has weights; 130,000,000 in the text"),
    ],
    ids=["scan", "multi30k", "g2p", "wmt"],
)
def test_a_small_vocabulary_of_frequent_symbols_needs_little_dropout(size, dropout, reason, caplog):
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=10_000)
    with caplog.at_level(logging.INFO):
        assert choose_dropout(config, size) == dropout
    assert f"dropout={dropout}: the text has {reason}" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "preset", "dropout"),
    [("", "base", 0.3), ("dropout=0.2", "base", 0.2), ("", "D-drop0.2", 0.2)],
)
def test_a_given_dropout_is_kept(overrides, preset, dropout):
    shape = ",".join(f"{name}={value}" for name, value in SMALL.items() if name != "vocab_size")
    arguments = ModelArguments(
        preset=preset, config_overrides=",".join(filter(None, (shape, "head_dim=12", overrides)))
    )
    tokenizer = train_tokenizer(["ein kleiner Text"], vocab_size=300)
    assert (
        make_model(arguments, tokenizer, None, MULTI30K._replace(target_tokens=9)).config.dropout
        == dropout
    )
    assert make_model(arguments, tokenizer, None).config.dropout != 0.3  # no size, no rule


def test_outputs_can_be_as_long_as_the_targets_of_the_text():
    model = seq2seq()
    extend_output_limit(model, MULTI30K)
    assert not hasattr(model.generation_config, "extra_output_tokens")  # the paper's 50 are enough
    extend_output_limit(model, MULTI30K._replace(longest_excess=200))
    assert model.generation_config.extra_output_tokens == 220
    extend_output_limit(model, MULTI30K._replace(longest_excess=100))  # a second training
    assert model.generation_config.extra_output_tokens == 220
    model.generation_config.extra_output_tokens = None  # as after `generation_kwargs` with null
    extend_output_limit(model, MULTI30K._replace(longest_excess=100))
    assert model.generation_config.extra_output_tokens == 110


@pytest.fixture
def marian():
    return MarianMTModel(
        MarianConfig(
            vocab_size=9,
            pad_token_id=0,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=1,
            decoder_attention_heads=1,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            decoder_start_token_id=0,
            eos_token_id=1,
            forced_eos_token_id=None,
        )
    )


@pytest.mark.parametrize(
    ("own", "longest_target", "expected"),
    [
        ({}, 300, {"max_length": 331}),
        ({"max_length": 50}, 100, {"max_length": 111}),
        ({"max_new_tokens": 50}, 100, {"max_new_tokens": 110}),
        ({}, 1000, {"max_length": 1025}),  # where the table of positions ends
    ],
)
def test_a_stock_models_outputs_can_be_as_long_as_the_targets_of_the_text(
    marian, own, longest_target, expected
):
    marian.generation_config.update(max_length=None)
    marian.generation_config.update(**own)
    extend_output_limit(marian, MULTI30K, longest_target)
    limits = {name: getattr(marian.generation_config, name) for name in expected}
    assert limits == expected


def test_a_stock_model_keeps_its_own_length_limit_if_it_is_higher(marian):
    extend_output_limit(marian, MULTI30K._replace(longest_excess=200))
    assert not hasattr(marian.generation_config, "extra_output_tokens")
    assert marian.generation_config.max_length == 257
    marian.generation_config.max_length = 512
    extend_output_limit(marian, MULTI30K, longest_target=400)
    assert marian.generation_config.max_length == 512


@pytest.mark.parametrize("side", ["input_ids", "labels"])
def test_a_text_longer_than_learned_positions_is_reported(side):
    model = seq2seq(position_encoding="learned", max_position_embeddings=3)
    row = {"input_ids": [4, 2], "labels": [4, 2]}
    expect_texts_to_fit(model, {"train": [row], "validation": [{**row, side: [4, 5, 2]}]})
    name = {"input_ids": "source", "labels": "target"}[side]
    message = f"validation data has a {name} of 4 tokens: expected at most 3, .* max_{name}_length"
    with pytest.raises(ValueError, match=message):
        expect_texts_to_fit(model, {"train": [row], "validation": [{**row, side: [4, 5, 6, 2]}]})
    expect_texts_to_fit(seq2seq(max_position_embeddings=3), {"train": [{**row, side: [4] * 9}]})


def test_the_size_of_a_text_is_counted_in_tokens():
    rows = [{"input_ids": [4, 2], "labels": [5, 6, 7, 2]}, {"input_ids": [4, 5, 2], "labels": [2]}]
    assert TextSize.of(rows) == TextSize.of(Dataset.from_list(rows)) == (2, 5, 5, 2, 4)
