# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Batches without their padding: the tokens of all rows in one, (1, tokens, d_model).

That is for attentions that keep such rows apart by themselves: flash attention, which is told where
each ends, and flex attention, whose mask leaves out blocks of other rows. Nothing else in a layer
looks at a token's neighbours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_causal_mask,
    flash_attention_mask,
    flex_attention_mask,
)


class PackedRows:
    """The tokens of (batch, length, dim) states: those of a boolean mask (batch, length)."""

    def __init__(self, states: torch.Tensor, attention_mask: torch.Tensor):
        self.shape = attention_mask.shape
        self.places = attention_mask.flatten().nonzero()[:, 0]  # (tokens,)
        self.rows = self.places // self.shape[1]  # (tokens,)
        lengths = attention_mask.count_nonzero(1)
        self.longest = int(lengths.max())
        self.ends = F.pad(lengths.cumsum(0), (1, 0)).int()  # (batch + 1,), 0 first
        self.states = states.flatten(0, 1)[self.places][None]  # (1, tokens, dim)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, dim) to (batch, length, dim), 0 where there is padding."""
        padded = states.new_zeros(self.shape.numel(), states.shape[-1])
        return padded.index_copy_(0, self.places, states[0]).unflatten(0, self.shape)

    def unpack_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(1, heads, tokens, head_dim) to (batch, heads, length, head_dim), likewise."""
        unpacked = self.unpack(states.transpose(1, 2).flatten(2))
        return unpacked.unflatten(2, (states.shape[1], -1)).transpose(1, 2)


def is_flash(config: PreTrainedConfig) -> bool:
    """Whether this is a flash attention, installed or from the Hub."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation) is flash_attention_mask


def keeps_rows_apart(config: PreTrainedConfig) -> bool:
    """Whether this attention takes packed rows, and leaves out what is between them."""
    is_flex = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation) is flex_attention_mask
    return is_flex or is_flash(config)


def are_recorded(config: PreTrainedConfig, options: dict[str, Any]) -> bool:
    """Whether states or attentions of each layer are asked for: these want one padded batch."""
    names = ("output_hidden_states", "output_attentions")
    return any(options.get(name, getattr(config, name, False)) for name in names)


def labelled(
    config: PreTrainedConfig,
    options: dict[str, Any],
    labels: torch.Tensor,
    decoder_input_ids: torch.Tensor | None,
) -> torch.Tensor | None:
    """A mask (batch, target_length) of all up to a row's last label: no loss depends on what
    follows. None where a mask saves nothing, or states of each layer are asked for."""
    if not keeps_rows_apart(config) or are_recorded(config, options):
        return None
    if decoder_input_ids is None or decoder_input_ids.shape != labels.shape:
        return None
    return (labels != -100).flip(1).cumsum(1).flip(1) > 0


def packed(
    layers: Callable[..., torch.Tensor],
    config: PreTrainedConfig,
    options: dict[str, Any],
    target: tuple[torch.Tensor, torch.Tensor | None],
    source: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    cache: Cache | None = None,
) -> torch.Tensor | None:
    """`layers(states, mask)`, or `layers(states, mask, source, source_mask)`, over packed rows of
    states and attention masks: (batch, length, d_model), 0 where there is padding. A decoder, which
    is causal, gives a `source`, if only one of None.

    None where that saves nothing, or can't be: states are kept in a cache, or those of each layer
    asked for, or a mask is of another kind.
    """
    if cache is not None or not keeps_rows_apart(config) or torch.compiler.is_compiling():
        return None
    both = (target, source or (None, None))
    rows = [(states, mask) for states, mask in both if states is not None]
    if are_recorded(config, options) or not _can_be_packed(rows):
        return None
    queries, *sources = (PackedRows(states, _tokens(states, mask)) for states, mask in rows)
    is_causal = source is not None
    arguments = [queries.states, _mask_between(config, queries, queries, is_causal)]
    for keys in sources:
        arguments += [keys.states, _mask_between(config, queries, keys)]
    return queries.unpack(layers(*arguments))


def _can_be_packed(rows: list[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """Whether each target has a source of its own, and some of what is there is padding."""
    if len({len(states) for states, _ in rows}) > 1:
        return False
    if any(mask is not None and mask.shape != states.shape[:2] for states, mask in rows):
        return False
    masks = [mask.bool() for _, mask in rows if mask is not None]
    return all(mask.any() for mask in masks) and not all(mask.all() for mask in masks)


def _tokens(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Which of (batch, length, dim) states are those of tokens: (batch, length), boolean."""
    if mask is None:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return mask.to(states.device, torch.bool)


def _mask_between(
    config: PreTrainedConfig, queries: PackedRows, keys: PackedRows, is_causal: bool = False
) -> Any:
    """What keeps rows apart: a mask of transformers' making, or what flash attention takes in place
    of one."""
    if is_flash(config):
        return {
            "cu_seq_lens_q": queries.ends,
            "cu_seq_lens_k": keys.ends,
            "max_length_q": queries.longest,
            "max_length_k": keys.longest,
        }

    def in_one_row(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return queries.rows[query] == keys.rows[key]

    if is_causal:
        return create_causal_mask(config, queries.states, None, None, and_mask_function=in_one_row)
    return create_bidirectional_mask(
        config, queries.states, None, keys.states, and_mask_function=in_one_row
    )


def attend_to_row(
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Flash attention, with the ends of rows in place of a mask."""
    return attend(module, query, key, value, None, **kwargs, **ends)
