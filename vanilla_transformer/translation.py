"""Translate any number of lines: in batches of similar length, in bounded memory, order kept."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Lines are sorted by length within so many batches: long enough to waste little on padding.
BATCHES_PER_WINDOW = 64


def translate(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 32,
    show_progress: bool = False,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Yield each line's translation in the order of the lines; a blank line's is empty.

    Args:
        lines: Sources; read as the translations are asked for.
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        batch_size: Lines decoded together.
        show_progress: Whether to show a bar.
        generate_kwargs: For `model.generate`, such as `num_beams`.

    Raises:
        ValueError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected a positive integer")
    model.eval()
    remaining = iter(lines)
    with tqdm(desc="Translating", unit="line", disable=not show_progress) as progress:
        while window := list(islice(remaining, batch_size * BATCHES_PER_WINDOW)):
            translations = [""] * len(window)
            for batch in _batches(window, tokenizer, batch_size):
                texts = _translate_batch(list(batch.values()), model, tokenizer, generate_kwargs)
                for index, text in zip(batch, texts, strict=True):
                    translations[index] = text
                progress.update(len(batch))
            progress.update(sum(not line.strip() for line in window))
            yield from translations


def _batches(
    window: list[str], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Iterator[dict[int, list[int]]]:
    """The token ids of the lines that say something, by line index, the longest first."""
    indices = [index for index, line in enumerate(window) if line.strip()]
    if not indices:
        return
    token_ids = tokenizer([window[index] for index in indices])["input_ids"]
    ordered = sorted(zip(indices, token_ids, strict=True), key=lambda row: -len(row[1]))
    for start in range(0, len(ordered), batch_size):
        yield dict(ordered[start : start + batch_size])


def _translate_batch(
    token_ids: list[list[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generate_kwargs: dict[str, Any],
) -> list[str]:
    inputs = tokenizer.pad({"input_ids": token_ids}, return_tensors="pt").to(model.device)
    with torch.inference_mode():
        generated = model.generate(**inputs, **generate_kwargs)
    return tokenizer.batch_decode(generated, skip_special_tokens=True)
