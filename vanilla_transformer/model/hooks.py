"""Who looks at what the modules of a model compute: hooks see whole batches, padding included."""

from torch import nn

# Whose hooks take any layout of a batch: they shard, move or record.
INDIFFERENT = (
    "torch.",
    "accelerate.",
    "deepspeed.",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)


def is_watched(module: nn.Module) -> bool:
    """Whether the module, or one in it, has forward hooks that may depend on a batch's rows."""
    return any(
        not str(getattr(hook, "__module__", None)).startswith(INDIFFERENT)
        for part in module.modules()
        if part._forward_hooks or part._forward_pre_hooks
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )
