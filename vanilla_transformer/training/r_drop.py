"""R-Drop: train a model to predict the same under two dropout masks (Liang et al., 2021,
https://arxiv.org/abs/2106.14448)."""

import torch
from torch.nn import functional as F

from ..model.loss import at_least_float32
from ..model.modeling_vanilla_transformer import label_smoothed_cross_entropy


def r_drop_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    alpha: float,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The cross-entropies of two passes over a batch, plus alpha times half the Kullback-Leibler
    divergences of each from the other (equation 3).

    Args:
        logits: Logits of both passes, concatenated, (2 * batch, length, vocabulary).
        labels: (batch, length); -100 is ignored.
        alpha: Weight of the divergence; the paper uses 5 for translation.
        label_smoothing: eps of the cross-entropy.
        num_items_in_batch: Divisor of the sums if several batches share one update; by default the
            number of this batch's labels.
    """
    labelled = labels != -100
    items = labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    twice = torch.cat([labels, labels])
    cross_entropies = label_smoothed_cross_entropy(logits, twice, label_smoothing, items)
    wide = at_least_float32(logits.dtype)
    one, other = (F.log_softmax(half[labelled], -1, dtype=wide) for half in logits.chunk(2))
    # the two divergences share their terms: p log(p / q) + q log(q / p) = (p - q) (log p - log q)
    divergences = ((one.exp() - other.exp()) * (one - other)).sum()
    return cross_entropies + alpha / 2 * divergences / items
