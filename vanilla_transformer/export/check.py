"""Compares an exported model with the original, on the same lines."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..conversion.check import as_table, in_batches
from ..conversion.saving import ORIGINAL
from ..data.text_files import read_file
from ..inference.loading import LoadingArguments
from ..inference.translation import translate, translate_n_best
from ..model.generation_options import GenerationOptions
from ..model.output_length import new_token_limits

BATCH, BEAMS = 32, 4
# Endings of files with weights.
WEIGHTS = (".safetensors", ".bin", ".onnx", ".onnx_data", ".onnx.data")


def check(model_folder: str | Path, output: str | Path, file: str | Path) -> str:
    """Compare the model, in single precision as exports read it, and the export on the lines of a
    file.

    Args:
        model_folder: The model.
        output: The exported folder.
        file: Source lines.

    Returns:
        A table, or the reason why nothing was compared.

    Raises:
        ValueError: The file is empty.
    """
    lines = list(read_file(file))
    if not any(line.strip() for line in lines):
        raise ValueError(f"{file}: expected lines of the source language, the file is empty")
    try:
        model = LoadingArguments(device="cpu", dtype="float32").load(model_folder)
        exported = LoadingArguments(device="cpu").load(output)
    except (OSError, ValueError) as error:
        return f"--check: {output} can't be run from here ({error}); nothing was compared"
    equal, difference, speeds = compare(model, exported, lines)
    sizes = [size(Path(folder)) / 1e6 for folder in (model_folder, output)]
    scores = "no equal translations" if difference is None else f"{difference:.1e}"
    rows = {
        "lines": f"{len(lines)}",
        "equal translations": f"{equal} ({equal / len(lines):.1%})",
        f"largest difference of scores, {BEAMS} beams": scores,
        "lines per second, model": f"{speeds[0]:.1f}",
        "lines per second, export": f"{speeds[1]:.1f}",
        "MB of weights, model": f"{sizes[0]:.1f}",
        "MB of weights, export": f"{sizes[1]:.1f}",
    }
    return as_table(rows)


class Comparison(NamedTuple):
    """How an exported model compares with the original.

    Attributes:
        equal: The number of equal translations with the model's own search, without sampling.
        difference: The largest difference of scores between best hypotheses of the same tokens, in
            beam search without a repetition penalty, which CTranslate2 does not support there; None
            if there are no such hypotheses.
        speeds: Of model and export, in lines per second.
    """

    equal: int
    difference: float | None
    speeds: list[float]


def compare(model: tuple[Any, Any], exported: tuple[Any, Any], lines: list[str]) -> Comparison:
    """Translate with both, batch by batch in turn, so that both run under the same load.

    Args:
        model: The model and its tokenizer.
        exported: The exported model and its tokenizer.
        lines: Source lines.
    """
    seconds, equal = [0.0, 0.0], 0
    differences = []
    for batch in in_batches(lines, BATCH):
        search, texts = {"do_sample": False, **_limit(model, exported[0], batch)}, []
        for number, pair in enumerate((model, exported)):
            start = time.perf_counter()
            texts.append(list(translate(batch, *pair, batch_size=BATCH, **search)))
            seconds[number] += time.perf_counter() - start
        equal += sum(map(str.__eq__, *texts))
        options = {"num_beams": BEAMS, "repetition_penalty": 1.0, **search}
        scored = [translate_n_best(batch, *pair, 1, **options) for pair in (model, exported)]
        for (ours, *_), (theirs, *_) in zip(*scored, strict=True):
            if ours.token_ids == theirs.token_ids:
                differences.append(abs(ours.score - theirs.score))
    speeds = [len(lines) / each for each in seconds]
    # Unlike `max`, NumPy's keeps NaN.
    difference = float(np.max(differences)) if differences else None
    return Comparison(equal, difference, speeds)


def _limit(model: tuple[Any, Any], exported: Any, lines: list[str]) -> dict[str, Any]:
    """A limit of length for both, if the model's grows with the source and the export's does not,
    as in a class of transformers. Otherwise, translations without an end would differ."""
    ours, theirs = model[0].generation_config, exported.generation_config
    has_own = ours.max_length is not None or ours.max_new_tokens is not None
    if has_own or hasattr(exported, "extra_output_tokens"):
        return {}
    longest = max(map(len, model[1](lines)["input_ids"]))
    options = GenerationOptions(ours, None, {})
    (most,) = new_token_limits(model[0], torch.ones(1, longest), 1, options)
    return {"max_length": min(1 + most, theirs.max_length)}


def size(folder: Path) -> int:
    """The bytes of the weights in a folder, without the checkpoints of a training, and without
    what only converting back needs."""
    files = (path for path in folder.rglob("*") if path.name.endswith(WEIGHTS))
    return sum(path.stat().st_size for path in files if not _is_unused(path.relative_to(folder)))


def _is_unused(path: Path) -> bool:
    is_other = path.parts[0] == ORIGINAL or path.parts[0].startswith(PREFIX_CHECKPOINT_DIR)
    return is_other or path.name == "training_args.bin"
