"""The mean of checkpoints follows the formula, and they must have the same architecture."""

import json
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from conftest import random_ids, run_command, small_config
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli.average import AveragingArguments, expect_same_tokens
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.training import averaging
from vanilla_transformer.training.averaging import average_checkpoints, select_checkpoints
from vanilla_transformer.training.checkpoints import CHECKSUMS_NAME, _write_checksums


def save(folder, seed, **options):
    torch.manual_seed(seed)
    model = VanillaTransformerForConditionalGeneration(small_config(**options))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def run(tmp_path, tokenizer):
    """A training's output folder, with checkpoints of steps 5, 10 and 100."""
    for step in (5, 10, 100):
        folder = tmp_path / f"run/checkpoint-{step}"
        save(folder, seed=step)
        tokenizer.save_pretrained(folder)
        for name in ("trainer_state.json", "optimizer.pt", "rng_state_0.pth"):
            (folder / name).write_text("{}")
    (tmp_path / "run/checkpoint-200").mkdir()  # it has no weights
    return tmp_path / "run"


def test_each_weight_becomes_its_mean(run, tmp_path):
    output = average_checkpoints(select_checkpoints(run, last=2), tmp_path / "mean")
    parts = [load_file(run / f"checkpoint-{step}/model.safetensors") for step in (10, 100)]
    mean = load_file(output / "model.safetensors")
    assert mean.keys() == parts[0].keys()
    for name, weight in mean.items():
        expected = (parts[0][name].double() + parts[1][name].double()) / 2
        torch.testing.assert_close(weight.double(), expected, atol=1e-8, rtol=1e-6)


def test_an_average_is_a_model_without_the_trainers_state(run, tmp_path):
    (run / "checkpoint-100/global_step100").mkdir()  # as DeepSpeed saves it
    output = average_checkpoints(select_checkpoints(run, last=3), tmp_path / "mean")
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.lm_head.weight is model.model.shared.weight
    assert AutoTokenizer.from_pretrained(output).pad_token is not None
    model.generate(random_ids(1, 3), max_new_tokens=2)
    state = {"trainer_state.json", "optimizer.pt", "rng_state_0.pth"}
    assert not state & {path.name for path in output.iterdir()}


def test_a_card_keeps_its_languages_but_not_its_scores(run, tmp_path):
    """The scores are those of a single checkpoint."""
    last = run / "checkpoint-100"
    (last / "curves.png").write_bytes(b"a picture")
    (last / "README.md").write_text(
        "---\nlanguage: [en, de]\nlicense: mit\nmodel-index:\n- name: x\n  results: []\n---\n"
        "| BLEU | 40.1 |\n"
    )
    output = average_checkpoints(select_checkpoints(run, last=2), tmp_path / "mean")
    card = (output / "README.md").read_text()
    assert metadata_load(output / "README.md") == {"language": ["en", "de"], "license": "mit"}
    assert "- checkpoint-10\n- checkpoint-100\n" in card
    assert "40.1" not in card
    assert not (output / "curves.png").exists()


def test_the_average_of_a_trainings_checkpoints_has_the_card_of_the_training(run, tmp_path):
    checkpoints = [run / "checkpoint-10", run / "checkpoint-100"]
    (run / "README.md").write_text("---\nlanguage: [en, de]\n---\n# mine\n")
    output = average_checkpoints(checkpoints, tmp_path / "average")
    assert metadata_load(output / "README.md") == {"language": ["en", "de"]}
    (run / "README.md").write_text("---\nlanguage: [en\n---\n")
    with pytest.raises(ValueError, match=r"README.md: expected YAML between two lines of ---"):
        average_checkpoints(checkpoints, tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_a_readme_in_the_output_folder_is_kept(run, tmp_path):
    (tmp_path / "README.md").write_text("my notes")
    average_checkpoints([run / "checkpoint-10"], tmp_path)
    assert (tmp_path / "README.md").read_text() == "my notes"


def test_an_average_does_not_overwrite_a_model(run, tmp_path):
    """The old model's card and other files would remain."""
    output = average_checkpoints([run / "checkpoint-5"], tmp_path / "mean")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    for folder in (output, run / "checkpoint-5"):
        with pytest.raises(FileExistsError, match=f"output_dir='{folder}' already holds a model"):
            average_checkpoints([run / "checkpoint-5", run / "checkpoint-10"], folder)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_an_average_that_fails_can_be_repeated(run, tmp_path, monkeypatch, name):
    """As when the disk is full: the folder has no configuration, so it does not look complete."""
    copy = shutil.copy2

    def fail(file, output):
        if file.name == name:
            raise OSError(28, "No space left on device")
        copy(file, output)

    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(folder.glob("*"))))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", fail)
        with pytest.raises(OSError, match="No space left"):
            average_checkpoints([run / "checkpoint-5"], tmp_path / "mean")
    assert not (tmp_path / "mean/config.json").exists()
    average_checkpoints([run / "checkpoint-5"], tmp_path / "mean")
    assert {"config.json", name} < {path.name for path in (tmp_path / "mean").iterdir()}


