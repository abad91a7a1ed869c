"""Attention that is faster than the equation of the model file, with the same result.

`attn_implementation="eager"` uses none of this: it runs the equation. "sdpa" chooses among kernels,
and the beams of a source share its keys in the cache of `cache.py`.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    flash_attention_mask,
    flex_attention_mask,
)

from .loss import product_dtype

if TYPE_CHECKING:
    from .packing import RowEnds, RowsByLength

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# ---------------------------------------------------------------- Kernels

# `Trainer` passes the last one to any model that takes keywords, such as a head on an encoder.
NO_ATTENTION_OPTIONS = {"use_cache", "output_hidden_states", "num_items_in_batch"}
FLASH_TILE = 128  # positions
CHOICE_OF_KERNELS = threading.Lock()  # the choice is global, and threads may share a model


class FastAttention(AttentionInterface):
    """transformers' attention functions, with ours in place of "sdpa", flash and flex attention.

    Each takes queries (batch, heads, query_length, d_k), keys (batch, heads, key_length, d_k),
    values (batch, heads, key_length, d_v) and a mask, and returns the output
    (batch, query_length, heads, d_v).
    """

    def get_interface(
        self, attn_implementation: str, default: AttentionFunction
    ) -> AttentionFunction:
        """The function of this name; for "eager" it is `default`, the equation."""
        attend = super().get_interface(attn_implementation, default)
        if attend is sdpa_attention_forward:
            return partial(sdpa_attention, default)
        if is_flash(attn_implementation) or is_flex(attn_implementation):
            return partial(flash_or_flex_attention, attend)
        return attend


def sdpa_attention(
    equation: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rows: "RowsByLength | None" = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Same as `sdpa_attention_forward`, with the fastest kernel of a CPU.

    In half precision, or where float32 is multiplied with less precision, torch's fused attention
    trains several times slower than the `equation`, which is used if the scores fit in memory.
    """
    again = partial(sdpa_attention, equation)
    if rows is not None:
        return rows.attend(again, module, query, key, value, **options)
    if query.shape[0] != key.shape[0]:
        return attend_with_shared_keys(again, module, query, key, value, attention_mask, **options)
    attend: AttentionFunction = sdpa_attention_forward
    if query.device.type == "cuda":
        attend = attend_on_gpu
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.to(query.dtype)  # a quantized layer may use another
    known = {"scaling", "dropout"} | NO_ATTENTION_OPTIONS
    if query.device.type == "cpu" and options.keys() <= known:
        is_small = query.shape[2] * key.shape[2] <= 512 * 512
        if query.requires_grad and _is_narrow(query.dtype):
            attend = partial(unfused_attention, equation) if is_small else attend
        elif not is_tracing():
            attend = fused_attention
    return attend(module, query, key, value, attention_mask, **options)


def is_our_sdpa(attn_implementation: str) -> bool:
    """Whether this is "sdpa", under which nobody has registered another function."""
    registered = AttentionInterface().get("sdpa")
    return attn_implementation == "sdpa" and registered is sdpa_attention_forward


def is_tracing() -> bool:
    """Whether `torch.compile` or `torch.jit.trace` records this call as a graph, which must not
    depend on the values of the batch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _is_narrow(dtype: torch.dtype) -> bool:
    if torch.compiler.is_compiling() or dtype != torch.float32:  # compiled code can't see more
        return dtype.itemsize == 2
    # `get_float32_matmul_precision` raises an error after a choice for a single backend
    return torch.backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16")


def fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward`, without its checks for options and devices that we don't use."""
    is_causal = attention_mask is None and module.is_causal and query.shape[2] > 1
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=is_causal, scale=scaling
    )
    return output.transpose(1, 2), None


