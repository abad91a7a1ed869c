"""Faster ways to compute what the model file writes out, with the same result.

`attn_implementation="eager"` uses none of them: it runs the equations of the model file.

| faster                              | where                                           |
|-------------------------------------|-------------------------------------------------|
| fused or written-out kernels        | "sdpa" on a CPU                                 |
| beams share the keys of their source| "sdpa", with the cache of `cache.py`            |
| padding never reaches a layer       | flash and flex attention; the encoder on a CPU  |
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_causal_mask,
    flash_attention_mask,
    flex_attention_mask,
)
from transformers.modeling_outputs import BaseModelOutput

from .hooks import is_position_wise, is_watched
from .loss import product_dtype
from .pretrained import count_positions

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# ---------------------------------------------------------------- Kernels

NO_ATTENTION_OPTIONS = {"use_cache", "output_hidden_states"}
FLASH_TILE = 128  # positions
CHOICE_OF_KERNELS = threading.Lock()  # it is the process's, and threads share a model


class FastAttention(AttentionInterface):
    """transformers' attention functions, with ours in the place of "sdpa" and of flash attention.

    Each takes queries (batch, heads, query_length, d_k), keys (batch, heads, key_length, d_k),
    values (batch, heads, key_length, d_v) and a mask, and returns the output
    (batch, query_length, heads, d_v).
    """

    def get_interface(
        self, attn_implementation: str, default: AttentionFunction
    ) -> AttentionFunction:
        """The function of this name; `default`, the equation written out, for "eager"."""
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
    """As `sdpa_attention_forward`, with the fastest kernel of a CPU.

    In half precision, or where float32 is multiplied with less precision, torch's fused attention
    trains several times slower than the `equation` written out, if the scores fit in memory.
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
            attention_mask = attention_mask.to(query.dtype)  # a quantized layer may choose its own
    known = {"scaling", "dropout"} | NO_ATTENTION_OPTIONS
    if query.device.type == "cpu" and options.keys() <= known:
        is_small = query.shape[2] * key.shape[2] <= 512 * 512
        if query.requires_grad and _is_narrow(query.dtype):
            attend = partial(unfused_attention, equation) if is_small else attend
        elif not is_tracing():
            attend = fused_attention
    return attend(module, query, key, value, attention_mask, **options)


