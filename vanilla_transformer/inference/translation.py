"""Translate any number of lines: in batches of similar length, in bounded memory, order kept."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

# Lines are sorted by length within so many batches: long enough to waste little on padding.
BATCHES_PER_WINDOW = 64

T = TypeVar("T")


class Hypothesis(NamedTuple):
    """A translation, and what beam search ranks it by: its log-probability, natural and with the
    end of the sentence, over the length penalty."""

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
    """Yield each line's translation in the order of the lines; a blank line's is empty.

    Args:
        lines: Sources; read as the translations are asked for.
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        batch_size: Lines decoded together.
        show_progress: Whether to show a bar.
        together: Whether all processes translate the same lines: each works on its share of the
            batches, and gets all translations, the same ones as a single process.
        generate_kwargs: For `model.generate`, such as `num_beams`.

    Raises:
        ValueError: `batch_size` is not positive.
    """

    def work(inputs: dict[str, torch.Tensor]) -> list[str]:
        generated = model.generate(**inputs, **generate_kwargs)
        return tokenizer.batch_decode(generated, skip_special_tokens=True)

    yield from _in_batches(lines, model, tokenizer, batch_size, show_progress, work, "", together)


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
    """As `translate`, but each line's `n_best` best hypotheses, the best first; a blank line has
    one, which is empty.

    Raises:
        ValueError: There is no beam search, or one of fewer beams; see also `translate`.
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
    yield from _in_batches(lines, model, tokenizer, batch_size, show_progress, work, blank)


def _in_batches(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    show_progress: bool,
    work: Callable[[dict[str, torch.Tensor]], list[T]],
    blank: T,
    together: bool = False,
) -> Iterator[T]:
    """What `work` makes of each line, or `blank`, in the order of the lines."""
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
            for batch in islice(_batches(window, tokenizer, batch_size), rank, None, processes):
                ids = {"input_ids": list(batch.values())}
                inputs = tokenizer.pad(ids, return_tensors="pt").to(model.device)
                with torch.inference_mode():
                    made = work(inputs)
                results.update(zip(batch, made, strict=True))
                progress.update(len(batch))
            progress.update(len(window) - len(results))
            gathered = gather_object([results]) if together else [results]
            everyones = ChainMap(*gathered)
            yield from (everyones.get(index, blank) for index in range(len(window)))


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
