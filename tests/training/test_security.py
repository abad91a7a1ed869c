"""Data is never executed: payloads planted in every file are not run."""

import json
import pickle
import re
import shutil
import sys

import pytest
import torch
from conftest import Payload, run_command, run_in_copy, small_config
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.parallel_text import DataArguments, load_parallel_dataset
from vanilla_transformer.export.source import expect_model
from vanilla_transformer.inference.loading import LoadingArguments, read_config
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.averaging import average_checkpoints
from vanilla_transformer.training.checkpoints import CHECKSUMS_NAME, find_defect
from vanilla_transformer.training.hub import expect_finished_model
from vanilla_transformer.training.trainer import make_trainer


def plant(path, mark):
    path.write_bytes(pickle.dumps(Payload(mark)))


def plant_as_torch_does(path, mark):
    torch.save({"state": Payload(mark)}, path)


PLANTERS = pytest.mark.parametrize("planter", [plant, plant_as_torch_does])


@PLANTERS
def test_the_payload_is_executed_if_pickles_are_trusted(tmp_path, planter):
    planter(tmp_path / "file.bin", tmp_path / "trace")
    if planter is plant:
        pickle.loads((tmp_path / "file.bin").read_bytes())
    else:
        torch.load(tmp_path / "file.bin", weights_only=False)
    assert (tmp_path / "trace").exists()


@PLANTERS
def test_pickled_weights_are_refused(checkpoint, tmp_path, mark, planter):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    planter(folder / "pytorch_model.bin", mark)
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl|unsafe|pickle"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        average_checkpoints([folder], tmp_path / "mean")


def trainer_in(folder, tokenizer, **options):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(tokenizer)))
    arguments = TranslationTrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    rows = [{"input_ids": [5, 2], "labels": [8, 2]}] * 4
    return make_trainer(model, tokenizer, arguments, {"train": Dataset.from_list(rows)})


@PLANTERS
@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickled_training_state_is_refused(tokenizer, tmp_path, mark, planter, file):
    trainer_in(tmp_path, tokenizer).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / CHECKSUMS_NAME).unlink()
    planter(checkpoint / file, mark)
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl|unsafe|pickle"):
        trainer_in(tmp_path, tokenizer).train(resume_from_checkpoint=str(checkpoint))


def test_pickled_training_arguments_are_never_read(tokenizer, tmp_path, mark):
    trainer_in(tmp_path, tokenizer).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / CHECKSUMS_NAME).unlink()
    plant(checkpoint / "training_args.bin", mark)
    trainer = trainer_in(tmp_path, tokenizer)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("name", ["train.pkl", "train.pickle", "train.pt", "train.npy"])
def test_pickled_data_is_refused(tmp_path, mark, name, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    plant(folder / name, mark)
    with pytest.raises(ValueError, match="expected a name that ends in one of"):
        DataArguments(train_file=str(folder / name))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(Exception, match=r"(?i)no .*data files|supported|couldn't find"):
        load_parallel_dataset(DataArguments(dataset_name=str(folder)))


def test_code_in_a_model_folder_is_only_run_on_request(checkpoint, tmp_path, mark):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("*.py"):
        path.write_text(f"import os\nos.mkdir({str(mark)!r})\n{path.read_text()}")
    (tmp_path / "text").write_text("see\n")
    text = ["--source", "text", "--target", "text"]
    for command in (
        ["translate", "--model", "model", "--source", "text", "--max_new_tokens", "2"],
        ["evaluate", "--model", "model", *text],
        ["score", "--model", "model", *text],
        ["plot", "attention", "--model", "model", "--source", "see", "--output", "maps.png"],
    ):
        run_command(*command, cwd=tmp_path)
    assert (tmp_path / "maps.png").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "{folder}/secret.safetensors"])
