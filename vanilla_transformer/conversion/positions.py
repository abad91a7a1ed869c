"""Tables of positions in checkpoints: sinusoids, recognized by comparison, or learned vectors."""

from typing import Any

import torch
from torch import Tensor

# The order of sines and cosines in the columns, and our `sinusoid_frequencies`.
LAYOUTS = ("interleaved", "halves")
FREQUENCIES = {"paper": 0, "tensor2tensor": 2}


def sinusoids(length: int, d_model: int, frequencies: str, layout: str) -> Tensor:
    """A table (length, d_model), in double precision."""
    divisor = d_model - FREQUENCIES[frequencies]
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / divisor
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0**-exponents
    if layout == "halves":
        return torch.cat([angles.sin(), angles.cos()], 1)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def find_sinusoids(table: Tensor) -> tuple[str, str] | None:
    """Frequencies and layout of a table (length, d_model) of sinusoids; None for anything else,
    such as learned vectors."""
    length, d_model = table.shape
    if d_model % 2 or d_model < 4:
        return None
    # A toolkit computes angles in single precision, and the table is rounded to its dtype.
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    limit = 1e-5 + positions * 1e-6 + 2 * torch.finfo(table.dtype).eps
    for frequencies in FREQUENCIES:
        for layout in LAYOUTS:
            expected = sinusoids(length, d_model, frequencies, layout)
            if ((expected - table).abs() < limit).all():
                return frequencies, layout
    return None


def learned_positions(encoder: Tensor, decoder: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Learned positions (length, d_model) of both stacks under our names, and the fields of the
    configuration. The shorter table repeats its last row up to the length of the longer."""
    length = max(len(encoder), len(decoder))
    rows = torch.arange(length)
    weights = {
        f"model.{stack}.embed_positions.weight": table[rows.clamp(max=len(table) - 1)]
        for stack, table in (("encoder", encoder), ("decoder", decoder))
    }
    return weights, {"position_encoding": "learned", "max_position_embeddings": length}
