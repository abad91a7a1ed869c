"""Keys and values of earlier positions while `generate()` runs: transformers' caches, with layers
that copy less."""

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import Seq2SeqLMOutput

# The name of the cache among inputs and outputs: "past_key_values" up to transformers 5.23.
CACHE_NAME = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"

# What layers hold besides keys and values. These are not attributes, as transformers' exporters
# treat every tensor that they find in an attribute as an input or output of the graph.
_BUFFERS: WeakKeyDictionary["GrowingLayer", tuple[torch.Tensor, ...]] = WeakKeyDictionary()
_SPARE: WeakKeyDictionary["GrowingLayer", list[torch.Tensor]] = WeakKeyDictionary()


def takes_either_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward` whose `cache` may be called `past_key_values` as well. Its signature has the name
    that transformers uses, because its exporters read it."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **rename_cache(kwargs, "cache"))

    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter.replace(name=CACHE_NAME) if name == "cache" else parameter
            for name, parameter in signature.parameters.items()
        ]
    )
    return wrapper


def rename_cache(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """The inputs, with the cache under this name, and a FutureWarning about `past_key_values` where
    transformers gives one.

    Raises:
        ValueError: There are two caches.
    """
    other = "past_key_values" if name == "cache" else "cache"
    if other not in inputs:
        return inputs
    if name == CACHE_NAME == "cache" and not torch.compiler.is_compiling():
        message = "`past_key_values` is deprecated since transformers 5.24: use `cache`"
        warnings.warn(message, FutureWarning, stacklevel=3)
    renamed = {key: value for key, value in inputs.items() if key != other}
    if inputs[other] is None:
        return renamed
    if renamed.get(name) is not None:
        raise ValueError("cache and past_key_values are the same: expected one of them")
    return {**renamed, name: inputs[other]}


def new_cache(config: PreTrainedConfig) -> Cache:
    """transformers' empty cache: for each layer, keys and values of the target, and of the source
    where there is one."""
    cache = DynamicCache(config=config)
    if not config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def update_kv_cache(
    cache: Cache | None,
    layer_idx: int,
    is_cross_attention: bool,
    project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    states: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all positions so far, (batch, heads, length, head_dim) each: those in the
    cache, and `project(states)` for new ones. The source's are projected once per generation.
    May change `options`, those of the attention function."""
    if cache is None:
        return project(states)
    if is_paged(cache):
        if CACHE_NAME == "cache":
            return cache.update(*project(states), layer_idx, options)
        options["cache"] = cache  # up to transformers 5.23, the attention function updates it
        return project(states)
    if not is_cross_attention:
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        return own.update(*project(states), layer_idx)
    cross = cache.cross_attention_cache
    if cache.is_updated.get(layer_idx):
        layer = cross.layers[layer_idx]
        if getattr(cross, "offloading", False):  # only an update loads them again
            if states.is_cuda:
                torch.cuda.default_stream(states.device).wait_stream(cross.prefetch_stream)
            return layer.keys.to(states.device), layer.values.to(states.device)
        return layer.keys, layer.values
    cache.is_updated[layer_idx] = True
    if is_generation_cache(cache):
        states = states[:: cross.layers[layer_idx].rows_per_source]
    return cross.update(*project(states), layer_idx)


class GrowingLayer(DynamicLayer):
    """Keys and values of earlier target positions, (batch, heads, length, head_dim) each.

    They are views of the filled part of two buffers. A full buffer is replaced by one twice as
    long, or as long as `max_length` if that is at most three times as long: n steps copy about 2 n
    positions, where concatenation copies n^2 / 2.

    Args:
        spare: Buffers to reorder beams into, shared by all layers of a cache.
        max_length: The most positions that are expected.
    """

    def __init__(self, spare: list[torch.Tensor], max_length: int):
        super().__init__()
        _SPARE[self] = spare
        self._max_length = max_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (batch, heads, new_length, head_dim) states and return all so far."""
        # A graph would be specific to the size of the buffer, and gradients need its old content.
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
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
        target = spare.pop() if spare else buffer.new_empty(0)
        shape = (len(beam_idx), *buffer.shape[1:])
        fits = target.shape == shape and target.dtype == buffer.dtype
        if not fits or target.device != buffer.device:
            target = buffer.new_empty(shape)
        spare.append(buffer)
        return torch.index_select(buffer, 0, beam_idx.to(buffer.device), out=target)

    def _fill(
        self, buffers: tuple[torch.Tensor, ...], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in buffers)
        _BUFFERS[self] = *buffers, self.keys
        return self.keys, self.values

    def _buffers(self) -> tuple[torch.Tensor, ...] | None:
        """None if a method of transformers has replaced the keys."""
        found = _BUFFERS.get(self)
        return found[:2] if found is not None and found[2] is self.keys else None


class SourceLayer(DynamicLayer):
    """Keys and values of a source. While its beams share them, nothing is reordered.

    Args:
        rows_per_source: Beams or samples of each source.
    """

    def __init__(self, rows_per_source: int):
        super().__init__()
        self.rows_per_source = rows_per_source

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing while beams share their source, within which they change places; otherwise row i
        becomes what row beam_idx[i] was."""
        if self.rows_per_source == 1:
            super().reorder_cache(beam_idx)


def generation_cache(
    config: PreTrainedConfig, rows_per_source: int, max_length: int
) -> EncoderDecoderCache:
    """An empty cache for an encoder-decoder that copies less than transformers' own.

    Args:
        rows_per_source: Beams or samples of each source.
        max_length: The most target positions that are expected.
    """
    own, cross, spare = DynamicCache(), DynamicCache(), list[torch.Tensor]()
    layers = range(config.decoder_layers)
    own.layers = [GrowingLayer(spare, max_length) for _ in layers]
    cross.layers = [SourceLayer(rows_per_source) for _ in layers]
    return EncoderDecoderCache(own, cross)


def is_paged(cache: object) -> bool:
    """Whether this is the cache of continuous batching, which comes with masks and positions."""
    return isinstance(cache, PagedAttentionCache)


def is_generation_cache(cache: object) -> bool:
    """Whether `generation_cache` made this cache."""
    if not isinstance(cache, EncoderDecoderCache):
        return False
    layers = cache.cross_attention_cache.layers
    return bool(layers) and isinstance(layers[0], SourceLayer)


def repeat_for_each_beam(cache: object) -> None:
    """Give each beam its own copy of the source's keys and values, for a caller of `generate()`."""
    if not is_generation_cache(cache):
        return
    assert isinstance(cache, EncoderDecoderCache)
    for layer in cache.cross_attention_cache.layers:
        layer.batch_repeat_interleave(layer.rows_per_source)
        layer.rows_per_source = 1


def _longer(states: torch.Tensor, length: int) -> torch.Tensor:
    batch, heads, filled, dim = states.shape
    buffer = states.new_empty(batch, heads, length, dim)
    buffer[:, :, :filled] = states
    return buffer
