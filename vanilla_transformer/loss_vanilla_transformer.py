"""Label smoothing (section 5.4): cross-entropy against a target that is not quite sure.

The target distribution is (1 - eps) on the label plus eps / V on each of the V tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .checks_vanilla_transformer import expect_labels, out_of_range

ROWS = 256  # of logits, worked on at a time


class ProjectedCrossEntropy(torch.autograd.Function):
    """What is behind `projected_cross_entropy`: from states to loss and gradients, a few rows at a
    time. Neither logits nor probabilities of all rows ever exist.

    With p = softmax(states projection^T), the gradient at the logits is p less (1 - eps) on the
    label less eps / V everywhere. The last part is the same in each column, as is its part in the
    loss, so that both come from the mean row of the projection instead of from V columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        projection: torch.Tensor,
        labels: torch.Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
        items: torch.Tensor | int,
    ) -> torch.Tensor:
        """(rows, d_model) states and a (vocabulary, d_model) matrix, which are multiplied in
        `dtype`, to a sum of -log p over so many items."""
        eps, wide = label_smoothing, at_least_float32(dtype)
        ctx.dtypes = states.dtype, projection.dtype
        mean_row = projection.mean(0).to(wide)
        states, projection = states.to(dtype), projection.to(dtype)
        total = -eps * (states.sum(0, dtype=wide) @ mean_row)
        grad_states = torch.empty_like(states)
        grad_projection = torch.zeros_like(projection, dtype=wide)
        rows, cached_rows = _rows_at_a_time(states, len(projection))
        logits = states.new_empty(min(rows, len(states)), len(projection))
        product = torch.empty_like(projection) if wide != dtype else None
        for part, gold, grad_part in _split(rows, states, labels, grad_states):
            scores = torch.mm(part, projection.t(), out=logits[: len(part)])
            for piece, piece_gold in _split(cached_rows, scores, gold):
                total += _softmax_less_label_(piece, piece_gold[:, None], 1 - eps)
            torch.mm(scores, projection, out=grad_part)
            if product is None:
                grad_projection.addmm_(scores.t(), part)
            else:
                torch.mm(scores.t(), part, out=product)
                for grad, narrow in _split(ROWS, grad_projection, product):
                    grad += narrow
        grad_states -= (eps * mean_row).to(states.dtype)
        grad_projection -= eps / len(projection) * states.sum(0, dtype=wide)
        ctx.items = items
        ctx.save_for_backward(grad_states, grad_projection.div_(items))
        return total / items

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that `forward` has found already. The projection's is large: on a CPU it is
        not written again to multiply it by 1. That of states may be too narrow for 1 / items."""
        grad_states, grad_projection = ctx.saved_tensors
        grad_states = grad_states.to(ctx.dtypes[0]) * (grad_total / ctx.items)
        grad_projection = grad_projection.to(ctx.dtypes[1])
        if grad_total.device.type != "cpu" or grad_total != 1:
            grad_projection = grad_projection * grad_total
        return grad_states, grad_projection, None, None, None, None


def _rows_at_a_time(states: torch.Tensor, vocab_size: int) -> tuple[int, int]:
    """How many rows of logits to have at a time, and how many of them in the cache of a CPU.

    Products in half precision are so fast that adding them up in float32, once for each part,
    takes its time: hence fewer and larger parts there. On a GPU each kernel wants much to do.
    """
    if states.device.type != "cpu":
        rows = max(1, 2**27 // vocab_size)
        return rows, rows
    rows = min(ROWS if states.dtype.itemsize > 2 else 2 * ROWS, max(1, 2**24 // vocab_size))
    return rows, max(1, 2**17 // vocab_size)


def _softmax_less_label_(scores: torch.Tensor, labels: torch.Tensor, weight: float) -> torch.Tensor:
    """Puts softmax(scores), less `weight` on each row's label, in the place of the scores; returns
    the sum of log(normaliser) - weight * score of the label."""
    wide = scores.to(at_least_float32(scores.dtype))
    highest = wide.amax(-1, keepdim=True)
    label_score = wide.gather(-1, labels)
    probabilities = torch.softmax(wide, -1, out=wide)
    log_normalizer = highest - probabilities.amax(-1, keepdim=True).log()  # exp(0) / normaliser
    probabilities.scatter_add_(-1, labels, torch.full_like(highest, -weight))
    if probabilities.dtype != scores.dtype:
        scores.copy_(probabilities)
    return (log_normalizer - weight * label_score).sum()


class SmoothedCrossEntropy(torch.autograd.Function):
    """The sum behind `label_smoothed_cross_entropy`, over rows of logits.

    torch's own keeps the log-probabilities and writes several gradients of their size. Here the
    gradient, softmax(logits) - target, is written once, and what lies between fits in a cache.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """(rows, vocabulary) logits and (rows,) labels to a sum of -log p, at least in float32."""
        total = logits.new_zeros((), dtype=at_least_float32(logits.dtype))
        log_normalizers = []
        unlabelled = labels == -100
        gold = labels.masked_fill(unlabelled, 0)
        for scores, tokens, absent in _split(ROWS, logits, gold, unlabelled):
            loss, log_normalizer = _losses(scores.to(total.dtype), tokens, label_smoothing)
            total += loss.masked_fill(absent, 0).sum()
            log_normalizers.append(log_normalizer)
        ctx.save_for_backward(logits, gold, ~unlabelled, torch.cat(log_normalizers))
        ctx.label_smoothing = label_smoothing
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Softmax less the smoothed target, 0 where there is no label."""
        logits = ctx.saved_tensors[0]
        grad_logits = torch.empty_like(logits)
        for grad, scores, gold, labelled, log_z in _split(ROWS, grad_logits, *ctx.saved_tensors):
            error = _errors_(scores.to(log_z.dtype, copy=True), log_z, gold, ctx.label_smoothing)
            torch.mul(error, (grad_total * labelled)[:, None], out=grad)
        return grad_logits, None, None


def _split(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _losses(
    scores: torch.Tensor, labels: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-log p of the smoothed target in each row, and the logarithm of the row's normaliser."""
    log_normalizer = scores.logsumexp(-1)
    label_score = scores.gather(-1, labels[:, None])[:, 0]
    expected_score = torch.lerp(label_score, scores.mean(-1), label_smoothing)
    return log_normalizer - expected_score, log_normalizer


