"""Checkpoints are complete or absent, and an interrupted training ends as if it had not been
interrupted."""

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import run_program, slow, small_trainer
from safetensors.torch import load_file
from transformers import TrainerState

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training import checkpoints
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.checkpoints import (
    CHECKSUMS_NAME,
    STAGING_DIR,
    checkpoints_by_step,
    find_defect,
    from_worst_to_best,
    last_complete_checkpoint,
)
from vanilla_transformer.training.folder_lock import locked
from vanilla_transformer.training.resumption import find_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("trained")
    small_trainer(folder, tokenizer).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a training's output folder, which a test can change."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


# ---------------------------------------------------------------- writing


def test_a_checkpoint_holds_all_files_and_their_checksums(run):
    folder = run / "checkpoint-8"
    contents = json.loads((folder / CHECKSUMS_NAME).read_text())
    assert set(contents) == {path.name for path in folder.iterdir()} - {CHECKSUMS_NAME}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} < set(contents)
    assert list(checkpoints_by_step(run)) == [2, 4, 6, 8]
    assert all(find_defect(path) is None for path in checkpoints_by_step(run).values())
    assert not (run / STAGING_DIR).exists()


def test_a_checkpoint_is_flushed_if_folders_cannot_be_opened(run, monkeypatch):
    """As on Windows, which also flushes only files that are open for writing."""
    opened, flush, names, flushed = os.open, os.fsync, {}, set()

    def open_on_windows(path, flags, *args, **kwargs):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        handle = opened(path, flags, *args, **kwargs)
        names[handle] = path
        return handle

    def flush_on_windows(handle):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flush(handle)
        flushed.add(names[handle])

    staged = run / STAGING_DIR / "checkpoint-8"
    staged.parent.mkdir()
    (run / "checkpoint-8").rename(staged)
    files = {*staged.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_on_windows)
        patch.setattr(os, "fsync", flush_on_windows)
        checkpoints._publish(staged, run / "checkpoint-8")
    assert flushed == files
    assert find_defect(run / "checkpoint-8") is None


def test_the_name_of_a_checkpoint_is_flushed_before_older_ones_are_deleted(run, monkeypatch):
    staged, flushed = run / STAGING_DIR / "checkpoint-8", []
    staged.parent.mkdir()
    (run / "checkpoint-8").rename(staged)
    monkeypatch.setattr(checkpoints, "_flush", lambda path: flushed.append((path, staged.exists())))
    checkpoints._publish(staged, run / "checkpoint-8")
    assert flushed[-1] == (run, False)


@pytest.mark.parametrize("mode", [0o444, 0o644])
def test_a_read_only_file_is_flushed_and_an_unreadable_file_is_reported(
    tmp_path, monkeypatch, mode
):
    """A copy of the model's code is read-only if the package is."""
    file, opened = tmp_path / "modeling.py", os.open
    file.touch(mode)

    def open_as_no_root(path, flags):
        if mode == 0o644 or flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", open_as_no_root)
    if mode == 0o444:
        checkpoints._flush(file)
    else:
        with pytest.raises(PermissionError, match=r"modeling\.py"):
            checkpoints._flush(file)


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.pt", CHECKSUMS_NAME])
def test_a_checkpoint_gets_its_name_when_it_is_complete(tokenizer, tmp_path, monkeypatch, file):
    """As when the disk is full while the third checkpoint is written."""

    def stop(args):
        if any("checkpoint-6" in str(arg) for arg in args):
            raise OSError(28, "No space left on device")

    owner, name = {
        "trainer_state.json": (TrainerState, "save_to_json"),
        "optimizer.pt": (torch, "save"),
        CHECKSUMS_NAME: (checkpoints, "_write_checksums"),
    }[file]
    write = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: stop(args) or write(*args))
    trainer = small_trainer(tmp_path, tokenizer)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert list(checkpoints_by_step(tmp_path)) == [2, 4]
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert (tmp_path / STAGING_DIR / "checkpoint-6").is_dir()


