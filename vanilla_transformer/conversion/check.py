"""Compares a toolkit with the model that was converted from its checkpoint, on the same lines.

A format takes part with a function `load_toolkit(path) -> Toolkit`, which imports the toolkit.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

BATCH = 16


class Toolkit(Protocol):
    """A model that its own toolkit runs."""

    def translate(self, sources: list[list[int]]) -> list[list[int]]:
        """Greedy translations, with their end tokens. A source has the special tokens that the
        toolkit expects."""

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
        """Of every token, after each prefix of a target: a tensor (length, vocabulary) for each."""


class Converted:
    """The converted model, in the same terms."""

    def __init__(self, folder: str | Path):
        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def translate(self, sources: list[list[int]]) -> list[list[int]]:
        """As `Toolkit.translate`."""
        outputs = self.model.generate(**self._pad(sources), num_beams=1, do_sample=False)
        return outputs[:, 1:].tolist()

    @torch.no_grad()
    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
        """As `Toolkit.log_probs`."""
        config = self.model.config
        inputs = [[config.decoder_start_token_id, *target[:-1]] for target in targets]
        longest = max(map(len, inputs))
        pad = config.pad_token_id
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in inputs])
        logits = self.model(**self._pad(sources), decoder_input_ids=padded).logits
        rows = logits.log_softmax(-1)
        return [row[: len(target)] for row, target in zip(rows, targets, strict=True)]

    def text(self, ids: list[int]) -> str:
        """What target ids say."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _pad(self, sources: list[list[int]]) -> dict[str, Any]:
        return self.tokenizer.pad({"input_ids": sources}, return_tensors="pt")


def compare(toolkit: Toolkit, folder: str | Path, lines: list[str]) -> dict[str, Any]:
    """Teacher-forced log-probabilities of the toolkit's own translations, and greedy translations.

    Returns:
        `lines`; `difference`, the largest of any token's log-probability; `equal`, the number of
        equal translations; `seconds` of the toolkit's translations and `our_seconds`.
    """
    ours = Converted(folder)
    found = {"lines": len(lines), "difference": 0.0, "equal": 0, "seconds": 0.0, "our_seconds": 0.0}
    for batch in _batches(lines):
        sources = ours.tokenizer(batch)["input_ids"]
        start = time.perf_counter()
        theirs = toolkit.translate(sources)
        middle = time.perf_counter()
        translations = ours.translate(sources)
        found["seconds"] += middle - start
        found["our_seconds"] += time.perf_counter() - middle
        for one, other in zip(theirs, translations, strict=True):
            found["equal"] += ours.text(one) == ours.text(other)
        pairs = zip(
            toolkit.log_probs(sources, theirs), ours.log_probs(sources, theirs), strict=True
        )
        for expected, row in pairs:
            difference = (expected - row[:, : expected.shape[1]]).abs().max().item()
            found["difference"] = max(found["difference"], difference)
    return found


def _batches(lines: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(lines), BATCH):
        yield lines[start : start + BATCH]


def check(path: str | Path, folder: str | Path, file: str | Path, format: Any) -> str:
    """Compare on the lines of a file.

    Args:
        path: The toolkit's checkpoint.
        folder: The converted model.
        file: Source lines.
        format: The module of the checkpoint's format.

    Returns:
        A table, or why nothing was compared.

    Raises:
        ValueError: The file is empty.
    """
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{file}: expected lines of the source language, the file is empty")
    if not hasattr(format, "load_toolkit"):
        return f"--check: {format.NAME} can't be run from here; nothing was compared"
    try:
        toolkit = format.load_toolkit(Path(path))
    except ImportError as error:
        return f"--check: {format.NAME} can't be imported ({error}); nothing was compared"
    found = compare(toolkit, folder, lines)
    rows = {
        "lines": found["lines"],
        "largest difference of log-probabilities": f"{found['difference']:.1e}",
        "equal greedy translations": f"{found['equal']} ({found['equal'] / found['lines']:.1%})",
        f"seconds, {format.NAME}": f"{found['seconds']:.1f}",
        "seconds, converted": f"{found['our_seconds']:.1f}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
