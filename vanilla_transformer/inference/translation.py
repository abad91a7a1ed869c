"""Translate any number of lines, in batches of similar length and in bounded memory."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

# Lines are sorted by length within this many batches, so that little padding is needed.
BATCHES_PER_WINDOW = 64

T = TypeVar("T")


class Hypothesis(NamedTuple):
    """A translation and its score in beam search: the natural log-probability, including </s>,
    divided by the length penalty."""

    text: str
    score: float


def translate(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 32,
    show_progress: bool = False,
    together: bool = False,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Yield the translation of each line, in the order of the lines; empty for a blank line.

    Args:
        lines: The sources, read lazily.
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        batch_size: The number of lines per batch.
        show_progress: Whether to show a progress bar.
        together: Whether all processes translate the same lines together. Each one decodes its
            share of the batches and yields all translations, the same as a single process would.
        generate_kwargs: Arguments of `model.generate`, such as `num_beams`.

    Raises:
        ValueError: `batch_size` is not positive.
    """

    def work(inputs: dict[str, torch.Tensor]) -> list[str]:
        generated = model.generate(**inputs, **generate_kwargs)
        return tokenizer.batch_decode(generated, skip_special_tokens=True)

    yield from _map_batches(lines, model, tokenizer, batch_size, show_progress, work, "", together)


def translate_n_best(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n_best: int,
    *,
    batch_size: int = 32,
    show_progress: bool = False,
    **generate_kwargs: Any,
) -> Iterator[list[Hypothesis]]:
    """The same as `translate`, but yield the `n_best` best hypotheses of each line, best first. A
    blank line has a single empty one.

    Raises:
        ValueError: There is no beam search, or it has fewer than `n_best` beams; also as in
            `translate`.
    """
    beams = generate_kwargs.get("num_beams") or model.generation_config.num_beams or 1
    if not 1 <= n_best <= beams or beams < 2:
        raise ValueError(
            f"n_best={n_best} with num_beams={beams}: expected a positive number, 2 beams or more, "
            "and as many beams as hypotheses"
        )
    options = {**generate_kwargs, "num_return_sequences": n_best, "output_scores": True}

    def work(inputs: dict[str, torch.Tensor]) -> list[list[Hypothesis]]:
        output: ModelOutput = model.generate(**inputs, **options, return_dict_in_generate=True)
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        ranked = list(map(Hypothesis, texts, output.sequences_scores.tolist()))
        return [ranked[start : start + n_best] for start in range(0, len(ranked), n_best)]

    blank = [Hypothesis("", 0.0)]
    yield from _map_batches(lines, model, tokenizer, batch_size, show_progress, work, blank)


def _map_batches(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    show_progress: bool,
    work: Callable[[dict[str, torch.Tensor]], list[T]],
    blank: T,
    together: bool = False,
) -> Iterator[T]:
    """Yield the result of `work` for each line, or `blank`, in the order of the lines."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected a positive integer")
    model.eval()
    rank, processes = 0, 1
    if together:
        from accelerate import PartialState
        from accelerate.utils import gather_object

        state = PartialState()
        rank, processes = state.process_index, state.num_processes
    remaining = iter(lines)
    with tqdm(desc="Translating", unit="line", disable=not show_progress) as progress:
        while window := list(islice(remaining, batch_size * BATCHES_PER_WINDOW)):
            results: dict[int, T] = {}
            for batch in islice(
                _make_batches(window, tokenizer, batch_size), rank, None, processes
            ):
                ids = {"input_ids": list(batch.values())}
                inputs = tokenizer.pad(ids, return_tensors="pt").to(model.device)
                with torch.inference_mode():
                    results.update(zip(batch, work(inputs), strict=True))
                progress.update(len(batch))
            progress.update(len(window) - len(results))
            gathered = gather_object([results]) if together else [results]
            of_all_processes = ChainMap(*gathered)
            yield from (of_all_processes.get(index, blank) for index in range(len(window)))


def _make_batches(
    window: list[str], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Iterator[dict[int, list[int]]]:
    """Batches of token ids by line index, without blank lines, the longest lines first."""
    indices = [index for index, line in enumerate(window) if line.strip()]
    if not indices:
        return
    token_ids = tokenizer([window[index] for index in indices])["input_ids"]
    ordered = sorted(zip(indices, token_ids, strict=True), key=lambda row: -len(row[1]))
    for start in range(0, len(ordered), batch_size):
        yield dict(ordered[start : start + batch_size])
