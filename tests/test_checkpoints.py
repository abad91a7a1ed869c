"""Checkpoints are whole or not there, and what was stopped ends as if it had not been."""

import json
import logging
import os
import signal

import pytest
import torch
from conftest import small_config
from datasets import Dataset
from transformers import TrainerCallback, TrainerState

from vanilla_transformer import VanillaTransformerForConditionalGeneration, checkpoints
from vanilla_transformer.arguments import TranslationTrainingArguments
from vanilla_transformer.checkpoints import (
    ASIDE,
    CHECKSUMS,
    checkpoints_in,
    defect_of,
    newest_whole_checkpoint,
)
from vanilla_transformer.training import exit_if_interrupted, find_checkpoint, make_trainer

ROWS = [{"input_ids": [5, 6, 7, 2], "labels": [8, 9, 2]}, {"input_ids": [9, 2], "labels": [2]}] * 6


def trainer_in(folder, tokenizer, *callbacks, **options):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(tokenizer)))
    defaults = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    arguments = TranslationTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{**defaults, **options},
    )
    data = Dataset.from_list(ROWS)
    trainer = make_trainer(model, tokenizer, arguments, {"train": data, "validation": data})
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


@pytest.fixture
def run(tmp_path, tokenizer):
    trainer_in(tmp_path, tokenizer).train()
    return tmp_path


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


# ---------------------------------------------------------------- writing


def test_a_checkpoint_holds_all_files_and_their_checksums(run):
    folder = run / "checkpoint-8"
    contents = json.loads((folder / CHECKSUMS).read_text())
    assert set(contents) == {path.name for path in folder.iterdir()} - {CHECKSUMS}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} < set(contents)
    assert list(checkpoints_in(run)) == [2, 4, 6, 8]
    assert all(defect_of(path) is None for path in checkpoints_in(run).values())
    assert not list((run / ASIDE).iterdir())


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.pt", CHECKSUMS])
def test_what_is_being_written_has_no_name_yet(tokenizer, tmp_path, monkeypatch, file):
    """As a disk that is full while the third checkpoint is written."""

    def stop(args):
        if any("checkpoint-6" in str(arg) for arg in args):
            raise OSError(28, "No space left on device")

    owner, name = {
        "trainer_state.json": (TrainerState, "save_to_json"),
        "optimizer.pt": (torch, "save"),
        CHECKSUMS: (checkpoints, "_write_checksums"),
    }[file]
    write = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: stop(args) or write(*args))
    trainer = trainer_in(tmp_path, tokenizer)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert list(checkpoints_in(tmp_path)) == [2, 4]
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert (tmp_path / ASIDE / "checkpoint-6").is_dir()


def test_what_an_earlier_run_left_half_written_is_removed(tokenizer, tmp_path):
    (tmp_path / ASIDE / "checkpoint-2").mkdir(parents=True)
    (tmp_path / ASIDE / "checkpoint-2/nonsense").touch()
    trainer_in(tmp_path, tokenizer, max_steps=2).train()
    assert not (tmp_path / "checkpoint-2/nonsense").exists()
    assert defect_of(tmp_path / "checkpoint-2") is None


def test_so_many_are_kept_and_the_best_among_them(tokenizer, tmp_path):
    trainer = trainer_in(
        tmp_path,
        tokenizer,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first is the worst, hence the best
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-2,
    )
    trainer.train()
    assert list(checkpoints_in(tmp_path)) == [2, 8]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


def test_a_step_that_is_saved_again_replaces_its_checkpoint(run, tokenizer):
    trainer = trainer_in(run, tokenizer)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert list(checkpoints_in(run)) == [2, 4, 6, 8]
    assert all(defect_of(path) is None for path in checkpoints_in(run).values())


# ---------------------------------------------------------------- damage


def damage_by(kind, path):
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "one bit":
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    else:
        path.unlink()


FILES = [
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "config.json", "tokenizer.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["truncated", "one bit", "missing"])
def test_damage_is_named_and_passed_over(run, caplog, kind):
    for file in FILES:
        newest = max(checkpoints_in(run).values(), key=lambda path: int(path.name[11:]))
        path = newest / file
        content = path.read_bytes()
        damage_by(kind, path)
        assert defect_of(newest).startswith(str(path))
        with caplog.at_level(logging.WARNING):
            assert newest_whole_checkpoint(run) == run / "checkpoint-6"
        assert str(path) in caplog.text
        caplog.clear()
        path.write_bytes(content)
    assert newest_whole_checkpoint(run) == newest


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(run):
    damage_by("one bit", run / "checkpoint-6/optimizer.pt")
    arguments = TranslationTrainingArguments(
        output_dir=str(run), use_cpu=True, resume_from_checkpoint=str(run / "checkpoint-6")
    )
    with pytest.raises(ValueError, match=r"checkpoint-6/optimizer.pt is not as it was written"):
        find_checkpoint(arguments)


def test_where_none_is_whole_all_are_named(run):
    for path in checkpoints_in(run).values():
        damage_by("truncated", path / "optimizer.pt")
    message = r"is whole: .*checkpoint-8/optimizer.pt has \d+ bytes.*checkpoint-2/optimizer.pt"
    with pytest.raises(ValueError, match=message):
        newest_whole_checkpoint(run)


def test_other_trainers_checkpoints_are_looked_at_too(run):
    folder = run / "checkpoint-8"
    (folder / CHECKSUMS).unlink()
    assert defect_of(folder) is None
    damage_by("truncated", folder / "model.safetensors")
    assert defect_of(folder).startswith(f"{folder / 'model.safetensors'} can't be read")
    (folder / "trainer_state.json").unlink()
    assert defect_of(folder) == f"{folder / 'trainer_state.json'} is missing"


def test_checksums_that_are_none_are_a_defect(run):
    (run / "checkpoint-8" / CHECKSUMS).write_text("[1]")
    assert defect_of(run / "checkpoint-8").endswith("can't be read")


# ---------------------------------------------------------------- signals


class Signal(TrainerCallback):
    """Sends this process a signal in the midst of a step."""

    def __init__(self, number, step, times=1):
        self.number, self.step, self.times = number, step, times

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_its_exit_code(run, tokenizer, tmp_path, number):
    whole = trainer_in(tmp_path / "whole", tokenizer)
    whole.train()
    before = signal.getsignal(number)
    trainer = trainer_in(tmp_path / "stopped", tokenizer, Signal(number, 5), save_strategy="no")
    trainer.train()
    assert signal.getsignal(number) == before
    with pytest.raises(SystemExit) as stopped:
        exit_if_interrupted(trainer)
    assert stopped.value.code == 128 + number
    assert list(checkpoints_in(tmp_path / "stopped")) == [5]
    again = trainer_in(tmp_path / "stopped", tokenizer)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-5"))
    exit_if_interrupted(again)
    assert torch.equal(weights_of(again), weights_of(whole))


def test_the_same_signal_twice_stops_at_once(tokenizer, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer = trainer_in(tmp_path, tokenizer, Signal(signal.SIGINT, 5, times=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) == before
    assert list(checkpoints_in(tmp_path)) == [2, 4]