@pytest.mark.parametrize("file", ["model.safetensors", *slow("optimizer.pt", "trainer_state.json")])
@pytest.mark.parametrize("leave_folder", [False, True])
def test_a_folder_removed_while_it_is_written_is_written_again(
    tokenizer, tmp_path, monkeypatch, caplog, file, leave_folder
):
    """In the end, nothing that was written before the folder disappeared is missing."""
    disturbed = []

    def remove(args):
        if disturbed or not any("checkpoint-6" in str(arg) for arg in args):
            return
        disturbed.append(file)
        aside = tmp_path / STAGING_DIR / "checkpoint-6"
        shutil.rmtree(tmp_path)
        if leave_folder:
            aside.mkdir(parents=True)

    owner, name = {
        "model.safetensors": (VanillaTransformerForConditionalGeneration, "save_pretrained"),
        "optimizer.pt": (torch, "save"),
        "trainer_state.json": (TrainerState, "save_to_json"),
    }[file]
    write = getattr(owner, name)
    monkeypatch.setattr(
        owner,
        name,
        lambda *args, **kwargs: remove([*args, *kwargs.values()]) or write(*args, **kwargs),
    )
    small_trainer(tmp_path, tokenizer).train()
    assert disturbed
    assert "was deleted during the save, which starts again" in caplog.text
    assert list(checkpoints_by_step(tmp_path)) == [6, 8]
    files = {path.name for path in (tmp_path / "checkpoint-8").iterdir()}
    assert {path.name for path in (tmp_path / "checkpoint-6").iterdir()} == files
    assert find_defect(tmp_path / "checkpoint-6") is None


def test_a_complete_checkpoint_in_the_staging_folder_gets_its_name(run):
    """As after a power failure between the two renames that replace a checkpoint of the same
    step."""
    (run / STAGING_DIR).mkdir(exist_ok=True)
    (run / "checkpoint-8").rename(run / STAGING_DIR / "checkpoint-8")
    assert last_complete_checkpoint(run) == run / "checkpoint-8"
    (run / "checkpoint-8").rename(run / STAGING_DIR / "checkpoint-8")
    (run / STAGING_DIR / "checkpoint-8/optimizer.pt").unlink()
    assert last_complete_checkpoint(run) == run / "checkpoint-6"
    shutil.copytree(run / "checkpoint-6", run / STAGING_DIR / "checkpoint-6")
    assert last_complete_checkpoint(run) == run / "checkpoint-6"


def test_an_incomplete_checkpoint_of_an_earlier_run_is_removed(tokenizer, tmp_path):
    (tmp_path / STAGING_DIR / "checkpoint-2").mkdir(parents=True)
    (tmp_path / STAGING_DIR / "checkpoint-2/nonsense").touch()
    small_trainer(tmp_path, tokenizer, max_steps=2).train()
    assert not (tmp_path / "checkpoint-2/nonsense").exists()
    assert find_defect(tmp_path / "checkpoint-2") is None


BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the first is the worst, and so the best
    "eval_strategy": "steps",
    "eval_steps": 2,
    "learning_rate": 1e-2,
}


def assert_loaded(trainer, checkpoint):
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(trainer.model.get_parameter(name), weight), name


def test_save_total_limit_checkpoints_are_kept_including_the_best(tokenizer, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer, save_total_limit=2, **BEST)
    trainer.train()
    assert list(checkpoints_by_step(tmp_path)) == [2, 8]
    state = json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    for best in (trainer.state.best_model_checkpoint, state["best_model_checkpoint"]):
        assert Path(best).samefile(tmp_path / "checkpoint-2")


def test_the_newest_checkpoint_is_kept_if_the_clock_is_set_back(tokenizer, tmp_path, monkeypatch):
    publish = checkpoints._publish

    def publish_earlier(staged, final):
        publish(staged, final)
        seconds = 1e9 - 60 * checkpoints.step_of(final)
        os.utime(final, (seconds, seconds))

    monkeypatch.setattr(checkpoints, "_publish", publish_earlier)
    small_trainer(tmp_path, tokenizer, save_total_limit=1).train()
    assert list(checkpoints_by_step(tmp_path)) == [8]


