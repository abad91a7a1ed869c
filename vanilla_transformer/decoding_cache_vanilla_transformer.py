# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Keys and values while `generate()` runs: transformers' caches, with layers that copy less."""

from collections.abc import Callable

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values of earlier target positions, (batch, heads, length, head_dim) each.

    They are the filled part of buffers which double when they are full: n steps copy some 2 n
    positions in all, where concatenation copies n^2 / 2.
    """

    _buffers: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (batch, heads, new_length, head_dim) states and return all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        length = self.keys.shape[2]
        new_length = length + key_states.shape[2]
        if not self._fits(new_length):
            self._buffers = tuple(_longer(old, 2 * new_length) for old in (self.keys, self.values))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:new_length] = states
        self.keys, self.values = (buffer[:, :, :new_length] for buffer in self._buffers)
        return self.keys, self.values

    def _fits(self, length: int) -> bool:
        """Whether the buffers have room, and have not been left by a reordering or the like."""
        if not self._buffers or self._buffers[0].shape[2] < length:
            return False
        return _storage(self.keys) == _storage(self._buffers[0])


class SourceLayer(DynamicLayer):
    """Keys and values of the source, once for each sentence: its beams share them, and change
    places only among themselves."""

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


def copy_less(cache: EncoderDecoderCache) -> None:
    """Give an empty cache these layers."""
    for part, layer in (
        (cache.self_attention_cache, GrowingLayer),
        (cache.cross_attention_cache, SourceLayer),
    ):
        part.layers = [layer() for _ in part.layers]


def give_each_beam_its_own(cache: object) -> None:
    """Repeat what beams shared, for who is given the cache after generation."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    pairs = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for own, source in pairs:
        if isinstance(source, SourceLayer) and source.is_initialized:
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


def _storage(states: torch.Tensor) -> int:
    return states.untyped_storage().data_ptr()
