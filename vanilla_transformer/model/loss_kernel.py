"""The softmax of the fused loss as one kernel of a GPU, in Triton, which comes with torch.

torch's operations read and write the logits six times; the kernel reads them once from the GPU's
memory and once from its cache, and writes them once.
"""

import torch

try:  # without it, transformers would require Triton to load a checkpoint's code
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    raise ModuleNotFoundError("Triton is not installed", name="triton") from None

BLOCK, WARPS = 8192, 16  # columns at a time, and the warps that share them
LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def _softmax_less_label(  # type: ignore[no-untyped-def]
    scores,
    labels,
    label_scores,
    out,
    losses,
    weight,
    units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, of units * UNIT columns: one load reads UNIT of them."""
    columns = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    scores += row * columns
    out += row * columns
    label = tl.load(labels + row)
    highest, total = LOWEST, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(scores + column, column < columns, float("-inf")).to(tl.float32)
        before, highest = highest, tl.maximum(highest, tl.max(score))
        total = total * tl.exp(before - highest) + tl.sum(tl.exp(score - highest))
    log_normalizer = highest + tl.log(total)
    label_score = tl.load(label_scores + row).to(tl.float32)
    tl.store(losses + row, log_normalizer - weight * label_score)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(scores + column, column < columns, float("-inf")).to(tl.float32)
        probability = tl.exp(score - highest) / total
        error = tl.where(column == label, probability - weight, probability)
        tl.store(out + column, error.to(out.dtype.element_ty), column < columns)


def softmax_less_label(
    scores: torch.Tensor, labels: torch.Tensor, weight: float, out: torch.Tensor
) -> torch.Tensor:
    """Writes softmax(scores), minus `weight` on each row's label, into `out`, and returns the sum
    of log(normalizer) - weight * score of the label.

    Args:
        scores: Contiguous, (rows, columns), of at most 32 bits, like `out`.
        labels: A column for each row, contiguous, (rows, 1).
    """
    rows, columns = scores.shape
    unit = 8 if columns % 8 == 0 else 1
    label_scores = scores.gather(-1, labels)  # here torch stops at a label that has no column
    losses = torch.empty(rows, dtype=torch.float32, device=scores.device)
    with torch.cuda.device_of(scores):  # Triton uses the current device
        _softmax_less_label[(rows,)](
            *(scores, labels, label_scores, out, losses, weight, columns // unit),
            UNIT=unit,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses.sum()