@pytest.mark.parametrize("kind", ["link", "open on NFS"])
def test_training_continues_if_an_old_checkpoint_cannot_be_deleted(
    tokenizer, run, tmp_path, monkeypatch, caplog, kind
):
    """As one that was moved to another disk."""
    elsewhere, delete = run / "elsewhere", shutil.rmtree
    elsewhere.mkdir()
    for step in (2, 4, 6):
        if kind == "link":
            (run / f"checkpoint-{step}").rename(elsewhere / str(step))
            (run / f"checkpoint-{step}").symlink_to(elsewhere / str(step))

    def delete_on_nfs(path, ignore_errors=False):
        if kind != "link" and Path(path).exists() and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        delete(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", delete_on_nfs)
    trainer = small_trainer(run, tokenizer, max_steps=10, save_total_limit=1)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-8"))
    assert list(checkpoints_by_step(run)) == [10]
    assert caplog.text.count("is not deleted completely") == (3 if kind == "link" else 4)
    assert "was deleted during the save" not in caplog.text
    assert all(find_defect(path) is None for path in elsewhere.iterdir())


def test_the_best_is_a_checkpoint_even_if_another_evaluation_was_better(tokenizer, tmp_path):
    trainer = small_trainer(tmp_path, tokenizer, save_steps=4, **BEST)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert_loaded(trainer, tmp_path / "checkpoint-4")


@pytest.mark.parametrize(("folder", "limit"), [("./out", 1), ("../here/out", 2), (".", 1)])
def test_the_best_is_found_however_the_folder_is_spelled(
    tokenizer, tmp_path, monkeypatch, folder, limit
):
    here = tmp_path / "here"
    (here / "out").mkdir(parents=True)
    monkeypatch.chdir(here)
    trainer = small_trainer(folder, tokenizer, save_total_limit=limit, **BEST)
    trainer.train()
    assert list(checkpoints_by_step(folder)) == [2, 8]
    assert_loaded(trainer, here / folder / "checkpoint-2")
    assert Path(trainer.state.best_model_checkpoint).samefile(here / folder / "checkpoint-2")


@pytest.mark.parametrize(
    ("folder", "resumed"),
    [
        ("out/", "{here}/out/checkpoint-4"),
        ("{here}/out", "./out/checkpoint-4/"),
        ("elsewhere", "./out/checkpoint-4/"),
    ],
)
def test_the_best_is_found_after_resuming_under_a_different_path(
    tokenizer, tmp_path, monkeypatch, folder, resumed
):
    """It is neither removed in favour of newer ones, nor forgotten if training continues in a
    different folder."""
    monkeypatch.chdir(tmp_path)
    small_trainer("./out", tokenizer, max_steps=4, **BEST).train()
    folder, resumed = (name.format(here=tmp_path) for name in (folder, resumed))
    trainer = small_trainer(folder, tokenizer, save_total_limit=2, **BEST)
    trainer.train(resume_from_checkpoint=resumed)
    assert_loaded(trainer, tmp_path / "out/checkpoint-2")


@pytest.mark.parametrize("copied", [False, True])
def test_the_best_is_found_after_the_folder_was_moved(tokenizer, tmp_path, monkeypatch, copied):
    monkeypatch.chdir(tmp_path)
    small_trainer("out", tokenizer, max_steps=4, **BEST).train()
    (shutil.copytree if copied else shutil.move)("out", "now")
    trainer = small_trainer("now", tokenizer, save_total_limit=2, **BEST)
    trainer.train(resume_from_checkpoint="now/checkpoint-4")
    assert trainer.state.best_model_checkpoint == "now/checkpoint-2"
    assert list(checkpoints_by_step("now")) == [2, 8]
    assert_loaded(trainer, tmp_path / "now/checkpoint-2")


def test_a_different_metric_selects_a_new_best(tokenizer, tmp_path):
    """The first metric is the evaluation's runtime, and no loss is below it."""
    by_loss = {**BEST, "greater_is_better": False}
    trainer = small_trainer(tmp_path, tokenizer, max_steps=4, **by_loss)
    trainer.args.metric_for_best_model = "runtime"
    trainer.train()
    for steps in (4, 8):
        trainer = small_trainer(tmp_path, tokenizer, max_steps=steps, **by_loss)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert (trainer.state.best_global_step, trainer.state.best_metric) == (steps, losses[-1])
        assert_loaded(trainer, tmp_path / f"checkpoint-{steps}")


def test_after_outdated_scores_the_first_new_one_is_the_best(tokenizer, tmp_path):
    """Without a new score, the best of the old ones is loaded."""
    small_trainer(tmp_path, tokenizer, max_steps=4, **BEST).train()
    for steps, best, scored in ((4, 2, []), (8, 6, [8, 6])):
        trainer = small_trainer(tmp_path, tokenizer, max_steps=steps, **BEST)
        trainer.outdated_scores = {"eval_loss"}
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert_loaded(trainer, tmp_path / f"checkpoint-{best}")
        assert from_worst_to_best(trainer.args, trainer.state, [2, 4, 6, 8]) == scored


def test_a_checkpoint_whose_scores_are_all_outdated_is_evaluated_again(tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2}
    first = small_trainer(tmp_path, tokenizer, max_steps=4, **options)
    first.train()
    trainer = small_trainer(tmp_path, tokenizer, **options)
    names = {name for log in first.state.log_history for name in log}
    trainer.outdated_scores = {name for name in names if name.startswith("eval_")}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [4, 6, 8]


@pytest.mark.parametrize(("outdated", "halved"), [(set(), 3), ({"eval_loss"}, 2)])
def test_a_schedule_compares_no_new_score_with_outdated_ones(tokenizer, tmp_path, outdated, halved):
    """Each evaluation without a gain halves the learning rate: all but the first."""
    options = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.9},
        "learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    small_trainer(tmp_path, tokenizer, max_steps=2, **options).train()
    trainer = small_trainer(tmp_path, tokenizer, max_steps=4, **options)
    trainer.outdated_scores = outdated
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**halved)


