"""The measurements from which `plan` estimates a training: which ones apply, and which is
nearest."""

import pytest
import torch
from datasets import Dataset

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli.plan import PlanArguments, phases
from vanilla_transformer.data.bpe_dropout import BPEDropout, BPEDropoutDataset
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.speeds import (
    find_speed,
    layer_weights,
    measurement_key,
    nearest_speed,
)

KEY = {
    "device": "NVIDIA H200", "shape": "base", "layer_weights": 9000, "heads": [8, 8],
    "vocabulary": 500, "precision": "bf16", "batch": 4000, "accumulation": 2, "processes": 4,
    "source_ratio": 1.0, "target_length": 32, "attention": "sdpa", "options": [],
}  # fmt: skip
# In newer files.
NEW = ("layer_weights", "heads", "accumulation", "processes", "source_ratio", "target_length")
TEXT = [{"input_ids": [5, 6, 3], "labels": [7, 3]}]


def make_model(**options):
    fields = {
        "vocab_size": 500, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, **options,
    }  # fmt: skip
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))


@pytest.fixture(scope="module")
def model():
    return make_model()


def row(speed=100.0, **changes):
    return {**KEY, "target_tokens_per_second": speed, "gib": 1.0, **changes}


def old_row(speed=100.0, **changes):
    """A measurement in a file of an older version."""
    return {name: value for name, value in row(speed, **changes).items() if name not in NEW}


@pytest.mark.parametrize("content", [b"[{", b'{"device": "cpu"}', b"[1]", b"[{}]", b"\xff"])
def test_a_file_without_measurements_is_reported_by_name(content, tmp_path):
    (tmp_path / "speeds.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"speeds='.*speeds.json': expected .*measurements"):
        PlanArguments(speeds=str(tmp_path / "speeds.json"))


def test_an_identical_measurement_is_used_unchanged(model):
    rows = [row(batch=4100), row(50.0), row(vocabulary=501)]
    assert nearest_speed(rows, KEY, model) == rows[1]


def test_the_nearest_batch_size_is_found_by_ratio(model):
    rows = [row(batch=1000), row(batch=8000), row(batch=40_000)]
    assert nearest_speed(rows, KEY, model) == rows[1]


def test_the_speed_is_scaled_to_the_weights_of_a_different_vocabulary(model):
    """The time per token is proportional to the number of weights, and twice the vocabulary has 500
    times d_model more."""
    found = nearest_speed([row(vocabulary=1000)], KEY, model)
    weights = model.num_parameters()
    expected = 100 * (weights + 500 * 16) / weights
    assert found["target_tokens_per_second"] == pytest.approx(expected)
    assert found["vocabulary"] == 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "A100"}, {"shape": "big"}, {"layer_weights": 9001}, {"precision": "fp32"},
        {"batch": -64}, {"attention": "eager"}, {"options": ["R-Drop"]}, {"heads": [8, 1]},
    ],
)  # fmt: skip
def test_measurements_with_different_settings_do_not_count(model, changes):
    assert nearest_speed([row(**changes)], KEY, model) is None


def test_batches_of_pairs_are_only_compared_with_batches_of_pairs(model):
    rows = [row(), row(batch=-16), row(batch=-48)]
    assert nearest_speed(rows, {**KEY, "batch": -64}, model) == rows[2]


@pytest.mark.parametrize("name", ["accumulation", "processes", "source_ratio"])
def test_the_nearest_update_size_is_found_by_ratio(model, name):
    rows = [row(**{name: KEY[name] * ratio}) for ratio in (16, 8, 32)]
    assert nearest_speed(rows, KEY, model) == rows[1]


