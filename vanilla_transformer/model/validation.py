"""Checks of inputs at the public boundary: an error names the value and what was expected."""

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .cache import CACHE_NAME
from .dropout import is_transformed

logger = logging.get_logger(__name__)

# Parameters that a checkpoint may lack: a gigabyte of them, or this many times those it has.
LACKING_ANYWAY, LACKING_TIMES = 2**28, 8
NO_TARGET = (
    "; for a trainer that keeps the labels, DataCollatorForSeq2Seq(tokenizer, model=model) makes "
    "decoder_input_ids from them; AutoModelForTextEncoding loads the encoder alone"
)


def validate_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `forward` with checked inputs. An error names a token id or position that has no
    embedding.

    Raises:
        TypeError, ValueError: Inputs are missing, given twice, of the wrong type, or their shapes
            don't fit together.
        IndexError: A token id or position is out of range (on the CPU).
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        expect_inputs(self, inputs)
        if hasattr(self, "encoder"):  # right padding does no harm in a decoder
            warn_of_padding(self, inputs.get("input_ids"), inputs.get("attention_mask"))
        try:
            return forward(self, *args, **kwargs)
        except IndexError:
            expect_in_range(self, inputs)
            raise

    return wrapper


def expect_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Raise an error unless each stack can read its inputs, and there are as many targets as
    sources, or the same number of targets for each source."""
    config, dtype, cache = model.config, _dtype(model), inputs.get("cache")
    if cache is not None and (isinstance(cache, dict) or not hasattr(cache, "update")):
        raise TypeError(f"{CACHE_NAME} of type {type(cache).__name__}: expected a Cache")
    # `EncoderDecoderModel` gives a whole model the configuration of an encoder alone.
    has_both = hasattr(model, "encoder") and hasattr(model, "decoder")
    if not (config.is_encoder_decoder or has_both):
        if inputs.get("encoder_hidden_states") is not None:
            raise ValueError("encoder_hidden_states for one stack alone: expected none")
        expect_stack_inputs(config, "encoder", inputs, "", dtype, cache)
        return
    if cache is not None and not hasattr(cache, "cross_attention_cache"):
        kind = type(cache).__name__
        raise TypeError(f"{CACHE_NAME} of type {kind}: expected an EncoderDecoderCache")
    encoded = inputs.get("encoder_outputs")
    if encoded is None:
        source = expect_stack_inputs(config, "encoder", inputs, "", dtype)
    else:
        is_plain = isinstance(encoded, (tuple, list)) and len(encoded) > 0
        if not is_plain and not hasattr(encoded, "last_hidden_state"):
            kind = type(encoded).__name__
            raise TypeError(
                f"encoder_outputs of type {kind}: expected a BaseModelOutput, or a tuple that "
                "begins with the encoder's states"
            )
        states = encoded[0] if is_plain else encoded.last_hidden_state
        expect_states(states, "encoder_outputs", config.d_model, dtype)
        source = states.shape[:2]
    target = expect_stack_inputs(config, "decoder", inputs, "decoder_", dtype, cache)
    expect_as_many(target[0], source[0])
    heads = config.decoder_attention_heads
    expect_mask(inputs.get("attention_mask"), target, source, heads, dtype)


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """The type of the weights, which `model.dtype` reads from parameters: a replica that
    `DataParallel` makes has none, nor has FSDP's first version with `use_orig_params=False`."""
    try:
        return model.dtype
    except StopIteration:
        weight: torch.Tensor = model.get_input_embeddings().weight
        return weight.dtype


def warn_of_padding(
    model: PreTrainedModel, ids: torch.Tensor | None, mask: torch.Tensor | None
) -> None:
    """Warns once about a source that begins or ends in padding and has no mask: a loop that trains
    without masks learns from different states than `generate()`, which makes masks, decodes.
    """
    if ids is not None and not is_transformed():
        model.warn_if_padding_and_no_attention_mask(ids, mask)


def expect_stack_inputs(
    config: Any,
    stack: str,
    inputs: dict[str, Any],
    prefix: str,
    dtype: torch.dtype,
    cache: Any = None,
) -> tuple[int, int]:
    """(batch, length) of a stack's inputs. Raise an error unless there are either integers (batch,
    length) or embeddings of the model's type (batch, length, d_model), with a mask for them, and
    the same positions for all rows or their own."""
    ids: Any = inputs.get(f"{prefix}input_ids")
    embeds: Any = inputs.get(f"{prefix}inputs_embeds")
    if (ids is None) == (embeds is None):
        hint = NO_TARGET if prefix and ids is None else ""
        raise ValueError(
            f"expected exactly one of {prefix}input_ids and {prefix}inputs_embeds{hint}"
        )
    if embeds is None:
        expect_integers(ids, f"{prefix}input_ids")
        shape = ids.shape
    else:
        expect_states(embeds, f"{prefix}inputs_embeds", config.d_model, dtype)
        shape = embeds.shape[:2]
    heads = getattr(config, f"{stack}_attention_heads")
    expect_mask(inputs.get(f"{prefix}attention_mask"), shape, shape, heads, dtype, cache)
    positions = inputs.get(f"{prefix}position_ids")
    if positions is not None:
        expect_integers(positions, f"{prefix}position_ids")
        if positions.shape[1] != shape[1] or positions.shape[0] not in (1, shape[0]):
            raise ValueError(
                f"{prefix}position_ids of shape {tuple(positions.shape)} for {shape[0]} rows of "
                f"{shape[1]} tokens: expected a position for each token"
            )
    return shape


