"""The card describes the run, no more and no less, wherever the model is uploaded."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from conftest import PAIRS, small_trainer
from huggingface_hub import HfApi
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.cli import train
from vanilla_transformer.data.parallel_text import DataArguments
from vanilla_transformer.serving.languages import languages_of_card
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.model_card import write_model_card
from vanilla_transformer.training.parsing import parse_arguments

SIDES = ("source", "target")
GROUPS = (ModelArguments, DataArguments, TranslationTrainingArguments)
SHAPE = "encoder_layers=1,decoder_layers=1,d_model=32,encoder_ffn_dim=32,decoder_ffn_dim=32"
TRAIN = {
    "dataset_name": "phrases",
    "target_lang": "fr",
    "source_lang": "en",
    "phrases_train_size": 40,
    "phrases_validation_size": 4,
    "phrases_test_size": 4,
    "preset": "tiny",
    "vocab_size": 320,
    "config_overrides": SHAPE,
    "per_device_train_batch_size": 8,
    "max_steps": 4,
    "save_steps": 2,
    "report_to": "none",
    "use_cpu": True,
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("la casa\n")
    return path


def card_of(model, folder, *flags):
    """The card of a run with these flags, its header and the recipe on it."""
    flags = ["--use_cpu", "--output_dir", folder, *flags]
    arguments = parse_arguments(GROUPS, list(map(str, flags)))
    log = {"steps": 4, "epochs": 1.0}
    card = write_model_card(model, {}, log, *arguments).read_text(encoding="utf-8")
    recipe = card.split("```yaml")[1].split("```")[0]
    return card, yaml.safe_load(card.split("---")[1]), yaml.safe_load(recipe)


def recipe_file(folder, **options):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def test_the_recipe_has_every_option_that_was_set(model, tmp_path):
    given = {
        "dataset_name": "phrases",
        "max_tokens": 4096,
        "eval_max_tokens": 2048,
        "tokenizer_name": "somewhere",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
        "generation_kwargs": {"length_penalty": 0.6, "length_penalty_type": "gnmt"},
        "optim_target_modules": ["fc1"],
    }
    _, _, recipe = card_of(model, tmp_path, "--config", recipe_file(tmp_path, **given))
    assert given.items() <= recipe.items()
    assert not {"report_to", "debug", "label_names", "accelerator_config"} & recipe.keys()


def test_the_recipe_has_the_dropout_that_the_text_decides(model, tmp_path):
    model.config.dropout = 0.3
    flags = ["--dataset_name", "phrases", "--config_overrides"]
    _, _, recipe = card_of(model, tmp_path, *flags, "encoder_layers=1")
    assert recipe["config_overrides"] == {"encoder_layers": 1, "dropout": 0.3}
    _, _, recipe = card_of(model, tmp_path, *flags, "dropout=0.2")
    assert recipe["config_overrides"] == "dropout=0.2"
    _, _, recipe = card_of(model, tmp_path, *flags[:2], "--model_name_or_path", "me/other")
    assert "config_overrides" not in recipe


def test_scores_belong_to_the_text_of_their_split(model, text, tmp_path):
    files = {f"{split}_{side}": str(text) for split in ("train", "test") for side in SIDES}
    for side in SIDES:
        files[f"test_{side}"] = str(text.with_name(f"test.{side}"))
        Path(files[f"test_{side}"]).write_text("la casa\n")
    flags = [word for name, file in files.items() for word in (f"--{name}", file)]
    arguments = parse_arguments(GROUPS, ["--output_dir", str(tmp_path), "--use_cpu", *flags])
    scores = {"test": {"bleu": 12.0, "bleu_signature": "s"}}
    card = write_model_card(model, scores, {"steps": 4, "epochs": 1.0}, *arguments).read_text()
    (result,) = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert result["dataset"] == {"name": "test.source", "type": "test.source", "split": "test"}
    assert "trained on `text`" in card


def test_the_recipe_has_no_option_without_effect(model, tmp_path):
    flags = ["--dataset_name", "phrases", "--disable_tqdm", "true"]
    _, _, recipe = card_of(model, tmp_path, *flags, "--max_tokens", 900, "--max_steps", 9)
    assert {name: recipe[name] for name in ("max_tokens", "max_steps")} == {
        "max_tokens": 900, "max_steps": 9,
    }  # fmt: skip
    replaced = {"per_device_train_batch_size", "num_train_epochs"}
    incidental = {"use_cpu", "disable_tqdm", "dataloader_pin_memory", "gradient_checkpointing"}
    assert not recipe.keys() & {*replaced, *incidental}
    _, _, recipe = card_of(model, tmp_path, *flags, "--per_device_train_batch_size", 4)
    assert recipe["per_device_train_batch_size"] == 4


@pytest.mark.parametrize("flags", [["--hub_token", "hf_s3cr3t"], ["--hub-token=hf_s3cr3t"]])
def test_the_card_contains_no_secret(model, tmp_path, monkeypatch, flags):
    monkeypatch.setattr("sys.argv", ["train", *flags, "--max_tokens", "9"])
    card, _, recipe = card_of(model, tmp_path, "--dataset_name", "phrases", *flags)
    assert "s3cr3t" not in card
    assert "hub_token" not in recipe
    assert "--max_tokens 9" in card


@pytest.mark.parametrize("spelling", ["--train_source", "--train-source"])
def test_local_files_do_not_get_the_languages_of_a_recipes_data_set(
    model, text, tmp_path, spelling
):
    recipe = recipe_file(tmp_path, dataset_name="some/set", source_lang="en", target_lang="de")
    flags = ["--config", recipe, spelling, text, "--train_target", text]
    card, header, _ = card_of(model, tmp_path, *flags)
    assert "for sequence-to-sequence tasks, trained on `text`" in card
    assert "language" not in header
    card, header, _ = card_of(model, tmp_path, *flags, "--source_lang=it", "--target_lang=de")
    assert "for it to de, trained on `text`" in card
    assert header["language"] == ["it", "de"]


def test_the_languages_of_phrases_are_known(model, tmp_path):
    for flags, target in (([], "de"), (["--target_lang", "fr"], "fr")):
        _, header, _ = card_of(model, tmp_path, "--dataset_name", "phrases", *flags)
        assert header["language"] == ["en", target]


@pytest.mark.parametrize(
    ("languages", "codes", "in_full"),
    [
        (("en", "de"), ["en", "de"], None),
        (("eng_Latn", "deu_Latn"), ["eng", "deu"], ["eng-Latn", "deu-Latn"]),
        (("en_XX", "de_DE"), ["en", "de"], ["en", "de-DE"]),
        (("en", "pt-BR"), ["en", "pt"], ["en", "pt-BR"]),
        (("pt-BR", "pt-PT"), ["pt"], ["pt-BR", "pt-PT"]),
        (("words", "sounds"), None, ["words", "sounds"]),
    ],
)
def test_the_hub_accepts_the_languages(model, text, tmp_path, languages, codes, in_full):
    """It refuses an upload if `language` is not an ISO 639 code."""
    files = ["--train_source", text, "--train_target", text]
    named = ["--source_lang", languages[0], "--target_lang", languages[1]]
    card, header, _ = card_of(model, tmp_path, *files, *named)
    assert (header.get("language"), header.get("language_bcp47")) == (codes, in_full)
    assert f"for {' to '.join(languages)}, trained" in card
    expected = tuple(in_full or codes)
    assert languages_of_card(tmp_path / "README.md") == expected


def test_languages_that_a_recipe_sets_for_its_own_files_are_kept(model, text, tmp_path):
    files = {"train_source": str(text), "train_target": str(text)}
    recipe = recipe_file(tmp_path, **files, source_lang="it", target_lang="de")
    other = ["--validation_source", text, "--validation_target", text]
    _, header, _ = card_of(model, tmp_path, "--config", recipe, *other)
    assert header["language"] == ["it", "de"]


@pytest.mark.parametrize("folder", ["outputs/mine", ".", "../here/outputs"])
def test_the_snippet_contains_the_folder_as_it_was_typed(model, tmp_path, monkeypatch, folder):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(folder).mkdir(parents=True, exist_ok=True)
    card, _, _ = card_of(model, folder, "--dataset_name", "phrases")
    assert f'pipeline("translation", model="{folder}", trust_remote_code=True)' in card
    assert f"# {Path(folder).resolve().name}\n" in card


def test_the_card_of_a_stream_has_no_number_of_epochs(train_here, tmp_path):
    options = TRAIN | {"streaming": True, "output_dir": tmp_path / "model"}
    train_here(*flags_of(**options))
    assert "\n4 steps, on cpu, " in (tmp_path / "model/README.md").read_text()


@pytest.mark.parametrize(
    ("best", "averaged", "said"),
    [
        (None, [], ""),
        ("run/checkpoint-2", [], " The weights are those of step 2."),
        ("run/checkpoint-4", [], ""),
        ("run/checkpoint-2", [2, 4], " The weights are the mean of those of the steps 2, 4."),
        (None, [2], " The weights are those of step 2."),
    ],
)
def test_the_card_says_which_steps_the_weights_are_from(tokenizer, tmp_path, best, averaged, said):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = small_trainer(tmp_path, tokenizer, **options)
    trainer.card_arguments = (ModelArguments(), DataArguments(dataset_name="phrases"))
    trainer.state.global_step, trainer.state.best_model_checkpoint = 4, best
    trainer.averaged_steps = averaged
    trainer.finish_card(trainer.model, {})
    (line,) = (
        line for line in (tmp_path / "README.md").read_text().split("\n") if "4 steps" in line
    )
    assert line.endswith(f"transformers {transformers.__version__}.{said}")
    trainer.is_in_train = True  # a checkpoint is pushed with its own weights
    trainer.create_model_card()
    assert ("The weights are" in (tmp_path / "README.md").read_text()) == bool(averaged)


def test_the_card_counts_the_epochs_that_there_were_whatever_the_batches(tokenizer, tmp_path):
    """`Trainer` counts as if all steps of a resumed training had had its last batches."""

    def train(size, steps, resume=None, **options):
        options |= {"per_device_train_batch_size": size, "max_steps": steps}
        trainer = small_trainer(tmp_path, tokenizer, **options)
        trainer.card_arguments = (ModelArguments(), DataArguments(dataset_name="phrases"))
        trainer.target_tokens_per_epoch = 1000
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))
        trainer.finish_card(trainer.model, {})
        return (tmp_path / "README.md").read_text()

    assert len(PAIRS) == 12
    assert "2 steps, 0.33 epochs, 333 target tokens" in train(2, 2)
    assert "4 steps, 0.83 epochs, 833 target tokens" in train(3, 4, resume=2)  # 4/12 + 6/12
    two = {"gradient_accumulation_steps": 2}
    assert "6 steps, 1.5 epochs, 1,500 target tokens" in train(2, 6, resume=4, **two)
    for _ in range(2):  # at its end, it makes no more steps
        assert "6 steps, 1.5 epochs, 1,500 target tokens" in train(1, 6, resume=6)


# ---------------------------------------------------------------- the Hub


@pytest.fixture
def uploads(monkeypatch):
    """What a stand-in for the Hub receives: each upload's message, and its card if it has one."""
    made = []

    def create_repo(self, repo_id, **options):
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload(message, card, run_as_future=False):
        made.append((message, card.read_text() if card.exists() else None))
        future = Future()
        future.set_result(None)
        return future if run_as_future else None

    def upload_folder(self, *, folder_path, commit_message, run_as_future=False, **options):
        assert options["repo_id"].startswith("me/")
        return upload(commit_message, Path(folder_path, "README.md"), run_as_future)

    for method in (create_repo, upload_folder):
        monkeypatch.setattr(HfApi, method.__name__, method)
    return made