def test_saving_a_step_again_replaces_its_checkpoint(run, tokenizer):
    trainer = small_trainer(run, tokenizer)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert list(checkpoints_by_step(run)) == [2, 4, 6, 8]
    assert all(find_defect(path) is None for path in checkpoints_by_step(run).values())


def test_checkpoints_later_than_the_resumed_one_are_reported(run, caplog):
    """The next "auto" would continue from them, and not from this training."""
    for step, warnings in ((8, []), (4, ["6, 8"])):
        caplog.clear()
        wanted = str(run / f"checkpoint-{step}")
        arguments = {"use_cpu": True, "resume_from_checkpoint": wanted}
        assert find_checkpoint(TranslationTrainingArguments(str(run), **arguments)) == wanted
        assert [record.args[2] for record in caplog.records] == warnings
    assert last_complete_checkpoint(run) == run / "checkpoint-8"


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
def test_a_damaged_checkpoint_is_reported_and_skipped(run, caplog, kind):
    for file in FILES:
        newest = max(checkpoints_by_step(run).values(), key=lambda path: int(path.name[11:]))
        path = newest / file
        content = path.read_bytes()
        damage_by(kind, path)
        assert find_defect(newest).startswith(str(path))
        with caplog.at_level(logging.WARNING):
            assert last_complete_checkpoint(run) == run / "checkpoint-6"
        assert str(path) in caplog.text
        caplog.clear()
        path.write_bytes(content)
    assert last_complete_checkpoint(run) == newest


def test_a_checkpoint_may_consist_of_links(run):
    """As in the Hub's cache, which keeps the files elsewhere."""
    folder, blobs = run / "checkpoint-8", run / "blobs"
    blobs.mkdir()
    for path in [*folder.iterdir()]:
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "blobs", path.name))
    assert find_defect(folder) is None
    damage_by("one bit", blobs / "optimizer.pt")
    assert find_defect(folder).startswith(f"{folder / 'optimizer.pt'} is corrupt")


def test_a_damaged_checkpoint_that_is_named_is_refused(run):
    damage_by("one bit", run / "checkpoint-6/optimizer.pt")
    arguments = TranslationTrainingArguments(
        output_dir=str(run), use_cpu=True, resume_from_checkpoint=str(run / "checkpoint-6")
    )
    with pytest.raises(
        ValueError, match=r"checkpoint-6/optimizer.pt is corrupt: its checksum does not match"
    ):
        find_checkpoint(arguments)


def test_if_no_checkpoint_is_complete_all_are_reported(run):
    for path in checkpoints_by_step(run).values():
        damage_by("truncated", path / "optimizer.pt")
    message = r"is complete: .*checkpoint-8/optimizer.pt has \d+ bytes.*checkpoint-2/optimizer.pt"
    with pytest.raises(ValueError, match=message):
        last_complete_checkpoint(run)


def test_checkpoints_of_other_trainers_are_checked_too(run):
    folder = run / "checkpoint-8"
    (folder / CHECKSUMS_NAME).unlink()
    assert find_defect(folder) is None
    damage_by("truncated", folder / "model.safetensors")
    assert find_defect(folder).startswith(f"{folder / 'model.safetensors'} can't be read")
    (folder / "trainer_state.json").unlink()
    assert find_defect(folder) == f"{folder / 'trainer_state.json'} is missing"


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.safetensors", "weights"),
        ("optimizer.pt", "optimizer state"),
        ("scheduler.pt", "learning rate scheduler"),
        ("rng_state.pth", "random number state"),
    ],
)
def test_a_checkpoint_without_checksums_and_a_necessary_file_is_incomplete(run, file, part):
    """As when somebody removes the folder while it is renamed: without one of these files, training
    would continue, but with a different result."""
    for name in (CHECKSUMS_NAME, file):
        (run / "checkpoint-8" / name).unlink()
    assert find_defect(run / "checkpoint-8") == f"{run / 'checkpoint-8'} holds no {part}"