def test_weights_that_differ_from_their_checksum_are_not_averaged(run, tmp_path):
    """Otherwise a flipped bit would be part of the mean. The optimizer's state has no effect."""
    folder = run / "checkpoint-10"
    (folder / CHECKSUMS_NAME).touch()
    _write_checksums(folder)
    (folder / "optimizer.pt").unlink()
    average_checkpoints([folder, run / "checkpoint-5"], tmp_path / "mean")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 64
    (folder / "model.safetensors").write_bytes(weights)
    message = "checkpoint-10/model.safetensors is corrupt: .*: expected a complete checkpoint"
    with pytest.raises(ValueError, match=message):
        average_checkpoints([folder, run / "checkpoint-5"], tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(weights[:99])
    with pytest.raises(ValueError, match=r"10/model\.safetensors: expected complete file"):
        average_checkpoints([folder, run / "checkpoint-5"], tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_the_mean_of_equal_models_is_that_model(run, tmp_path):
    folder = run / "checkpoint-5"
    copies = [shutil.copytree(folder, tmp_path / name) for name in ("one", "other")]
    output = average_checkpoints([folder, *copies], tmp_path / "mean")
    for name, weight in load_file(output / "model.safetensors").items():
        assert torch.equal(weight, load_file(folder / "model.safetensors")[name])


def test_sharded_weights_are_averaged_the_same(run, tmp_path):
    folders = [tmp_path / str(step) for step in (5, 10)]
    for folder, step in zip(folders, (5, 10), strict=True):
        model = AutoModelForSeq2SeqLM.from_pretrained(run / f"checkpoint-{step}")
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
    whole = average_checkpoints(select_checkpoints(run, steps=[5, 10]), tmp_path / "whole")
    parts = average_checkpoints(folders, tmp_path / "parts")
    one, other = (AutoModelForSeq2SeqLM.from_pretrained(path) for path in (whole, parts))
    for weight, expected in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert not (parts / "model.safetensors.index.json").exists()  # it names other files


def test_checkpoints_are_never_completely_in_memory(run, tmp_path, monkeypatch):
    size = sum(
        weight.numel() for weight in load_file(run / "checkpoint-5/model.safetensors").values()
    )
    alive, most = 0, 0

    class Watched:
        """A file that counts how many of the values read from it are still in memory."""

        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            nonlocal alive, most
            tensor = self.file.get_tensor(name)
            alive += tensor.numel()
            most = max(most, alive)
            weakref.finalize(tensor, self.forget, tensor.numel())
            return tensor

        def forget(self, numel):
            nonlocal alive
            alive -= numel

    real = averaging.safe_open
    monkeypatch.setattr(averaging, "safe_open", Watched)
    average_checkpoints(select_checkpoints(run, last=3), tmp_path / "mean")
    assert 0 < most < size


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"last": 4}, "holds checkpoints of steps [5, 10, 100], expected 4"),
        (
            {"steps": [5, 7, 200]},
            "holds checkpoints of steps [5, 10, 100], expected [7, 200]",
        ),
    ],
)
def test_missing_steps_are_reported(run, wanted, message):
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        select_checkpoints(run, **wanted)


def test_a_checkpoint_saved_on_a_signal_is_not_among_the_last(run):
    state = {"stateful_callbacks": {"off_schedule": {}}}
    (run / "checkpoint-100/trainer_state.json").write_text(json.dumps(state))
    last = [run / "checkpoint-5", run / "checkpoint-10"]
    assert select_checkpoints(run, last=2) == last
    assert select_checkpoints(run, steps=[100]) == [run / "checkpoint-100"]


def test_a_repeated_step_is_refused(run):
    message = "steps=[5, 100]: expected each once"
    with pytest.raises(ValueError, match=re.escape(message)):
        select_checkpoints(run, steps=[100, 5, 10, 5, 100, 100])


