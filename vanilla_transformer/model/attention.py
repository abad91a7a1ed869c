# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Faster ways to the same numbers: what the model does not owe to the paper but to processors."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask

from .packing import PackedRows, are_recorded, attend_to_row, is_flash
from .validation import expect_as_many

# ---------------------------------------------------------------- Random numbers


class _Masked(torch.autograd.Function):
    """States where `kept` is 1, scaled: a byte is remembered of each, where torch's product would
    remember a float."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (states * kept).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Masked.apply(grad, *ctx.saved_tensors, ctx.scale), None, None


class Dropout(nn.Dropout):
    """As torch's, but on the CPU the probability is rounded to a multiple of 2^-16.

    torch draws 64 random bits for each element there, which takes a tenth of a small model's
    training step; this draws 16.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Zero each element with probability p while training, and scale up the others."""
        dropped = round(self.p * 2**16)
        if not self.training or dropped == 0:
            return states
        if states.device.type != "cpu" or torch.compiler.is_compiling() or dropped == 2**16:
            return super().forward(states)
        bits = torch.empty(-(-states.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = bits.view(torch.int16)[: states.numel()].view(states.shape)
        kept = (bits >= dropped - 2**15).view(torch.uint8)
        return _Masked.apply(states, kept, 2**16 / (2**16 - dropped))


# ---------------------------------------------------------------- Lower precision on a CPU


def cast_once(states: torch.Tensor) -> torch.Tensor:
    """What autocast would do to the same states in each of several products."""
    kind = states.device.type
    if states.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return states.to(torch.get_autocast_dtype(kind))
    return states


OF_NO_ACCOUNT = {"use_cache", "output_hidden_states"}  # to attention itself


def fastest(
    attend: Callable[..., Any],
    products: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """The attention asked for, unless a CPU has a faster one of the same result, or flash attention
    is given a mask of four dimensions, which it does not know.

    In half precision, or where float32 is multiplied with less precision, torch's fused attention
    takes several times as long to train. There `products`, the equation written out, serve if their
    scores are not too many to keep.
    """
    if isinstance(mask, RowsByLength):
        return partial(mask.attend, fastest(attend, products, query, key, None, options))
    if isinstance(mask, dict):
        return partial(attend_to_row, attend)
    if attend is flash_attention_forward and mask is not None and mask.ndim == 4:
        return sdpa_attention_forward
    foreign = attend is not sdpa_attention_forward or options.keys() - OF_NO_ACCOUNT
    if foreign or query.device.type != "cpu":
        return attend
    if query.requires_grad and _narrow(query.dtype):
        few = query.shape[2] * key.shape[2] <= 512 * 512
        return partial(unfused_attention, products) if few else attend
    return attend if torch.compiler.is_compiling() else fused_attention


def _narrow(dtype: torch.dtype) -> bool:
    if torch.compiler.is_compiling() or dtype != torch.float32:  # a compiler can't ask for more
        return dtype.itemsize == 2
    return torch.get_float32_matmul_precision() != "highest"


def fused_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward` without its look at other models' options and other devices."""
    causal = attention_mask is None and module.is_causal and query.shape[2] > 1
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=causal, scale=scaling
    )
    return output.transpose(1, 2), None


