# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""From states to the logits that are asked for: of some positions, or of the likeliest tokens."""

from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn
from transformers import LogitsProcessor

from .loss import at_least_float32, is_plain_matrix
from .validation import expect_tensor

LARGE, PIECE = 2**24, 2**21  # bytes of a projection, and of as much as a CPU's caches hold
FEW = 512  # rows of states


class BestTokens(LogitsProcessor):
    """Given as `logits_to_keep`, the logits of each row's `count` likeliest tokens, in order.

    That is all that a step of beam search needs, and far less than the logits of a vocabulary, of
    which transformers holds four copies: the best continuations of a sentence are among the best of
    its beams. As the only logits processor it then puts log-probabilities among all tokens in the
    place of those among the few.
    """

    def __init__(self, count: int):
        self.count = count
        self.tokens: torch.Tensor  # (rows, count) ids, of the last step
        self.log_probs: torch.Tensor  # (rows, count)

    def logits(self, states: torch.Tensor, projection: nn.Module) -> torch.Tensor:
        """(rows, 1, d_model) states to (rows, 1, count) logits."""
        rows, found, log_normalizers = states[:, 0], [], []
        whole = [] if _pays_in_pieces(rows, projection) else [(0, projection(rows))]
        hooked = not is_plain_matrix(projection)  # who may keep what is theirs
        for first, narrow in whole or _in_pieces(rows, projection.weight):
            scores = narrow.to(at_least_float32(narrow.dtype), copy=hooked)
            values, places = _topk(scores, min(self.count, scores.shape[1]))
            found.append((values, places + first))
            highest = values[:, :1]
            normalizer = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            log_normalizers.append(highest + normalizer.log())
        values, tokens = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        best, places = values.topk(self.count)
        self.tokens = tokens.gather(-1, places)
        self.log_probs = best - torch.cat(log_normalizers, -1).logsumexp(-1, keepdim=True)
        return best[:, None]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Log-probabilities (rows, count), whatever the scores among the few."""
        return self.log_probs


# Of the beam search that runs in this thread; None if it looks at all tokens.
BEST_TOKENS: ContextVar[BestTokens | None] = ContextVar("BEST_TOKENS", default=None)


def project(
    states: torch.Tensor,
    projection: nn.Module,
    logits_to_keep: int | torch.Tensor | BestTokens = 0,
) -> torch.Tensor:
    """`projection` of `at_positions` of the same, (batch, length, vocabulary)."""
    if isinstance(logits_to_keep, BestTokens):
        return logits_to_keep.logits(states, projection)
    rows = states.flatten(0, -2)
    if not _pays_in_pieces(rows, projection) or len(rows) > FEW:
        return projection(states)
    logits = rows.new_empty(len(rows), len(projection.weight))
    for _ in _in_pieces(rows, projection.weight, logits):
        pass
    return logits.unflatten(0, states.shape[:-1])


def _pays_in_pieces(rows: torch.Tensor, projection: nn.Module) -> bool:
    """Whether a CPU multiplies (rows, d_model) states, if they are few, by pieces of this matrix a
    third faster than by the whole."""
    if rows.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    narrow = rows.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
    if narrow or type(rows) is not torch.Tensor or not is_plain_matrix(projection):
        return False
    return len(rows) > 1 and projection.weight.nbytes > LARGE


def _in_pieces(
    rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """First token and scores (rows, tokens) of each piece of the vocabulary, written into `out` if
    that is given, (rows, vocabulary)."""
    width = max(1, PIECE // matrix[0].nbytes)
    for first in range(0, len(matrix), width):
        piece = matrix[first : first + width]
        where = None if out is None else out[:, first : first + width]
        yield first, torch.mm(rows, piece.t(), out=where)


def _topk(scores: torch.Tensor, count: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scores.topk(count)`, in half the time where it is a few of many: the best are in those
    columns of `rows` scores whose best are the best."""
    if scores.shape[1] % rows or scores.shape[1] < rows * count:
        return scores.topk(count)
    columns = scores.unflatten(1, (rows, -1))
    best = columns.amax(1).topk(count, sorted=False).indices
    among = columns.gather(2, best[:, None].expand(-1, rows, -1)).flatten(1)
    values, places = among.topk(count)
    return values, best.gather(1, places % count) + places // count * columns.shape[2]


def at_positions(
    states: torch.Tensor, logits_to_keep: int | torch.Tensor | BestTokens
) -> torch.Tensor:
    """The last so many of the states (batch, length, d_model), 0 for all, or those of an index; the
    last one's best tokens are a matter of `project`.

    Raises:
        TypeError: `logits_to_keep` is neither a number nor a tensor.
        IndexError: It is no index of positions, or of one that is not there, which shows on the CPU
            only.
    """
    if isinstance(logits_to_keep, BestTokens):
        logits_to_keep = 1
    if isinstance(logits_to_keep, int):
        return states[:, slice(-logits_to_keep, None)]
    expect_tensor(logits_to_keep, "logits_to_keep")
    try:
        return states[:, logits_to_keep]
    except IndexError as error:
        raise IndexError(
            f"logits_to_keep of shape {tuple(logits_to_keep.shape)} and {logits_to_keep.dtype}: "
            f"expected indices of {states.shape[1]} positions; {error}"
        ) from None