def test_invalid_checksums_are_a_defect(run):
    (run / "checkpoint-8" / CHECKSUMS_NAME).write_text("[1]")
    assert find_defect(run / "checkpoint-8").endswith("can't be read")


# ---------------------------------------------------------------- two trainings, one folder


@contextmanager
def another_training(folder):
    """A second process that trains in a folder, with a worker that outlives it for a moment."""
    (told, tell), (alive, life) = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        try:
            os.close(life)
            with locked(folder):
                if os.fork() == 0:  # the worker
                    os.read(alive, 1)  # until the test ends
                    os._exit(0)
                os.write(tell, b"!")
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"!"
        yield other
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        for handle in (told, alive, life):
            os.close(handle)


def test_a_folder_that_another_training_is_using_is_refused(tmp_path):
    message = f"output_dir={tmp_path}: expected a folder in which no other training is at work"
    with (
        another_training(tmp_path),
        pytest.raises(FileExistsError, match=message),
        locked(tmp_path),
    ):
        pass


def test_a_killed_training_releases_its_folder(tmp_path):
    with another_training(tmp_path) as other:
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        with locked(tmp_path):
            assert (
                find_checkpoint(TranslationTrainingArguments(str(tmp_path), use_cpu=True)) is None
            )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_training_that_fails_leaves_no_trace_of_the_lock(tmp_path, error):
    def fail(folder):
        with locked(folder):
            assert folder.is_dir()
            raise error

    (tmp_path / "here").mkdir()
    for name in ("here", "new"):
        with pytest.raises(error):
            fail(tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "here"]


OTHER_HOST = """
import os
from pathlib import Path
from types import SimpleNamespace
from accelerate import PartialState
from vanilla_transformer.training import folder_lock, resumption

folder_lock.SECONDS_TO_APPEAR = 0.5
state = PartialState(cpu=True)
disk = Path(os.environ["RANK"])
disk.mkdir()
(disk / "out").mkdir()
(disk / "out/_lock").write_bytes(b"an older training's")
for folder in (Path("shared"), disk / "out"):
    try:
        with folder_lock.locked(folder):
            print("trains in", folder.name)
    except FileNotFoundError as error:
        print(error)
resumption._find_checkpoint = lambda *arguments: "0/out"  # what the main process has found
os.chdir("/" if state.process_index else ".")
try:
    resumption.find_checkpoint(SimpleNamespace(
        output_dir="out", resume_from_checkpoint="0/out", deepspeed_plugin=None))
except FileNotFoundError as error:
    print(error)
state.destroy_process_group()
"""


def test_processes_that_see_different_folders_are_refused_before_they_train(tmp_path):
    """Otherwise the second host would find no model to score after all updates."""
    failed, output = run_program(2, OTHER_HOST, cwd=tmp_path)
    assert not failed, output
    assert output.count("trains in shared") == 2
    for disk in "01":
        message = f"output_dir={disk}/out: process 0 sees this folder, processes [1] do not: expec"
        assert message in output
    assert output.count("\n0/out: process 0 sees this folder, processes [1] do not: expect") == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_training_works_on_file_systems_without_locks(tmp_path, monkeypatch, number):
    def lock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lock)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["there", "new"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch, name):
    """Otherwise the first checkpoint would fail, after hours of training."""
    (tmp_path / "there").mkdir()

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open" if name == "there" else "mkdir", refuse)
    monkeypatch.setattr(os, "access", lambda *args: False)
    message = f"output_dir={tmp_path / name}: expected a folder that can be written .Read-only file"
    with pytest.raises(PermissionError, match=message), locked(tmp_path / name):
        pass


def test_a_lock_that_another_user_has_left_is_ignored(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with locked(tmp_path):
        pass


def test_a_file_as_output_folder_is_not_locked_but_refused(tmp_path):
    (tmp_path / "file").touch()
    with locked(tmp_path / "file"), pytest.raises(FileExistsError, match="is a file: expected a"):
        find_checkpoint(TranslationTrainingArguments(str(tmp_path / "file"), use_cpu=True))