def is_tracing() -> bool:
    """Whether a compiler or `torch.jit.trace` makes a graph of this call, which must not depend on
    the values of this batch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _is_narrow(dtype: torch.dtype) -> bool:
    if torch.compiler.is_compiling() or dtype != torch.float32:  # a compiler can't ask for more
        return dtype.itemsize == 2
    return torch.get_float32_matmul_precision() != "highest"


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
    """`sdpa_attention_forward`, without its checks for options and devices that are not ours."""
    is_causal = attention_mask is None and module.is_causal and query.shape[2] > 1
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=is_causal, scale=scaling
    )
    return output.transpose(1, 2), None


def one_row_for_all_queries(is_token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A mask (batch, 1, 1, length) of keys for "sdpa" from (batch, length) booleans. On a GPU it is
    0 for tokens and -inf for padding, in the type of the heads that follow from `states` and in
    rows of a multiple of 16: torch would make that of booleans in each layer."""
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
    caller has left no alternative. cuDNN's, on Hopper and Blackwell, plans each new shape, which
    takes longer than a training step, and sentences have many shapes. Flash attention works on
    tiles of 128 positions: for short sentences, the memory-efficient kernel is faster."""
    heads = (query, key, value)
    arguments, is_short = (module, *heads, attention_mask), suits_small_tiles(module, *heads)
    if torch.compiler.is_compiling():
        with sdpa_kernel(kernels_to_choose_from(is_short)):
            return sdpa_attention_forward(*arguments, **options)
    kernels = torch.backends.cuda  # `sdpa_kernel` would take longer, in each layer
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
    """Whether these are short sentences in training, in heads that the memory-efficient kernel
    takes: their width is a multiple of 8."""
    if not module.training or any(states.shape[3] % 8 for states in heads):
        return False
    return all(states.shape[2] <= FLASH_TILE for states in heads)


def keeps_cudnn_and_flash(is_short: bool) -> tuple[bool, bool]:
    """Whether cuDNN's kernel and flash attention's stay among those to choose from."""
    kernels = torch.backends.cuda
    cudnn = kernels.cudnn_sdp_enabled() and not kernels.math_sdp_enabled()
    flash = kernels.flash_sdp_enabled() and not (is_short and kernels.mem_efficient_sdp_enabled())
    return cudnn, flash


@torch.compiler.assume_constant_result
def kernels_to_choose_from(is_short: bool) -> list[SDPBackend]:
    """For a compiler, which can't ask what is enabled, and follows no later change."""
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
    """A mask to add to scores, from one, or from booleans that are True where a key is visible."""
    if attention_mask.dtype != torch.bool:
        return attention_mask
    return torch.where(attention_mask, 0.0, torch.finfo(torch.float32).min)


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
    """Flash attention, told where packed rows end, or flex attention. SDPA computes what they don't
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
    """The states in autocast's type, which would otherwise be cast in each of several products."""
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
    keys: the beams of a source become further queries of one row. No query is hidden from another,
    so a mask of keys, (batch * beams, 1, 1, key_length), is enough."""
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


# ---------------------------------------------------------------- Batches without padding


class Rows:
    """The tokens of a batch in one row.

    Args:
        shape: (batch, length).
        places: Where the tokens are in the flattened batch, in the order of the row, (tokens,).
    """

    def __init__(self, shape: torch.Size, places: torch.Tensor):
        self.shape, self.places = shape, places

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, length, ...) to (1, tokens, ...)."""
        return states.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, dim) to (batch, length, dim), 0 where there is padding."""
        padded = states.new_zeros(self.shape.numel(), states.shape[-1])
        return padded.index_copy_(0, self.places, states.squeeze(0)).unflatten(0, self.shape)


class PackedRows(Rows):
    """Row after row.

    Args:
        is_token: Which positions of the batch hold a token, boolean, (batch, length).
    """

    def __init__(self, is_token: torch.Tensor):
        super().__init__(is_token.shape, is_token.flatten().nonzero()[:, 0])
        self.row_of = self.places // self.shape[1]  # (tokens,)
        self._lengths = is_token.count_nonzero(1)

    def unpack_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(1, heads, tokens, head_dim) to (batch, heads, length, head_dim), likewise."""
        unpacked = self.unpack(states.transpose(1, 2).flatten(2))
        return unpacked.unflatten(2, (states.shape[1], -1)).transpose(1, 2)

    def ends(self) -> tuple[torch.Tensor, int]:
        """Where each row ends, after a 0, (batch + 1,), and the longest row's length."""
        return F.pad(self._lengths.cumsum(0), (1, 0)).int(), int(self._lengths.max())


class PackedInputs(NamedTuple):
    """The rows of a stack's own positions, and those of the source that a decoder attends to."""

    own: PackedRows
    source: PackedRows | None = None


class RowEnds(NamedTuple):
    """Where packed rows end, as flash attention takes it: in the attention to a stack's own
    positions, and in a decoder's to the source. The layers share it, as a GPU has to wait for the
    lengths."""

    own: dict[str, Any]
    source: dict[str, Any]

    @classmethod
    def of(cls, rows: PackedInputs) -> "RowEnds":
        """Those of a stack's inputs."""
        own = rows.own.ends()
        source = own if rows.source is None else rows.source.ends()
        names = ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
        return cls(*(dict(zip(names, (*own, *keys), strict=True)) for keys in (own, source)))


