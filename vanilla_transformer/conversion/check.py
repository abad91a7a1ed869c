"""Compares a toolkit with the model that was converted from its checkpoint, on the same lines."""

import time
from collections.abc import Iterator, Mapping
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from ..data.text_files import read_file
from ..inference.decoding import expect_positions, position_limits
from .core import ConversionOptions
from .toolkit import Toolkit, TransformersModel

T = TypeVar("T")
BATCH = 16


class Converted(TransformersModel):
    """The converted model, which has all ids."""

    def __init__(self, folder: str | Path, dtype: str = "float32"):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
        size, unk = model.config.vocab_size, self.tokenizer.unk_token_id
        super().__init__(model, size, unk, lambda line: self.tokenizer(line)["input_ids"])

    def text(self, ids: list[int]) -> str:
        """The text of target ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def of_targets(rows: list[Tensor], targets: list[list[int]]) -> list[Tensor]:
    """Log-probabilities (length, 1) of the targets' own tokens, from what `log_probs` returned."""
    return [
        row if row.shape[1] == 1 else row.gather(1, torch.tensor(target)[:, None])
        for row, target in zip(rows, targets, strict=True)
    ]


def largest_difference(
    toolkit: Toolkit, ours: Converted, sources: list[list[int]], targets: list[list[int]]
) -> float:
    """The largest difference of log-probabilities, over all positions and all tokens that the
    toolkit reports. NaN if one is NaN."""
    theirs = toolkit.log_probs(sources, targets)
    log_probs = ours.log_probs(sources, targets)
    if theirs[0].shape[1] == 1:
        log_probs = of_targets(log_probs, targets)
    differences = [
        (expected - row[:, : expected.shape[1]]).abs().max().item()
        for expected, row in zip(theirs, log_probs, strict=True)
    ]
    return float(np.max(differences))  # unlike `max`, it keeps NaN


def equal_ids(toolkit: Toolkit, ours: Converted, lines: list[str]) -> tuple[int, list[str]]:
    """The number of lines with equal ids, and the other lines. Ids that only we have are
    unknown."""
    found = toolkit.known(ours.tokenizer(lines)["input_ids"])
    other = [
        line
        for line, ids in zip(lines, found, strict=True)
        if ids != toolkit.known([toolkit.encode(line)])[0]
    ]
    return len(lines) - len(other), other


class Comparison(NamedTuple):
    """The largest difference of any token's log-probability, the number of equal translations, and
    the seconds that both took to translate."""

    difference: float
    equal: int
    seconds: float
    our_seconds: float


def compare(toolkit: Toolkit, ours: Converted, lines: list[str]) -> Comparison:
    """Teacher-forced log-probabilities of the toolkit's own translations, and greedy translations,
    both of the ids that our tokenizer makes."""
    encoded = ours.tokenizer(lines)["input_ids"]
    if isinstance(toolkit, TransformersModel):
        expect_positions("line", encoded, position_limits(toolkit.module)[0], first=1)
    difference, equal, seconds, our_seconds = 0.0, 0, 0.0, 0.0
    for sources in in_batches(encoded, BATCH):
        start = time.perf_counter()
        theirs = toolkit.translate(sources)
        middle = time.perf_counter()
        translations = ours.translate(sources)
        seconds += middle - start
        our_seconds += time.perf_counter() - middle
        equal += sum(map(eq, map(ours.text, theirs), map(ours.text, translations)))
        of_batch = largest_difference(toolkit, ours, sources, theirs)
        difference = float(np.maximum(difference, of_batch))
    return Comparison(difference, equal, seconds, our_seconds)


def in_batches(rows: list[T], size: int) -> Iterator[list[T]]:
    """The rows in lists of this size; the last may be shorter."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def as_table(rows: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def check(
    path: str | Path,
    folder: str | Path,
    file: str | Path,
    format: Any,
    options: ConversionOptions | None = None,
) -> str:
    """Compare toolkit and converted model on the lines of a file.

    Args:
        path: The toolkit's checkpoint.
        folder: The converted model.
        file: Source lines.
        format: The module of the checkpoint's format.
        options: The options of the conversion.

    Returns:
        A table, or why nothing was compared.

    Raises:
        ValueError: The file is empty, or a line is longer than the toolkit's table of positions.
    """
    lines = list(read_file(file))
    if not lines:
        raise ValueError(f"{file}: expected lines of the source language, the file is empty")
    options = options or ConversionOptions()
    try:
        toolkit = format.load_toolkit(Path(path), options)
    except ImportError as error:
        return f"--check: {format.NAME} can't be imported ({error}); nothing was compared"
    ours = Converted(folder)
    comparison = compare(toolkit, ours, lines)
    rows = {"lines": f"{len(lines)}"}
    if options.moses is None:  # which the toolkit does not run
        rows["equal token ids"] = _share(equal_ids(toolkit, ours, lines)[0], lines)
    rows |= {
        "largest difference of log-probabilities": f"{comparison.difference:.1e}",
        "equal greedy translations": _share(comparison.equal, lines),
        f"seconds, {format.NAME}": f"{comparison.seconds:.1f}",
        "seconds, converted": f"{comparison.our_seconds:.1f}",
    }
    return as_table(rows)


def _share(number: int, lines: list[str]) -> str:
    return f"{number} ({number / len(lines):.1%})"
