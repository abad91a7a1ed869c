"""The label-smoothed loss without logits: from states to loss and gradients, a few rows at a time,
as in Liger's fused linear cross-entropy."""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .dropout import is_transformed
from .hooks import are_all_watched, hooks_of

logger = logging.getLogger(__name__)

ROWS = 256  # of logits, computed at a time
# Roughly the logit of a token that a conversion has added and no translation may contain. Label
# smoothing ignores such tokens.
SUPPRESSED = -1e4
# Returns an additional loss of log-probabilities (rows, vocabulary). Adds its gradient with respect
# to the logits to the probabilities.
Regularizer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def can_fuse(config: PreTrainedConfig, projection: nn.Module) -> bool:
    """Whether `fused_linear_cross_entropy` can replace this projection and the loss."""
    is_eager = config._attn_implementation == "eager"
    return not (is_eager or is_transformed()) and is_plain_matrix(projection)


def fused_linear_cross_entropy(
    states: torch.Tensor,
    matrix: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    regularizer: Regularizer | None = None,
) -> torch.Tensor:
    """The model file's `label_smoothed_cross_entropy` without ever holding all logits.

    Args:
        states: (batch, length, d_model), or of several passes over a batch, (passes * batch,
            length, d_model).
        matrix: The projection, (vocabulary, d_model).
        labels: (batch, length); -100 is ignored, and its row is not projected.
        label_smoothing: eps.
        num_items_in_batch: What the sum is divided by; by default the number of labels.
        regularizer: An additional loss of each token's predictions; all passes are adjacent.
    """
    flat = labels.to(states.device, torch.long).flatten().contiguous()  # for the kernel
    passes = max(1, len(states) // max(1, len(labels)))
    rows = states.flatten(0, -2)
    with_label = (flat != -100).nonzero()[:, 0]
    items = max(1, len(with_label)) if num_items_in_batch is None else num_items_in_batch
    if isinstance(items, torch.Tensor):
        items = items.to(states.device)
    if passes > 1:
        of_pass = torch.arange(passes, device=flat.device) * len(flat)
        with_label, flat = (with_label[:, None] + of_pass).flatten(), flat.repeat(passes)
    if len(with_label) < len(flat) or passes > 1:
        rows, flat = rows.index_select(0, with_label), flat[with_label]
    dtype = product_dtype(matrix)
    # No gradient is needed without autograd, or where weights are frozen.
    wanted = [torch.is_grad_enabled() and one.requires_grad for one in (rows, matrix)]
    with torch.autocast(states.device.type, enabled=False):
        return FusedLinearCrossEntropy.apply(
            rows, matrix, flat, label_smoothing, dtype, items, *wanted, passes, regularizer
        )


class FusedLinearCrossEntropy(torch.autograd.Function):
    """The autograd function of `fused_linear_cross_entropy`.

    With p = softmax(states projection^T), the gradient with respect to the logits is p, minus (1 -
    eps) on the label, minus eps / V everywhere. The last term is the same in each column, also in
    the loss, so both are computed from the mean row of the projection instead of from V columns.
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
        wants_grad_states: bool,
        wants_grad_projection: bool,
        passes: int = 1,
        regularizer: Regularizer | None = None,
    ) -> torch.Tensor:
        """The sum of -log p over `items`, from (rows, d_model) states and a (vocabulary, d_model)
        matrix, which are multiplied in `dtype`. Rows of `passes` stay together."""
        eps, wide = label_smoothing, at_least_float32(dtype)
        ctx.dtypes, ctx.items = (states.dtype, projection.dtype), items
        mean_row = projection.mean(0).to(wide)
        states, projection = states.to(dtype), projection.to(dtype)
        total = -eps * (states.sum(0, dtype=wide) @ mean_row)
        grad_states = torch.empty_like(states)
        grad_projection = product = None
        if wants_grad_projection:
            grad_projection = torch.zeros_like(projection, dtype=wide)
            if wide != dtype and not _has_wide_products(projection.device):
                product = torch.empty_like(projection)
        rows, cached_rows = (
            max(passes, number // passes * passes)
            for number in _rows_at_a_time(states, len(projection))
        )
        logits = states.new_empty(min(rows, len(states)), len(projection))
        errors = torch.empty_like(logits)
        for part, gold, grad_part in _split(rows, states, labels, grad_states):
            scores = torch.mm(part, projection.t(), out=logits[: len(part)])
            error = errors[: len(part)]
            for piece, piece_gold, out in _split(cached_rows, scores, gold, error):
                total += _softmax_less_label(piece, piece_gold[:, None], 1 - eps, out, regularizer)
            if wants_grad_states:
                torch.mm(error, projection, out=grad_part)
            if grad_projection is not None:
                _add_product(grad_projection, error, part, product)
        if wants_grad_states:
            grad_states -= (eps * mean_row).to(states.dtype)
        if grad_projection is not None:
            grad_projection -= eps / len(projection) * states.sum(0, dtype=wide)
            grad_projection /= items
        ctx.save_for_backward(grad_states if wants_grad_states else None, grad_projection)
        return total / items

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that `forward` has computed. The projection's is large, so on a CPU it is
        not written again to multiply it by 1. The states' may be too narrow for 1 / items."""
        if torch.is_grad_enabled():  # by create_graph; `once_differentiable` misses a constant 1
            raise RuntimeError(
                "create_graph=True: the loss without logits has no second derivatives; expected "
                'a model with attn_implementation="eager"'
            )
        grad_states, grad_projection = ctx.saved_tensors
        if grad_states is not None:
            grad_states = grad_states.to(ctx.dtypes[0]) * (grad_total / ctx.items)
        if grad_projection is not None:
            grad_projection = grad_projection.to(ctx.dtypes[1])
            if grad_total.device.type != "cpu" or grad_total != 1:
                grad_projection = grad_projection * grad_total
        return grad_states, grad_projection, *(None,) * 8


def _has_wide_products(device: torch.device) -> bool:
    """Whether products of half precision can be accumulated and written in float32."""
    return device.type == "cuda" and torch.version.cuda is not None


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, product: torch.Tensor | None
) -> None:
    """Adds left^T right to a total, through the buffer `product` if there is one."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif product is None:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        torch.mm(left.t(), right, out=product)
        # On a CPU each slice stays in the cache; elsewhere, each would be a kernel.
        rows = ROWS if total.device.type == "cpu" else len(total)
        for wide, narrow in _split(rows, total, product):
            wide += narrow


def _rows_at_a_time(states: torch.Tensor, vocab_size: int) -> tuple[int, int]:
    """How many rows of logits to compute at a time, and how many of these a CPU's cache holds.

    Products in half precision are so fast that adding them up in float32, once for each part,
    becomes noticeable, so the parts are fewer and larger. On a GPU a kernel needs enough work, in
    tiles of up to 128 rows.
    """
    if states.device.type != "cpu":
        rows = max(128, 2**27 // vocab_size // 128 * 128)
        return rows, rows
    rows = min(ROWS if states.dtype.itemsize > 2 else 2 * ROWS, 2**24 // vocab_size)
    return rows, 2**17 // vocab_size


def _softmax_less_label(
    scores: torch.Tensor,
    labels: torch.Tensor,
    weight: float,
    out: torch.Tensor,
    regularizer: Regularizer | None = None,
) -> torch.Tensor:
    """Writes softmax(scores), minus `weight` on each row's label, into `out`; returns the sum of
    log(normalizer) - weight * score of the label. The regularizer adds to both."""
    kernel = _gpu_kernel(scores.device) if scores.device.type == "cuda" else None
    if kernel is not None and regularizer is None and scores.dtype.itemsize <= 4:
        return kernel(scores, labels, weight, out)
    wide = at_least_float32(scores.dtype)
    highest = scores.amax(-1, keepdim=True).to(wide)
    label_score = scores.gather(-1, labels).to(wide)
    same = out if out.dtype == wide else None
    probabilities = torch.softmax(scores, -1, dtype=wide, out=same)
    log_normalizer = highest - probabilities.amax(-1, keepdim=True).log()  # exp(0) / normalizer
    total = (log_normalizer - weight * label_score).sum()
    if regularizer is not None:
        total += regularizer(scores - log_normalizer, probabilities)
    probabilities.scatter_add_(-1, labels, torch.full_like(highest, -weight))
    if same is None:
        out.copy_(probabilities)
    return total


@cache
def _gpu_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """`softmax_less_label` of `loss_kernel.py`; None if it can't be built because Triton, or the C
    compiler that it needs, is missing."""
    try:
        from .loss_kernel import softmax_less_label

        scores = torch.zeros(1, 8, device=device)
        softmax_less_label(scores, scores.new_zeros(1, 1, dtype=torch.long), 1.0, scores)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        logger.warning(
            "The loss is computed more slowly: Triton can't build its kernel: %s", reason
        )
        return None
    return softmax_less_label


def _split(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def not_suppressed(logits: torch.Tensor, has_label: torch.Tensor) -> torch.Tensor:
    """Which tokens a translation may contain, (vocabulary,), from logits (batch, length,
    vocabulary): all except those whose logit is about `SUPPRESSED` wherever there is a label,
    (batch, length)."""
    is_suppressed = (logits - SUPPRESSED).abs() < -SUPPRESSED / 2
    return (~is_suppressed & has_label[..., None]).flatten(0, -2).any(dim=0)


def is_plain_matrix(projection: nn.Module) -> bool:
    """Whether this is only a matrix: without bias, not quantized, adapted or offloaded."""
    plain = (
        type(projection) is nn.Linear
        and projection.bias is None
        and type(projection.weight) is nn.Parameter
    )
    has_hooks = hooks_of(projection) or are_all_watched()
    return plain and not has_hooks and "forward" not in vars(projection)


def product_dtype(factor: torch.Tensor) -> torch.dtype:
    """The type of a product with a matrix: autocast's, if enabled and not for float64."""
    kind = factor.device.type
    if factor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return factor.dtype
    return torch.get_autocast_dtype(kind)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision; otherwise the same."""
    return torch.promote_types(dtype, torch.float32)