def unfused_attention(
    products: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`products`, with the masks of `sdpa_attention_forward`: one is added to scores, or is True
    where a key is seen, and a query that sees none gets 0; without one a causal module's queries
    see no later key."""
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        seen = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        attention_mask = seen.tril()
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return products(module, query, key, value, attention_mask, **kwargs)[0], None
    added = torch.where(attention_mask, 0.0, torch.finfo(torch.float32).min)
    output, _ = products(module, query, key, value, added, **kwargs)
    sees_any = attention_mask.any(-1)  # (..., query_length)
    return output if sees_any.all() else output * sees_any.transpose(-1, -2)[..., None], None


# ---------------------------------------------------------------- Less to write


@lru_cache(maxsize=32)
def _kept(make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return make(*args)


def made_once(make: Callable[..., torch.Tensor], beside: torch.Tensor, *args: Any) -> torch.Tensor:
    """`make(*args)`, a constant, kept for the next time: unless a compiler or an exporter looks on,
    whose tensors, as that `beside` it, must not be met again."""
    plain = type(beside) is torch.Tensor and not torch.compiler.is_compiling()
    return _kept(make, *args) if plain else make(*args)


def queries_see_alike(config: PreTrainedConfig) -> bool:
    """Whether this attention takes a mask (batch, 1, 1, key_length) for all queries."""
    return config._attn_implementation in ("eager", "sdpa") or is_flash(config)


def padding_mask(
    config: PreTrainedConfig,
    queries: torch.Tensor,
    attention_mask: torch.Tensor | None,
    keys: torch.Tensor,
) -> torch.Tensor | None:
    """transformers' mask of keys that are padding, not of query x key where a vector does, or the
    caller's own of four dimensions. Without a gradient to come, fused attention is given one to be
    added to scores: torch would make that of a boolean one in each layer. transformers' flash
    attention would take the mask of keys for that of queries where these are others."""
    of_others = queries is not keys and is_flash(config)
    if of_others and attention_mask is not None and attention_mask.ndim == 2:
        return attention_mask[:, None, None].bool()
    if queries_see_alike(config):
        queries = queries[:, :1]
    mask = create_bidirectional_mask(config, queries, attention_mask, keys)
    is_boolean = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    if config._attn_implementation != "sdpa" or not is_boolean or torch.is_grad_enabled():
        return mask
    return torch.zeros_like(mask, dtype=keys.dtype).masked_fill_(~mask, -torch.inf)


# ---------------------------------------------------------------- Beams that share a source


def fold_beams(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(batch * beams, length, dim) to (batch, beams * length, dim), where beams share keys."""
    if queries.shape[0] == keys.shape[0]:
        return queries
    expect_as_many(queries, keys)
    return queries.reshape(keys.shape[0], -1, queries.shape[-1])


def unfold_beams(
    rows: int, output: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(batch, beams * length, heads, d_v) back to (batch * beams, length, heads, d_v), and weights
    (batch, heads, beams * length, key_length) likewise."""
    if output.shape[0] == rows:
        return output, weights
    beams = rows // output.shape[0]
    if weights is not None:
        weights = weights.unflatten(2, (beams, -1)).movedim(2, 1).flatten(0, 1)
    return output.unflatten(1, (beams, -1)).flatten(0, 1), weights


# ---------------------------------------------------------------- Sentences of similar length

SHORTEST = 0.6  # sentence of a group, over its longest


def by_length(
    layers: Callable[[torch.Tensor, Any], torch.Tensor],
    config: PreTrainedConfig,
    options: dict[str, Any],
    states: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """`layers(states, mask)`, of tokens alone where much of a batch is padding.

    What is padding is 0 in what is returned, (batch, length, d_model). That pays on a CPU, where no
    gradient is to come. Nor may states of each layer be asked for (among `options` or in the
    configuration), which want one padded batch.
    """
    if not is_padded(states, attention_mask) or are_recorded(config, options):
        return layers(states, padding_mask(config, states, attention_mask, states))
    assert attention_mask is not None
    if not attention_mask.any():
        return torch.zeros_like(states)
    rows = RowsByLength(config, states, attention_mask)
    return rows.unpack(layers(rows.states, rows))


class RowsByLength:
    """The tokens of a batch as one row, (1, tokens, d_model), those of sentences of similar length
    beside each other, so that attention, which needs each sentence apart, has little padding."""

    def __init__(
        self, config: PreTrainedConfig, states: torch.Tensor, attention_mask: torch.Tensor
    ):
        self.shape = states.shape
        self.groups: list[tuple[PackedRows, torch.Tensor | None]] = []  # with the mask of keys
        self.places: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows in _of_similar_length(attention_mask.count_nonzero(1)):
            mask = attention_mask[rows]
            columns = mask.any(0).nonzero()[:, 0]
            place, mask = (rows[:, None], columns), mask[:, columns]
            group = states[place]
            mask_of_keys = padding_mask(config, group, mask, group)
            self.groups.append((PackedRows(group, mask.bool()), mask_of_keys))
            self.places.append(place)
        self.states = torch.cat([group.states for group, _ in self.groups], 1)
        self._lengths = [group.states.shape[1] for group, _ in self.groups]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, d_model) to (batch, length, d_model), 0 where there is padding."""
        padded = self.states.new_zeros(self.shape)
        parts = states.to(padded.dtype).split(self._lengths, 1)
        for (group, _), place, part in zip(self.groups, self.places, parts, strict=True):
            padded[place] = group.unpack(part)
        return padded

    def attend(
        self,
        attend: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention group by group, (1, heads, tokens, head_dim) to (1, tokens, heads, d_v)."""
        outputs = []
        parts = (states.split(self._lengths, 2) for states in (query, key, value))
        for (group, mask), *heads in zip(self.groups, *parts, strict=True):
            unpacked = (group.unpack_heads(states) for states in heads)
            output, _ = attend(module, *unpacked, mask, **kwargs)
            outputs.append(output.flatten(0, 1)[group.places])
        return torch.cat(outputs)[None], None


def is_padded(states: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether a CPU is better off without the padding of (batch, length, d_model) states."""
    if states.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.shape[0] == 1:
        return False
    return int(attention_mask.count_nonzero()) < 0.75 * attention_mask.numel()


def _of_similar_length(lengths: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of rows that are not empty, group by group, none much shorter than the longest of
    its group."""
    order = lengths.argsort(descending=True)[: int(lengths.count_nonzero())]
    descending, start = lengths[order].tolist(), 0
    for end in range(1, len(descending) + 1):
        if end == len(descending) or descending[end] < SHORTEST * descending[start]:
            yield order[start:end]
            start = end
