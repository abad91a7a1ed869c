"""Translates any number of lines, in batches of similar length and in bounded memory."""

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator
from itertools import islice, repeat, takewhile, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.text_files import expect_several
from ..model.generation_options import LIMITS
from ..model.output_length import new_token_limits
from ..model.pipelines import evaluation_mode, is_blank
from .decoding import (
    decoder_start,
    expect_hypotheses,
    expect_known_search,
    expect_positions,
    options_of,
    position_limits,
    samples,
)

T = TypeVar("T")

# Lines are sorted by length within this many batches, so that little padding is needed.
BATCHES_PER_WINDOW = 64


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        text: The translation.
        score: In beam search, the natural log-probability, including `</s>`, divided by the length
            penalty; NaN without beam search. Reranking replaces it.
        token_ids: The target's token ids with `</s>`, but without the token that starts it.
        is_complete: Whether it ends with `</s>`, and not at the length limit.
        token_scores: The natural log-probability of each token, from `add_token_scores`.
        alignment: Pairs of a source index and a target index, from `add_alignments`.
    """

    text: str
    score: float = math.nan
    token_ids: tuple[int, ...] = ()
    is_complete: bool = True
    token_scores: tuple[float, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()


BLANK = Hypothesis("", 0.0)
# transformers (5.17 to 5.24) gives a beam without a hypothesis -1e9, which length penalties reduce.
IMPOSSIBLE = -1e5


def translate(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    prefixes: Iterable[str] | None = None,
    show_progress: bool = False,
    together: bool = False,
    max_source_length: int | None = None,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Yield the translation of each line, in the order of the lines; empty for a blank line.

    Args:
        lines: The sources, read lazily.
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        batch_size: The number of lines per batch.
        max_tokens: The maximum number of source tokens in a batch, including padding, in place of
            `batch_size`.
        prefixes: The beginning of each translation, or an empty string.
        show_progress: Whether to show a progress bar.
        together: Whether all processes translate the same lines together. Each one decodes its
            share of the batches, and yields all translations.
        max_source_length: Truncate longer lines to this many tokens, special tokens included.
        generate_kwargs: Arguments of `model.generate`, such as `num_beams`.

    Raises:
        ValueError: `batch_size` or `max_tokens` is not positive, a prefix is as long as the longest
            translation, a line is longer than the model's table of positions, or the generation
            config has options that transformers lacks.
        TypeError: `lines` or `prefixes` is a single string.
    """
    batches = Batches(
        lines, model, tokenizer, batch_size, max_tokens, prefixes, generate_kwargs,
        max_source_length=max_source_length,
    )  # fmt: skip
    for hypotheses in batches.hypotheses(None, show_progress, together):
        yield hypotheses[0].text


def translate_n_best(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n_best: int | None,
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    prefixes: Iterable[str] | None = None,
    show_progress: bool = False,
    together: bool = False,
    first: int = 0,
    **generate_kwargs: Any,
) -> Iterator[list[Hypothesis]]:
    """Same as `translate`, but yields the `n_best` best hypotheses of each line, best first. A
    blank line has a single, empty one. A line may have fewer if the search finds no more. Errors
    count lines from `first`, which is 0 for the first line of a file.

    Sampling (`do_sample` with one beam) yields independent samples, which have no score. With
    `n_best=None`, each line has one hypothesis, without a score.

    Raises:
        ValueError: Neither sampling nor a beam search with `n_best` beams is enabled; also as in
            `translate`.
    """
    if n_best is not None:
        expect_hypotheses(n_best, model, generate_kwargs)
    batches = Batches(
        lines, model, tokenizer, batch_size, max_tokens, prefixes, generate_kwargs, first=first
    )
    yield from batches.hypotheses(n_best, show_progress, together)


def pair_up(lines: Iterable[str], values: Iterable[T], name: str) -> Iterator[tuple[str, T]]:
    """Yield each line with what belongs to it, such as its prefix.

    Args:
        name: What the values are, for the message, such as "prefixes".

    Raises:
        ValueError: Their numbers differ, for example as an iterator has been read before.
    """
    end: Any = object()
    for number, (line, value) in enumerate(zip_longest(lines, values, fillvalue=end)):
        if line is end or value is end:
            fewer, more = ("lines", name) if line is end else (name, "lines")
            raise ValueError(
                f"there are only {number} {fewer}, and more {more}: expected the same number; an "
                "iterator can be read only once"
            )
        yield line, value


