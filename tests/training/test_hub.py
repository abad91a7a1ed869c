"""What is uploaded to the Hub, over HTTP: a model that loads from there, our card, and no
secrets."""

import json
import os
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import transformers
import yaml
from conftest import REPOSITORY, run_command, small_trainer
from huggingface_hub.errors import HfHubHTTPError
from local_hub import TOKEN, serving
from transformers import Trainer

from vanilla_transformer.data.parallel_text import DataArguments
from vanilla_transformer.inference.derived_cards import card_metadata
from vanilla_transformer.inference.metrics import score_translations
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.checkpoints import CHECKSUMS_NAME, find_defect
from vanilla_transformer.training.hub import push_folder
from vanilla_transformer.training.model_card import ModelCardTrainer, write_model_card


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub, used by this process too."""
    with serving() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def finished(checkpoint, tmp_path):
    """A folder as training leaves it, with files that must not be uploaded."""
    folder = tmp_path / "finished"
    shutil.copytree(checkpoint, folder)
    private = ("training_args.bin", "optimizer.pt", "scaler.pt", ".env")
    below = (
        "checkpoint-4/model.safetensors",
        "pytorch_model_fsdp_0/__0_0.distcp",
        "original/conversion.json",
        "logs/events.out.tfevents.1796078358.the-host.1.0",
    )
    for name in (*private, *below):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOKEN)
    (folder / "curves.png").write_bytes(b"a picture")
    return folder


def metadata(files):
    return yaml.safe_load(files["README.md"].decode().split("---")[1])


# ---------------------------------------------------------------- a folder


def test_one_commit_holds_all_files_for_loading_and_nothing_else(hub, finished, checkpoint):
    commit = push_folder(finished, "mine", private=True)
    assert hub.visibility == {"me/mine": "private"}
    assert hub.log("me/mine") == ["initial commit", "Upload model"]
    assert hub.branches["me/mine"] == {"main": commit.oid}
    files = hub.files("me/mine")
    made = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert "modeling_vanilla_transformer.py" in made
    card = files.pop("README.md").decode()
    assert files == {**made, "curves.png": b"a picture"}
    assert 'pipeline("translation", model="me/mine", trust_remote_code=True)' in card
    assert "revision=" in card


def test_the_card_only_changes_in_the_name_of_the_repository(hub, finished):
    card = """---
language: [en, de]
my_key: my value
model-index:
- name: finished
  results:
  - task: {type: translation}
    dataset: {type: phrases, name: phrases}
    metrics: [{type: bleu, value: 12.5}]
---
# finished

translate = pipeline("translation", model="outputs/finished", trust_remote_code=True)

