"""Batches without padding: the tokens of all rows in one row, for the layers of a stack.

Flash and flex attention keep packed rows separate by themselves. On a CPU, "sdpa" works on groups
of rows of similar length, in the encoder. With hooks, eager attention or a compiler, batches keep
their padding.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from .attention import AttentionFunction, is_flash, is_flex, is_our_sdpa, is_tracing
from .hooks import is_position_wise, is_watched
from .pretrained import count_positions
from .validation import expect_mask


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
    """Packs one row after the other.

    Args:
        is_token: Which positions of the batch hold a token, boolean, (batch, length).
    """

    def __init__(self, is_token: torch.Tensor):
        super().__init__(is_token.shape, is_token.flatten().nonzero()[:, 0])
        self.row_of = self.places // self.shape[1]  # (tokens,)
        self._lengths = is_token.count_nonzero(1)

    def unpack_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(1, heads, tokens, head_dim) to (batch, heads, length, head_dim), 0 at padding."""
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
        """The ends of a stack's rows, and of the source's."""
        own = rows.own.ends()
        source = own if rows.source is None else rows.source.ends()
        names = ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
        return cls(*(dict(zip(names, (*own, *keys), strict=True)) for keys in (own, source)))


class RowsByLength(Rows):
    """Rows of similar length next to each other: attention, which needs separate rows, works on
    groups with little padding.

    Args:
        attention_mask: 1 for tokens, (batch, length).
    """

    SHORTEST = 0.6  # length of a row in a group, relative to the longest

    def __init__(self, attention_mask: torch.Tensor):
        self.groups: list[tuple[PackedRows, torch.Tensor | None]] = []  # and the mask of their keys
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
    """A stack's `forward` that computes the tokens of a batch in one row, without padding, if that
    saves time and no hook or module of a user could notice. Its output is 0 at padding."""
    names = list(inspect.signature(forward).parameters)[1:]
    is_decoder = "encoder_hidden_states" in names

    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> BaseModelOutput:
        keeps_apart = keeps_rows_apart(self.config)
        if is_tracing() or (is_decoder and not keeps_apart):
            return forward(self, *args, **kwargs)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in inputs.items() if value is not None}
        packed = None
        if not are_layers_recorded(self.config, given):
            packed = (
                pack_rows(self.config, is_decoder, **given)
                if keeps_apart
                else group_by_length(self.config, **given)
            )
        # Checked last, as these two visit all modules.
        if packed is None or is_watched(self) or not is_position_wise(self):
            return forward(self, *args, **kwargs)
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
    """A mask (batch, target_length) of all positions up to a row's last label, as the loss does not
    depend on later ones; None if a mask saves nothing."""
    if not keeps_rows_apart(config) or are_layers_recorded(config, options):
        return None
    if decoder_input_ids is None or decoder_input_ids.shape != labels.shape:
        return None
    return (labels != -100).flip(1).cumsum(1).flip(1) > 0


def keeps_rows_apart(config: PreTrainedConfig) -> bool:
    """Whether this attention supports packed rows: flash attention, which gets their ends, and flex
    attention, whose mask leaves out blocks of different rows."""
    return is_flash(config._attn_implementation) or is_flex(config._attn_implementation)


def group_by_length(
    config: PreTrainedConfig, attention_mask: torch.Tensor | None = None, **inputs: Any
) -> tuple[Rows, dict[str, Any]] | None:
    """The rows of a padded source, and the encoder's inputs for their tokens alone; None unless
    padding costs time: with "sdpa" on a CPU, where no gradients are needed.

    Raises:
        ValueError: The mask and the source have different shapes.
    """
    mask = attention_mask
    if mask is None or mask.ndim != 2:
        return None
    source = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if source is not None:  # an encoder that is called by itself has not checked it
        shape = source.shape[:2]
        expect_mask(mask, shape, shape, config.encoder_attention_heads, source.dtype)
    if mask.shape[0] == 1 or mask.device.type != "cpu":
        return None
    if not is_our_sdpa(config._attn_implementation) or torch.is_grad_enabled():
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
    """The rows of a padded batch, and a stack's inputs for their tokens alone; None with a cache or
    without padding."""
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
    """The inputs that keep packed rows separate: their ends, or masks."""
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
    """Whether each target has its own source, and there are both tokens and padding."""
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

    empty = torch.empty(1, 1, 0, device=queries.places.device)  # for its shape, type and device
    asking, seen = (empty.expand(1, len(rows.places), 0) for rows in (queries, keys))
    if is_causal:
        return create_causal_mask(config, asking, None, None, and_mask_function=in_one_row)
    return create_bidirectional_mask(config, asking, None, seen, and_mask_function=in_one_row)