def test_a_measurement_of_an_older_file_is_used_if_none_is_nearer(model):
    """Its update counts as one batch on one device. It is never taken for an identical
    measurement."""
    key = {**KEY, "accumulation": 1, "processes": 1}
    rows = [old_row(), row(accumulation=1, processes=1), old_row(batch=8000)]
    assert nearest_speed(rows, key, model) == rows[1]
    assert nearest_speed([rows[2], rows[0]], key, model) == rows[0]
    other = row(batch=4100, accumulation=1, processes=1)
    assert nearest_speed([other, rows[0]], key, model) == rows[0]
    of_two = {**other, "accumulation": 2}
    assert nearest_speed([of_two, rows[2]], {**key, "accumulation": 2}, model) == rows[2]
    assert find_speed([rows[0]], key) is None
    assert nearest_speed([old_row(shape="big")], key, model) is None


def key_of(folder, model, text=TEXT, **options):
    arguments = TranslationTrainingArguments(str(folder), use_cpu=True, **options)
    return measurement_key(model, arguments, text)


def test_accumulated_small_batches_do_not_count_as_one_large_batch(model, tmp_path):
    """An update has 8,000 tokens each time."""
    many = key_of(tmp_path, model, max_tokens=80, gradient_accumulation_steps=100)
    one = key_of(tmp_path, model, max_tokens=8000)
    assert [(key["batch"], key["accumulation"]) for key in (many, one)] == [(80, 100), (8000, 1)]
    assert find_speed([{**many, "gib": 1.0}], one) is None
    assert find_speed([{**many, "gib": 1.0}, {**one, "gib": 2.0}], one)["gib"] == 2.0


def test_several_processes_are_measured_separately(model, tmp_path, monkeypatch):
    one = key_of(tmp_path, model)
    monkeypatch.setattr(TranslationTrainingArguments, "world_size", 2)
    assert key_of(tmp_path, model) == {**one, "processes": 2}
    assert find_speed([one], key_of(tmp_path, model)) is None


def test_a_text_with_longer_sources_is_measured_separately(model, tmp_path):
    """The speed is counted in target tokens, but its sources take time too."""
    longer = [{**TEXT[0], "input_ids": [5] * 9 + [3]}]
    key, other = (key_of(tmp_path, model, text) for text in (TEXT, longer))
    assert (key["source_ratio"], other["source_ratio"]) == (1.5, 5.0)
    shortest = [{"input_ids": [3], "labels": [5] * 40}]
    assert key_of(tmp_path, model, shortest)["source_ratio"] == 0.1  # not 0: it is a divisor
    assert find_speed([key], key_of(tmp_path, model, TEXT * 2)) == key
    assert find_speed([key], other) is None


def test_a_text_of_longer_pairs_is_measured_separately(model, tmp_path):
    """A batch of 32 of them holds more tokens, which takes less time per token."""
    longer = [{side: [5] * 20 for side in TEXT[0]}]
    nearly_as_long = [{side: [5] * 19 for side in TEXT[0]}]
    keys = [
        key_of(tmp_path, model, text, per_device_train_batch_size=32)
        for text in (TEXT, longer, nearly_as_long)
    ]
    assert [(key["batch"], key["target_length"]) for key in keys] == [
        (-32, 2),
        (-32, 16),
        (-32, 16),
    ]
    assert find_speed(keys[:1], {**keys[1], "source_ratio": keys[0]["source_ratio"]}) is None
    assert find_speed(keys[1:2], keys[2]) == keys[1]


def test_sharded_training_is_measured_separately(model, tmp_path, monkeypatch):
    keys = [key_of(tmp_path, model)]
    with monkeypatch.context() as patch:
        patch.setattr("vanilla_transformer.training.speeds.uses_fsdp", lambda: True)
        keys.append(key_of(tmp_path, model))
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True)
    arguments.deepspeed_plugin = object()
    keys.append(measurement_key(model, arguments, TEXT))
    assert [key["options"] for key in keys] == [[], ["FSDP"], ["DeepSpeed"]]