class RowsByLength(Rows):
    """Rows of similar length next to each other: attention, which needs each row apart, works on
    groups with little padding.

    Args:
        attention_mask: 1 for tokens, (batch, length).
    """

    SHORTEST = 0.6  # row of a group, relative to its longest

    def __init__(self, attention_mask: torch.Tensor):
        self.groups: list[tuple[PackedRows, torch.Tensor | None]] = []  # with the mask of keys
        index = torch.arange(attention_mask.numel(), device=attention_mask.device)
        index, places = index.view(attention_mask.shape), [index[:0]]
        for rows in self._of_similar_length(attention_mask.count_nonzero(1)):
            is_token = attention_mask[rows].bool()
            columns = is_token.any(0).nonzero()[:, 0]
            is_token = is_token[:, columns]
            group = PackedRows(is_token)
            places.append(index[rows[:, None], columns].flatten()[group.places])
            self.groups.append((group, None if is_token.all() else is_token[:, None, None]))
        super().__init__(attention_mask.shape, torch.cat(places))
        self._tokens = [len(group.places) for group, _ in self.groups]

    def attend(
        self,
        attend: AttentionFunction,
        module: torch.nn.Module,
        *heads: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention group by group, (1, heads, tokens, head_dim) to (1, tokens, heads, d_v)."""
        outputs = [heads[-1].new_empty(0, *heads[-1].shape[1::2])]
        parts = (states.split(self._tokens, 2) for states in heads)
        for (group, mask), *states in zip(self.groups, *parts, strict=True):
            output, _ = attend(module, *map(group.unpack_heads, states), mask, **options)
            outputs.append(output.flatten(0, 1).index_select(0, group.places))
        return torch.cat(outputs)[None], None

    def _of_similar_length(self, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
        """Indices of rows with tokens, group by group, from long to short."""
        order = lengths.argsort(descending=True)[: int(lengths.count_nonzero())]
        descending, start = lengths[order].tolist(), 0
        for end in range(1, len(descending) + 1):
            if end == len(descending) or descending[end] < self.SHORTEST * descending[start]:
                yield order[start:end]
                start = end


def without_padding(forward: Callable[..., BaseModelOutput]) -> Callable[..., BaseModelOutput]:
    """A stack's `forward` that computes the tokens of a batch in one row, without padding, where
    that saves time and no hook or module of a user would notice. Its output is 0 at padding."""
    names = list(inspect.signature(forward).parameters)[1:]
    is_decoder = "encoder_hidden_states" in names

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> BaseModelOutput:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in inputs.items() if value is not None}
        packed = None
        if not (is_tracing() or are_layers_recorded(self.config, given)):
            if keeps_rows_apart(self.config):
                packed = pack_rows(self.config, is_decoder, **given)
            elif not is_decoder:
                packed = group_by_length(self.config, **given)
        # Last, as these walk through all modules.
        if packed is None or is_watched(self) or not is_position_wise(self):
            return forward(self, **inputs)
        rows, changed = packed
        output = forward(self, **{**inputs, **changed})
        output.last_hidden_state = rows.unpack(output.last_hidden_state)
        return output

    return wrapper


def are_layers_recorded(config: PreTrainedConfig, options: dict[str, Any]) -> bool:
    """Whether the caller wants states or attentions of each layer, which come as padded batches."""
    names = ("output_hidden_states", "output_attentions")
    return any(options.get(name, getattr(config, name, False)) for name in names)


def mask_from_labels(
    config: PreTrainedConfig,
    labels: torch.Tensor,
    decoder_input_ids: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """A mask (batch, target_length) of everything up to a row's last label, as no loss depends on
    what follows; None where a mask saves nothing."""
    if not keeps_rows_apart(config) or are_layers_recorded(config, options):
        return None
    if decoder_input_ids is None or decoder_input_ids.shape != labels.shape:
        return None
    return (labels != -100).flip(1).cumsum(1).flip(1) > 0


def keeps_rows_apart(config: PreTrainedConfig) -> bool:
    """Whether this attention takes packed rows: flash attention, which is told where they end, and
    flex attention, whose mask leaves out blocks of different rows."""
    return is_flash(config._attn_implementation) or is_flex(config._attn_implementation)


def group_by_length(
    config: PreTrainedConfig, attention_mask: torch.Tensor | None = None, **inputs: Any
) -> tuple[Rows, dict[str, Any]] | None:
    """The rows of a padded source, and the encoder's inputs of their tokens alone; None unless
    padding costs time: with "sdpa" on a CPU, where no gradients are needed.

    Raises:
        ValueError: The mask has another shape than the source.
    """
    mask = attention_mask
    if mask is None or mask.ndim != 2:
        return None
    source = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if source is not None and source.shape[:2] != mask.shape:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: expected {tuple(source.shape[:2])}, as "
            "the source"
        )
    if mask.shape[0] == 1 or mask.device.type != "cpu":
        return None
    if config._attn_implementation != "sdpa" or torch.is_grad_enabled():
        return None
    if int(mask.count_nonzero()) >= 0.75 * mask.numel():
        return None
    rows = RowsByLength(mask)
    return rows, {**_packed_inputs(rows, mask, **inputs), "attention_mask": None, "rows": rows}


def pack_rows(
    config: PreTrainedConfig,
    is_decoder: bool,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **inputs: Any,
) -> tuple[Rows, dict[str, Any]] | None:
    """The rows of a padded batch, and a stack's inputs of their tokens alone; None with a cache,
    and without padding."""
    sides = [(inputs.get("input_ids", inputs.get("inputs_embeds")), attention_mask)]
    if encoder_hidden_states is not None:
        sides.append((encoder_hidden_states, encoder_attention_mask))
    if cache is not None or not _can_be_packed(sides):
        return None
    masks = [_is_token(*side) for side in sides]
    rows = PackedInputs(*map(PackedRows, masks))
    changed = _packed_inputs(rows.own, masks[0], **inputs)
    if rows.source is not None:
        changed["encoder_hidden_states"] = rows.source.pack(encoder_hidden_states)
    return rows.own, changed | _kept_apart(config, rows, is_decoder)


def _packed_inputs(rows: Rows, mask: torch.Tensor, **inputs: Any) -> dict[str, Any]:
    """Token ids or embeddings of the tokens alone, and their positions."""
    given: dict[str, Any] = {
        name: inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs
    }
    positions = inputs.get("position_ids", count_positions(mask, mask))
    given["position_ids"] = positions.expand(rows.shape)
    return {name: rows.pack(states) for name, states in given.items()}


def _kept_apart(config: PreTrainedConfig, rows: PackedInputs, is_decoder: bool) -> dict[str, Any]:
    """The inputs that keep packed rows apart: where they end, or masks."""
    masks: dict[str, Any] = {"attention_mask": None}
    if is_decoder:
        masks["encoder_attention_mask"] = None
    if is_flash(config._attn_implementation):
        return {**masks, "rows": RowEnds.of(rows)}
    masks["attention_mask"] = _block_mask(config, rows.own, rows.own, is_decoder)
    if rows.source is not None:
        masks["encoder_attention_mask"] = _block_mask(config, rows.own, rows.source)
    return masks


def _can_be_packed(sides: list[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """Whether each target has a source of its own, and some of what is there is padding."""
    if len({len(states) for states, _ in sides}) > 1:
        return False
    if any(mask is not None and mask.shape != states.shape[:2] for states, mask in sides):
        return False
    masks = [mask.bool() for _, mask in sides if mask is not None]
    return all(mask.any() for mask in masks) and not all(mask.all() for mask in masks)


def _is_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Which of (batch, length, ...) states belong to tokens: (batch, length), boolean."""
    if mask is None:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return mask.to(states.device, torch.bool)


def _block_mask(
    config: PreTrainedConfig, queries: PackedRows, keys: PackedRows, is_causal: bool = False
) -> Any:
    """transformers' mask for flex attention, in which rows see only themselves."""

    def in_one_row(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return queries.row_of[query] == keys.row_of[key]

    empty = torch.empty(1, 1, 0, device=queries.places.device)  # gives shape, type and device
    asking, seen = (empty.expand(1, len(rows.places), 0) for rows in (queries, keys))
    if is_causal:
        return create_causal_mask(config, asking, None, None, and_mask_function=in_one_row)
    return create_bidirectional_mask(config, asking, None, seen, and_mask_function=in_one_row)