My own words about outputs/finished.
"""
    (finished / "README.md").write_text(card)
    push_folder(finished, "my-team/better")
    files = hub.files("my-team/better")
    assert files["README.md"].decode().split("---\n")[2] == card.split("---\n")[2].replace(
        "# finished", "# better"
    ).replace('model="outputs/finished"', 'model="my-team/better"')
    header = metadata(files)
    assert header["my_key"] == "my value"
    assert header["language"] == ["en", "de"]
    assert header["model-index"][0]["name"] == "better"
    assert header["model-index"][0]["results"][0]["metrics"] == [{"type": "bleu", "value": 12.5}]
    assert (finished / "README.md").read_text() == card


def test_a_checkpoint_has_the_languages_and_the_licence_of_its_training(hub, finished):
    header = "license: mit\nlanguage: [en, de]\nmodel-index: []"
    (finished.parent / "README.md").write_text(f"---\n{header}\n---\n# run\n\nScores: 12.5\n")
    checkpoint = finished.rename(finished.parent / "checkpoint-500")
    (checkpoint / "README.md").unlink(missing_ok=True)
    push_folder(checkpoint, "mine")
    files = hub.files("me/mine")
    assert metadata(files) == {
        "library_name": "transformers", "pipeline_tag": "translation",
        "license": "mit", "language": ["en", "de"],
    }  # fmt: skip
    card = files["README.md"].decode()
    assert "\n# mine\n" in card
    assert 'pipeline("translation", model="me/mine", trust_remote_code=True)' in card
    assert "12.5" not in card


def test_only_a_checkpoint_has_the_card_of_the_folder_above(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    for name, expected in (("checkpoint-2", {"license": "mit"}), ("model", {})):
        (tmp_path / name).mkdir()
        assert card_metadata(tmp_path / name) == expected


def test_the_card_of_a_folder_without_code_says_how_to_download_it(hub, finished):
    (finished / "README.md").unlink(missing_ok=True)
    for code in finished.glob("*.py"):
        code.unlink()
    push_folder(finished, "my-team/engine")
    card = hub.files("my-team/engine")["README.md"].decode()
    assert "hf download my-team/engine --local-dir FOLDER" in card
    assert "trust_remote_code" not in card


def test_the_card_of_an_export_says_how_to_download_it(hub, finished):
    text = "```bash\nvanilla-transformer translate --model FOLDER --source FILE\n```\n"
    title = f"# {finished.name}\n\n## {finished.name}\n\n"
    (finished / "README.md").write_text(title + text)
    push_folder(finished, "my-team/engine")
    card = hub.files("my-team/engine")["README.md"].decode()
    assert f"# engine\n\n## {finished.name}\n" in card  # only the title
    command = "hf download my-team/engine --local-dir FOLDER\nvanilla-transformer translate --model"
    assert card.count(command) == 1
    (finished / "README.md").write_text(card)  # as after a download
    push_folder(finished, "me/copy")
    assert hub.files("me/copy")["README.md"].decode() == card.replace("my-team/engine", "me/copy")


def test_a_revision_is_a_branch_that_is_created_if_missing(hub, finished):
    push_folder(finished, "mine", revision="v2")
    push_folder(finished, "mine", revision="v2")
    assert hub.files("me/mine") == {}
    assert "config.json" in hub.files("me/mine", "v2")


def test_weights_of_an_earlier_upload_that_loading_would_prefer_are_removed(hub, finished):
    (finished / "model.bin").write_bytes(b"of an engine")
    (finished / "onnx").mkdir()
    (finished / "onnx" / "encoder.onnx").write_bytes(b"in a folder of its own")
    push_folder(finished, "mine")
    (finished / "model.bin").unlink()
    shutil.rmtree(finished / "onnx")
    (finished / "model.safetensors").rename(finished / "model-1-of-1.safetensors")
    (finished / "model.safetensors.index.json").write_text(SHARDED)
    push_folder(finished, "mine")
    files = hub.files("me/mine")
    assert not {"model.bin", "model.safetensors"} & files.keys()
    assert {"model-1-of-1.safetensors", "onnx/encoder.onnx", "config.json"} <= files.keys()
    assert len(hub.log("me/mine")) == 3


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def leave_leftovers(folder):
    """A conversion keeps tensors that the model does not need."""
    (folder / "original").mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder / "original" / "leftovers.safetensors")


SHARDED = json.dumps({"weight_map": {"a": "model-1-of-1.safetensors"}})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "expected a model's folder"),
        (remove("config.json"), "holds no configuration.*its checkpoints are models"),
        (remove("model.safetensors"), "holds no weights: expected"),
        (leave_leftovers, "holds no weights: expected"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
        (remove("tokenizer.json"), "holds no tokenizer: expected tokenizer.json or"),
        (
            write("tokenizer_config.json", '{"tokenizer_class": "VanillaTransformerTokenizer"}'),
            "holds no target tokenizer: expected target_tokenizer.json",
        ),
        (write("model.safetensors.index.json", SHARDED), "model-1-of-1.safetensors is missing"),
        (write("model.safetensors", "cut"), "model.safetensors: expected complete files, but"),
        (write("generation_config.json", ""), "generation_config.json: expected complete files"),
        (write(CHECKSUMS_NAME, '{"config.json": [1, 2]}'), "expected a complete checkpoint"),
        (write("README.md", "---\n- a list\n---\n"), "README.md: expected YAML"),
        (write("README.md", "---\na: [\n---\n"), "README.md: expected YAML"),
    ],
)
def test_an_unfinished_folder_is_refused_before_a_repository_is_made(hub, finished, spoil, message):
    spoil(finished)
    with pytest.raises(ValueError, match=message):
        push_folder(finished, "mine")
    assert hub.commits == {}
    assert hub.requests == []


def test_a_folder_of_several_models_is_refused(hub, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "1")
    with pytest.raises(ValueError, match="runs holds no configuration: expected config"):
        push_folder(tmp_path / "runs", "mine")
    assert hub.requests == []


def test_a_wrong_token_creates_nothing(hub, finished, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HfHubHTTPError, match="401"):
        push_folder(finished, "mine")
    assert hub.commits == {}


def test_without_a_token_the_command_says_how_to_get_one(finished, tmp_path):
    process = run_command("push", finished, "mine", cwd=tmp_path, check=False)
    assert process.returncode == 2
    assert "hf auth login" in process.stderr


# ---------------------------------------------------------------- training

SHAPE = "encoder_layers=1,decoder_layers=1,d_model=32,encoder_ffn_dim=32,decoder_ffn_dim=32"
TINY = [
    "--dataset_name", "phrases", "--source_lang", "en", "--target_lang", "fr",
    "--phrases_train_size", "40", "--phrases_validation_size", "4", "--phrases_test_size", "4",
    "--preset", "tiny", "--vocab_size", "320", "--config_overrides", SHAPE, "--use_cpu",
    "--per_device_train_batch_size", "8", "--max_steps", "4", "--save_steps", "2",
    "--save_total_limit", "1",
]  # fmt: skip


@pytest.mark.curves
def test_every_push_of_a_training_can_be_loaded_and_contains_no_secret(
    hub, train_here, tmp_path, monkeypatch
):
    monkeypatch.delenv("HF_TOKEN")
    push = ["--push_to_hub", "--hub_token", TOKEN, "--hub_always_push", "--license", "mit"]
    folder = tmp_path / "mine"
    push += ["--hub_strategy", "checkpoint", "--logging_steps", "1"]
    train_here(*TINY, *push, "--output_dir", folder)
    first = "Training in progress, step 2"
    assert {first, f"{first}, checkpoint", "Model save", "Model card"} <= set(hub.log("me/mine"))
    for message, files in hub.commits["me/mine"].values():
        assert not any(TOKEN.encode() in content for content in files.values())
        if message == "initial commit" or "README.md" not in files:
            continue  # the two uploads of a checkpoint can come in any order
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert "modeling_vanilla_transformer.py" in files
        header = metadata(files)
        assert (header["license"], header["language"]) == ("mit", ["en", "fr"])
        assert "base_model" not in header
        assert "datasets" not in header
        assert b'model="me/mine"' in files["README.md"]
    assert header["metrics"] == ["bleu", "chrf", "exact_match"]
    assert [one["name"] for one in header["model-index"]] == ["mine"]
    assert files["curves.png"].startswith(b"\x89PNG")
    assert b"![Loss and scores over steps](curves.png)" in files["README.md"]
    # The checkpoint was uploaded completely, while it was renamed and an older one was deleted.
    for name, content in files.items():
        path = tmp_path / "downloaded" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert find_defect(tmp_path / "downloaded" / "last-checkpoint") is None


def test_a_training_creates_the_branch_that_it_pushes_to(hub, tokenizer, tmp_path):
    push = {"push_to_hub": True, "hub_token": TOKEN}
    for revision in ("v2", "v2", "refs/pr/1"):
        small_trainer(tmp_path / "mine", tokenizer, hub_revision=revision, **push)
    assert hub.branches["me/mine"].keys() == {"main", "v2"}


def test_failing_uploads_end_a_training_only_after_its_scores(hub, train_here, tmp_path, caplog):
    hub.refusals.append("/api/models/me/mine/commit")
    folder = tmp_path / "mine"
    with pytest.raises(ConnectionError, match=r"mine, but their upload failed: .*500") as raised:
        train_here(*TINY, "--push_to_hub", "--hub_token", TOKEN, "--output_dir", folder)
    assert f"`vanilla-transformer push {folder} me/mine`" in str(raised.value)
    assert hub.log("me/mine") == ["initial commit"]
    told = [text for text in caplog.messages if "upload to the Hub failed" in text]
    assert told[0].startswith("An upload to the Hub failed, and training continues: ")
    assert told[-1].startswith("The upload to the Hub failed, and is repeated at the end: ")
    assert all("500" in message for message in told)
    assert "| test | " in (folder / "README.md").read_text()
    assert (folder / "trainer_state.json").is_file()


def test_the_last_upload_repeats_one_that_failed(hub, train_here, tmp_path, monkeypatch):
    def answer_again(trainer, *arguments):
        hub.refusals.clear()
        finish_card(trainer, *arguments)

    finish_card = ModelCardTrainer.finish_card
    monkeypatch.setattr(ModelCardTrainer, "finish_card", answer_again)
    hub.refusals.append("/api/models/me/mine/commit")
    train_here(*TINY, "--push_to_hub", "--hub_token", TOKEN, "--output_dir", tmp_path / "mine")
    assert hub.log("me/mine") == ["initial commit", "Model card"]
    files = hub.files("me/mine")
    assert files["model.safetensors"] == (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "modeling_vanilla_transformer.py"} <= files.keys()
    assert not any(name.startswith(("checkpoint-", "_incomplete")) for name in files)


def test_the_card_of_a_fine_tuned_model_names_its_base_model_and_data(model, tmp_path):
    arguments = (
        ModelArguments(model_name_or_path="team/base"),
        DataArguments(dataset_name="wmt14", dataset_config_name="de-en"),
        TranslationTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
    )
    scores = score_translations(["ein Haus"], ["ein Haus"])
    log = {"steps": 4, "epochs": 1.0}
    write_model_card(model, {"test": scores}, log, *arguments)
    header = metadata({"README.md": (tmp_path / "README.md").read_bytes()})
    assert header["base_model"] == "team/base"
    assert header["datasets"] == "wmt14"
    dataset = header["model-index"][0]["results"][0]["dataset"]
    assert (dataset["type"], dataset["config"], dataset["split"]) == ("wmt14", "de-en", "test")


def test_the_example_of_a_stock_model_only_needs_our_pipeline(tmp_path):
    shape = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    config = transformers.MarianConfig(vocab_size=8, max_position_embeddings=8, **shape, **heads)
    arguments = (
        ModelArguments(model_name_or_path="team/base"),
        DataArguments(dataset_name="wmt14"),
        TranslationTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
    )
    write_model_card(transformers.MarianMTModel(config), None, {"steps": 4}, *arguments)
    card = (tmp_path / "README.md").read_text()
    assert "trust_remote_code" not in card
    assert 'import vanilla_transformer  # adds the pipeline\n\ntranslate = pipeline("tr' in card


# ---------------------------------------------------------------- a later commit

LOAD = """
import json, sys
from transformers import pipeline

