"""R-Drop: train a model to predict the same under two dropout masks (Liang et al., 2021,
https://arxiv.org/abs/2106.14448)."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..model.loss import at_least_float32, can_fuse, fused_linear_cross_entropy
from ..model.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    label_smoothed_cross_entropy,
)


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


def can_fuse_r_drop(model: nn.Module) -> bool:
    """Whether `fused_r_drop_loss` can replace this model's projection and `r_drop_loss`."""
    is_ours = type(model) is VanillaTransformerForConditionalGeneration
    return is_ours and can_fuse(model.config, model.lm_head)


def fused_r_drop_loss(
    states: torch.Tensor,
    matrix: torch.Tensor,
    labels: torch.Tensor,
    alpha: float,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`r_drop_loss` without ever holding all logits.

    Args:
        states: The decoder's states in both passes, concatenated, (2 * batch, length, d_model).
        matrix: The projection, (vocabulary, d_model).
        labels, alpha, label_smoothing, num_items_in_batch: As for `r_drop_loss`.
    """
    options = (label_smoothing, num_items_in_batch, partial(_add_divergence, alpha / 2))
    return fused_linear_cross_entropy(states, matrix, labels, *options)


def _add_divergence(weight: float, log_probs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The divergences of neighbouring rows from each other, times `weight`, given their
    log-probabilities, (rows, vocabulary). Adds its gradient with respect to the logits to
    `gradient`, which contains the probabilities."""
    one, other = gradient[::2], gradient[1::2]
    difference = log_probs[::2] - log_probs[1::2]
    change = one - other
    terms = change * difference
    for probs, sign in ((one, 1), (other, -1)):
        divergence = (probs * difference).sum(-1, keepdim=True)
        probs += weight * (sign * probs * (difference - divergence) + sign * change)
    return weight * terms.sum()
