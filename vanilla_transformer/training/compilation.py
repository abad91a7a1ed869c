"""Training with compiled layers: the same layer many times, compiled once."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

GRAPHS = 64  # per layer: torch's limit of 8 is too low for batches with and without padding


def compile_layers(model: nn.Module, **options: Any) -> bool:
    """Compile the training of each layer of encoder and decoder, for batches of any shape.

    Code outside the layers is not compiled, such as the loss without logits, nor is generation,
    whose steps would each be compiled again.

    Args:
        model: Any of transformers' models.
        options: Of `torch.compile`.

    Returns:
        Whether there are layers that transformers marks as such: FSMT, for example, has none.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)

    @cache
    def compiled(kind: type[nn.Module]) -> Callable:
        return torch.compile(kind.forward, dynamic=True, **options)

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(_forward, compiled, layer)
    return bool(layers)


def _forward(compiled: Callable, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind = type(layer)  # FSDP changes it
    forward = compiled(kind) if layer.training else kind.forward
    return forward(layer, *args, **kwargs)
