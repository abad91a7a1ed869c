"""The average of the last checkpoints' weights (section 6.1), tensor by tensor."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..inference.derived_cards import card_metadata, write_card
from ..inference.loading import open_weights
from .checkpoints import CHECKSUMS_NAME, checkpoints_by_step, expect_intact, is_off_schedule

# Files of a checkpoint that do not belong to an averaged model: its own weights, the trainer's
# state, also under FSDP, and reports.
NOT_COPIED = (
    "*.safetensors", SAFE_WEIGHTS_INDEX_NAME, "trainer_state.json", "training_args.bin",
    "optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin", "scheduler.pt", "scaler.pt",
    "rng_state*", CHECKSUMS_NAME, "README.md", "curves.png",
)  # fmt: skip
# Fields that don't change the output of a trained model, besides the rates of dropout.
IGNORED_CONFIG_FIELDS = {
    "transformers_version", "dtype", "_name_or_path", "label_smoothing", "initializer", "use_cache",
}  # fmt: skip


def checkpoints_with_weights(folder: str | Path) -> dict[int, Path]:
    """The checkpoints in a trainer's output folder that hold safetensors weights, by step."""
    return {step: path for step, path in checkpoints_by_step(folder).items() if _weight_map(path)}


def select_checkpoints(
    folder: str | Path, last: int | None = None, steps: Sequence[int] | None = None
) -> list[Path]:
    """The last `last` checkpoints with weights in a trainer's output folder, or those of `steps`.
    Checkpoints that were saved only because of a signal don't count as last.

    Raises:
        FileNotFoundError: There are fewer, or none of one of the steps. The message names those
            that exist.
        ValueError: A step is repeated.
    """
    found = checkpoints_with_weights(folder)
    there = f"{folder} holds checkpoints of steps {list(found) or 'none'}"
    if steps is not None:
        if repeated := sorted({step for step in steps if steps.count(step) > 1}):
            raise ValueError(f"steps={repeated}: expected each once")
        missing = [step for step in steps if step not in found]
        if missing:
            raise FileNotFoundError(f"{there}, expected {missing}")
        return [found[step] for step in steps]
    on_schedule = [path for path in found.values() if not is_off_schedule(path)]
    if last is None or last > len(on_schedule):
        raise FileNotFoundError(f"{there}, expected {last or 'some'}")
    return on_schedule[-last:]


def average_checkpoints(folders: Sequence[str | Path], output_dir: str | Path) -> Path:
    """Write a model with the mean of the weights in the folders, the configuration and tokenizer
    of the last folder, and a card with its languages and licence.

    Besides the mean, only one tensor of one checkpoint is in memory at a time. Sums are in
    float64. Integer tensors are copied from the last folder.

    Args:
        folders: Models of the same architecture.
        output_dir: Where to write the averaged model.

    Raises:
        FileExistsError: The output folder holds a model, whose card would be wrong.
        FileNotFoundError: A folder holds no safetensors weights.
        ValueError: There is no folder, one is repeated, the models differ in architecture or are
            quantized, weights are damaged, or the last one's card can't be read.
    """
    if Path(output_dir, "config.json").exists():
        raise FileExistsError(
            f"output_dir={str(output_dir)!r} already holds a model: expected another folder"
        )
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("there is no checkpoint to average")
    _expect_each_once(paths)
    metadata = card_metadata(paths[-1])
    output = write_average(paths, output_dir)
    if not (output / "README.md").exists():
        names = "\n".join(f"- {path.resolve().name}" for path in paths)
        write_card(output, metadata, f"The mean of the weights of\n\n{names}")
    return output


def write_average(folders: Sequence[str | Path], output_dir: str | Path) -> Path:
    """Same as `average_checkpoints`, without a card."""
    paths = [Path(folder) for folder in folders]
    _check_same_architecture(paths)
    for path in paths:
        expect_intact(path, "*.safetensors")  # its optimizer's state may be damaged or deleted
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(_mean(paths), str(output))
    # The configuration is last: a folder that has one is complete.
    for file in sorted(paths[-1].iterdir(), key=lambda file: file.name == "config.json"):
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            shutil.copy2(file, output)
    return output


def _mean(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    places = [_weight_map(path) for path in paths]
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for weights in places
            for file in set(weights.values())
        }

        def read(weights: dict[str, Path], name: str) -> torch.Tensor:
            return files[weights[name]].get_tensor(name)

        mean = {}
        for name in tqdm(places[-1], desc="Averaging", leave=False):
            last = read(places[-1], name)
            if last.is_floating_point():
                total = last.double()
                for weights in places[:-1]:
                    total += read(weights, name)
                last = (total / len(places)).to(last.dtype)
            mean[name] = last
        return mean


def _weight_map(folder: Path) -> dict[str, Path]:
    """The file of each tensor; empty if there are no safetensors weights."""
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        with open_weights(whole) as file:
            return dict.fromkeys(file.keys(), whole)
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / Path(place).name for name, place in places.items()}
    return {}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    weights = _weight_map(folder)
    if not weights:
        raise FileNotFoundError(f"{folder}: expected a model's weights, {SAFE_WEIGHTS_NAME}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(weights.values())):
        with open_weights(path) as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a model's config.json")
    values = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: value
        for name, value in values.items()
        if name not in IGNORED_CONFIG_FIELDS and "dropout" not in name
    }


def _expect_each_once(folders: Sequence[Path]) -> None:
    """Raise a ValueError if two names lead to one folder, which would count twice in the mean."""
    places = [folder.resolve() for folder in folders]
    named = zip(folders, places, strict=True)
    if repeated := dict.fromkeys(str(name) for name, place in named if places.count(place) > 1):
        raise ValueError(f"{', '.join(repeated)}: expected each folder once")


def _check_same_architecture(paths: Sequence[Path]) -> None:
    first, shapes = _read_config(paths[0]), _shapes(paths[0])
    if "quantization_config" in first:
        raise ValueError(f"{paths[0]} is quantized: expected models before they are quantized")
    for path in paths[1:]:
        other = _read_config(path)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{path} holds a different architecture from {paths[0]}: its {name} is "
                    f"{other.get(name)!r}, not {first.get(name)!r}"
                )
        differing = {name for name, _ in shapes.items() ^ _shapes(path).items()}
        if differing:
            raise ValueError(
                f"{path} holds a different architecture from {paths[0]}: tensors differ in name or "
                f"shape, such as {min(differing)}"
            )
