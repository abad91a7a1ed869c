"""Finds hooks and foreign modules in a model: these get complete batches, with padding."""

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

from .pretrained import own_class

# The packages whose hooks accept any layout of a batch: they shard, move or record.
INDIFFERENT = (
    "torch.",
    "accelerate.",
    "deepspeed.",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)
# The packages whose modules treat each position alike, or support packed rows.
POSITION_WISE = (
    f"{__package__}.dropout",
    f"{__package__}.modeling_vanilla_transformer",
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "torch.nn.modules.module",  # containers, which have no method of their own
    "torch.nn.modules.normalization",
    "torch.nn.modules.sparse",
    "torch.ao.",
    "transformers.activations",
    "transformers.integrations.",
    "peft.",
    "bitsandbytes.",
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
    """Whether the module or a submodule has hooks that may depend on the rows of a batch."""
    hooks = chain.from_iterable(hooks_of(part) for part in module.modules())
    return any(map(_depends_on_rows, hooks)) or are_all_watched()


def are_all_watched() -> bool:
    """Whether such a hook is registered for all modules of the process."""
    return any(
        _depends_on_rows(hook)
        for kind in ("forward_pre", "forward", "backward_pre", "backward")
        for hook in getattr(of_all_modules, f"_global_{kind}_hooks").values()
    )


def _depends_on_rows(hook: Callable[..., Any]) -> bool:
    return not str(getattr(hook, "__module__", None)).startswith(INDIFFERENT)


def is_position_wise(module: nn.Module) -> bool:
    """Whether the module gives the same for packed rows as for a batch: no submodule or replaced
    method is from another package, which might treat them as one long row."""
    return all(
        str(getattr(made, "__module__", None)).startswith(POSITION_WISE)
        for part in module.modules()
        for made in (own_class(part), part.forward)
    )
