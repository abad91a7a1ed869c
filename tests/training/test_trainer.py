"""Recipes, output folders, and a `Seq2SeqTrainer` over our model."""

import io
import itertools
import json
import logging
import re
import shutil
import sys
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from conftest import REPOSITORY, as_typed, slow, small_config, small_trainer
from datasets import Dataset
from PIL import Image
from sacrebleu.metrics import BLEU
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBartTokenizer,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    pipeline,
)
from transformers.integrations import TensorBoardCallback

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    plotting,
)
from vanilla_transformer.data.collation import PairCollator
from vanilla_transformer.data.parallel_text import DataArguments
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.export.source import read_model
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.metrics import make_compute_metrics
from vanilla_transformer.model import loss
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.callbacks import CurvesCallback
from vanilla_transformer.training.checkpoints import checkpoints_by_step
from vanilla_transformer.training.defaults import TextSize
from vanilla_transformer.training.languages import set_languages, start_in_target_language
from vanilla_transformer.training.model_card import write_model_card
from vanilla_transformer.training.parsing import parse_arguments
from vanilla_transformer.training.preparation import (
    expect_end_of_targets,
    make_model,
    make_tokenizer,
    warn_of_another_vocabulary,
    warn_of_changed_references,
)
from vanilla_transformer.training.resumption import find_checkpoint
from vanilla_transformer.training.trainer import (
    TranslationTrainer,
    load_averaged_checkpoints,
    make_trainer,
)

GROUPS = (ModelArguments, DataArguments, TranslationTrainingArguments)


def write_recipe(folder, **options):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"dataset_name": "phrases", **options}))
    return str(path)


# ---------------------------------------------------------------- recipes


def test_a_recipe_gives_defaults_and_flags_override_them(tmp_path):
    recipe = write_recipe(
        tmp_path, preset="tiny", learning_rate="1.0e-3", max_steps=7, predict_with_generate=True
    )
    model_args, data_args, training_args = parse_arguments(
        GROUPS, ["--config", recipe, "--max_steps", "9", "--output_dir", str(tmp_path)]
    )
    assert (model_args.preset, data_args.dataset_name) == ("tiny", "phrases")
    assert (training_args.learning_rate, training_args.max_steps) == (1e-3, 9)
    assert training_args.predict_with_generate


@pytest.mark.parametrize(
    ("flag", "value", "replaced"),
    [
        ("num_train_epochs", 3, ("max_steps", -1)),
        ("per_device_train_batch_size", 8, ("max_tokens", None)),
        ("gradient_accumulation_steps", 1, ("batches_per_update", None)),
    ],
)
def test_a_flag_replaces_a_recipes_equivalent_option(flag, value, replaced, tmp_path):
    recipe = write_recipe(tmp_path, max_steps=7, max_tokens=100, batches_per_update=4)
    flags = ["--config", recipe, f"--{flag}", str(value), "--output_dir", str(tmp_path)]
    _, _, training_args = parse_arguments(GROUPS, flags)
    assert getattr(training_args, flag) == value
    assert getattr(training_args, replaced[0]) == replaced[1]


@pytest.mark.parametrize(
    ("in_recipe", "given"),
    [
        (["train_file"], ["train_source", "train_target"]),
        (["train_source", "train_target"], ["train_file"]),
        (["train_source", "train_target", "validation_file"], ["dataset_name"]),
        (["dataset_name"], ["train_file"]),
    ],
    ids=str,
)
def test_data_on_the_command_line_replaces_that_of_the_recipe(tmp_path, in_recipe, given):
    (tmp_path / "new.tsv").write_text("a house\tein Haus\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(dict.fromkeys(in_recipe, "old.tsv")))
    value = "phrases" if given == ["dataset_name"] else str(tmp_path / "new.tsv")
    flags = [word for name in given for word in (f"--{name}", value)]
    _, data_args, _ = parse_arguments(
        GROUPS, ["--config", str(recipe), *flags, "--output_dir", str(tmp_path)]
    )
    assert {getattr(data_args, name) for name in in_recipe if name not in given} == {None}
    for name in given:
        assert getattr(data_args, name) in (value, [value])


def test_a_metric_on_the_command_line_has_its_own_direction(tmp_path):
    """A model card's recipe has the direction of its metric."""
    best = {"metric_for_best_model": "bleu", "greater_is_better": True}
    recipe = write_recipe(tmp_path, predict_with_generate=True, eval_strategy="no", **best)
    flags = ["--config", recipe, "--output_dir", str(tmp_path), "--metric_for_best_model"]
    *_, training_args = parse_arguments(GROUPS, [*flags, "ter"])
    assert training_args.greater_is_better is False
    *_, training_args = parse_arguments(GROUPS, [*flags, "ter", "--greater_is_better", "true"])
    assert training_args.greater_is_better is True


@pytest.mark.parametrize(
    ("metric", "greater", "is_reported"),
    [("loss", True, True), ("loss", False, False), ("bleu", False, True), ("bleu", None, False)],
)
def test_a_metric_whose_worst_value_counts_as_the_best_is_reported(
    tmp_path, metric, greater, is_reported, caplog
):
    training_arguments(
        tmp_path,
        metric_for_best_model=metric,
        greater_is_better=greater,
        predict_with_generate=True,
    )
    message = f"greater_is_better={greater} with metric_for_best_model={metric}: the worst"
    assert (message in caplog.text) == is_reported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 7, "num_train_epochs": 2}, "num_train_epochs=2 has no effect: max_steps=7"),
        (
            {"max_tokens": 9, "per_device_train_batch_size": 2},
            "per_device_train_batch_size=2 has no effect: max_tokens=9",
        ),
        (
            {"max_tokens": 9, "train_sampling_strategy": "sequential"},
            "train_sampling_strategy=sequential has no effect: max_tokens=9",
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 9},
            "warmup_steps=9 has no effect: lr_scheduler_type=constant",
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": '{"min_lr": 1}'},
            'lr_scheduler_kwargs={"min_lr": 1} has no effect: lr_scheduler_type=constant_with',
        ),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9,amsgrad=true"},
            "optim_args=amsgrad=true has no effect with optim=sgd",
        ),
        (
            {"optim_target_modules": "fc1"},
            "optim_target_modules=fc1 has no effect with optim=adamw_torch_fused",
        ),
        ({"optim_args": "eps=1"}, "optim_args=eps=1 has no effect with optim=adamw_torch_fused"),
    ],
)
def test_an_option_without_effect_is_reported(options, message, tmp_path, caplog):
    TranslationTrainingArguments(output_dir=str(tmp_path), **options)
    assert message in caplog.text
    assert caplog.text.count("has no effect") == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["non_padding"], "non_padding"),
        (["all"], "all"),
        (["true"], "all"),
        ([], "all"),
        (["false"], "no"),
    ],
)
def test_the_tokens_to_count_can_be_set_on_the_command_line(tmp_path, given, expected):
    flags = ["--config", write_recipe(tmp_path), "--output_dir", str(tmp_path)]
    *_, arguments = parse_arguments(GROUPS, [*flags, "--include_num_input_tokens_seen", *given])
    assert arguments.include_num_input_tokens_seen == expected


def test_bf16_full_eval_is_reported_as_without_effect(tmp_path, caplog):
    flags = ["--config", write_recipe(tmp_path), "--bf16_full_eval"]
    parse_arguments(GROUPS, [*flags, "--output_dir", str(tmp_path)])
    assert caplog.messages == ["bf16_full_eval=True has no effect: bf16 or fp16 decides"]


@pytest.mark.parametrize("in_recipe", [False, True])
def test_do_train_false_is_refused(tmp_path, in_recipe):
    """The option comes from transformers' scripts, whose users give `--do_train` to train."""
    recipe = write_recipe(tmp_path, **({"do_train": False} if in_recipe else {}))
    flags = ["--config", recipe, "--output_dir", str(tmp_path)]
    parse_arguments(GROUPS, [*flags, "--do_train"])
    parse_arguments(GROUPS, [*flags, "--do_train", "true"])
    with pytest.raises(ValueError, match="do_train=False: expected true; `vanilla-transformer"):
        parse_arguments(GROUPS, flags if in_recipe else [*flags, "--do_train", "false"])


def test_two_options_that_exclude_each_other_are_refused(tmp_path):
    options = {"batches_per_update": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        TranslationTrainingArguments(output_dir=str(tmp_path), **options)


def test_a_recipe_is_parsed_like_a_command_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "dataset_name: phrases\nlearning_rate: 1e-3\neval_strategy: no\n"
        "user_tokens: <2fr>\ncorpus_tags: ['']\nmetrics: [ter]\n"
        "generation_kwargs: {length_penalty: 0.6}\nresume_from_checkpoint: true\n"
        "target_lang: no\nrun_name: 2024-13-01\n"  # no date, but text
    )
    flags = ["--config", str(path), "--output_dir", str(tmp_path)]
    model_args, data_args, training_args = parse_arguments(GROUPS, flags)
    assert (training_args.learning_rate, training_args.eval_strategy) == (1e-3, "no")
    assert (model_args.user_tokens, data_args.corpus_tags) == (["<2fr>"], [""])
    assert data_args.target_lang == "no"
    assert training_args.run_name == "2024-13-01"
    assert training_args.metrics == ["ter"]
    assert training_args.generation_kwargs == {"length_penalty": 0.6}
    assert training_args.resume_from_checkpoint == "true"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_steps: 100.5", "invalid int value: '100.5'"),
        ("bf16: 2", "--bf16"),
        ("seed: x", "--seed"),
    ],
)
def test_an_invalid_value_in_a_recipe_is_reported(line, message, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"dataset_name: phrases\n{line}\n")
    with pytest.raises(SystemExit):
        parse_arguments(GROUPS, ["--config", str(path), "--output_dir", str(tmp_path)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "recipe.yaml: expected YAML"),
        ("seed: 0b_", "recipe.yaml: expected YAML .invalid literal for int"),
        (b"\xff\xfe", "recipe.yaml: expected YAML .'utf-8' codec can't decode"),
        ("preset: tiny\npreset: base", "recipe.yaml: expected YAML .preset appears twice"),
        ("learning_rate: [1]", r"learning_rate=\[1\]: expected a single value"),
        ("preset: [tiny]", r"preset=\['tiny'\]: expected a single value"),
        ("tokenizer_name: {a: b}", "tokenizer_name={'a': 'b'}: expected a single value"),
        ("r_drop_alpha: null", "r_drop_alpha=None: expected a single value"),
        ("metrics: null", "metrics=None: expected a list of single values"),
        ("user_tokens: [[a]]", r"user_tokens=\[\['a'\]\]: expected a list of single values"),
        ("config_overrides: [dropout=0.2]", "config_overrides=.*: expected a single value"),
        ("generation_kwargs: abc", "generation_kwargs='abc': expected a JSON object"),
        ("batch_eval_metrics: true", "batch_eval_metrics=True: expected false"),
        ("report_to: [here, wandb]", "report_to='here': expected none, all or some of azure_ml, c"),
    ],
)
def test_an_unreadable_recipe_is_reported(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    flags = ["--output_dir", str(tmp_path), "--dataset_name", "phrases"]
    with pytest.raises(ValueError, match=message):
        parse_arguments(GROUPS, ["--config", str(path), *flags])


def test_a_missing_reporting_package_is_reported_before_the_text_is_read(tmp_path, monkeypatch):
    checks = "vanilla_transformer.training.option_checks"
    monkeypatch.setattr(f"{checks}.get_available_reporting_integrations", lambda: ["trackio"])
    with pytest.raises(ValueError, match="report_to='wandb': its package is not installed"):
        TranslationTrainingArguments(str(tmp_path), use_cpu=True, report_to=["trackio", "wandb"])


def test_a_recipe_has_the_types_that_its_options_expect(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "config_overrides: {layer_norm_eps: 1e-6, dropout: .5e+0, activation_function: gelu}\n"
        "generation_kwargs: {length_penalty: 6E-1}\nuser_tokens: null\nmax_tokens: null\n"
    )
    flags = ["--config", str(path), "--output_dir", str(tmp_path), "--dataset_name", "phrases"]
    model_args, _, training_args = parse_arguments(GROUPS, flags)
    expected = {"layer_norm_eps": 1e-6, "dropout": 0.5, "activation_function": "gelu"}
    assert model_args.overrides() == expected
    assert training_args.generation_kwargs == {"length_penalty": 0.6}
    assert (model_args.user_tokens, training_args.max_tokens) == ([], None)


def test_a_recipe_is_not_required(tmp_path):
    model_args, _, _ = parse_arguments(
        GROUPS, ["--dataset_name", "phrases", "--preset", "big", "--output_dir", str(tmp_path)]
    )
    assert model_args.preset == "big"


def test_local_files_replace_the_recipes_data_set(tmp_path):
    recipe = write_recipe(tmp_path, dataset_name="some/dataset", dataset_config_name="de-en")
    text = tmp_path / "text"
    text.write_text("a\n")
    flags = ["--config", recipe, "--train_source", str(text), f"--train_target={text}"]
    _, data_args, _ = parse_arguments(GROUPS, [*flags, "--output_dir", str(tmp_path)])
    assert data_args.dataset_name is None
    assert data_args.dataset_config_name is None
    assert data_args.train_source == [str(text)]


def test_an_unknown_option_in_a_recipe_is_reported(tmp_path):
    recipe = write_recipe(tmp_path, learning_rat=1, config="phrases")  # recipes do not inherit
    with pytest.raises(ValueError, match=r"recipe.yaml: unknown options config, learning_rat"):
        parse_arguments(GROUPS, ["--config", recipe])


def test_a_recipe_must_be_a_mapping(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="expected a mapping from options to values"):
        parse_arguments(GROUPS, ["--config", str(path)])


def test_a_missing_recipe_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.yaml"):
        parse_arguments(GROUPS, ["--config", str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "vanilla_transformer/recipes").glob("*.yaml")), ids=str
)
def test_every_recipe_parses(path, tmp_path):
    flags = ["--config", str(path), "--output_dir", str(tmp_path)]
    recipe = yaml.safe_load(path.read_text())
    files = [] if "dataset_name" in recipe else [str(path)] * len(recipe.get("corpus_tags", [""]))
    if files:
        flags += ["--train_source", *files, "--train_target", *files]
    model_args, data_args, _ = parse_arguments(GROUPS, flags)
    assert (data_args.train_source or []) == files
    assert small_config(**{**model_args.overrides(), "d_model": 24})


def test_config_overrides_in_a_recipe_can_be_a_mapping(tmp_path):
    overrides = {"dropout": 0.2, "head_dim": None, "eos_token_id": [2, 3]}
    recipe = write_recipe(tmp_path, config_overrides=overrides)
    flags = ["--config", recipe, "--output_dir", str(tmp_path)]
    assert parse_arguments(GROUPS, flags)[0].overrides() == overrides


@pytest.mark.parametrize(
    "of_recipe", ["encoder_layers=2,dropout=0.3", {"encoder_layers": 2, "dropout": 0.3}]
)
def test_config_overrides_add_to_those_of_the_recipe(tmp_path, of_recipe):
    """Changing the dropout does not restore the preset's number of layers."""
    recipe = write_recipe(tmp_path, config_overrides=of_recipe)
    flags = ["--config", recipe, "--output_dir", str(tmp_path), "--config_overrides", "dropout=0.1"]
    expected = {"encoder_layers": 2, "dropout": 0.1}
    assert parse_arguments(GROUPS, flags)[0].overrides() == expected
    flags += ["--config_overrides", "norm_position=pre"]
    assert parse_arguments(GROUPS, flags)[0].overrides() == {**expected, "norm_position": "pre"}


def test_config_overrides_are_typed():
    text = "dropout=0.2, norm_position=pre,head_dim=null,layer_norm_eps=1e-6"
    assert ModelArguments(config_overrides=text).overrides() == {
        "dropout": 0.2, "norm_position": "pre", "head_dim": None, "layer_norm_eps": 1e-6,

    }  # fmt: skip


def test_config_overrides_can_change_special_tokens(tokenizer):
    arguments = ModelArguments(preset="tiny", config_overrides="eos_token_id=5,layer_norm_eps=1e-6")
    config = make_model(arguments, tokenizer, None).config
    assert (config.eos_token_id, config.layer_norm_eps) == (5, 1e-6)
    assert config.pad_token_id == tokenizer.pad_token_id


def test_options_of_a_model_or_tokenizer_that_is_loaded_are_reported(caplog):
    given = {"vocab_size": 1000, "tokenizer_type": "char", "preset": "big"}
    ModelArguments(**given).warn_of_what_has_no_effect()
    ModelArguments(model_name_or_path="m").warn_of_what_has_no_effect()
    assert not caplog.messages
    ModelArguments(**given, model_name_or_path="m").warn_of_what_has_no_effect()
    assert set(caplog.messages) == {
        f"{name}={value} has no effect: model_name_or_path=m decides"
        for name, value in given.items()
    }
    caplog.clear()
    ModelArguments(**given, tokenizer_name="t").warn_of_what_has_no_effect()
    assert "vocab_size=1000 has no effect: tokenizer_name=t decides" in caplog.messages
    assert not any(message.startswith("preset") for message in caplog.messages)


def test_vocab_size_for_a_vocabulary_from_a_file_is_reported_as_without_effect(tmp_path, caplog):
    codes = tmp_path / "codes"
    codes.write_text("a b</w>\n")
    ModelArguments(vocab_size=1000, bpe_codes=[str(codes)]).warn_of_what_has_no_effect()
    assert caplog.messages == [f"vocab_size=1000 has no effect: bpe_codes={[str(codes)]} decides"]


def test_one_sentencepiece_model_for_separate_vocabularies_is_reported(tmp_path, caplog):
    """Both sides have its pieces. One file of codes makes two vocabularies."""
    file = tmp_path / "file"
    file.touch()
    for option in ({"bpe_codes": [str(file)]}, {"sentencepiece_model": [str(file)] * 2}):
        ModelArguments(separate_vocabularies=True, **option).warn_of_what_has_no_effect()
    assert not caplog.messages
    one = ModelArguments(separate_vocabularies=True, sentencepiece_model=[str(file)])
    one.warn_of_what_has_no_effect()
    (message,) = caplog.messages
    assert message.startswith("separate_vocabularies=True has no effect: sentencepiece_model=")


