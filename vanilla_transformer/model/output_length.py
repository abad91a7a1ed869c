"""The paper's length penalty and limit of length (section 6.1), in transformers' searches."""

import math
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .generation_options import LIMITS, GenerationOptions, first_given

# ---------------------------------------------------------------- The length penalty

# For each `length_penalty_type`, a and b of (a + length) / b, which replaces the length. "gnmt",
# the paper's, is equation 14 of https://arxiv.org/abs/1609.08144; "avg" and "wu" are OpenNMT-py's.
LENGTH_PENALTIES = {"power": (0, 1), "gnmt": (5, 6), "avg": (1, 1), "wu": (6, 6)}


class LengthPenalty(float):
    """The exponent alpha of ((a + length) / b)^alpha, for code that writes length ** alpha."""

    a: float
    b: float

    def __new__(cls, alpha: float, a: float, b: float) -> "LengthPenalty":
        penalty = super().__new__(cls, alpha)
        penalty.a, penalty.b = a, b
        return penalty

    def __getnewargs__(self) -> tuple[float, float, float]:  # type: ignore[override]
        return float(self), self.a, self.b  # so that it can be copied with a generation config

    def __rpow__(self, length: Any, modulo: None = None) -> Any:
        return ((self.a + length) / self.b) ** float(self)


def use_length_penalty_type(options: GenerationOptions) -> None:
    """Replace `length_penalty` with the one that `length_penalty_type` names.

    Raises:
        ValueError: It names none, or alpha is negative or not a number.
    """
    kind, alpha = options.take("length_penalty_type") or "power", options["length_penalty"]
    if kind not in list(LENGTH_PENALTIES):  # a list is not hashable
        choices = ", ".join(LENGTH_PENALTIES)
        raise ValueError(f"length_penalty_type={kind!r}: expected one of {choices}")
    if kind == "power":
        return
    alpha = 1.0 if alpha is None else alpha
    if not 0 <= alpha < math.inf:
        raise ValueError(
            f"length_penalty={alpha} with length_penalty_type={kind!r}: expected a number from 0"
        )
    options["length_penalty"] = LengthPenalty(alpha, *LENGTH_PENALTIES[kind])


# ---------------------------------------------------------------- The limit


def limit_by_source(
    model: Any, inputs: torch.Tensor | None, prompt_length: int, options: GenerationOptions
) -> None:
    """Limit outputs to input length + `extra_output_tokens` unless another limit is set;
    transformers' own default is 20 tokens. Each row ends at its own limit or, with
    `max_length_factor` as in Marian, at that multiple of the batch's longest source. With learned
    positions, a row also ends where their table does."""
    limiting = options.first_of(LIMITS)
    extra = first_given(options.take("extra_output_tokens"), model.extra_output_tokens)
    factor = options.take("max_length_factor")
    if limiting in ("max_new_tokens", "max_length"):
        return
    kwargs = options.kwargs
    encoded = first_given(kwargs.get("encoder_outputs"), [torch.ones(1, 1)])[0]
    source = first_given(inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), encoded)
    by_factor = limiting == "max_length_factor"
    limit = max(1, int(factor * source.shape[1])) if by_factor else source.shape[1] + extra
    if model.config.position_encoding == "learned":
        limit = min(limit, _positions_left(model.config, prompt_length))
    options["max_new_tokens"] = limit
    mask = options["attention_mask"]
    has_ends = options["pad_token_id"] is not None or options["eos_token_id"] is not None
    if by_factor or mask is None or mask.ndim != 2 or not has_ends:
        return
    lengths = (mask.count_nonzero(1) + extra).clamp(min=1, max=limit)
    limits = set(lengths.tolist())
    if len(limits) == 1:  # one limit for all rows, which assisted decoding meets exactly
        options["max_new_tokens"] = limits.pop()
    else:
        _end_rows_at(prompt_length + lengths, options)


def _positions_left(config: Any, prompt_length: int) -> int:
    """The positions after a prompt in a table of learned ones."""
    positions: int = config.max_position_embeddings
    if prompt_length >= positions:
        raise ValueError(
            f"decoder_input_ids of {prompt_length} tokens, the first included: expected fewer than "
            f"max_position_embeddings={positions}"
        )
    return positions - prompt_length


def _end_rows_at(lengths: torch.Tensor, options: GenerationOptions) -> None:
    """End the targets of each source at its length, which includes the prompt, (sources,)."""
    ends, forced = SourceLengthCriteria(lengths), options["forced_eos_token_id"]
    criteria = options.kwargs.get("stopping_criteria") or []
    options.kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, ends])
    if forced is not None:
        processors = options.kwargs.get("logits_processor") or []
        force = SourceLengthForcedEnd(ends, forced)
        options.kwargs["logits_processor"] = LogitsProcessorList([*processors, force])


class SourceLengthCriteria(StoppingCriteria):
    """Ends each row at its own length, which depends on its source alone and not on the rest of the
    batch.

    Args:
        max_lengths: For the targets of each source, with the prompt, (sources,). The targets of a
            source, beams or samples, are adjacent rows.
    """

    eos_token_id = None  # its presence makes transformers pad rows that have ended

    def __init__(self, max_lengths: torch.Tensor):
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of (rows, length) targets has ended, (rows,)."""
        ended = input_ids.shape[1] >= self.max_lengths.to(input_ids.device)
        return ended.repeat_interleave(input_ids.shape[0] // len(ended))


class SourceLengthForcedEnd(LogitsProcessor):
    """Forces the last token of each row at the row's own length, as transformers' processor does at
    one length for the batch.

    Args:
        ends: The lengths.
        token_ids: `forced_eos_token_id`.
    """

    def __init__(self, ends: SourceLengthCriteria, token_ids: int | list[int]):
        self.ends, self.token_ids = ends, token_ids

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Scores (rows, vocabulary) after (rows, length) targets."""
        with_next: Any = F.pad(input_ids, (0, 1))
        force = ForcedEOSTokenLogitsProcessor(
            with_next.shape[1], self.token_ids, device=scores.device
        )
        is_last = self.ends(with_next, scores)
        return torch.where(is_last[:, None], force(input_ids, scores), scores)


def new_token_limits(
    model: Any, source: torch.Tensor, prompt_length: int, options: GenerationOptions
) -> list[int]:
    """The largest number of new tokens for each of (sources, source_length), by the rules of
    `limit_by_source`, for code that does not call `generate()` of our models."""
    limit_by_source(model, source, prompt_length, options)
    for criteria in options.kwargs.get("stopping_criteria") or []:
        if isinstance(criteria, SourceLengthCriteria):
            limits: list[int] = (criteria.max_lengths - prompt_length).tolist()
            return limits
    most = options["max_new_tokens"]
    return [options["max_length"] - prompt_length if most is None else most] * len(source)