def one_row_for_all_queries(is_token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A mask (batch, 1, 1, length) of keys for "sdpa" from (batch, length) booleans. On a GPU it is
    0 for tokens and -inf for padding, in the type of projected `states` and padded to a multiple of
    16: torch would convert booleans to this in each layer."""
    if is_token.device.type != "cuda":
        return is_token[:, None, None]
    (batch, length), dtype = is_token.shape, product_dtype(states)
    scores = states.new_full((batch, -(-length // 16) * 16), -torch.inf, dtype=dtype)
    scores[:, :length].masked_fill_(is_token, 0)
    return scores[:, None, None, :length]


def attend_on_gpu(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward` without two kernels that torch 2.11 to 2.13 prefer, unless the
    caller has disabled the alternatives. cuDNN's kernel, on Hopper and Blackwell, plans each new
    shape, which takes longer than a training step, and sentences have many shapes. Flash attention
    works on tiles of 128 positions: for short sentences, the memory-efficient kernel is faster."""
    heads = (query, key, value)
    arguments, is_short = (module, *heads, attention_mask), suits_small_tiles(module, *heads)
    if torch.compiler.is_compiling():
        with sdpa_kernel(kernels_to_choose_from(is_short)):
            return sdpa_attention_forward(*arguments, **options)
    kernels = torch.backends.cuda  # `sdpa_kernel` is slower, and runs in each layer
    with CHOICE_OF_KERNELS:
        before = kernels.cudnn_sdp_enabled(), kernels.flash_sdp_enabled()
        cudnn, flash = keeps_cudnn_and_flash(is_short)
        kernels.enable_cudnn_sdp(cudnn)
        kernels.enable_flash_sdp(flash)
        try:
            return sdpa_attention_forward(*arguments, **options)
        finally:
            kernels.enable_cudnn_sdp(before[0])
            kernels.enable_flash_sdp(before[1])


def suits_small_tiles(module: torch.nn.Module, *heads: torch.Tensor) -> bool:
    """Whether these are short sentences in training, with heads that the memory-efficient kernel
    supports: their width is a multiple of 8."""
    if not module.training or any(states.shape[3] % 8 for states in heads):
        return False
    return all(states.shape[2] <= FLASH_TILE for states in heads)


def keeps_cudnn_and_flash(is_short: bool) -> tuple[bool, bool]:
    """Whether torch may choose cuDNN's kernel, and flash attention's."""
    kernels = torch.backends.cuda
    cudnn = kernels.cudnn_sdp_enabled() and not kernels.math_sdp_enabled()
    flash = kernels.flash_sdp_enabled() and not (is_short and kernels.mem_efficient_sdp_enabled())
    return cudnn, flash


@torch.compiler.assume_constant_result
def kernels_to_choose_from(is_short: bool) -> list[SDPBackend]:
    """The enabled kernels. A compiler can't read them, and later changes have no effect on it."""
    kernels = torch.backends.cuda
    cudnn, flash = keeps_cudnn_and_flash(is_short)
    enabled = {
        SDPBackend.FLASH_ATTENTION: flash,
        SDPBackend.EFFICIENT_ATTENTION: kernels.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: kernels.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cudnn,
    }
    return [kernel for kernel, is_enabled in enabled.items() if is_enabled]


def as_scores(attention_mask: torch.Tensor) -> torch.Tensor:
    """A mask to add to scores, from such a mask or from booleans, True where a key is visible."""
    if attention_mask.dtype != torch.bool:
        return attention_mask
    zero = torch.zeros((), dtype=torch.float32, device=attention_mask.device)
    return torch.where(attention_mask, zero, torch.finfo(torch.float32).min)


def unfused_attention(
    equation: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The `equation`, with the masks of `sdpa_attention_forward`: a mask is added to the scores, or
    is True where a key is visible, and a query that sees no key gets 0. Without a mask, the queries
    of a causal module see no later key."""
    given = attention_mask
    if given is None and module.is_causal and query.shape[2] > 1:
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    output, _ = equation(module, query, key, value, attention_mask, **options)
    if given is None or given.dtype != torch.bool:
        return output, None
    sees_any = given.any(-1)  # (..., query_length)
    if not is_tracing() and sees_any.all():
        return output, None
    return output * sees_any.transpose(-1, -2)[..., None], None


def flash_or_flex_attention(
    attend: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    rows: "RowEnds | None" = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Flash attention, with the ends of packed rows, or flex attention. SDPA does what they don't
    support: masks of four dimensions and, for flash, masks of keys from another sequence."""
    if rows is not None:
        ends = rows.source if module.is_cross_attention else rows.own
        attention_mask, options = None, options | ends
    elif isinstance(attention_mask, torch.Tensor):
        if attention_mask.ndim == 2 and module.is_cross_attention:
            attention_mask = attention_mask[:, None, None].bool()
        attend = attend_on_gpu if attention_mask.ndim == 4 else attend
    return attend(module, query, key, value, attention_mask, **options)


def is_flash(attn_implementation: str) -> bool:
    """Whether this is a flash attention, installed or from the Hub."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(attn_implementation) is flash_attention_mask


def is_flex(attn_implementation: str) -> bool:
    """Whether this is torch's flex attention."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(attn_implementation) is flex_attention_mask


def cast_once(states: torch.Tensor) -> torch.Tensor:
    """The states in autocast's type. Otherwise each product with them would cast them again."""
    return states.to(product_dtype(states)) if states.dtype == torch.float32 else states


# ---------------------------------------------------------------- Beams that share a source


def attend_with_shared_keys(
    attend: AttentionFunction,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (batch * beams, heads, length, d_k) queries to (batch, heads, key_length, d_k)
    keys: the beams of a source become further queries of one row. All queries see the same keys, so
    a mask of keys, (batch * beams, 1, 1, key_length), is enough."""
    batch, beams = key.shape[0], query.shape[0] // key.shape[0]
    heads, length = query.shape[1:3]
    folded = query.unflatten(0, (batch, beams)).transpose(1, 2).flatten(2, 3)
    if attention_mask is not None:
        attention_mask = attention_mask[::beams, :, :1]
    output, _ = attend(module, folded, key, value, attention_mask, **options)
    return output.reshape(batch * beams, length, heads, -1), None


def repeat_sources(
    targets: torch.Tensor, sources: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sources (batch, source_length, d_model) and their mask, repeated where each source has
    several targets."""
    times = targets.shape[0] // sources.shape[0]
    if times == 1:
        return sources, attention_mask
    if attention_mask is not None and attention_mask.shape[0] == sources.shape[0]:
        attention_mask = attention_mask.repeat_interleave(times, 0)
    return sources.repeat_interleave(times, 0), attention_mask