def expect_in_range(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Raise an IndexError about the first token id or position that has no embedding."""
    config, cache = model.config, inputs.get("cache")
    limits = {"": config.vocab_size}
    if config.is_encoder_decoder:
        limits["decoder_"] = config.target_vocab_size
    for prefix, vocab_size in limits.items():
        ids, embeds = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}inputs_embeds")
        if ids is not None:
            raise_if_outside(ids, vocab_size, "token id")
        given = ids if ids is not None else embeds
        if given is None or config.position_encoding != "learned":
            continue
        positions = inputs.get(f"{prefix}position_ids")
        if positions is None:
            is_source = config.is_encoder_decoder and not prefix  # a source has no past
            past = 0 if is_source else _past_length(cache) or 0
            positions = torch.arange(past, past + given.shape[1])
        raise_if_outside(positions, config.max_position_embeddings, "position")


def raise_if_outside(ids: torch.Tensor, limit: int, name: str) -> None:
    """Raise an IndexError about the first of the ids that is not in [0, limit)."""
    outside = ids[(ids < 0) | (ids >= limit)]
    if len(outside):
        raise IndexError(
            f"{name} {int(outside[0])} is out of range: expected 0 <= {name} < {limit}"
        )


def expect_tensor(value: Any, name: str) -> None:
    """Raise a TypeError unless this is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} of type {type(value).__name__}: expected a tensor")


def expect_integers(ids: Any, name: str) -> None:
    """Raise an error unless these are integers of 32 or 64 bits, (batch, length)."""
    expect_tensor(ids, name)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} of shape {tuple(ids.shape)} and {ids.dtype}: expected (batch, length), "
            "both 1 at least, of torch.int64 or torch.int32"
        )


def expect_states(states: Any, name: str, d_model: int, dtype: torch.dtype) -> None:
    """Raise an error unless these are (batch, length, d_model) of this type; autocast takes any
    floats."""
    expect_tensor(states, name)
    casts = torch.is_autocast_enabled(states.device.type) and states.is_floating_point()
    fits = states.ndim == 3 and states.shape[-1] == d_model and 0 not in states.shape
    if not fits or (states.dtype != dtype and not casts):
        raise ValueError(
            f"{name} of shape {tuple(states.shape)} and {states.dtype}: expected (batch, length, "
            f"{d_model}), all 1 at least, of {dtype}"
        )


def _past_length(cache: Any) -> int | None:
    """Positions in a cache; None if the cache keeps the number on the GPU."""
    if cache is None:
        return 0
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
    return None if isinstance(length, torch.Tensor) else length


def expect_mask(
    attention_mask: torch.Tensor | None,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    dtype: torch.dtype,
    cache: Any = None,
) -> None:
    """Raise an error unless a mask covers keys of this shape, (batch, length, ...), and those in a
    cache: (batch, past + length) of any numbers, or (batch or 1, heads or 1, query_length or 1,
    past + length) of booleans or of the type of the scores that it is added to, and longer if the
    cache has room for more."""
    if attention_mask is None:
        return
    expect_tensor(attention_mask, "attention_mask")
    shape, (batch, length), past = attention_mask.shape, keys[:2], _past_length(cache)
    covered = length + (past or 0)
    if attention_mask.ndim == 2:
        fits = shape[0] == batch and (shape[1] >= covered if past is None else shape[1] == covered)
    else:
        fits = attention_mask.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
        fits = fits and shape[2] in (1, queries[1])
        fits = fits and (shape[3] == covered if cache is None else shape[3] >= covered)
    if not fits or attention_mask.is_complex():
        before = f" and {past} before them" if past else ""
        raise ValueError(
            f"attention mask of shape {tuple(shape)} for {batch} rows of {length} tokens{before}: "
            f"expected a mask for each token, ({batch}, {covered})"
        )
    if attention_mask.ndim == 4 and attention_mask.dtype not in (torch.bool, dtype):
        raise ValueError(
            f"attention mask of {attention_mask.dtype} and four dimensions: "
            f"expected torch.bool or {dtype}"
        )


