"""The mean of the last checkpoints' weights (section 6.1), tensor by tensor."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpoints import CHECKSUMS, checkpoints_in

# What a trainer's checkpoint holds besides a model; none of it fits averaged weights.
OF_THE_TRAINER = {
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    CHECKSUMS,
    SAFE_WEIGHTS_INDEX_NAME,
}
IMMATERIAL = {"transformers_version", "dtype", "_name_or_path"}  # in a configuration


def with_weights(folder: str | Path) -> dict[int, Path]:
    """Of a trainer's checkpoints in its output folder those that hold weights, by growing step."""
    checkpoints = checkpoints_in(folder)
    return {step: path for step, path in checkpoints.items() if _weight_files(path)}


def find_checkpoints(
    folder: str | Path, last: int | None = None, steps: Sequence[int] | None = None
) -> list[Path]:
    """Of the checkpoints `with_weights` in a folder the last so many, or those of `steps`.

    Raises:
        FileNotFoundError: There are fewer, or none of such a step; those there are are named.
    """
    found = with_weights(folder)
    there = f"{folder}: there are checkpoints of the steps {list(found) or 'none'}"
    if steps is not None:
        missing = [step for step in steps if step not in found]
        if missing:
            raise FileNotFoundError(f"{there}, expected {missing}")
        return [found[step] for step in steps]
    if last is None or last > len(found):
        raise FileNotFoundError(f"{there}, expected {last or 'some'}")
    return list(found.values())[-last:]


def average_checkpoints(folders: Sequence[str | Path], output_dir: str | Path) -> Path:
    """Write a model whose weights are the mean of those of the folders', with the configuration and
    the tokenizer of the last.

    One tensor of each checkpoint is in memory at a time, besides the mean. Sums are found in
    float64; what is no floating-point number is the last's.

    Raises:
        FileNotFoundError: A folder holds no safetensors weights.
        ValueError: There is nothing to average; the models differ in shape.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("there is no checkpoint to average")
    _check_one_architecture(paths)
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(_mean(paths), str(output))
    for file in paths[-1].iterdir():
        is_weight = file.suffix == ".safetensors"
        is_state = file.name in OF_THE_TRAINER or file.name.startswith("rng_state")
        if file.is_file() and not is_weight and not is_state:
            shutil.copy2(file, output)
    return output


def _mean(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    places = [_weight_files(path) for path in paths]
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


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; empty where there are no safetensors weights."""
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / Path(place).name for name, place in places.items()}
    return {}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    weights = _weight_files(folder)
    if not weights:
        raise FileNotFoundError(f"{folder}: expected a model's weights, {SAFE_WEIGHTS_NAME}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(weights.values())):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def _configuration(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a model's config.json")
    values = json.loads(path.read_text())
    return {name: value for name, value in values.items() if name not in IMMATERIAL}


def _check_one_architecture(paths: Sequence[Path]) -> None:
    first, shapes = _configuration(paths[0]), _shapes(paths[0])
    for path in paths[1:]:
        other = _configuration(path)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{path} holds another architecture than {paths[0]}: its {name} is "
                    f"{other.get(name)!r}, not {first.get(name)!r}"
                )
        differing = {name for name, _ in shapes.items() ^ _shapes(path).items()}
        if differing:
            raise ValueError(
                f"{path} holds another architecture than {paths[0]}: tensors differ in name or "
                f"shape, such as {min(differing)}"
            )
