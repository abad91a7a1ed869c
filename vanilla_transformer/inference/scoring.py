"""The log-probability of given translations, and of the tokens of hypotheses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.collation import PairCollator, shift_right
from ..data.token_batches import TokenBudgetSampler, expect_tokens
from ..model.generation import VanillaTransformerGenerationMixin
from ..model.pipelines import evaluation_mode
from .decoding import decoder_start, expect_positions, position_limits
from .translation import Hypothesis, pair_up

PAIRS_PER_WINDOW = 10_000  # sorted by length together
LINES_PER_WINDOW = 512  # whose hypotheses are processed together

T = TypeVar("T")


class PairScore(NamedTuple):
    """The natural log-probability of a target given its source, and its number of tokens. Both
    include the final `</s>`."""

    log_probability: float
    tokens: int


def score_pairs(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = 2048,
    show_progress: bool = False,
) -> Iterator[PairScore]:
    """Yield the score of each pair, in the order of the pairs, without label smoothing.

    Args:
        pairs: Sources and targets, read lazily.
        model: Any sequence-to-sequence model of transformers, or an engine.
        tokenizer: Its tokenizer.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch, including
            padding.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: A source or target has no token, or more than the model has positions. The error
            counts the pairs from 1.
    """
    is_ours = isinstance(model, VanillaTransformerGenerationMixin)
    start = decoder_start(model) if is_ours else None  # others may begin with a language
    remaining, first = iter(pairs), 1
    with tqdm(desc="Scoring", unit="pair", disable=not show_progress) as progress:
        while window := list(islice(remaining, PAIRS_PER_WINDOW)):
            sources = tokenizer([source for source, _ in window])["input_ids"]
            targets = tokenizer(text_target=[target for _, target in window])["input_ids"]
            expect_tokens(list(map(len, sources)), list(map(len, targets)), first)
            of_source, of_target = position_limits(model)
            expect_positions("the source of pair", sources, of_source, first)
            expect_positions("the target of pair", targets, of_target, first)
            scores = map_pairs(
                lambda inputs: token_scores(model, inputs).sum(1).tolist(),
                sources, targets, model, tokenizer, max_tokens, progress, start=start,
            )  # fmt: skip
            yield from map(PairScore, scores, map(len, targets))
            first += len(window)


def add_token_scores(
    lines: Iterable[str],
    found: Iterable[list[Hypothesis]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = 2048,
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each line with their `token_scores`.

    Args:
        lines: The sources, read lazily.
        found: The hypotheses of each source.
        model: The model.
        tokenizer: Its tokenizer.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch.
    """

    def score(sources: list[str], hypotheses: list[Hypothesis]) -> Iterator[Hypothesis]:
        scores = map_pairs(
            lambda inputs: token_scores(model, inputs).tolist(),
            tokenizer(sources)["input_ids"], [list(h.token_ids) for h in hypotheses],
            model, tokenizer, max_tokens, start=decoder_start(model),
        )  # fmt: skip
        for hypothesis, row in zip(hypotheses, scores, strict=True):
            yield hypothesis._replace(token_scores=tuple(row[: len(hypothesis.token_ids)]))

    yield from map_hypotheses(score, lines, found)


def map_hypotheses(
    change: Callable[[list[str], list[Hypothesis]], Iterable[Hypothesis]],
    lines: Iterable[str],
    found: Iterable[list[Hypothesis]],
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each line as `change` returns them. `change` gets sources with a
    hypothesis for each, one window at a time, without blank lines."""
    rows = pair_up(lines, found, "hypotheses")
    while window := list(islice(rows, LINES_PER_WINDOW)):
        kept = [(line, h) for line, hypotheses in window for h in hypotheses if h.token_ids]
        changed = iter(change([line for line, _ in kept], [h for _, h in kept]))
        for _, hypotheses in window:
            yield [next(changed) if h.token_ids else h for h in hypotheses]


def map_pairs(
    work: Callable[[dict[str, torch.Tensor]], Iterable[T]],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    progress: Any = None,
    *,
    start: int | None = None,
) -> list[T]:
    """The result of `work` for each pair of token ids, in their order.

    Args:
        work: Takes a batch with `input_ids` and `attention_mask` (pairs, source_length),
            `decoder_input_ids` and `labels` (pairs, target_length), and returns a result for each
            pair.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch, including
            padding. A longer pair is a batch of its own.
        progress: A progress bar.
        start: The id that starts each target. By default, the model makes `decoder_input_ids` from
            the targets, which must be complete: mBART's start with the language at a target's end.
    """
    results: dict[int, T] = {}
    batches = pair_batches(sources, targets, model, tokenizer, max_tokens, start)
    with evaluation_mode(model):
        for rows, inputs in batches:
            with torch.inference_mode():
                results.update(zip(rows, work(inputs), strict=True))
            if progress is not None:
                progress.update(len(rows))
    return [results[row] for row in range(len(sources))]


def pair_batches(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    start: int | None = None,
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Yield batches of pairs of similar length: the indices of the pairs, and the model's inputs.

    Args:
        sources, targets: Token ids of at least one pair.
        max_tokens, start: As for `map_pairs`.
    """
    collate = PairCollator(tokenizer, model=model)
    pad = tokenizer.pad_token_id
    source_lengths, target_lengths = (list(map(len, side)) for side in (sources, targets))
    budget = max(max_tokens, min(map(max, source_lengths, target_lengths)))
    for rows in TokenBudgetSampler(source_lengths, target_lengths, budget, shuffle=False):
        inputs = collate([{"input_ids": sources[row], "labels": targets[row]} for row in rows])
        if start is not None:
            inputs["decoder_input_ids"] = shift_right(inputs["labels"], start, pad)
        yield rows, inputs.to(model.device)


def token_scores(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The natural log-probability of each label, 0 for padding, (pairs, target_length)."""
    if hasattr(model, "token_scores"):  # an engine that returns no logits
        return model.token_scores(**inputs)
    labels = inputs["labels"]
    logits = model(**reading_inputs(inputs), use_cache=False).logits.float()
    # torch sums a large vocabulary more precisely over the last dimension than over others.
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view_as(labels).cpu().double()  # Apple's GPUs lack double precision


def reading_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch without labels, for which the model computes logits and no loss."""
    return {name: value for name, value in inputs.items() if name != "labels"}
