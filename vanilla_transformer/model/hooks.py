"""Who looks at what the modules of a model compute: hooks see whole batches, padding included."""

from collections.abc import Callable
from typing import Any

from torch import nn

# Whose hooks take any layout of a batch: they shard, move or record.
INDIFFERENT = (
    "torch.",
    "accelerate.",
    "deepspeed.",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run when this module is called, or when a gradient passes through it."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def is_watched(module: nn.Module) -> bool:
    """Whether the module, or one in it, has hooks that may depend on the rows of a batch."""
    return any(
        not str(getattr(hook, "__module__", None)).startswith(INDIFFERENT)
        for part in module.modules()
        for hook in hooks_of(part)
    )