def _errors_(
    scores: torch.Tensor, log_normalizer: torch.Tensor, labels: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    """Softmax less the smoothed target, which takes the scores' place."""
    errors = scores.sub_(log_normalizer[:, None]).exp_().sub_(label_smoothing / scores.shape[-1])
    on_label = errors.new_full((len(labels), 1), label_smoothing - 1)
    return errors.scatter_add_(-1, labels[:, None], on_label)


def _summed(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # Rows in pieces would be a graph for each number of pieces. A compiler fuses torch's own.
        wide = logits.to(at_least_float32(logits.dtype))
        return F.cross_entropy(wide, labels, label_smoothing=label_smoothing, reduction="sum")
    return SmoothedCrossEntropy.apply(logits, labels, label_smoothing)


def projected_cross_entropy(
    states: torch.Tensor,
    projection: nn.Linear,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """As `label_smoothed_cross_entropy` of `projection(states)`, which is never whole in memory.

    Only rows with a label are projected. `states` are (batch, length, d_model).
    """
    expect_labels(labels, states)
    if not is_plain_matrix(projection):
        logits = projection(states)
        return label_smoothed_cross_entropy(logits, labels, label_smoothing, num_items_in_batch)
    rows, flat = states.flatten(0, -2), labels.to(states.device).flatten()
    labelled = (flat != -100).nonzero()[:, 0]
    if len(labelled) < len(flat):
        rows, flat = rows[labelled], flat[labelled]
    matrix, kind = projection.weight, states.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else matrix.dtype
    with torch.autocast(kind, enabled=False), _naming_bad_labels(flat, len(matrix)):
        items = _count_items(labels, num_items_in_batch, rows.device)
        return ProjectedCrossEntropy.apply(rows, matrix, flat, label_smoothing, dtype, items)


def is_plain_matrix(projection: nn.Module) -> bool:
    """Whether a call is only a product: nothing quantised, adapted, parallel or offloaded."""
    hooks = (
        projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection)
    )
    plain = type(projection) is nn.Linear and type(projection.weight) is nn.Parameter
    return plain and projection.bias is None and not hooks


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy against (1 - eps) on the label plus eps / vocabulary on every token.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length); -100 takes no part.
        label_smoothing: eps.
        num_items_in_batch: What the sum is divided by, where other batches share one gradient
            step; by default this batch's own labels.

    Raises:
        ValueError: `labels` and `logits` differ in batch or length.
        IndexError: A label is neither -100 nor in the vocabulary (on the CPU).
    """
    expect_labels(labels, logits)
    rows, flat = logits.flatten(0, -2), labels.to(logits.device).flatten()
    with _naming_bad_labels(flat, logits.shape[-1]):
        total = _summed(rows, flat, label_smoothing)
    return total / _count_items(labels, num_items_in_batch, total.device)


@contextmanager
def _naming_bad_labels(labels: torch.Tensor, vocab_size: int) -> Iterator[None]:
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise out_of_range(labels[labels != -100], vocab_size, "label") from None


def _count_items(
    labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None, device: torch.device
) -> torch.Tensor | int:
    """What a sum of losses is divided by."""
    if num_items_in_batch is None:
        return (labels != -100).sum().clamp(min=1).to(device)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(device)
    return num_items_in_batch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Half precision widened to float32; float64 stays."""
    return torch.promote_types(dtype, torch.float32)