def test_the_log_only_contains_the_sizes_of_new_tokenizers(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    codes = tmp_path / "codes"
    codes.write_text("a b</w>\n")
    pairs = Dataset.from_dict({"source": ["a b c"] * 3, "target": ["a b"] * 3})
    make_tokenizer(ModelArguments(bpe_codes=[str(codes)]), pairs, None)
    assert not caplog.messages
    sizes = {"vocab_size": 262, "target_vocab_size": 263}
    make_tokenizer(ModelArguments(**sizes, separate_vocabularies=True), pairs, None)
    said = [f"Training a tokenizer with at most {size} tokens" for size in sizes.values()]
    assert [message for message in caplog.messages if "Training" in message] == said


def test_a_tokenizer_that_does_not_match_the_model_is_reported(tokenizer, tmp_path, caplog):
    small_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ModelArguments(model_name_or_path=str(tmp_path / "model"), tokenizer_name="other")
    warn_of_another_vocabulary(arguments, tokenizer)
    assert not caplog.messages
    other = train_tokenizer(["x y z"] * 3, 290, show_progress=False)
    warn_of_another_vocabulary(arguments, other)
    assert "tokenizer_name=other has a different vocabulary than model_name_or" in caplog.text


def test_references_that_no_translation_can_equal_are_reported(caplog):
    """With a different Unicode normal form, the score would be 0 after a training without
    errors."""
    composed = [unicodedata.normalize("NFC", text) for text in ("café", "öl", "a naïve idea", "b")]
    decomposed = [unicodedata.normalize("NFD", text) for text in composed]
    tokenizer = train_tokenizer(composed, 300, show_progress=False)
    for name, texts in {"test": composed, "validation": decomposed}.items():
        pairs = {name: Dataset.from_dict({"source": texts, "target": texts})}
        warn_of_changed_references(pairs, tokenizer)
        assert ("changes 3 of the first 4 targets" in caplog.text) == (texts is decomposed)
    warn_of_changed_references({"train": None, "test": iter([])}, tokenizer)


def test_noise_that_transformers_would_not_add_is_reported(tokenizer, splits, tmp_path):
    arguments = training_arguments(tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5.0: expected a model whose source"):
        make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    make_trainer(small_model(tokenizer, tie_word_embeddings=False), tokenizer, arguments, splits)


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", ["eval_strategy", "save_strategy", "logging_strategy"])
def test_strategies_by_epoch_are_refused_for_a_stream(tmp_path, name, rows):
    options = {"per_device_train_batch_size": rows, name: "epoch"}
    arguments = TranslationTrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=5, report_to="none", **options
    )
    arguments.expect_data(["train", "validation"])
    with pytest.raises(ValueError, match=f"{name}=epoch: expected steps or no, as batches from"):
        arguments.expect_data(["train", "validation"], streaming=True)


def test_several_processes_cannot_share_rows_of_a_stream(tmp_path, monkeypatch):
    options = {"use_cpu": True, "max_steps": 5, "report_to": "none"}
    by_rows = {"per_device_train_batch_size": 4, **options}
    arguments = TranslationTrainingArguments(str(tmp_path), **by_rows)
    by_tokens = TranslationTrainingArguments(str(tmp_path), max_tokens=90, **options)
    arguments.expect_data(["train"], streaming=True)
    launched = "vanilla_transformer.training.arguments.launched_world_size"
    monkeypatch.setattr(launched, lambda: 2)
    message = "per_device_train_batch_size=4 with a stream in 2 processes: expected max_tokens in"
    with pytest.raises(ValueError, match=message):
        arguments.expect_data(["train"], streaming=True)
    arguments.expect_data(["train"])
    by_tokens.expect_data(["train"], streaming=True)


@pytest.mark.parametrize(
    ("strategy", "streaming", "is_reported"),
    [("group_by_length", True, True), ("group_by_length", False, False), ("random", True, False)],
)
def test_batches_by_length_are_reported_as_without_effect_on_a_stream(
    tmp_path, caplog, strategy, streaming, is_reported
):
    options = {"train_sampling_strategy": strategy, "max_steps": 5, "report_to": "none"}
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
    arguments.expect_data(["train"], streaming)
    assert (f"train_sampling_strategy={strategy} has no effect" in caplog.text) == is_reported


def test_training_with_gradient_checkpointing_can_be_resumed(tokenizer, tmp_path):
    """It computes the same gradients, and the model keeps its cache."""
    options = {"gradient_checkpointing": True, "config": {"dropout": 0.0}}
    trainer = small_trainer(tmp_path, tokenizer, **options)
    trainer.train()
    saved = VanillaTransformerConfig.from_pretrained(tmp_path / "checkpoint-8")
    assert saved.use_cache
    arguments = ModelArguments(preset="tiny")
    checkpoint = tmp_path / "without_cache"
    config = make_model(arguments, tokenizer, None).config
    config.use_cache = False  # as earlier versions saved it
    config.save_pretrained(checkpoint)
    assert make_model(arguments, tokenizer, str(checkpoint)).config.use_cache


def test_the_checkpoints_to_average_are_kept_under_a_limit(tokenizer, tmp_path, monkeypatch):
    """The best three, not the best and the last two."""
    losses = itertools.chain([5.0, 4.0, 6.0], itertools.count(7.0))

    def evaluate(self, *args, **kwargs):
        metrics = {"eval_loss": next(losses)}
        self.log(metrics)
        return metrics

    monkeypatch.setattr(TranslationTrainer, "evaluate", evaluate)
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 3}
    trainer = small_trainer(
        tmp_path, tokenizer, load_best_model_at_end=True, average_checkpoints=3, **steps
    )
    trainer.train()
    assert list(checkpoints_by_step(tmp_path)) == [1, 2, 3, 8]
    load_averaged_checkpoints(trainer)
    assert trainer.averaged_steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "preset='huge': expected one of base"),
        ({"config_overrides": "dropuot=1"}, "config_overrides has 'dropuot': no field"),
        ({"config_overrides": "dropout"}, "config_overrides has 'dropout': expected name=value"),
        ({"config_overrides": "vocab_size=9"}, "'vocab_size', which follows from the tokenizer"),
        ({"float32_matmul_precision": "low"}, "float32_matmul_precision='low': expected highest"),
    ],
)
def test_invalid_model_options_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        ModelArguments(**options)


# ---------------------------------------------------------------- output folders


def checkpoint_at(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "optimizer.pt").write_text("")
    (path / "checksums.json").write_text("{}")
    return str(path)


def arguments_for(folder, resume=None):
    return Seq2SeqTrainingArguments(output_dir=as_typed(folder), resume_from_checkpoint=resume)


def test_training_starts_in_a_new_or_empty_folder(tmp_path):
    assert find_checkpoint(arguments_for(tmp_path / "new")) is None
    assert find_checkpoint(arguments_for(tmp_path)) is None
    assert find_checkpoint(arguments_for(tmp_path, "auto")) is None


def test_resuming_uses_the_newest_checkpoint(tmp_path):
    first, newest = checkpoint_at(tmp_path, 5), checkpoint_at(tmp_path, 20)
    for resume, expected in (("true", newest), ("auto", newest), (first, first)):
        assert Path(find_checkpoint(arguments_for(tmp_path, resume))).samefile(expected)


@pytest.mark.parametrize("folder", ["out", "./out/", "../here/out"])
@pytest.mark.parametrize("resume", ["true", "auto", "./out/checkpoint-5/"])
def test_resuming_finds_a_checkpoint_however_its_path_is_typed(
    tmp_path, monkeypatch, folder, resume
):
    (tmp_path / "here").mkdir()
    expected = checkpoint_at(tmp_path / "here/out", 5)
    monkeypatch.chdir(tmp_path / "here")
    assert Path(find_checkpoint(arguments_for(folder, resume))).samefile(expected)


@pytest.mark.parametrize("resume", ["true", "auto", "checkpoint-5"])
@pytest.mark.parametrize(
    ("state", "plugin", "message"),
    [
        ("scheduler.txt", None, "holds no optimizer state, expected that of one process or DDP"),
        ("global_step5", None, "holds the optimizer state of DeepSpeed, expected that of one"),
        (
            "optimizer_0",
            None,
            "holds the optimizer state of FSDP with SHARDED_STATE_DICT, expected that of one "
            "process or DDP; `accelerate merge-weights` gathers its weights, and --model_name",
        ),
        ("optimizer.bin", None, "holds the optimizer state of FSDP with FULL_STATE_DICT, expected"),
        (
            "optimizer.pt",
            object(),
            "holds the optimizer state of one process or DDP, expected that of DeepSpeed; --model",
        ),
    ],
)
def test_a_checkpoint_without_a_usable_optimizer_state_is_refused(
    tmp_path, monkeypatch, resume, state, plugin, message
):
    path = Path(checkpoint_at(tmp_path, 5))
    (path / "optimizer.pt").rename(path / state)
    monkeypatch.chdir(tmp_path)
    arguments = arguments_for(".", resume)
    arguments.deepspeed_plugin = plugin  # as transformers sets it, for any value but None
    with pytest.raises(ValueError, match=f"checkpoint-5 {message}"):
        find_checkpoint(arguments)


@pytest.mark.parametrize("content", ["checkpoint-3/trainer_state.json", "config.json"])
def test_a_folder_that_holds_a_model_is_not_overwritten(tmp_path, content):
    (tmp_path / content).parent.mkdir(exist_ok=True)
    (tmp_path / content).write_text("{}")
    with pytest.raises(FileExistsError, match="already holds a model: choose another folder"):
        find_checkpoint(arguments_for(tmp_path))


@pytest.mark.parametrize("name", ["README.md", "loss.py"])
def test_a_users_file_that_training_would_replace_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    message = f"holds {name}, which training would replace: move it, or choose another folder"
    with pytest.raises(FileExistsError, match=message):
        find_checkpoint(arguments_for(tmp_path))