def flags_of(**options):
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def test_every_push_holds_our_card_and_the_last_one_the_scores(train_here, uploads, tmp_path):
    folder = tmp_path / "pushed"
    push = {"push_to_hub": True, "hub_token": "hf_s3cr3t", "hub_always_push": True}
    train_here(*flags_of(**TRAIN, **push, output_dir=folder))
    messages = [message for message, _ in uploads]
    assert messages[0] == "Training in progress, step 2"
    assert "Model save" in messages
    for _, card in uploads:
        assert 'model="me/pushed"' in card
        assert "for en to fr, trained on `phrases`" in card
        assert "s3cr3t" not in card
    assert "\n2 steps" in uploads[0][1]
    assert "Not measured yet" in uploads[0][1]
    last = uploads[-1][1]
    assert "\n4 steps" in last
    assert "| test |" in last
    assert last == (folder / "README.md").read_text()


def test_a_trainer_without_card_arguments_writes_transformers_card(tokenizer, uploads, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer, push_to_hub=True, max_steps=2)
    trainer.train()
    trainer.push_to_hub()
    assert "generated automatically" in uploads[-1][1]


# ---------------------------------------------------------------- precision


def test_scores_are_those_of_the_saved_model(train_here, tmp_path, monkeypatch):
    """In its own precision, neither under bfloat16 autocast nor with rounded products."""
    seen = []

    def translate(lines, model, tokenizer, **options):
        inputs = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[1]])}
        seen.append((model.eval()(**inputs).logits, torch.get_float32_matmul_precision()))
        return ["" for _ in lines]

    monkeypatch.setattr(train, "translate", translate)
    rounded = {"bf16": True, "float32_matmul_precision": "medium"}
    train_here(*flags_of(**TRAIN, **rounded, output_dir=tmp_path / "model"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[1]])}
    expected = model(**inputs).logits
    for logits, precision in seen:
        assert precision == "highest"
        assert logits.dtype == torch.float32
        assert torch.equal(logits, expected)
    assert len(seen) == 2
