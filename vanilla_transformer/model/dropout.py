"""Dropout (section 5.4), with fewer random bits on a CPU."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """`torch.nn.functional.dropout`; on a CPU, p is rounded to a multiple of 2^-16.

    There torch draws 64 random bits for each element, which takes a tenth of a small model's
    training step; this draws 16.
    """
    dropped = round(p * 2**16)
    if not training or dropped == 0:
        return states
    if states.device.type != "cpu" or is_transformed() or dropped == 2**16:
        return F.dropout(states, p)
    longs = torch.empty(-(-states.numel() // 4), dtype=torch.int64, device="cpu")
    bits = longs.random_(-(2**63), None).view(torch.int16)[: states.numel()].view(states.shape)
    kept = (bits >= dropped - 2**15).view(torch.uint8)
    return MaskedScale.apply(states, kept, 2**16 / (2**16 - dropped))


class Dropout(nn.Dropout):
    """`dropout` as a module: its `p` and mode can be changed, as for Monte Carlo dropout."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Same as of `torch.nn.Dropout`."""
        return dropout(states, self.p, self.training)


def is_transformed() -> bool:
    """Whether `torch.compile` or `torch.func` is active: our autograd functions support neither."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class MaskedScale(torch.autograd.Function):
    """states * kept * scale, which saves one byte per element for the backward pass, where torch's
    product would save a float."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        """The product, in the states' type."""
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (states * kept).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The same product of the gradient."""
        return MaskedScale.apply(grad, *ctx.saved_tensors, ctx.scale), None, None
