"""Label smoothing (section 5.4): cross-entropy against a target that is not quite sure.

The target distribution is (1 - eps) on the label plus eps / V on each of the V tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .checks_vanilla_transformer import out_of_range

ROWS = 256  # whose logits are worked on at a time


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
        for scores, gold in _split_rows(logits, labels):
            scores = scores.to(total.dtype)
            log_normalizer = scores.logsumexp(-1)
            label_score = scores.gather(-1, gold.clamp(min=0)[:, None])[:, 0]
            loss = log_normalizer - torch.lerp(label_score, scores.mean(-1), label_smoothing)
            total += loss.masked_fill(gold == -100, 0).sum()
            log_normalizers.append(log_normalizer)
        ctx.save_for_backward(logits, labels, torch.cat(log_normalizers))
        ctx.label_smoothing = label_smoothing
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Softmax less the smoothed target, 0 where there is no label."""
        logits, labels, log_normalizer = ctx.saved_tensors
        grad_logits, eps = torch.empty_like(logits), ctx.label_smoothing
        for grad, scores, gold, log_z in _split_rows(grad_logits, logits, labels, log_normalizer):
            error = (scores - log_z[:, None]).exp_().sub_(eps / logits.shape[-1])
            on_label = error.new_full((len(gold), 1), eps - 1)
            error.scatter_add_(-1, gold.clamp(min=0)[:, None], on_label)
            torch.mul(error, (grad_total * (gold != -100))[:, None], out=grad)
        return grad_logits, None, None


def _split_rows(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(ROWS) for tensor in tensors), strict=True)


def _summed(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # Rows in pieces would be a graph for each number of pieces. A compiler fuses torch's own.
        wide = logits.to(at_least_float32(logits.dtype))
        return F.cross_entropy(wide, labels, label_smoothing=label_smoothing, reduction="sum")
    return SmoothedCrossEntropy.apply(logits, labels, label_smoothing)


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
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for predictions of shape "
            f"{tuple(logits.shape[:-1])}: expected one label for each prediction"
        )
    rows, flat = logits.flatten(0, -2), labels.to(logits.device).flatten()
    try:
        total = _summed(rows, flat, label_smoothing)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise out_of_range(flat[flat != -100], logits.shape[-1], "label") from None
    if num_items_in_batch is None:
        return total / (labels != -100).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Half precision widened to float32; float64 stays."""
    return torch.promote_types(dtype, torch.float32)