def test_bpe_dropout_is_measured_separately(model, tmp_path):
    """It segments the text again in each epoch, which takes time."""
    tokenizer = train_tokenizer(["a lake"] * 9, 265, show_progress=False)
    pairs = Dataset.from_list([{"source": "a lake", "target": "a lake"}])
    text = BPEDropoutDataset(pairs, Dataset.from_list(TEXT), BPEDropout(tokenizer, 0.1))
    key = key_of(tmp_path, model)
    assert key_of(tmp_path, model, text)["options"] == ["BPE-dropout"]
    assert find_speed([key], {**key, "options": ["BPE-dropout"]}) is None


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"decoder_ffn_dim": 1024}, 992 * (2 * 16 + 1)),
        ({"head_dim": 64}, 2 * 16 * (64 - 8) * 4 * 3),
        ({"attention_bias": True}, 16 * 4 * 3),
        ({"norm_position": "pre"}, 2 * 2 * 16),
    ],
    ids=str,
)
def test_models_with_different_layers_are_measured_separately(model, tmp_path, options, more):
    key, other = (key_of(tmp_path, each) for each in (model, make_model(**options)))
    assert other["layer_weights"] == key["layer_weights"] + more
    assert find_speed([key], other) is None


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_more_heads_with_as_many_weights_are_measured_separately(model, tmp_path, stack):
    """Row (A-h32) of the paper's Table 3 trains at two thirds of the speed of (A-h1)."""
    models = make_model(), make_model(**{f"{stack}_attention_heads": 4})
    key, other = (key_of(tmp_path, each) for each in models)
    assert other["layer_weights"] == key["layer_weights"]
    assert find_speed([key], other) is None


def test_the_shape_contains_both_widths_if_they_differ(model, tmp_path):
    other = make_model(decoder_ffn_dim=64)
    shapes = [key_of(tmp_path, each)["shape"] for each in (model, other)]
    assert shapes == [f"d_model 16, 1+1 layers, d_ff {d_ff}" for d_ff in ("32", "32+64")]


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 900}, {"tie_word_embeddings": False}, {"decoder_vocab_size": 300},
        {"lm_head_bias": True}, {"position_encoding": "learned"},
    ],
    ids=str,
)  # fmt: skip
def test_embeddings_and_projection_do_not_count_as_layer_weights(model, options):
    assert layer_weights(make_model(**options)) == layer_weights(model)


def test_products_that_torch_may_round_are_measured_separately(model, tmp_path):
    found = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            for options in ({}, {"bf16": True}):
                arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
                found.append(measurement_key(model, arguments, TEXT)["precision"])
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # as after `--tf32`, on a CPU
        arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True)
        found.append(measurement_key(model, arguments, TEXT)["precision"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["fp32", "bf16", "fp32 (medium)", "bf16", "fp32 (high)"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"r_drop_alpha": 5.0}, ["R-Drop"]),
        ({"optim": "adafactor"}, ["adafactor"]),
        ({"train_sampling_strategy": "group_by_length"}, ["group_by_length batches"]),
        ({"train_sampling_strategy": "group_by_length", "max_tokens": 90}, []),
        (
            {"gradient_checkpointing": True, "torch_compile": True},
            ["gradient checkpointing", "torch.compile"],
        ),
    ],
)
def test_what_changes_the_speed_is_part_of_the_key(given, expected, model, tmp_path):
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **given)
    key = measurement_key(model, arguments, TEXT)
    assert (key["options"], key["attention"]) == (expected, "sdpa")
    assert torch.backends.cpu.get_cpu_capability() in key["device"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, [(5.0, 1.0)]), (25, [(0.0, 0.25), (5.0, 0.75)]), (100, [(0.0, 1.0)]), (300, [(0.0, 1.0)])],
)
def test_only_phases_that_a_training_has_are_measured(tmp_path, start, expected):
    options = {"max_steps": 100, "r_drop_alpha": 5.0, "r_drop_start": start}
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
    assert phases(arguments, updates_per_epoch=10) == expected