def test_a_weight_index_cannot_refer_to_files_outside_its_folder(checkpoint, tmp_path, name):
    """A hostile index would have had the secret in a model that is shared."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    save_file({"secret": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["secret"] = name.format(folder=tmp_path)
    index.write_text(json.dumps(content))
    with pytest.raises(FileNotFoundError, match=r"secret\.safetensors"):
        average_checkpoints([folder], tmp_path / "mean")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    message = r"index\.json: expected files in this folder, but it names .*secret"
    load = LoadingArguments(device="cpu").load
    for read in (load, read_config, expect_model, expect_finished_model):
        with pytest.raises(ValueError, match=message):
            read(folder)


def test_an_index_in_a_subfolder_cannot_refer_to_files_outside_either(checkpoint, tmp_path):
    """transformers finds it by a field of the configuration."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    weights = dict.fromkeys(load_file(tmp_path / "secret.safetensors"), "../secret.safetensors")
    index = folder / "shards" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = str(index.relative_to(folder))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^{index}: expected files in this folder"):
        LoadingArguments(device="cpu").load(folder)


@pytest.mark.parametrize("name", ["../secret", "{folder}/secret"])
def test_checksums_cannot_refer_to_files_outside_their_folder(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    contents = {name.format(folder=tmp_path): [6, 0]}
    (folder / CHECKSUMS_NAME).write_text(json.dumps(contents))
    assert find_defect(folder) == f"{folder / CHECKSUMS_NAME} can't be read"


def test_a_pickle_in_place_of_a_tokenizer_file_is_refused(checkpoint, tmp_path, mark):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    plant(folder / "tokenizer.json", mark)
    with pytest.raises(Exception, match=r"(?i)utf-8|tokenizer|expected"):
        AutoTokenizer.from_pretrained(folder)


HOSTILE_SIZES = [
    ("vocab_size", 10**12, "expected at most 16777216"),
    ("decoder_vocab_size", 10**12, "expected at most 16777216"),
    ("encoder_layers", 10**9, "expected at most 1000"),
    ("decoder_layers", 10**9, "expected at most 1000"),
    ("max_position_embeddings", 10**12, "expected at most 16777216"),
    ("d_model", 2**40, "expected at most 16777216"),
    ("encoder_ffn_dim", 10**30, "expected at most 16777216"),
    ("head_dim", 2**24, "encoder_attention_heads=2 of head_dim=16777216: expected at most"),
    ("hidden_size", -3, "hidden_size=-3 is another name of d_model=24: expected one"),
    ("vocab_size", 1e12, "expected int, got float"),
    ("d_model", "512", "expected int, got str"),
    # the largest that is allowed, but not the checkpoint's size
    ("vocab_size", 2**24, "vocab_size=16777216.*: .* that the checkpoint lacks"),
    ("decoder_vocab_size", 2**24, "decoder_vocab_size=16777216.*: .* that the checkpoint lacks"),
    ("encoder_ffn_dim", 2**24, "encoder_ffn_dim=16777216.*: .* that the checkpoint lacks"),
]
LOAD = """
import json, psutil, resource, sys
from pathlib import Path
from transformers import AutoModelForSeq2SeqLM
most = psutil.Process().memory_info().vms + 8 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (most, most))
kept = json.loads(Path("config.json").read_text())
for name, value, expected in json.loads(sys.argv[1]):
    Path("config.json").write_text(json.dumps({**kept, name: value}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        AutoModelForSeq2SeqLM.from_pretrained(".")
        print("loaded")
    except MemoryError:
        print("memory")
    except Exception as error:
        print(" ".join(str(error).split()))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 200_000, f"{name}={value} took {taken} kB"
"""


def test_hostile_sizes_are_refused_before_memory_is_allocated(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("*.py"):
        path.unlink()
    (tmp_path / "load.py").write_text(LOAD)
    script = [sys.executable, tmp_path / "load.py", json.dumps(HOSTILE_SIZES)]
    done = run_in_copy(script, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(HOSTILE_SIZES)
    for (name, value, expected), line in zip(HOSTILE_SIZES, lines, strict=True):
        assert name in line, (name, value, line)
        assert re.search(expected, line), (name, value, line)