def expect_prompt(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Raise an error unless a model can read the inputs of `generate()`."""
    for name in ("inputs", "input_ids", "decoder_input_ids"):
        if options.get(name) is not None:
            expect_integers(options[name], name)
    mask = options.get("attention_mask")
    if mask is not None:
        expect_tensor(mask, "attention_mask")
        if mask.ndim not in (2, 4) or mask.is_complex():
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype}: "
                "expected (batch, length)"
            )
    source = options.get("inputs" if options.get("inputs") is not None else "input_ids")
    if model.config.is_encoder_decoder and source is not None and "encoder_outputs" not in options:
        shape, heads = source.shape, model.config.encoder_attention_heads
        expect_mask(mask, shape, shape, heads, model.dtype)


def is_a(kind: type, value: Any) -> bool:
    """Whether this is a number of this kind, from Python or NumPy."""
    return isinstance(value, kind) and not isinstance(value, bool)


def expect_weights(model: PreTrainedModel, lacking: Collection[str]) -> None:
    """Raise a ValueError if weights that a checkpoint lacks, or has in other sizes, are far larger
    than those it has: its configuration does not belong to these weights."""
    weights = dict(model.named_parameters())
    sizes = {name: weight.numel() for name, weight in weights.items()}
    missing = {name: sizes[name] for name in lacking if name in sizes}
    wanted, held = sum(missing.values()), sum(sizes.values()) - sum(missing.values())
    if wanted <= max(LACKING_ANYWAY, LACKING_TIMES * held):
        return
    largest = max(missing, key=lambda name: missing[name])
    shape = tuple(weights[largest].shape)
    fields = {name: value for name, value in model.config.to_dict().items() if value in shape}
    said = ", ".join(f"{name}={value}" for name, value in fields.items()) or "the configuration"
    raise ValueError(
        f"{said}: {largest} of shape {shape} and others take {wanted} parameters that the "
        f"checkpoint lacks, expected the sizes of the {held} that it has"
    )


def expect_as_many(targets: int, sources: int) -> None:
    """Raise a ValueError unless each source has the same number of targets."""
    if targets % sources != 0:
        raise ValueError(
            f"{targets} targets for {sources} sources: expected as many, or as many for each source"
        )


def expect_labels(labels: Any, predictions: torch.Tensor, vocab_size: int) -> None:
    """Raise an error unless there is a label for each of (batch, length, ...) predictions, and
    labels are -100 or in the vocabulary (on the CPU)."""
    expect_integers(labels, "labels")
    if labels.shape != predictions.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for predictions of shape "
            f"{tuple(predictions.shape[:-1])}: expected one label for each prediction"
        )
    if labels.device.type == "cpu" and not is_transformed():
        raise_if_outside(labels[labels != -100], vocab_size, "label")


def expect_count(count: Any, name: str) -> None:
    """Raise a TypeError unless this is a number or a tensor with one, as `DataParallel` makes
    tensors of shape (1, 1)."""
    if isinstance(count, torch.Tensor):
        if count.numel() == 1 and not count.is_complex():
            return
        shape = tuple(count.shape)
        raise TypeError(f"{name} of shape {shape} and {count.dtype}: expected a number")
    if not (count is None or is_a(Real, count)):
        raise TypeError(f"{name}={count!r}: expected a number, or None for the number of labels")


def warn_of_unshifted(labels: Any, decoder_input_ids: Any) -> None:
    """Warns once (on the CPU) if the decoder reads the same tokens that it must predict: it learns
    to copy them, with a low loss, but `generate()` has nothing to copy."""
    given = (labels, decoder_input_ids)
    if not all(isinstance(ids, torch.Tensor) and ids.device.type == "cpu" for ids in given):
        return
    if labels.shape != decoder_input_ids.shape or is_transformed():
        return
    counts = labels != -100
    gold, read = labels[counts], decoder_input_ids[counts]
    # An empty target equals its shift if </s> also starts a target.
    if torch.equal(gold, read.to(gold.dtype)) and len(gold.unique()) > 1:
        logger.warning_once(
            "decoder_input_ids are the labels: expected the labels shifted right by one, or none, "
            "as the model makes them from the labels"
        )


def select_positions(states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The last `logits_to_keep` (batch, length, d_model) states, all for 0, or those at its
    indices.

    Raises:
        TypeError: `logits_to_keep` is neither a number nor a tensor.
        IndexError: It is not an index of positions, or a position does not exist (on the CPU).
    """
    if isinstance(logits_to_keep, int):
        return states[:, slice(-logits_to_keep, None)]
    expect_tensor(logits_to_keep, "logits_to_keep")
    try:
        return states[:, logits_to_keep]
    except IndexError as error:
        raise IndexError(
            f"logits_to_keep of shape {tuple(logits_to_keep.shape)} and {logits_to_keep.dtype}: "
            f"expected indices of {states.shape[1]} positions; {error}"
        ) from None


def expect_shiftable(labels: Any, **token_ids: int | None) -> None:
    """Raise an error unless labels are integers (batch, target_length), and the configuration has
    all of these token ids."""
    expect_integers(labels, "labels")
    for name, token_id in token_ids.items():
        if token_id is None:
            raise ValueError(
                f"{name}=None: expected a token id in the configuration, "
                "to make decoder_input_ids from labels"
            )
