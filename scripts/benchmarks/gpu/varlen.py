"""torch's own kernel for rows of any length, as an attention of transformers.

It packs rows as flash attention does, without another package. It only trains, in half precision.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "varlen"


def register() -> None:
    """Make it available as an `attn_implementation`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, heads, tokens, head_dim) queries, keys and values of packed rows, with their
    ends as for flash attention. Without ends, no position may be padding.

    Raises:
        ValueError: There is padding: the rows are not packed.
    """
    if cu_seq_lens_q is None:
        if attention_mask is not None:
            raise ValueError("attention_mask of padded rows: expected packed rows")
        return sdpa_attention_forward(module, query, key, value, None, **options)
    causal: dict[str, Any] = {}
    if module.is_causal:  # a separate argument up to torch 2.10
        has_flag = "is_causal" in inspect.signature(varlen.varlen_attn).parameters
        causal = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}
    heads = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    ends = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    return varlen.varlen_attn(*heads, *ends, **causal)[None], None