def encode_prefixes(
    prefixes: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generate_kwargs: dict[str, Any],
    first: int = 0,
) -> list[list[int]]:
    """The token ids of each prefix, without the tokens that start and end a target.

    Args:
        first: The number of the first line, from 0, for error messages.

    Raises:
        ValueError: A prefix is as long as the longest translation.
    """
    encoded, limit = [], _prefix_limit(model, generate_kwargs)
    eos = tokenizer.eos_token_id
    ends = options_of(model, generate_kwargs).ends() if eos is None else [eos]
    for number, prefix in enumerate(prefixes, first):
        ids: list[int] = tokenizer(text_target=prefix)["input_ids"] if prefix.strip() else []
        ids = list(takewhile(lambda id_: id_ not in ends, ids))  # in mBART, the language follows
        if len(ids) >= limit:
            raise ValueError(
                f"target prefix {number + 1} has {len(ids)} tokens: expected fewer than {limit}, "
                "the length limit of its translation with the prefix"
            )
        encoded.append(ids)
    return encoded


def _prefix_limit(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> float:
    """A prefix must have fewer tokens than this; infinity without a limit. Only `max_length` and a
    table of positions count the prefix."""
    options, limit = options_of(model, generate_kwargs), math.inf
    if options["max_new_tokens"] is None and options.first_of(LIMITS) == "max_length":
        limit = options["max_length"] - 1
    return min(limit, position_limits(model)[1] - 1)


class Row(NamedTuple):
    """The token ids of a line, and those of its prefix."""

    source: list[int]
    prefix: list[int]


class Batches(NamedTuple):
    """Lines to translate, with the arguments of `translate` and `translate_n_best`."""

    lines: Iterable[str]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    max_tokens: int | None
    prefixes: Iterable[str] | None
    generate_kwargs: dict[str, Any]
    max_source_length: int | None = None
    first: int = 0

    def hypotheses(
        self, n_best: int | None, show_progress: bool = False, together: bool = False
    ) -> Iterator[list[Hypothesis]]:
        """Yield the hypotheses of each line in the order of the lines; see `translate_n_best`."""
        for name, value in (("batch_size", self.batch_size), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive integer")
        expect_several(lines=self.lines, prefixes=self.prefixes)
        size = self.batch_size if self.max_tokens is None else self.max_tokens
        expect_known_search(self.model, self.generate_kwargs, size)
        rank, processes = 0, 1
        if together:
            from accelerate import PartialState
            from accelerate.utils import gather_object

            state = PartialState()
            rank, processes = state.process_index, state.num_processes
        first = self.first
        remaining: Iterator[tuple[str, str]] = zip(self.lines, repeat(""), strict=False)
        if self.prefixes is not None:
            remaining = pair_up(self.lines, self.prefixes, "prefixes")
        with tqdm(desc="Translating", unit="line", disable=not show_progress) as progress:
            while window := list(islice(remaining, self.batch_size * BATCHES_PER_WINDOW)):
                results: dict[int, list[Hypothesis]] = {}
                batches = islice(self._batches(window, first), rank, None, processes)
                with evaluation_mode(self.model):
                    for batch in batches:
                        hypotheses = self._generate(list(batch.values()), n_best)
                        results.update(zip(batch, hypotheses, strict=True))
                        progress.update(len(batch))
                progress.update(len(window) - len(results))
                gathered = gather_object([results]) if together else [results]
                of_all_processes = ChainMap(*gathered)
                yield from (of_all_processes.get(index, [BLANK]) for index in range(len(window)))
                first += len(window)

    def _batches(self, window: list[tuple[str, str]], first: int) -> Iterator[dict[int, Row]]:
        """Batches of rows by line index, without blank lines, the longest sources first. The
        prefixes of a batch have the same length."""
        lines, texts = zip(*window, strict=True)
        limit = self.max_source_length
        cut = {"truncation": limit is not None, "max_length": limit}
        sources = self.tokenizer(list(lines), **cut)["input_ids"]
        expect_positions("line", sources, position_limits(self.model)[0], first + 1)
        prefixes: list[list[int]] = [[]] * len(window)
        if any(texts):
            models = (self.model, self.tokenizer)
            prefixes = encode_prefixes(texts, *models, self.generate_kwargs, first)
        nothing = self.tokenizer("")["input_ids"]  # same for text that a tokenizer removes
        rows = {
            index: row
            for index, row in enumerate(map(Row, sources, prefixes))
            if not is_blank(lines[index]) and row.source != nothing
        }
        batch: dict[int, Row] = {}
        for index in sorted(rows, key=lambda i: (len(rows[i].prefix), -len(rows[i].source))):
            if batch and self._is_full(next(iter(batch.values())), rows[index], len(batch)):
                yield batch
                batch = {}
            batch[index] = rows[index]
        if batch:
            yield batch

    def _is_full(self, longest: Row, row: Row, size: int) -> bool:
        """Whether a batch of this size, with its longest row, has no room for another row."""
        if len(row.prefix) != len(longest.prefix):
            return True
        if self.max_tokens is None:
            return size == self.batch_size
        return (size + 1) * len(longest.source) > self.max_tokens

    def _generate(self, rows: list[Row], n_best: int | None) -> list[list[Hypothesis]]:
        model, options = self.model, options_of(self.model, self.generate_kwargs)
        ids = {"input_ids": [row.source for row in rows]}
        padded = self.tokenizer.pad(ids, return_attention_mask=True, return_tensors="pt")
        inputs = padded.to(model.device)
        if rows[0].prefix:
            start = decoder_start(model, self.generate_kwargs)
            prompts = [[start, *row.prefix] for row in rows]
            inputs["decoder_input_ids"] = torch.tensor(prompts, device=model.device)
        own: dict[str, Any] = {"num_return_sequences": (n := n_best or 1)}
        if n_best is not None:
            with_scores = not samples(model, self.generate_kwargs)
            own |= {"return_dict_in_generate": True, "output_scores": with_scores}
        for name, value in own.items():
            options.kwargs.pop(name, None)
            options[name] = value
        with torch.inference_mode():
            output = model.generate(**inputs, generation_config=options.given, **options.kwargs)
        sequences, prompt_length = getattr(output, "sequences", output), 1 + len(rows[0].prefix)
        ends = self._row_ends(inputs["attention_mask"], prompt_length, sequences.shape[1])
        found = self._hypotheses(sequences, prompt_length, [end for end in ends for _ in range(n)])
        scores = getattr(output, "sequences_scores", None)
        if scores is not None:
            found = [h._replace(score=s) for h, s in zip(found, scores.tolist(), strict=True)]
        groups = (found[start : start + n] for start in range(0, len(found), n))
        return [group[:1] + [h for h in group[1:] if not h.score < IMPOSSIBLE] for group in groups]

    def _row_ends(self, mask: torch.Tensor, prompt_length: int, length: int) -> list[int]:
        """The largest number of tokens in targets of each source, including the prompt. Later ones
        are padding, which is not an end token even if both have the same id."""
        options = options_of(self.model, {**self.generate_kwargs, "attention_mask": mask})
        pads_with_end = options["pad_token_id"] in {None, *options.ends()}
        if not (pads_with_end and hasattr(self.model, "extra_output_tokens")):
            return [length] * len(mask)
        limits = new_token_limits(self.model, mask, prompt_length, options)
        return [prompt_length + limit for limit in limits]

    def _hypotheses(
        self, sequences: torch.Tensor, prompt_length: int, row_ends: list[int]
    ) -> list[Hypothesis]:
        """The hypotheses in (rows, length) token ids, which begin with the prompt and have at most
        `row_ends` tokens."""
        options = options_of(self.model, self.generate_kwargs)
        ends, pad = options.ends(), options["pad_token_id"]
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        found = []
        for text, row, most in zip(texts, sequences.tolist(), row_ends, strict=True):
            length = min(len(row), most)
            new = range(prompt_length, length)
            end = next((place + 1 for place in new if row[place] in ends), None)
            length = length if end is None else end
            while end is None and length > prompt_length and row[length - 1] == pad:
                length -= 1
            ids = tuple(row[1:length])
            found.append(Hypothesis(text, token_ids=ids, is_complete=end is not None))
        return found
