"""Checkpoints that are either complete or absent, whatever interrupts training."""

import json
import logging
import math
import os
import shutil
import stat
import zlib
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, sort_checkpoints

logger = logging.getLogger(__name__)

# A folder inside the output folder for checkpoints that are being written or removed. `Trainer`
# pushes no folder with a leading underscore to the Hub.
STAGING_DIR = "_incomplete"
CHECKSUMS_NAME = "checksums.json"
# In a checkpoint's `TrainerState.stateful_callbacks`:
OFF_SCHEDULE = "off_schedule"
UNSEEN = "unseen_epochs"  # how many more epochs `TrainerState.epoch` counts than there were
REQUIRED_FILES = {  # parts of any trainer's checkpoint, and the files that each may be in
    "weights": ("*model*.safetensors", "pytorch_model*", "global_step*"),
    "optimizer state": ("optimizer*", "global_step*"),
    "learning rate scheduler": ("scheduler.pt",),
    "random number state": ("rng_state*.pth",),
}


class AtomicCheckpointTrainer(Trainer):
    """A mixin for any trainer: `class MyTrainer(AtomicCheckpointTrainer, Seq2SeqTrainer)`.

    It writes each checkpoint to a staging folder, with checksums of its files, flushes it to the
    disk, and only then renames it. An old checkpoint is moved to the staging folder before its
    files are deleted.

    If `outdated_scores` names scores such as "eval_bleu", earlier ones are renamed to
    "earlier_eval_bleu" in the log when training resumes, and the first new one is the best so far.
    """

    resumed_checkpoint: str | None = None
    outdated_scores: Collection[str] = ()
    _is_staging = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_CheckpointCallback(self))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Same as `Trainer.train`. It first deletes what an earlier run left in the staging
        folder."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str):
            self.resumed_checkpoint = resume_from_checkpoint
        if self.args.should_save:
            shutil.rmtree(Path(self.args.output_dir, STAGING_DIR), ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def resumed_state(self) -> TrainerState | None:
        """The trainer's state in the checkpoint to resume from."""
        return None if self.resumed_checkpoint is None else state_of(self.resumed_checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        """Same as in `Trainer` (5.17 to 5.24), or the staging folder while it saves."""
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING_DIR) if self._is_staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Same as in `Trainer` (5.17 to 5.24), but through the staging folder. If that is deleted
        meanwhile, a single process writes the checkpoint again."""
        folder = Path(self._get_output_dir(trial))
        staged = folder / STAGING_DIR / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            self._stage_and_publish(model, trial, staged)
        except Exception:
            if self.args.world_size > 1 or (staged / CHECKSUMS_NAME).exists():
                raise
            logger.warning("%s was deleted during the save, which starts again", staged)
            self._stage_and_publish(model, trial, staged)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / staged.name))
        self.accelerator.wait_for_everyone()  # until the checkpoint has its name

    def _stage_and_publish(self, model: nn.Module, trial: Any, staged: Path) -> None:
        folder = staged.parent.parent
        if self.args.should_save:
            # This file is created first: if it still exists in the end, so do all others.
            staged.mkdir(parents=True, exist_ok=True)
            (staged / CHECKSUMS_NAME).touch()
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_staging = False
        self.accelerator.wait_for_everyone()  # until all processes have written their files
        if self._is_best(staged):
            self.state.best_model_checkpoint = str(folder / staged.name)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            _write_checksums(staged)
            _publish(staged, folder / staged.name)
            self._delete_old_checkpoints(folder / staged.name)
            with suppress(OSError):  # the staging folder may hold something else
                staged.parent.rmdir()

    def _is_best(self, staged: Path) -> bool:
        """Whether no checkpoint so far is better. `Trainer` (5.17 to 5.24) ignores all that are
        worse than an evaluation without a checkpoint, and could end with the last one."""
        best, step = self.state.best_model_checkpoint, self.state.global_step
        known = [] if best is None else [step_of(best)]
        if not self.args.load_best_model_at_end or self.state.best_global_step in known:
            return best is not None and Path(best) == staged
        return from_worst_to_best(self.args, self.state, [*known, step])[-1:] == [step]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Same as in `Trainer` (5.17 to 5.24), but waits until the checkpoint has its final name,
        and until no earlier upload reads the files that this one replaces. If the upload fails, a
        warning says so."""
        if self._is_staging:
            return
        if self.args.hub_always_push:
            self._finish_current_push()
        before = getattr(self, "push_in_progress", None)
        super()._push_from_checkpoint(checkpoint_folder)
        current = getattr(self, "push_in_progress", None)
        if current is not None and current is not before:
            for job in current.jobs:
                job.add_done_callback(_report_failure)

    def _delete_old_checkpoints(self, newest: Path) -> None:
        limit, folder = self.args.save_total_limit, newest.parent
        if not limit or limit < 0 or self.is_uploading():
            return
        # By their times, the newest may be older than others: a clock can be set back.
        by_time = map(Path, sort_checkpoints(str(folder), use_mtime=True))
        older = [path for path in by_time if path != newest]
        kept = {Path(self.state.best_model_checkpoint or folder).resolve()}
        averaged = getattr(self.args, "average_checkpoints", None)
        if averaged and self.args.load_best_model_at_end:  # the mean of the best ones
            checkpoints = checkpoints_by_step(folder)
            best = from_worst_to_best(self.args, self.state, checkpoints)[-averaged:]
            kept |= {checkpoints[step].resolve() for step in best}
        removable = [path for path in older if path.resolve() not in kept]
        removable.sort(key=lambda path: not is_off_schedule(path))
        # A checkpoint that a signal caused must not replace one that an average needs.
        total = len(older) + (not is_off_schedule(newest))
        for path in removable[: max(0, total - limit)]:
            try:
                _delete(path)
            except OSError as error:  # such as a link, or a file that is open on NFS
                if not newest.exists():
                    raise
                logger.warning("%s is not deleted completely: %s", path, error)

    def is_uploading(self) -> bool:
        """Whether a thread may still read the output folder and a checkpoint, which the next save
        could delete."""
        push = getattr(self, "push_in_progress", None)
        return push is not None and not push.is_done()


class _CheckpointCallback(TrainerCallback):
    """Finds the best checkpoint after its run was moved or copied: it is next to the one that
    training resumes from. `Trainer` looks for it only at its old path.

    At the end it waits for the last upload before anything else writes to the output folder."""

    def __init__(self, trainer: AtomicCheckpointTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Replace the path that the checkpoint has recorded."""
        resumed, recorded = self.trainer.resumed_checkpoint, self.trainer.resumed_state()
        if resumed is None or recorded is None:
            return
        outdated = self.trainer.outdated_scores
        state.log_history = [
            {f"earlier_{name}" if name in outdated else name: log[name] for name in log}
            for log in state.log_history
        ]
        best = Path(resumed).parent / Path(recorded.best_model_checkpoint or "").name
        if recorded.best_model_checkpoint and best.is_dir():
            state.best_model_checkpoint = str(best)
            logger.info("The best checkpoint so far is %s", best)
        if _is_of_another_metric(args, state):
            _choose_best_anew(args, state, Path(resumed).parent)
            _forget_best(self.trainer.lr_scheduler)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the upload, as `Trainer` does only after the callbacks have written files."""
        self.trainer._finish_current_push()


def _is_of_another_metric(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the best score so far is of another metric or outdated, so that this run's scores
    can't be compared with it."""
    best = state.best_metric
    if args.metric_for_best_model is None or best is None or not math.isfinite(best):
        return False
    return best not in _scores(args, state).values()


def _choose_best_anew(args: TrainingArguments, state: TrainerState, folder: Path) -> None:
    """Choose among the checkpoints in a folder by this run's metric. If none has such a score, the
    best one stays until one has."""
    scores, checkpoints = _scores(args, state), checkpoints_by_step(folder)
    known = [step for step in checkpoints if math.isfinite(scores.get(step, math.nan))]
    state.best_metric = None
    if known:
        best = from_worst_to_best(args, state, known)[-1]
        state.best_global_step, state.best_metric = best, scores[best]
        state.best_model_checkpoint = str(checkpoints[best])


def _forget_best(schedule: Any) -> None:
    """Let a schedule by metric count the next score as its best so far."""
    if hasattr(schedule, "num_bad_epochs"):
        schedule.best = math.inf if schedule.mode == "min" else -math.inf


def _report_failure(upload: Future[Any]) -> None:
    if error := upload.exception():
        logger.warning("An upload to the Hub failed, and training continues: %s", error)


def _publish(staged: Path, final: Path) -> None:
    """Flush a checkpoint to the disk and give it its final name, in place of an earlier one."""
    for path in (*staged.rglob("*"), staged):
        _flush(path)
    if final.exists():
        _delete(final)
    staged.rename(final)
    _flush(final.parent)


def _delete(checkpoint: Path) -> None:
    doomed = checkpoint.parent / STAGING_DIR / f"old-{checkpoint.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk. Windows flushes only files that are open for
    writing, and can't open folders."""
    # A copy of this package's code is read-only if the package is.
    is_writable = path.is_file() and path.stat().st_mode & stat.S_IWUSR
    try:
        handle = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_checksums(checkpoint: Path) -> None:
    """Fill the empty file that was created before all others. It must still exist: if the folder
    was deleted meanwhile, files are missing, even if it exists again."""
    contents = {
        path.relative_to(checkpoint).as_posix(): [path.stat().st_size, _checksum(path)]
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != CHECKSUMS_NAME
    }
    with (checkpoint / CHECKSUMS_NAME).open("r+", encoding="utf-8") as file:
        json.dump(contents, file, indent=1)


def step_of(checkpoint: str | Path) -> int:
    """The step at the end of a checkpoint's name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def state_of(checkpoint: str | Path) -> TrainerState:
    """The trainer's state in a checkpoint."""
    return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def checkpoints_by_step(folder: str | Path) -> dict[int, Path]:
    """The checkpoints in a trainer's output folder, in order of their steps."""
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and path.is_dir():
            found[int(step)] = path
    return dict(sorted(found.items()))


def is_off_schedule(checkpoint: Path) -> bool:
    """Whether an `InterruptibleTrainer` saved this checkpoint only because of a signal."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of another trainer, or damaged
        return False
    return OFF_SCHEDULE in state.get("stateful_callbacks", {})


def _scores(args: Any, state: TrainerState) -> dict[int, float]:
    """The values of `metric_for_best_model` by the steps of the evaluations."""
    metric = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
    return {log["step"]: log[metric] for log in state.log_history if metric in log}


def times_evaluated(state: TrainerState) -> int:
    """How often the model was evaluated at the current step, by scores that are not outdated."""
    logs = [log for log in state.log_history if log["step"] == state.global_step]
    return sum(any(name.startswith("eval_") for name in log) for log in logs)


def from_worst_to_best(args: Any, state: TrainerState, steps: Iterable[int]) -> list[int]:
    """The steps at which the model was evaluated, sorted by `metric_for_best_model`; a later one
    counts as better than an equal earlier one."""
    scores = _scores(args, state)
    sign = 1 if args.greater_is_better else -1
    return sorted(scores.keys() & set(steps), key=lambda step: (sign * scores[step], step))


def expect_intact(folder: Path, files: str = "*") -> None:
    """Raise a ValueError if a folder is a checkpoint, with checksums, and one of these files was
    damaged or deleted after it was saved."""
    if (folder / CHECKSUMS_NAME).is_file() and (defect := find_defect(folder, files)):
        raise ValueError(f"{defect}: expected a complete checkpoint")


def find_defect(checkpoint: str | Path, files: str = "*") -> str | None:
    """The reason why training can't resume from a checkpoint, with the name of the file; None if
    the checkpoint is complete. `files` is a pattern of the names to check.

    A checkpoint without checksums, written by another trainer, gets a weaker check: the trainer's
    state and the header of the weights must be readable, and the other files must exist.
    """
    folder = Path(checkpoint)
    if not (folder / CHECKSUMS_NAME).is_file():
        return _find_defect_without_checksums(folder)
    try:
        text = (folder / CHECKSUMS_NAME).read_text(encoding="utf-8")
        contents: dict[str, list[int]] = json.loads(text)
        for name, (size, checksum) in contents.items():
            if not fnmatch(name, files):
                continue
            path = folder / name
            # A name must not point outside the folder. A link may: in the Hub's cache, all do.
            Path(os.path.abspath(path)).relative_to(os.path.abspath(folder))
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes: expected {size}"
            if _checksum(path) != checksum:
                return f"{path} is corrupt: its checksum does not match"
    except (ValueError, TypeError, AttributeError):
        return f"{folder / CHECKSUMS_NAME} can't be read"
    return None


def _find_defect_without_checksums(folder: Path) -> str | None:
    path = folder / TRAINER_STATE_NAME
    try:
        json.loads(path.read_text(encoding="utf-8"))
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, SafetensorError) as error:
        return f"{path} can't be read ({error})"
    names = {path.name for path in folder.iterdir()}
    for part, patterns in REQUIRED_FILES.items():
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return f"{folder} holds no {part}"
    return None


def last_complete_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in an output folder, or None if it holds no checkpoint. For
    each newer one that is skipped, a warning says why.

    A complete checkpoint that is still in the staging folder is renamed first.

    Raises:
        ValueError: There are checkpoints, but none is complete.
    """
    for staged in checkpoints_by_step(Path(folder, STAGING_DIR)).values():
        final = Path(folder, staged.name)
        if not final.exists() and find_defect(staged) is None:
            staged.rename(final)
    defects = []
    for checkpoint in reversed(checkpoints_by_step(folder).values()):
        defect = find_defect(checkpoint)
        if defect is None:
            return checkpoint
        logger.warning("%s: this checkpoint is skipped", defect)
        defects.append(defect)
    if defects:
        raise ValueError(f"no checkpoint to resume from is complete: {'; '.join(defects)}")
    return None