name, revision = sys.argv[1:]
translate = pipeline("translation", model=name, revision=revision, trust_remote_code=True)
text = translate("the lake", max_new_tokens=5)[0]["translation_text"]
print(json.dumps([type(translate.model).__module__, type(translate).__module__, text]))
"""


@pytest.mark.slow
def test_a_push_of_every_checkpoint_waits_for_the_one_before(tokenizer, tmp_path, monkeypatch):
    """Which may still read the files that this one replaces."""
    trainer, calls = small_trainer(tmp_path, tokenizer, hub_always_push=True), []
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: calls.append("wait"))
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda *_: calls.append("push"))
    trainer._push_from_checkpoint("checkpoint-2")
    assert calls == ["wait", "push"]


def test_a_pinned_commit_never_runs_later_code(hub, finished, tmp_path):
    def run(*command, check=True):
        environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path / "home")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
        process = subprocess.run(
            [sys.executable, *map(str, command)],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or process.returncode == 0, process.stderr[-4000:]
        return process

    push = ("-m", "vanilla_transformer", "push", "finished", "mine")
    told = run(*push).stdout
    commit = hub.branches["me/mine"]["main"]
    assert f'revision="{commit}"' in told
    (finished / "modeling_vanilla_transformer.py").write_text("raise SystemExit('ruined')")
    run(*push, "--commit_message", "ruin")
    assert hub.log("me/mine") == ["initial commit", "Upload model", "ruin"]
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    model, pipeline, text = json.loads(run(script, "me/mine", commit).stdout.splitlines()[-1])
    assert model.startswith(f"transformers_modules.me.mine.{commit}")
    assert pipeline.startswith(f"transformers_modules.me.mine.{commit}")
    assert isinstance(text, str)
    assert "ruined" in run(script, "me/mine", "main", check=False).stderr
