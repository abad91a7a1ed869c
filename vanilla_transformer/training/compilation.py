"""Training with compiled layers: the same layer many times, compiled once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

GRAPHS = 64  # of a layer: torch's limit of 8 is below the kinds of batches, with padding or without


def compile_layers(model: nn.Module, **options: Any) -> bool:
    """Compile what each layer of encoder and decoder does in training, for batches of any shape.

    What is around the layers stays as it is, the loss without logits too, and so does generation,
    which would compile each of its steps anew.

    Args:
        model: Any of transformers' models.
        options: Of `torch.compile`.

    Returns:
        Whether there are layers that transformers knows as such: FSMT, for one, has none.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    compiled: dict[type, Callable] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            kind = type(layer)
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, dynamic=True, **options)
            layer.forward = partial(_forward, compiled[kind], layer)
    return bool(compiled)


def _forward(compiled: Callable, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = compiled if layer.training else type(layer).forward
    return forward(layer, *args, **kwargs)