def test_code_from_a_tokenizer_does_not_count_as_a_users_file(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")  # in a new repository
    shutil.copy(Path(loss.__file__), tmp_path)
    assert find_checkpoint(arguments_for(tmp_path)) is None


def test_resuming_from_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        find_checkpoint(arguments_for(tmp_path, "true"))
    with pytest.raises(FileNotFoundError, match="elsewhere: not a trainer's checkpoint"):
        find_checkpoint(arguments_for(tmp_path, "elsewhere"))


def test_a_file_as_output_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file: expected a folder"):
        find_checkpoint(arguments_for(tmp_path / "file", "auto"))


def test_a_checkpoint_of_a_different_shape_is_not_resumed(checkpoint, tokenizer):
    overrides = (
        "d_model=24,encoder_layers=2,decoder_layers=3,encoder_attention_heads=2,"
        "decoder_attention_heads=4,encoder_ffn_dim=40,decoder_ffn_dim=36"
    )
    arguments = ModelArguments(config_overrides=overrides)
    assert make_model(arguments, tokenizer, str(checkpoint)).config.d_model == 24
    other = ModelArguments(config_overrides=overrides + ",norm_position=pre")
    with pytest.raises(
        ValueError, match="different model: its norm_position is 'post', this run's"
    ):
        make_model(other, tokenizer, str(checkpoint))


def test_a_resumed_run_keeps_the_dropout_that_was_chosen(checkpoint, tokenizer):
    # The text can have changed, and with it the choice.
    text = TextSize(3, 10, 10, distinct_target_tokens=10, longest_excess=0)
    overrides = (
        "d_model=24,encoder_layers=2,decoder_layers=3,encoder_attention_heads=2,"
        "decoder_attention_heads=4,encoder_ffn_dim=40,decoder_ffn_dim=36"
    )
    arguments = ModelArguments(config_overrides=overrides)
    assert make_model(arguments, tokenizer, None, text).config.dropout == 0.3
    assert make_model(arguments, tokenizer, str(checkpoint), text).config.dropout == 0.1


def test_a_fine_tuned_model_is_not_resumed_with_different_options(checkpoint, tokenizer, tmp_path):
    arguments = ModelArguments(model_name_or_path=str(checkpoint))
    model = make_model(arguments, tokenizer, None)
    model.save_pretrained(tmp_path / "checkpoint-1")
    make_model(arguments, tokenizer, str(tmp_path / "checkpoint-1"))
    other = ModelArguments(
        model_name_or_path=str(checkpoint), config_overrides="scale_embedding=false"
    )
    with pytest.raises(ValueError, match="its scale_embedding is True, this run's is False"):
        make_model(other, tokenizer, str(tmp_path / "checkpoint-1"))


# ---------------------------------------------------------------- training


@pytest.fixture
def splits(tokenizer):
    pairs = [("a house", "ein Haus"), ("the lake", "der See"), ("deep", "tief")] * 4
    rows = {
        "input_ids": [tokenizer(source)["input_ids"] for source, _ in pairs],
        "labels": [tokenizer(text_target=target)["input_ids"] for _, target in pairs],
    }
    return {
        "train": Dataset.from_dict(rows),
        "validation": Dataset.from_dict(rows).select(range(3)),
    }


def training_arguments(folder, **options):
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": None if "max_tokens" in options else 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
    }
    return TranslationTrainingArguments(output_dir=as_typed(folder), **{**defaults, **options})


def small_model(tokenizer, **overrides):
    torch.manual_seed(0)
    config = small_config(vocab_size=len(tokenizer), **{"dropout": 0.0, **overrides})
    return VanillaTransformerForConditionalGeneration(config)


def weights_after(trainer):
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_decoding_options_add_to_a_given_generation_config(tokenizer, splits, tmp_path):
    GenerationConfig(num_beams=4, max_length=30).save_pretrained(tmp_path / "given")
    model = small_model(tokenizer)
    model.generation_config.extra_output_tokens = 77
    arguments = training_arguments(
        tmp_path,
        generation_config=str(tmp_path / "given"),
        generation_kwargs={"length_penalty": 0.6, "length_penalty_type": "gnmt"},
    )
    own = model.generation_config.decoder_start_token_id
    found = make_trainer(model, tokenizer, arguments, splits).model.generation_config
    assert (found.num_beams, found.max_length, found.decoder_start_token_id) == (4, 30, own)
    assert (found.length_penalty, found.length_penalty_type) == (0.6, "gnmt")
    assert found.extra_output_tokens == 77
    arguments.generation_num_beams = 2
    make_trainer(model, tokenizer, arguments, splits)
    assert model.generation_config.num_beams == 2


def test_labels_are_padded_on_the_right(tokenizer, splits, tmp_path, monkeypatch):
    batches = []
    for side in ("left", "right"):
        monkeypatch.setattr(tokenizer, "padding_side", side)
        arguments = training_arguments(tmp_path)
        collate = make_trainer(small_model(tokenizer), tokenizer, arguments, splits).data_collator
        batches.append(collate([splits["train"][row] for row in range(3)]))
    for name in ("labels", "decoder_input_ids"):
        assert torch.equal(batches[0][name], batches[1][name])
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert (batches[0]["labels"] == -100).any()


@pytest.mark.curves
def test_the_trainer_learns_and_leaves_a_complete_folder(tokenizer, splits, tmp_path, caplog):
    caplog.set_level("INFO", "vanilla_transformer.inference.metrics")
    arguments = training_arguments(
        tmp_path,
        max_steps=60,
        predict_with_generate=True,
        log_translations=1,
        eval_strategy="steps",
        eval_steps=30,
        generation_num_beams=2,
    )
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    trainer.train()
    trainer.save_model()
    history = trainer.state.log_history
    scores = [entry for entry in history if "eval_bleu" in entry]
    assert len(scores) == 2
    assert scores[-1]["eval_exact_match"] == 100
    shown = [message for message in caplog.messages if message.startswith("Translation: ")]
    assert len(shown) == 2  # one in each evaluation
    translation, reference = shown[-1].split("\n")
    assert translation.removeprefix("Translation: ") == reference.removeprefix("  reference: ")
    assert history[0]["loss"] > 3 * scores[-1]["eval_loss"]
    saved = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert saved.generation_config.num_beams == 2
    assert saved.config.use_cache
    assert (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / "modeling_vanilla_transformer.py").is_file()
    assert Image.open(tmp_path / "curves.png").size[0] > 500


@pytest.mark.curves
@pytest.mark.parametrize(("pause", "times"), [(0.0, 3), (60.0, 1)])
def test_curves_are_drawn_as_often_as_the_interval_allows(
    tokenizer, tmp_path, monkeypatch, pause, times
):
    """After each of two evaluations and at the end, or only at the end."""
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path))
    monkeypatch.setattr(CurvesCallback, "INTERVAL", pause)
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no"}
    small_trainer(tmp_path, tokenizer, **options).train()
    assert drawn == [tmp_path / "curves.png"] * times


