# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Keys and values while `generate()` runs: transformers' caches, with layers that copy less."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

from .attention import (
    cast_once,
    fold_beams,
    is_padded,
    padding_mask,
    queries_see_alike,
)
from .packing import PackedRows
from .validation import expect_mask

# What layers hold besides keys and values. It is not among their attributes: transformers'
# exporters take every tensor that those lead to for an input or an output of the graph.
_BUFFERS: WeakKeyDictionary["GrowingLayer", tuple[torch.Tensor, ...]] = WeakKeyDictionary()
_SPARE: WeakKeyDictionary["GrowingLayer", list[torch.Tensor]] = WeakKeyDictionary()
_MASK: WeakKeyDictionary["SourceLayer", torch.Tensor | None] = WeakKeyDictionary()
_ROWS: WeakKeyDictionary["SourceLayer", PackedRows] = WeakKeyDictionary()


class GrowingLayer(DynamicLayer):
    """Keys and values of earlier target positions, (batch, heads, length, head_dim) each.

    They are the filled part of buffers which double, or for the last time treble, when they are
    full, up to the most positions that are expected: n steps copy some 2 n positions in all, where
    concatenation copies n^2 / 2.
    Beams change places on the way into a spare buffer, which all layers share.
    """

    def __init__(self, spare: list[torch.Tensor], max_length: int):
        super().__init__()
        _SPARE[self] = spare
        self._max_length = max_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (batch, heads, new_length, head_dim) states and return all so far."""
        if torch.compiler.is_compiling():  # a graph would hold as many steps as there is room for
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        length, new_length = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        buffers = self._buffers()
        if buffers is None or buffers[0].shape[2] < new_length:
            is_last = new_length <= self._max_length < 3 * new_length
            room = self._max_length if is_last else 2 * new_length
            buffers = _longer(self.keys, room), _longer(self.values, room)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:new_length] = states
        return self._fill(buffers, new_length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        buffers = self._buffers()
        if buffers is None:
            super().reorder_cache(beam_idx)
            return
        reordered = tuple(self._reordered(buffer, beam_idx) for buffer in buffers)
        self._fill(reordered, self.keys.shape[2])

    def _reordered(self, buffer: torch.Tensor, beam_idx: torch.LongTensor) -> torch.Tensor:
        spare = _SPARE.setdefault(self, [])  # a copied layer has none
        other = spare.pop() if spare else buffer.new_empty(0)
        shape = (len(beam_idx), *buffer.shape[1:])
        if other.shape != shape or other.dtype != buffer.dtype or other.device != buffer.device:
            other = buffer.new_empty(shape)
        spare.append(buffer)
        return torch.index_select(buffer, 0, beam_idx.to(buffer.device), out=other)

    def _fill(
        self, buffers: tuple[torch.Tensor, ...], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in buffers)
        _BUFFERS[self] = *buffers, self.keys
        return self.keys, self.values

    def _buffers(self) -> tuple[torch.Tensor, ...] | None:
        """None if they hold the keys no more: some of transformers' methods replace those."""
        found = _BUFFERS.get(self)
        return found[:2] if found is not None and found[2] is self.keys else None


class SourceLayer(DynamicLayer):
    """Keys and values of the source, once for each sentence: its beams share them, and change
    places only among themselves."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep (batch, heads, length, head_dim) states, or (1, heads, tokens, head_dim) of rows."""
        rows = _ROWS.pop(self, None)
        if rows is not None:
            key_states, value_states = map(rows.unpack_heads, (key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing moves."""


def new_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache of keys and values, one for each kind of attention in a layer."""
    cache = DynamicCache(config=config)
    if not config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def remember(
    project: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    cache: Cache | None,
    layer_idx: int,
    of_source: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all positions so far from those that `project` makes of the new ones; the
    source's are made once for a whole generation. (batch, heads, length, head_dim) each."""
    if cache is None:
        return project()
    if not of_source:
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        return own.update(*project(), layer_idx)
    if cache.is_updated.get(layer_idx):
        layer = cache.cross_attention_cache.layers[layer_idx]
        return layer.keys, layer.values
    cache.is_updated[layer_idx] = True
    return cache.cross_attention_cache.update(*project(), layer_idx)


def remember_source(
    config: PreTrainedConfig,
    states: torch.Tensor,
    source: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The source (batch, source_length, d_model) as attention wants it, and the mask of its
    padding; both are made once for a whole generation."""
    layer = _shared_source(cache)
    if layer is not None and layer in _MASK:
        return source, _MASK[layer]
    queries = fold_beams(states, source)
    heads = config.decoder_attention_heads
    expect_mask(attention_mask, queries.shape, source.shape, heads, source.dtype)
    mask = padding_mask(config, queries, attention_mask, source)
    if layer is not None and queries_see_alike(config):
        _MASK[layer] = mask
    if layer is not None and is_padded(source, attention_mask):
        assert attention_mask is not None
        rows = PackedRows(source, attention_mask.bool())
        for layer in _source_layers(cache):
            _ROWS[layer] = rows
        source = rows.states
    return cast_once(source), mask


def causal_mask(
    config: PreTrainedConfig,
    states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
) -> torch.Tensor | None:
    """transformers' mask for the decoder's own positions. In a step of generation there is none:
    the one new token may see all."""
    if attention_mask is None and states.shape[1] == 1 and copies_less(cache):
        return None
    return create_causal_mask(config, states, attention_mask, cache, position_ids=position_ids)


def copies_less(cache: Cache | None) -> bool:
    """Whether `copy_less` had this cache."""
    return _shared_source(cache) is not None


def masks_itself(cache: Cache | None) -> bool:
    """Whether a decoder with this cache is to be given no mask but the caller's own: `causal_mask`
    makes that of a static cache as well, where it may be compiled with the step."""
    is_static = isinstance(cache, EncoderDecoderCache) and cache.is_compileable
    return is_static or copies_less(cache)


def _shared_source(cache: Cache | None) -> SourceLayer | None:
    return next(iter(_source_layers(cache)), None)


def _source_layers(cache: Cache | None) -> list[SourceLayer]:
    if not isinstance(cache, EncoderDecoderCache):
        return []
    layers = cache.cross_attention_cache.layers
    return layers if layers and isinstance(layers[0], SourceLayer) else []


def copy_less(cache: EncoderDecoderCache, max_length: int) -> None:
    """Give an empty cache these layers, for so many target positions."""
    own, of_source = cache.self_attention_cache, cache.cross_attention_cache
    spare: list[torch.Tensor] = []
    own.layers = [GrowingLayer(spare, max_length) for _ in own.layers]
    of_source.layers = [SourceLayer() for _ in of_source.layers]


def give_each_beam_its_own(cache: object) -> None:
    """Repeat what beams shared, for who is given the cache after generation."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    pairs = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for own, source in pairs:
        if isinstance(source, SourceLayer) and source.is_initialized:
            _MASK.pop(source, None)
            source.batch_repeat_interleave(own.keys.shape[0] // source.keys.shape[0])


def is_plain(cache: Cache) -> bool:
    """Whether nothing but keeping keys and values is asked of an encoder-decoder's cache."""
    if not isinstance(cache, EncoderDecoderCache):
        return False
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    return all(
        type(part) is DynamicCache
        and not part.offloading
        and all(type(layer) is DynamicLayer for layer in part.layers)
        for part in parts
    )


def _longer(states: torch.Tensor, length: int) -> torch.Tensor:
    batch, heads, filled, dim = states.shape
    buffer = states.new_empty(batch, heads, length, dim)
    buffer[:, :, :filled] = states
    return buffer
