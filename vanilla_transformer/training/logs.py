"""The log of a training run, read from its output folder."""

from collections.abc import Iterable
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..plotting import LOSSES, SCORES, Log, has_curves
from .checkpoints import checkpoints_by_step


def read_log(folder: str | Path) -> Log:
    """`TrainerState.log_history` of the newest state in an output folder or in its checkpoints.

    Raises:
        FileNotFoundError: The folder holds no trainer state.
        ValueError: A state can't be read, or its log has no entry for a learning curve.
    """
    folders = [Path(folder), *checkpoints_by_step(folder).values()]
    paths = [path for place in folders if (path := place / TRAINER_STATE_NAME).is_file()]
    if not paths:
        raise FileNotFoundError(
            f"{folder}: expected a training's output folder, with {TRAINER_STATE_NAME} in it or in "
            f"a {PREFIX_CHECKPOINT_DIR}"
        )
    log = max(map(_read_state, paths), key=lambda state: state.global_step).log_history
    if not has_curves(log):
        raise ValueError(
            f"{folder}: its log has none of {', '.join(LOSSES | SCORES)}: expected a training of "
            "at least logging_steps updates"
        )
    return log


def _read_state(path: Path) -> TrainerState:
    try:
        return TrainerState.load_from_json(str(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a trainer's state ({error})") from error


def read_runs(folders: Iterable[str | Path]) -> dict[str, Log]:
    """`read_log` of each folder, by its name, or by its path if two folders share a name.

    Raises:
        FileNotFoundError, ValueError: As `read_log`, or a folder is given twice.
    """
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    runs: dict[str, Log] = {}
    for path, name in zip(paths, names, strict=True):
        label = name if names.count(name) == 1 else str(path)
        if label in runs:
            raise ValueError(f"{path} is given twice")
        runs[label] = read_log(path)
    return runs
