"""Checkpoints that are whole or not there, whatever stops a training.

WholeCheckpointTrainer   a `Trainer` that writes them aside and renames them when they are done
checkpoints_in           those in an output folder
newest_whole_checkpoint  the one to go on from
defect_of                what is wrong with one
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

logger = logging.getLogger(__name__)

# In the output folder: what is being written, and what is being removed. `Trainer` pushes no folder
# with such a name to the Hub.
ASIDE = "_incomplete"
CHECKSUMS = "checksums.json"
PARTS = {  # of any trainer's checkpoint, and what holds each
    "weights": ("*model*.safetensors", "pytorch_model*", "global_step*"),
    "optimizer state": ("optimizer*", "global_step*"),
    "schedule": ("scheduler.pt",),
    "state of random numbers": ("rng_state*.pth",),
}


class WholeCheckpointTrainer(Trainer):
    """For any trainer: `class Mine(WholeCheckpointTrainer, Seq2SeqTrainer)`.

    A checkpoint is written aside, flushed to the disk, and gets its name when nothing of it is
    missing; checksums of its files lie beside them. One that is to go loses its name first.
    """

    _is_saving = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; what an earlier run has left half-written is removed."""
        if self.args.should_save:
            shutil.rmtree(Path(self.args.output_dir, ASIDE), ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return super().train(*args, **kwargs)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """As the trainer's (5.17 to 5.23), which looks for the best checkpoint where it was saved:
        if the folder has been moved or copied since, it is beside the one to resume from."""
        trained = super()._init_training_state(*args)
        *_, resumed, _ = args
        if resumed is not None:
            state = TrainerState.load_from_json(os.path.join(resumed, TRAINER_STATE_NAME))
            best = Path(resumed).parent / Path(state.best_model_checkpoint or "").name
            if state.best_model_checkpoint and best.is_dir():
                self.state.best_model_checkpoint = str(best)
                logger.info("The best checkpoint so far is %s", best)
        return trained

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, ASIDE) if self._is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        aside = folder / ASIDE / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            self._save_whole(model, trial, aside)
        except Exception:
            if self.args.world_size > 1 or (aside / CHECKSUMS).exists():
                raise
            logger.warning("%s was removed while it was written: once more", aside)
            self._save_whole(model, trial, aside)
        self.accelerator.wait_for_everyone()  # none goes on before it is there

    def _save_whole(self, model: nn.Module, trial: Any, aside: Path) -> None:
        folder = aside.parent.parent
        if self.args.should_save:
            # Not before there is this file can one tell that all others are still there.
            aside.mkdir(parents=True, exist_ok=True)
            (aside / CHECKSUMS).touch()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        self.accelerator.wait_for_everyone()  # all of them have written
        best = self.state.best_model_checkpoint
        if best and Path(best) == aside:
            self.state.best_model_checkpoint = str(folder / aside.name)
        if self.args.should_save:
            self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
            _write_checksums(aside)
            _put_in_place(aside, folder / aside.name)
            self._remove_oldest(folder)
            with suppress(OSError):  # of a folder in which there is something else
                aside.parent.rmdir()

    def _remove_oldest(self, folder: Path) -> None:
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return
        *older, _ = map(Path, sort_checkpoints(str(folder), use_mtime=True))
        best = Path(self.state.best_model_checkpoint or folder).resolve()
        removable = [path for path in older if path.resolve() != best]
        for path in removable[: max(0, len(older) + 1 - limit)]:
            _remove(path)


def _put_in_place(aside: Path, final: Path) -> None:
    """Give a checkpoint that is on the disk its name, which an earlier one of its step may have."""
    for path in (*aside.rglob("*"), aside):
        _flush(path)
    if final.exists():
        _remove(final)
    aside.rename(final)
    _flush(final.parent)


def _remove(checkpoint: Path) -> None:
    doomed = checkpoint.parent / ASIDE / f"old-{checkpoint.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(checkpoint: Path) -> Iterator[Path]:
    return (path for path in sorted(checkpoint.rglob("*")) if path.is_file())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_checksums(checkpoint: Path) -> None:
    """Fill the file that was there, empty, before all others. A folder that somebody removes loses
    it like any other, also where those written later are there again."""
    contents = {
        path.relative_to(checkpoint).as_posix(): [path.stat().st_size, _checksum(path)]
        for path in _files(checkpoint)
        if path.name != CHECKSUMS
    }
    with (checkpoint / CHECKSUMS).open("r+") as file:
        json.dump(contents, file, indent=1)


def checkpoints_in(folder: str | Path) -> dict[int, Path]:
    """A trainer's checkpoints in its output folder, by growing step."""
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and path.is_dir():
            found[int(step)] = path
    return dict(sorted(found.items()))


def defect_of(checkpoint: str | Path) -> str | None:
    """What keeps a trainer's checkpoint from being resumed, naming the file; None if it is whole.

    Where there are no checksums, as in a checkpoint of another trainer, only the trainer's state,
    the header of the weights and the names of the files are looked at.
    """
    folder = Path(checkpoint)
    if not (folder / CHECKSUMS).is_file():
        return _defect_without_checksums(folder)
    try:
        contents: dict[str, list[int]] = json.loads((folder / CHECKSUMS).read_text())
        for name, (size, checksum) in contents.items():
            path = folder / name
            path.resolve().relative_to(folder.resolve())  # a name may not lead out of the folder
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes: expected {size}"
            if _checksum(path) != checksum:
                return f"{path} is not as it was written"
    except (ValueError, TypeError, AttributeError):
        return f"{folder / CHECKSUMS} can't be read"
    return None


def _defect_without_checksums(folder: Path) -> str | None:
    path = folder / TRAINER_STATE_NAME
    try:
        json.loads(path.read_text())
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, SafetensorError) as error:
        return f"{path} can't be read ({error})"
    names = {path.name for path in folder.iterdir()}
    for part, patterns in PARTS.items():
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return f"{folder} holds no {part}"
    return None


def newest_whole_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in an output folder that nothing is wrong with; a warning says which
    ones are passed over, and why. None if there is no checkpoint at all.

    One that was whole but had no name yet gets it now.

    Raises:
        ValueError: There are some, but none is whole.
    """
    for aside in checkpoints_in(Path(folder, ASIDE)).values():
        final = Path(folder, aside.name)
        if not final.exists() and defect_of(aside) is None:
            aside.rename(final)
    defects = []
    for checkpoint in reversed(checkpoints_in(folder).values()):
        defect = defect_of(checkpoint)
        if defect is None:
            return checkpoint
        logger.warning("%s: it is passed over", defect)
        defects.append(defect)
    if defects:
        raise ValueError(f"no checkpoint to resume from is whole: {'; '.join(defects)}")
    return None