@pytest.mark.curves
def test_training_continues_if_curves_cannot_be_written(tokenizer, tmp_path, monkeypatch, caplog):
    """As on a disk that is full for a moment."""

    def fail(figure, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vanilla_transformer.plotting.save", fail)
    small_trainer(tmp_path, tokenizer, max_steps=2).train()
    assert "The curves are not drawn ([Errno 28] No space left on device)" in caplog.text


@pytest.mark.curves
def test_a_training_without_a_logged_loss_has_no_curves(tokenizer, tmp_path):
    """Otherwise its model card would show an empty picture."""
    small_trainer(tmp_path, tokenizer, logging_steps=500).train()
    assert not (tmp_path / "curves.png").exists()


def test_a_blank_source_has_a_blank_translation(tokenizer, splits, tmp_path):
    """As in `translate`: scores during training ignore what the model generates for an empty
    source."""
    rows = splits["validation"].select(range(3)).to_list()
    rows[1] = {"input_ids": tokenizer("")["input_ids"], "labels": tokenizer("")["input_ids"]}
    arguments = training_arguments(tmp_path, predict_with_generate=True)
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    found = trainer.predict(Dataset.from_list(rows)).predictions
    texts = tokenizer.batch_decode(found.clip(0), skip_special_tokens=True)
    assert [bool(text) for text in texts] == [True, False, True]


@pytest.mark.parametrize("options", [{}, {"eval_max_tokens": 8}])
def test_predictions_need_no_labels(tokenizer, splits, tmp_path, options):
    arguments = training_arguments(tmp_path, predict_with_generate=True, **options)
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    rows = splits["validation"]
    expected = trainer.predict(rows, max_length=30).predictions
    found = trainer.predict(rows.remove_columns("labels"), max_length=30)
    assert found.predictions.tolist() == expected.tolist()
    assert found.label_ids is None
    assert "test_loss" not in found.metrics


def test_a_source_has_one_translation_whatever_is_saved_with_the_model(tokenizer, splits, tmp_path):
    """As in `translate`."""
    rows = splits["validation"].select(range(3))
    arguments = training_arguments(tmp_path, predict_with_generate=True, generation_num_beams=2)
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    expected = trainer.predict(rows).predictions
    config = trainer.model.generation_config
    config.num_return_sequences, config.return_dict_in_generate = 2, True
    assert trainer.predict(rows).predictions.tolist() == expected.tolist()
    config = trainer.model.generation_config
    assert (config.num_return_sequences, config.return_dict_in_generate) == (2, True)


@pytest.mark.parametrize("ours", [False, True])
def test_evaluation_does_not_shorten_later_translations(tokenizer, splits, tmp_path, ours):
    """Seq2SeqTrainer leaves max_length=20 in the model: our trainer restores it, and with a
    different trainer the model does not treat it as a user's choice."""
    model = small_model(tokenizer, eos_token_id=None)
    trainer = (TranslationTrainer if ours else Seq2SeqTrainer)(
        model=model,
        args=training_arguments(tmp_path, predict_with_generate=True),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=make_compute_metrics(tokenizer),
    )
    trainer.evaluate(splits["validation"])
    trainer.save_model()
    saved = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    source = torch.tensor([[5, 6, 7]])
    for each in (model, saved):
        assert each.generate(source).shape[1] == 1 + 3 + 50
    exported, _ = read_model(tmp_path)
    translated, _ = LoadingArguments(device="cpu").load_model(tmp_path)
    assert exported.generation_config.max_length is None
    assert translated.generation_config.max_length is None
    assert model.generate(source, max_length=20).shape[1] == 20
    limited = GenerationConfig(max_length=20, eos_token_id=None, decoder_start_token_id=0)
    assert model.generate(source, generation_config=limited).shape[1] == 20
    fresh = small_model(tokenizer, eos_token_id=None)
    fresh.generation_config.max_length = 20
    assert fresh.generate(source).shape[1] == 20


def predict_with_transformers_trainer(model, tokenizer, splits, folder):
    trainer = Seq2SeqTrainer(
        model,
        training_arguments(folder, predict_with_generate=True),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.predict(splits["validation"])
    trainer.save_model()


def test_a_limit_of_20_tokens_that_a_user_chose_is_kept_after_an_evaluation(
    tokenizer, splits, tmp_path
):
    model = small_model(tokenizer, eos_token_id=None)
    model.generation_config.max_length = 20
    predict_with_transformers_trainer(model, tokenizer, splits, tmp_path)
    assert model.generate(torch.tensor([[5, 6, 7]])).shape[1] == 20


def test_a_choice_after_an_evaluation_is_kept(tokenizer, splits, tmp_path):
    """`Seq2SeqTrainer` only sets what was not set before: later values are the user's."""
    model = small_model(tokenizer, eos_token_id=None)
    config = model.generation_config
    config.num_beams, config.max_length = 4, 30
    predict_with_transformers_trainer(model, tokenizer, splits, tmp_path)
    config.num_beams, config.max_length = 1, 20
    assert model.generate(torch.tensor([[5, 6, 7]])).shape[1] == 20
    assert (config.num_beams, config.max_length) == (1, 20)


@pytest.mark.parametrize(("chosen", "used"), [(None, 4), (1, None), (2, None)])
def test_an_evaluation_does_not_change_the_beams_of_pipelines(
    tokenizer, splits, tmp_path, monkeypatch, chosen, used
):
    """`Seq2SeqTrainer` leaves num_beams=1 in the model, which would replace a pipeline's 4."""
    model = small_model(tokenizer)
    model.generation_config.num_beams = chosen
    predict_with_transformers_trainer(model, tokenizer, splits, tmp_path)
    saved = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    for each in (model, saved):
        pipe = pipeline("translation", model=each, tokenizer=tokenizer)
        given = Mock(side_effect=each.generate)
        monkeypatch.setattr(each, "generate", given)
        pipe("a house")
        assert given.call_args.kwargs.get("num_beams") == used
        assert each.generation_config.num_beams == chosen


def test_accumulated_steps_equal_one_large_batch(tokenizer, splits, tmp_path):
    results = []
    for size, accumulation in ((12, 1), (3, 4)):
        arguments = training_arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            optim="sgd",
        )
        results.append(
            weights_after(make_trainer(small_model(tokenizer), tokenizer, arguments, splits))
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def stock_model(tokenizer, config_class, model_class):
    torch.manual_seed(0)
    width = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokens["decoder_start_token_id"] = tokenizer.eos_token_id
    names = ("dropout", "attention_dropout", "encoder_layerdrop", "decoder_layerdrop")
    return model_class(
        config_class(
            **width, **heads, **tokens, **dict.fromkeys(names, 0.0), vocab_size=len(tokenizer)
        )
    )


STOCK = [(MarianConfig, MarianMTModel), (M2M100Config, M2M100ForConditionalGeneration)]


@pytest.mark.parametrize("classes", STOCK)
def test_accumulated_steps_of_a_stock_model_are_weighted_by_labels(
    classes, tokenizer, splits, tmp_path
):
    results = []
    for size, accumulation in ((12, 1), (3, 4)):
        arguments = training_arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            optim="sgd",
        )
        trainer = make_trainer(stock_model(tokenizer, *classes), tokenizer, arguments, splits)
        weights = weights_after(trainer)
        results.append((weights, trainer.state.log_history[0]["loss"]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_processes_only_wait_for_gradients_that_each_of_them_has(tokenizer, splits, tmp_path):
    """Each process of a stock model may drop other layers, as M2M-100 does. Ours drops none."""

    def searches(model, **options):
        arguments = training_arguments(tmp_path, **options)
        handler = make_trainer(model, tokenizer, arguments, splits).accelerator.ddp_handler
        return handler.find_unused_parameters

    assert not searches(small_model(tokenizer))
    assert searches(stock_model(tokenizer, M2M100Config, M2M100ForConditionalGeneration))
    assert searches(small_model(tokenizer), ddp_find_unused_parameters=True)


def test_a_model_that_only_shifts_labels_internally_gets_the_same_inputs(tokenizer, splits):
    model = stock_model(tokenizer, *STOCK[1]).eval()
    batch = PairCollator(tokenizer, model=model)([splits["train"][row] for row in range(3)])
    given = model(**batch).logits
    del batch["decoder_input_ids"]
    assert torch.equal(model(**batch).logits, given)


def test_a_batch_does_not_contain_the_length_column(tokenizer, splits):
    """Also with `remove_unused_columns=False`: `generate()` would refuse it."""
    pairs = [{**splits["train"][row], "length": 9} for row in range(3)]
    assert "length" not in PairCollator(tokenizer)(pairs)
    assert pairs[0]["length"] == 9


def test_a_batch_can_have_sources_without_labels(tokenizer, splits):
    model = stock_model(tokenizer, *STOCK[1])
    sources = [{"input_ids": splits["train"][row]["input_ids"]} for row in range(3)]
    batch = PairCollator(tokenizer, model=model)(sources)
    assert batch.keys() == {"input_ids", "attention_mask"}


def test_labels_are_padded_with_label_pad_token_id(tokenizer, splits):
    pairs = [{**splits["train"][0], "labels": [5] * length} for length in (1, 3)]
    batch = PairCollator(tokenizer, label_pad_token_id=-1)(pairs)
    assert batch["labels"].tolist() == [[5, -1, -1], [5, 5, 5]]


def test_a_custom_loss_gets_the_number_of_labels(tokenizer, splits, tmp_path):
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append((int((labels != -100).sum()), int(num_items_in_batch)))
        return outputs.logits.sum() * 0

    arguments = training_arguments(tmp_path, max_steps=2)
    model = stock_model(tokenizer, *STOCK[0])
    collate = PairCollator(tokenizer, model=model)
    TranslationTrainer(
        model, arguments, train_dataset=splits["train"], data_collator=collate,
        processing_class=tokenizer, compute_loss_func=loss,
    ).train()  # fmt: skip
    assert len(seen) == 2
    assert all(given == counted for counted, given in seen)


def test_a_source_of_one_token_is_not_blank_if_eos_is_also_padding(tmp_path):
    words = Tokenizer(models.WordLevel({"</s>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 0)])
    names = {"pad_token": "</s>", "eos_token": "</s>", "bos_token": "<s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    rows = [{**tokenizer(text), "labels": [2, 0]} for text in ("a", "", "a b")]
    arguments = training_arguments(tmp_path, predict_with_generate=True)
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(
        small_config(vocab_size=4, pad_token_id=0, eos_token_id=0, bos_token_id=1)
    )
    splits = {"train": Dataset.from_list(rows)}
    predictions = make_trainer(model, tokenizer, arguments, splits).predict(splits["train"])
    first = model.generate(torch.tensor([rows[0]["input_ids"]]))[0].tolist()
    assert predictions.predictions[0][: len(first)].tolist() == first
    assert set(predictions.predictions[1]) == {0}


def test_label_smoothing_of_transformers_trainer_equals_ours(tokenizer, splits, tmp_path):
    results = []
    for ours, theirs in ((0.2, 0.0), (0.0, 0.2)):
        arguments = training_arguments(tmp_path, label_smoothing_factor=theirs, optim="sgd")
        model = small_model(tokenizer, label_smoothing=ours)
        results.append(weights_after(make_trainer(model, tokenizer, arguments, splits)))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("generates", [False, True])
def test_an_evaluation_of_a_stock_model_leaves_out_label_smoothing(
    tokenizer, splits, tmp_path, generates
):
    options = {"predict_with_generate": generates, "generation_max_length": 4}
    losses = []
    for factor in (0.0, 0.2):
        arguments = training_arguments(tmp_path, label_smoothing_factor=factor, **options)
        model = stock_model(tokenizer, *STOCK[0])
        trainer = make_trainer(model, tokenizer, arguments, splits)
        losses.append(trainer.evaluate(splits["train"])["eval_loss"])
        assert (trainer.label_smoother is not None) == (factor > 0)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "options", [{"r_drop_alpha": 1.0}, *slow({}, {"label_smoothing_factor": 0.1})]
)
def test_a_run_in_bfloat16_learns_evaluates_resumes_and_loads(tokenizer, splits, tmp_path, options):
    def trainer_in(folder, **more):
        arguments = training_arguments(
            tmp_path / folder,
            bf16=True,
            predict_with_generate=True,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="steps",
            save_steps=10,
            **{"max_steps": 30, **options, **more},
        )
        model = small_model(tokenizer, label_smoothing=0.0)
        return make_trainer(model, tokenizer, arguments, splits)

    trainer = trainer_in("whole")
    whole = weights_after(trainer)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0] / 4
    scores = trainer.evaluate()
    assert scores["eval_loss"] < losses[0]
    assert scores["eval_bleu"] >= 0

    resumed = trainer_in("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-20"))
    parameters = [p.detach().flatten() for p in resumed.model.parameters()]
    assert torch.equal(torch.cat(parameters), whole)

    trainer.save_model()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    inputs = tokenizer("the lake", return_tensors="pt")
    assert tokenizer.decode(loaded.generate(**inputs)[0], skip_special_tokens=True) == "der See"


def test_resuming_ends_in_the_same_weights(tokenizer, splits, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    model = small_model(tokenizer, dropout=0.1)
    whole = weights_after(
        make_trainer(model, tokenizer, training_arguments(tmp_path / "a", **options), splits)
    )
    trainer = make_trainer(
        small_model(tokenizer, dropout=0.1),
        tokenizer,
        training_arguments(tmp_path / "b", **options),
        splits,
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    resumed = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert torch.equal(whole, resumed)


def test_a_stock_seq2seqtrainer_trains_the_model(tokenizer, splits, tmp_path):
    model = small_model(tokenizer)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_arguments(tmp_path, gradient_checkpointing=True),
        train_dataset=splits["train"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize("folder", [".", "../mine/"])
def test_the_title_of_the_card_is_the_name_of_the_folder(tokenizer, tmp_path, monkeypatch, folder):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    data = DataArguments(dataset_name="phrases")
    log = {"steps": 4, "epochs": 1.0}
    arguments = (ModelArguments(), data, training_arguments(folder))
    card = write_model_card(small_model(tokenizer), {}, log, *arguments)
    assert card == tmp_path / "mine/README.md"
    assert "# mine\n" in card.read_text()


@pytest.mark.parametrize("tied", [True, False])
def test_only_missing_weights_are_reported(tokenizer, tmp_path, caplog, tied):
    """A tied matrix is saved once, and its other names do not count as missing."""
    options = {
        "config": {"tie_word_embeddings": tied},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "average_checkpoints": 2,
    }
    trainer = small_trainer(tmp_path, tokenizer, **options)
    trainer.train()
    load_averaged_checkpoints(trainer)
    again = small_trainer(tmp_path, tokenizer, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert "missing keys" not in caplog.text
    weights = load_file(tmp_path / "checkpoint-6/model.safetensors")
    missing = {"lm_head.weight", "model.shared.weight"} & weights.keys()
    missing.add(next(name for name in weights if "layers.0" in name))
    save_file(
        {name: weight for name, weight in weights.items() if name not in missing},
        tmp_path / "checkpoint-6/model.safetensors",
    )
    again._load_from_checkpoint(str(tmp_path / "checkpoint-6"))
    (line,) = (line for line in caplog.text.splitlines() if "missing keys" in line)
    assert {name for name in weights if f"'{name}'" in line} == missing


# ---------------------------------------------------------------- averaged checkpoints


@pytest.mark.parametrize("wanted", [2, 9])
def test_the_mean_of_the_last_checkpoints_becomes_the_model(tokenizer, splits, tmp_path, wanted):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    arguments = training_arguments(tmp_path, average_checkpoints=wanted, **options)
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    trainer.train()
    (tmp_path / "checkpoint-9").mkdir()  # it holds no weights
    load_averaged_checkpoints(trainer)
    saved = [
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        for step in (2, 4, 6)
    ][-wanted:]
    for name, weight in trainer.model.state_dict().items():
        expected = torch.stack([weights[name] for weights in saved]).mean(0)
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-5)
    assert trainer.model.lm_head.weight is trainer.model.model.shared.weight
    assert trainer.averaged_steps == [2, 4, 6][-wanted:]


def test_a_recipes_averaging_can_be_turned_off(tokenizer, tmp_path, caplog):
    """0, as `--average_checkpoints 0` on the command line, leaves the weights of the last step."""
    trainer = small_trainer(tmp_path, tokenizer, average_checkpoints=0)
    trainer.train()
    last = load_file(tmp_path / "checkpoint-8/model.safetensors")
    with caplog.at_level("INFO"):
        load_averaged_checkpoints(trainer)
    assert "checkpoints" not in caplog.text
    for name, weight in last.items():
        assert torch.equal(trainer.model.get_parameter(name), weight), name
    TranslationTrainingArguments(str(tmp_path), average_checkpoints=0, save_strategy="no")


def test_the_mean_leaves_out_steps_after_the_last_one(tokenizer, tmp_path, caplog):
    """Such as those of a longer run in the same folder, from the middle of which this one
    resumes."""
    small_trainer(tmp_path, tokenizer).train()
    trainer = small_trainer(tmp_path, tokenizer, average_checkpoints=2, max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with caplog.at_level("INFO"):
        load_averaged_checkpoints(trainer)
    assert "the mean of the checkpoints at steps [4, 6]" in caplog.text


@pytest.mark.parametrize("content", ["checkpoint-3/trainer_state.json", "config.json"])
def test_resuming_from_a_different_run_does_not_overwrite_a_model(tokenizer, tmp_path, content):
    small_trainer(tmp_path / "run", tokenizer, max_steps=2).train()
    (tmp_path / "other" / content).parent.mkdir(parents=True)
    (tmp_path / "other" / content).write_text("{}")
    wanted = str(tmp_path / "run/checkpoint-2")
    arguments = training_arguments(tmp_path / "other", resume_from_checkpoint=wanted)
    with pytest.raises(FileExistsError, match="already holds a model: choose another folder"):
        find_checkpoint(arguments)
    arguments = training_arguments(tmp_path / "new", resume_from_checkpoint=wanted)
    assert find_checkpoint(arguments) == wanted


def test_without_checkpoints_the_model_is_unchanged(tokenizer, tmp_path, caplog):
    """As when a finished run is resumed in a different folder."""
    small_trainer(tmp_path / "run", tokenizer).train()
    trainer = small_trainer(tmp_path / "elsewhere", tokenizer, average_checkpoints=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-8"))
    load_averaged_checkpoints(trainer)
    assert "there are only 0 checkpoints to average: expected 2" in caplog.text
    for name, weight in load_file(tmp_path / "run/checkpoint-8/model.safetensors").items():
        assert torch.equal(trainer.model.get_parameter(name), weight), name


@pytest.mark.parametrize(
    ("metric", "scores", "chosen"),
    [
        ("bleu", {2: 9.0, 4: 1.0, 6: 8.0, 8: 7.0}, (2, 6)),
        ("loss", {2: 9.0, 4: 1.0, 6: 2.0}, (4, 6)),
        ("loss", {2: 1.0, 4: 1.0, 6: 1.0}, (4, 6)),  # the later of equal ones
    ],
)
def test_the_mean_can_be_that_of_the_best(tokenizer, splits, tmp_path, metric, scores, chosen):
    """In one case the checkpoint of step 8 has no score, and is left out."""
    arguments = training_arguments(
        tmp_path,
        average_checkpoints=2,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        predict_with_generate=True,
        max_steps=8,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    trainer.train()
    trainer.state.log_history = [
        {"step": step, f"eval_{metric}": score} for step, score in scores.items()
    ]
    load_averaged_checkpoints(trainer)
    saved = [
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        for step in chosen
    ]
    for name, weight in trainer.model.state_dict().items():
        expected = torch.stack([weights[name] for weights in saved]).mean(0)
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-5)


def test_the_saved_generation_config_has_the_options_of_the_recipe(tokenizer, splits, tmp_path):
    wished = {"length_penalty": 0.6, "length_penalty_type": "gnmt", "early_stopping": "never"}
    for given in (wished, json.dumps(wished)):
        arguments = training_arguments(tmp_path, generation_num_beams=4, generation_kwargs=given)
        trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
        trainer.save_model()
        saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
        assert {name: getattr(saved, name) for name in wished} == wished
        assert saved.num_beams == 4


def test_a_limit_of_length_replaces_that_of_the_model_to_fine_tune(tokenizer, splits, tmp_path):
    """A converted model of fairseq has a limit of 200 new tokens."""
    model = small_model(tokenizer)
    model.generation_config.max_new_tokens = 200
    arguments = training_arguments(tmp_path, generation_kwargs={"extra_output_tokens": 3})
    make_trainer(model, tokenizer, arguments, splits)
    assert model.generation_config.max_new_tokens is None
    source = tokenizer("a house", return_tensors="pt")["input_ids"]
    model.generation_config.suppress_tokens = [tokenizer.eos_token_id]
    assert model.eval().generate(source).shape[1] == 1 + source.shape[1] + 3
    both = {"extra_output_tokens": 3, "max_length_factor": 2}
    arguments = training_arguments(tmp_path, generation_kwargs=both)
    with pytest.raises(ValueError, match="extra_output_tokens=3: expected one limit of length"):
        make_trainer(model, tokenizer, arguments, splits)


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_evaluations_do_not_warn_of_a_limit_of_the_model_to_fine_tune(
    limit, tokenizer, splits, tmp_path
):
    """transformers does so in each batch. Stock models often have a `max_length` of 512."""
    model = small_model(tokenizer)
    model.generation_config.update(max_length=512, max_new_tokens=511)
    arguments = training_arguments(tmp_path, generation_kwargs={limit: 9})
    make_trainer(model, tokenizer, arguments, splits)
    given = {
        name: getattr(model.generation_config, name) for name in ("max_new_tokens", "max_length")
    }
    assert given == {"max_new_tokens": None, "max_length": None, limit: 9}


def test_a_fine_tuned_model_keeps_its_number_of_beams_unless_one_is_given(
    tokenizer, splits, tmp_path
):
    model = small_model(tokenizer)
    model.generation_config.num_beams = 6
    for given, expected in ((None, 6), (3, 3)):
        arguments = training_arguments(tmp_path, generation_num_beams=given)
        make_trainer(model, tokenizer, arguments, splits)
        assert model.generation_config.num_beams == expected
    model.generation_config.num_beams = None  # a pipeline would take 4
    make_trainer(model, tokenizer, training_arguments(tmp_path), splits)
    assert model.generation_config.num_beams == 1


def test_an_error_says_how_one_beam_replaces_a_models_own_beam_search(tokenizer, splits, tmp_path):
    model = small_model(tokenizer)
    model.generation_config.early_stopping = True
    arguments = training_arguments(tmp_path, generation_num_beams=1)
    with pytest.raises(ValueError, match="In generation_kwargs, null unsets an option"):
        make_trainer(model, tokenizer, arguments, splits)
    unset = {"early_stopping": None}
    arguments = training_arguments(tmp_path, generation_num_beams=1, generation_kwargs=unset)
    assert make_trainer(model, tokenizer, arguments, splits).model.generation_config.num_beams == 1


@pytest.mark.parametrize(
    "options", [{"oversized": "cut"}, {"oversized": "drop", "per_device_train_batch_size": 4}]
)
def test_cutting_or_dropping_longer_pairs_requires_max_tokens(options, tmp_path):
    with pytest.raises(ValueError, match=r"oversized='\w+': expected max_tokens with it"):
        TranslationTrainingArguments(output_dir=str(tmp_path), **options)
    assert TranslationTrainingArguments(output_dir=str(tmp_path), oversized="drop").left_open


def test_an_unknown_field_of_the_generation_config_is_reported(tmp_path):
    message = "generation_kwargs has 'lenght_penalty': no field of GenerationConfig"
    with pytest.raises(ValueError, match=message):
        training_arguments(tmp_path, generation_kwargs={"lenght_penalty": 0.6})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 0}, "num_beams=0: expected a whole number from 1"),
        ({"length_penalty_type": "gnm"}, "length_penalty_type='gnm': expected"),
        ({"temperature": 0.5}, "`do_sample` is not set to"),
    ],
)
def test_invalid_decoding_options_are_reported_before_training(
    given, message, tokenizer, splits, tmp_path
):
    arguments = training_arguments(tmp_path, generation_kwargs=given)
    with pytest.raises(ValueError, match=message):
        make_trainer(small_model(tokenizer), tokenizer, arguments, splits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_checkpoints": -1}, "average_checkpoints=-1: expected 0 or more"),
        (
            {"average_checkpoints": 5, "save_total_limit": 2, "save_strategy": "steps"},
            "average_checkpoints=5 and save_total_limit=2: expected save_total_limit of at least 5",
        ),
        ({"average_checkpoints": 5, "save_strategy": "no"}, "save_strategy='no' keeps none"),
    ],
)
def test_averaging_checkpoints_that_are_not_kept_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train_epochs": 0}, "num_train_epochs=0: expected a positive number"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan: expected a positive number"),
        ({"max_steps": 0}, "max_steps=0: expected a positive number, or -1 for as many as in"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps=0: expected a positive number"),
        ({"eval_strategy": "steps", "eval_steps": -2}, "eval_steps=-2: expected a positive"),
        ({"logging_steps": -1}, "logging_steps=-1: expected a positive number"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: expected 1 or more"),
        ({"generation_num_beams": 0}, "generation_num_beams=0: expected 1 or more"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1: expected 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: expected 0 or more"),
        ({"warmup_steps": float("inf")}, "warmup_steps=inf: expected a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate=inf: expected a finite number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan: expected a finite number"),
        ({"data_seed": -1}, "data_seed=-1: expected 0 or more"),
        ({"seed": 2**32}, "seed=4294967296: expected less than 2^32"),
        ({"learning_rate": -1.0}, "optim=adamw_torch_fused: Invalid learning rate: -1.0"),
        ({"adam_beta2": 1.5}, "optim=adamw_torch_fused: Invalid beta parameter at index 1: 1.5"),
        (
            {"optim": "rmsprop", "optim_args": "alpha=x"},
            "optim=rmsprop and optim_args='alpha=x': could not convert string to float: 'x'",
        ),
        (
            {"auto_find_batch_size": True, "max_tokens": 200},
            "auto_find_batch_size=True: expected per_device_train_batch",
        ),
        (
            {"include_for_metrics": ["source"]},
            "include_for_metrics='source': expected inputs or loss",
        ),
        ({"label_names": ["target"]}, "label_names='target': expected labels"),
        ({"optim_args": "a"}, "optim_args='a': expected name=value, with commas between several"),
        ({"optim_args": "a=1,"}, "optim_args='a=1,': expected name=value"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch"},
            "load_best_model_at_end=True with eval_strategy=epoch and save_strategy=no: expected "
            "steps for both, or epoch",
        ),
        (
            {"load_best_model_at_end": True},
            "load_best_model_at_end=True with eval_strategy=no and save_strategy=no: expected",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_type=warmup_stable_decay with lr_scheduler_kwargs={}: get_wsd_schedule() "
            "missing 1 required positional argument: 'num_decay_steps'",
        ),
        (
            {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
            "lr_scheduler_type=linear with lr_scheduler_kwargs={'min_lr': 1e-05}: get_linear",
        ),
        ({"lr_scheduler_kwargs": "a=1"}, "lr_scheduler_kwargs='a=1': expected a JSON object"),
        (  # one value for two groups of weights
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "lr_scheduler_kwargs": {"min_lr": [1e-6]},
            },
            "lr_scheduler_type=reduce_lr_on_plateau with lr_scheduler_kwargs={'min_lr': [1e-06]}: ",
        ),
        (
            {"include_num_input_tokens_seen": "some"},
            "include_num_input_tokens_seen=some: expected all, non_padding or no",
        ),
        (
            {"dataloader_persistent_workers": True},
            "dataloader_persistent_workers=True: expected dataloader_num_workers too",
        ),
        (
            {"dataloader_multiprocessing_context": "spawn"},
            "dataloader_multiprocessing_context=spawn: expected dataloader_num_workers too",
        ),
        (
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            "save_strategy=best: expected eval_strategy and metric_for_best_model with it",
        ),
        (
            {"save_strategy": "best", "eval_strategy": "epoch"},
            "save_strategy=best: expected eval_strategy and metric_for_best_model with it",
        ),
        (
            {"batch_eval_metrics": True},
            "batch_eval_metrics=True: expected false, as scores are computed over all pairs",
        ),
        (
            {"eval_do_concat_batches": False},
            "eval_do_concat_batches=False: expected true, as scores are computed over all pairs",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        training_arguments(tmp_path, **options)


def test_gradients_may_have_any_norm(tmp_path):
    """The norm is then in the log, and nothing is clipped."""
    assert training_arguments(tmp_path, max_grad_norm=float("inf")).max_grad_norm == float("inf")


def test_a_missing_package_of_an_optimizer_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match="optim=ademamix: You need to install `bitsandbytes`"):
        training_arguments(tmp_path, optim="ademamix")
    assert training_arguments(tmp_path, optim="adafactor")


@pytest.mark.parametrize("metric", ["bleu", "eval_exact_match"])
def test_a_translation_metric_needs_predict_with_generate(tmp_path, metric):
    options = {"metric_for_best_model": metric, "eval_strategy": "steps"}
    with pytest.raises(ValueError, match=f"metric_for_best_model={metric}: expected predict_with"):
        training_arguments(tmp_path, **options)
    options["predict_with_generate"] = True
    with pytest.raises(ValueError, match=f"metric_for_best_model={metric}: expected prediction_l"):
        training_arguments(tmp_path, prediction_loss_only=True, **options)
    assert training_arguments(tmp_path, **options)


@pytest.mark.parametrize(
    ("metric", "greater"), [("wer", False), ("eval_chrf", True), ("ter", False)]
)
def test_a_metric_that_selects_the_best_is_computed_and_has_the_right_direction(
    tokenizer, splits, tmp_path, metric, greater
):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    arguments = training_arguments(
        tmp_path,
        metrics=["ser"],
        metric_for_best_model=metric,
        predict_with_generate=True,
        **options,
    )
    assert arguments.greater_is_better is greater
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    scores = trainer.evaluate(max_new_tokens=5)
    assert {"eval_ser", f"eval_{metric.removeprefix('eval_')}"} <= scores.keys()
    assert "eval_bleu" not in scores
    own = training_arguments(
        tmp_path, metric_for_best_model=metric, greater_is_better=True, predict_with_generate=True
    )
    assert own.greater_is_better is True


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_watches_a_metric_has_the_right_direction(
    tokenizer, splits, tmp_path, schedule
):
    def mode(**options):
        options |= {"lr_scheduler_type": schedule, "eval_strategy": "steps"}
        arguments = training_arguments(tmp_path, predict_with_generate=True, **options)
        trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
        trainer.create_optimizer_and_scheduler(4)
        return trainer.lr_scheduler.mode

    assert mode(metric_for_best_model="bleu", lr_scheduler_kwargs={"patience": 1}) == "max"
    assert mode(metric_for_best_model="wer") == mode() == "min"


def test_bleu_uses_the_requested_tokenizer(tokenizer, splits, tmp_path):
    arguments = training_arguments(tmp_path, bleu_tokenize="char", predict_with_generate=True)
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    ids = np.array(tokenizer(["one two three four"])["input_ids"])
    labels = np.array(tokenizer(["one two three five"])["input_ids"])
    found = trainer.compute_metrics(EvalPrediction(ids, labels))["bleu"]
    scorer = BLEU(tokenize="char")
    expected = scorer.corpus_score(["one two three four"], [["one two three five"]]).score
    assert found == pytest.approx(expected)
    assert found > make_compute_metrics(tokenizer)(EvalPrediction(ids, labels))["bleu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["blue"]}, "metrics=blue: expected one of bleu, chrf, ter"),
        ({"metrics": ["comet"]}, "metrics=comet: expected one of bleu, chrf, ter"),
        ({"metric_for_best_model": "blue"}, "metric_for_best_model=blue: expected loss or one of"),
        ({"bleu_tokenize": "14a"}, "bleu_tokenize='14a': expected one of none, zh, 13a"),
    ],
)
def test_unknown_metrics_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        training_arguments(tmp_path, predict_with_generate=True, **options)


@pytest.mark.parametrize(
    ("options", "is_terminal", "expected"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"disable_tqdm": False}, False, False),
        ({"disable_tqdm": True}, True, True),
    ],
)
def test_progress_bars_are_only_shown_on_terminals_unless_requested(
    tmp_path, monkeypatch, options, is_terminal, expected
):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
    assert arguments.disable_tqdm == expected


def test_the_help_lists_all_ways_to_resume(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(GROUPS, ["--help"])
    assert "'auto' for the same if there is one," in " ".join(capsys.readouterr().out.split())


def test_cutting_to_the_budget_limits_both_sides(tmp_path):
    data = DataArguments(dataset_name="phrases", max_target_length=20)
    arguments = training_arguments(tmp_path, max_tokens=50)
    arguments.limit(data)
    assert (data.max_source_length, data.max_target_length) == (None, 20)
    arguments.oversized = "cut"
    arguments.limit(data)
    assert (data.max_source_length, data.max_target_length) == (50, 20)


def test_tensorboard_is_used_if_installed_unless_turned_off(tokenizer, splits, tmp_path):
    pytest.importorskip("tensorboard")
    for options, expected in (({}, True), ({"report_to": "none"}, False)):
        arguments = TranslationTrainingArguments(str(tmp_path), use_cpu=True, **options)
        trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
        callbacks = trainer.callback_handler.callbacks
        assert any(isinstance(one, TensorBoardCallback) for one in callbacks) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_training_continues_if_its_tensorboard_folder_is_deleted(tokenizer, splits, tmp_path):
    """The folder is deleted at step 2; its writer notices during training, or at the end."""
    pytest.importorskip("tensorboard")

    class Remove(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                shutil.rmtree(tmp_path)

    arguments = training_arguments(
        tmp_path, max_steps=6, logging_steps=1, report_to="tensorboard", disable_tqdm=True
    )
    trainer = make_trainer(small_model(tokenizer), tokenizer, arguments, splits)
    trainer.add_callback(Remove())
    trainer.train()
    assert trainer.state.global_step == 6


def test_the_tokenizer_is_the_checkpoints_or_a_given_one_or_a_new_one(checkpoint, tokenizer):
    pairs = Dataset.from_dict({"source": ["a house"] * 9, "target": ["ein Haus"] * 9})
    new = make_tokenizer(ModelArguments(vocab_size=290), pairs, None)
    assert len(new) < 290
    named = make_tokenizer(ModelArguments(tokenizer_name=str(checkpoint)), pairs, None)
    resumed = make_tokenizer(ModelArguments(vocab_size=290), pairs, str(checkpoint))
    assert named.get_vocab() == resumed.get_vocab() == tokenizer.get_vocab()


def byte_level(folder, template, **tokens):
    """A byte-level tokenizer like GPT-2's or BART's, with these special tokens, in a folder."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = list(tokens.values())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    )
    ids = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    PreTrainedTokenizerFast(tokenizer_object=backend, **tokens).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("template", "tokens", "start"),
    [
        ("$A </s>", {"pad_token": "<pad>", "eos_token": "</s>"}, "<pad>"),
        ("<s> $A </s>", {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}, "<s>"),
    ],
    ids=["T5's", "BART's"],
)
def test_a_model_can_be_trained_with_a_stock_tokenizer(tmp_path, template, tokens, start):
    named = ModelArguments(
        tokenizer_name=byte_level(tmp_path / "tokenizer", template, **tokens),
        preset="tiny",
        config_overrides="d_model=32,encoder_layers=1,decoder_layers=1,dropout=0.0",
    )
    tokenizer = make_tokenizer(named, None, None)
    model = make_model(named, tokenizer, None)
    assert model.config.decoder_start_token_id == tokenizer.convert_tokens_to_ids(start)
    pairs = [("ab", "ba"), ("bc", "cb")]
    rows = {
        "input_ids": [tokenizer(source)["input_ids"] for source, _ in pairs],
        "labels": [tokenizer(text_target=target)["input_ids"] for _, target in pairs],
    }
    data = Dataset.from_dict(rows)
    arguments = training_arguments(
        tmp_path / "run", max_steps=150, learning_rate=3e-3, predict_with_generate=True
    )
    trainer = make_trainer(model, tokenizer, arguments, {"train": data, "validation": data})
    trainer.train()
    assert trainer.evaluate()["eval_exact_match"] == 100


@pytest.mark.parametrize(
    ("template", "tokens", "message"),
    [
        ("$A </s>", {"eos_token": "</s>"}, "the tokenizer has no pad_token, expected one"),
        ("$A", {"pad_token": "<pad>"}, "the tokenizer has no eos_token, expected one"),
    ],
)
def test_a_tokenizer_without_padding_or_eos_token_is_refused(tmp_path, template, tokens, message):
    named = ModelArguments(tokenizer_name=byte_level(tmp_path, template, **tokens))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}: {message}"):
        make_tokenizer(named, None, None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("$A", "does not add its eos_token '</s>' to the end of a text"),
        ("</s> $A", "does not add its eos_token '</s>' to the end of a text"),
        ("</s> <pad> $A </s>", "begins a target with its eos_token '</s>'"),
    ],
    ids=["GPT-2's", "OPT's", "SeamlessM4T's"],
)
def test_only_a_tokenizer_that_does_not_end_its_targets_is_refused(tmp_path, template, message):
    folder = byte_level(tmp_path, template, pad_token="<pad>", eos_token="</s>")
    tokenizer = make_tokenizer(ModelArguments(tokenizer_name=folder), None, None)
    with pytest.raises(ValueError, match=re.escape(f"{folder}: the tokenizer {message}")):
        expect_end_of_targets(tokenizer)


def test_a_language_token_can_follow_the_eos_token_of_a_target(tmp_path):
    """As in mBART."""
    folder = byte_level(tmp_path, "$A </s> <pad>", pad_token="<pad>", eos_token="</s>")
    expect_end_of_targets(make_tokenizer(ModelArguments(tokenizer_name=folder), None, None))


def letters(vocab, template, **marks):
    """A tokenizer of letters with these ids, whose template can add special tokens with different
    ids."""
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[*vocab.items(), *marks.items()]
    )
    tokens = {"pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def test_a_tokenizer_need_not_know_latin_letters():
    expect_end_of_targets(letters({"<pad>": 0, "</s>": 1, "猫": 2}, "$A </s>"))


def test_a_word_tokenizer_need_not_have_an_unknown_token():
    tokenizer = letters({"<pad>": 0, "</s>": 1, "zwei": 2}, "$A </s>")
    tokenizer.backend_tokenizer.model = models.WordLevel(tokenizer.get_vocab(), unk_token="<unk>")
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a")
    expect_end_of_targets(tokenizer)


@pytest.mark.parametrize(
    ("numbers", "template", "marks", "size"),
    [
        ((0, 1, 2), "$A </s>", {}, 3),
        ((0, 5, 9), "$A </s>", {}, 10),
        ((0, 1, 2), "de $A </s>", {"de": 7}, 8),  # M2M-100's languages
    ],
    ids=["without holes", "with holes", "with ids beyond its vocabulary"],
)
def test_a_new_model_has_an_embedding_for_its_tokenizers_largest_id(numbers, template, marks, size):
    vocab = dict(zip(("<pad>", "</s>", "a"), numbers, strict=True))
    tokenizer = letters(vocab, template, **marks)
    model = make_model(ModelArguments(preset="tiny"), tokenizer, None)
    assert model.config.vocab_size == size


def test_a_new_model_with_mbarts_tokenizer_is_resumed(tmp_path):
    """Its decoder starts with the target language, which a different run can change."""
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer = MBartTokenizer(vocab=[*special, ("▁", -2.0), ("a", -2.0)])
    set_languages(tokenizer, "en_XX", "de_DE")
    arguments, checkpoint = ModelArguments(preset="tiny"), str(tmp_path / "checkpoint-1")
    model = make_model(arguments, tokenizer, None)
    start_in_target_language(model, tokenizer)
    model.save_pretrained(checkpoint)
    german = tokenizer.convert_tokens_to_ids("de_DE")
    assert make_model(arguments, tokenizer, checkpoint).config.decoder_start_token_id == german
    set_languages(tokenizer, "en_XX", "fr_XX")
    with pytest.raises(ValueError, match=f"its decoder_start_token_id is {german}, this run's is"):
        make_model(arguments, tokenizer, checkpoint)


def test_a_marian_tokenizer_with_two_vocabularies_is_only_for_fine_tuning(tmp_path):
    module = pytest.importorskip("sentencepiece", reason="Marian's tokenizers need it")
    module.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba"] * 4), model_prefix=str(tmp_path / "both"), vocab_size=9,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "<pad>": 2}')
    model, vocab, folder = (str(tmp_path / name) for name in ("both.model", "vocab.json", "saved"))
    MarianTokenizer(model, model, vocab, vocab, separate_vocabs=True).save_pretrained(folder)
    make_tokenizer(ModelArguments(model_name_or_path=folder), None, None)
    message = f"tokenizer_name='{folder}' with separate_vocabs=True: expected one vocabulary"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_tokenizer(ModelArguments(tokenizer_name=folder), None, None)


def test_fine_tuning_starts_from_the_checkpoint(checkpoint, tokenizer):
    model = make_model(ModelArguments(model_name_or_path=str(checkpoint)), tokenizer, None)
    expected = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