def test_a_repeated_folder_is_refused_however_it_is_spelled(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(run / "checkpoint-5")
    names = ["run/checkpoint-5/", "run/checkpoint-10", "link", run / "checkpoint-5"]
    message = f"run/checkpoint-5, link, {run}/checkpoint-5: expected each folder once"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        average_checkpoints(names, "mean")
    with pytest.raises(ValueError, match=r"^link: expected each folder once$"):
        average_checkpoints(["link", "link"], "mean")
    assert not (tmp_path / "mean").exists()


def test_quantized_models_are_not_averaged(run, tmp_path):
    """The integers would come from the last model, and the scales from the mean."""
    for step in (5, 10):
        path = run / f"checkpoint-{step}/config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "any"}}))
    with pytest.raises(ValueError, match=r"checkpoint-5 is quantized: expected models before"):
        average_checkpoints(select_checkpoints(run, steps=[5, 10]), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 32}, "its d_model is 32, not 24"),
        ({"decoder_layers": 2}, "its decoder_layers is 2, not 3"),
    ],
)
def test_a_different_architecture_is_refused_before_anything_is_written(
    run, tmp_path, options, message
):
    save(tmp_path / "other", seed=0, **options)
    with pytest.raises(ValueError, match="holds a different architecture.*" + message):
        average_checkpoints([run / "checkpoint-5", tmp_path / "other"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_models_trained_with_different_dropout_can_be_averaged(run, tmp_path):
    save(tmp_path / "other", seed=0, dropout=0.3, label_smoothing=0.0)
    folders = [run / "checkpoint-5", tmp_path / "other"]
    output = average_checkpoints(folders, tmp_path / "mean")
    weights = [load_file(folder / "model.safetensors") for folder in (*folders, output)]
    one, other, mean = (weight["model.shared.weight"] for weight in weights)
    torch.testing.assert_close(mean, (one + other) / 2)
    assert json.loads((output / "config.json").read_text())["dropout"] == 0.3  # the last one's


def test_integer_tensors_are_taken_from_the_last_folder(tmp_path):
    folders = [tmp_path / "1", tmp_path / "4"]
    for folder in folders:
        folder.mkdir()
        save_file({"count": torch.tensor(int(folder.name))}, folder / "model.safetensors")
    assert averaging._mean(folders) == {"count": torch.tensor(4)}


def test_tensors_with_different_names_are_refused(run, tmp_path):
    config = json.loads((run / "checkpoint-5/config.json").read_text())
    save(tmp_path / "other", seed=0, tie_word_embeddings=False)
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tensors differ in name or shape, such as"):
        average_checkpoints([run / "checkpoint-5", tmp_path / "other"], tmp_path / "mean")


def test_an_empty_list_and_a_folder_without_a_model_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint to average"):
        average_checkpoints([], tmp_path / "mean")
    with pytest.raises(FileNotFoundError, match=re.escape("expected a model's config.json")):
        average_checkpoints([run / "checkpoint-200"], tmp_path / "mean")
    (run / "checkpoint-5/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("expected a model's weights")):
        average_checkpoints([run / "checkpoint-5"], tmp_path / "mean")


def test_the_script_averages_and_refuses(run, tmp_path):
    def script(*flags):
        return run_command("average", *flags, cwd=tmp_path, check=False)

    output = tmp_path / "mean"
    process = script("--checkpoints_of", run, "--steps", 5, 100, "--output_dir", output)
    assert process.returncode == 0, process.stderr
    expected = average_checkpoints(select_checkpoints(run, steps=[5, 100]), tmp_path / "expected")
    weights = [load_file(folder / "model.safetensors") for folder in (output, expected)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
    again = script("--checkpoints_of", run, "--last", 1, "--output_dir", output)
    assert f"output_dir='{output}' already holds a model" in again.stderr
    twice = script("--checkpoints_of", run, "--steps", 5, 10, 10, "--output_dir", "other")
    assert "steps=[10]: expected each once" in twice.stderr.splitlines()[-1]
    twice = script("--models", "run/checkpoint-5", run / "checkpoint-5", "--output_dir", "other")
    assert "checkpoint-5: expected each folder once" in twice.stderr.splitlines()[-1]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of --models and --checkpoints_of"),
        ({"models": ["a"], "checkpoints_of": "run"}, "expected one of --models and"),
        ({"checkpoints_of": "run"}, "checkpoints_of='run': expected one of --last and --steps"),
        ({"checkpoints_of": "run", "last": 1, "steps": [1]}, "expected one of --last and --steps"),
        ({"checkpoints_of": "run", "last": 0}, "last=0: expected a positive number"),
        ({"models": ["a", "b"], "last": 2}, "last=2: expected --checkpoints_of"),
        ({"models": ["a", "b"], "steps": [2]}, r"steps=\[2\]: expected --checkpoints_of"),
    ],
)
def test_invalid_options_of_averaging_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        AveragingArguments("mean", **options)


def test_models_with_different_vocabularies_are_not_averaged(run, tmp_path):
    others = train_tokenizer(["x y z w v"] * 3, 300, show_progress=False)
    others.save_pretrained(run / "checkpoint-10")
    (run / "checkpoint-100/tokenizer_config.json").unlink()
    expect_same_tokens([run / "checkpoint-5", run / "checkpoint-100"])
    with pytest.raises(ValueError, match="checkpoint-10 has a different vocabulary"):
        expect_same_tokens([run / "checkpoint-5", run / "checkpoint-10"])
    flags = ("--models", run / "checkpoint-5", run / "checkpoint-10", "--output_dir", "mean")
    process = run_command("average", *flags, cwd=tmp_path, check=False)
    assert "checkpoint-10 has a different vocabulary" in process.stderr
    assert not (tmp_path / "mean").exists()
