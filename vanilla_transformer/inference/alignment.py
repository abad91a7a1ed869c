"""The source tokens that a translation's tokens are aligned to.

Alignments come from the attention of the decoder to the source. In a Transformer that was not
trained to align, the average over the heads of the penultimate layer aligns best (Garg et al.,
2019, https://arxiv.org/abs/1909.02074).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, __version__

from ..data.vocabularies import unknown_id
from .decoding import decoder_start, runs_in_torch
from .scoring import map_hypotheses, map_pairs, reading_inputs
from .translation import Hypothesis

UNITS = ("words", "pieces")


def add_alignments(
    lines: Iterable[str],
    found: Iterable[list[Hypothesis]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    unit: str = "words",
    layer: int | None = None,
    replace_unknown: bool = False,
    max_tokens: int = 2048,
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each line with their `alignment`. Each target token is aligned to one
    source token.

    Args:
        lines: The sources, read lazily.
        found: The hypotheses of each source.
        model: The model; for an ensemble, the attention of the members is averaged.
        tokenizer: Its tokenizer.
        unit: "words", separated by white space, or "pieces", the tokens except special ones.
        layer: The decoder layer from 0, or from the end if negative. Default: the penultimate.
        replace_unknown: Whether to replace an unknown token with the source word it is aligned to.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch.

    Raises:
        TypeError: The model is not a PyTorch model.
        ValueError: The unit or the layer does not exist, the tokenizer is not a fast one or has no
            unknown token to replace, or the model returns no attentions.
    """
    expect_alignable(model, tokenizer, unit, layer, replace_unknown)
    reader = _AlignmentReader(tokenizer, unit, replace_unknown)
    special = torch.tensor(sorted(reader.source_special), device=model.device)

    def align(sources: list[str], hypotheses: list[Hypothesis]) -> Iterator[Hypothesis]:
        encoded = tokenizer(sources, return_offsets_mapping=True)
        places = map_pairs(
            lambda inputs: _aligned_places(model, inputs, layer, special),
            encoded["input_ids"], [list(h.token_ids) for h in hypotheses],
            model, tokenizer, max_tokens, start=decoder_start(model),
        )  # fmt: skip
        target_words = reader.words_of_texts(hypotheses)
        columns = (encoded["input_ids"], encoded["offset_mapping"], places, target_words)
        for row in zip(sources, hypotheses, *columns, strict=True):
            yield reader.read(*row)

    yield from map_hypotheses(align, lines, found)


def expect_alignable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    unit: str,
    layer: int | None,
    replace_unknown: bool,
) -> None:
    """Raise the errors of `add_alignments`."""
    if not runs_in_torch(model):
        raise TypeError(f"alignments with a {type(model).__name__}: expected a PyTorch model")
    if unit not in UNITS:
        raise ValueError(f"alignments={unit!r}: expected one of {', '.join(UNITS)}")
    for member in _members(model):
        layers, _ = layers_and_heads(member.config, "decoder")
        if layer is not None and not -layers <= layer < layers:
            raise ValueError(f"alignment_layer={layer}: expected {-layers} to {layers - 1}")
    if not tokenizer.is_fast:
        raise ValueError(f"alignments with {type(tokenizer).__name__}: expected a fast tokenizer")
    if getattr(tokenizer, "_moses", None) is not None and (replace_unknown or unit == "words"):
        raise ValueError(
            f"alignments={unit!r}, replace_unknown={replace_unknown} with a tokenizer that splits "
            "text as Moses does: expected 'pieces', as its places are not those of the text"
        )
    if replace_unknown and unknown_id(tokenizer) is None:
        raise ValueError(
            f"replace_unknown=True with {type(tokenizer).__name__} without an unknown token: "
            "expected a tokenizer that has one"
        )


def _aligned_places(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], layer: int | None, special: Any
) -> list[list[int]]:
    """The index of the source token that each target token attends to most, (pairs,
    target_length). Special tokens are left out, as attention goes to them when it finds nothing."""
    inputs = reading_inputs(inputs)
    weights = torch.zeros(())
    for member in _members(model):
        with _eager_attention(member):
            outputs = member(**inputs, output_attentions=True, use_cache=False)
        maps = outputs.cross_attentions
        if not maps:  # T5 in transformers 5.17
            raise ValueError(
                f"alignments with {type(member).__name__}: transformers {__version__} returns none "
                "of its attentions, expected a newer version"
            )
        chosen = penultimate_layer(len(maps)) if layer is None else layer
        weights = weights.to(maps[0]) + maps[chosen].mean(1)
    hidden = torch.isin(inputs["input_ids"], special) | (inputs["attention_mask"] == 0)
    places = weights.masked_fill(hidden[:, None], -1).argmax(-1)
    padding = inputs["attention_mask"].argmax(-1, keepdim=True)  # left padding
    return (places - padding).clamp(min=0).tolist()


def penultimate_layer(layers: int) -> int:
    """The index of the layer that aligns by default: the last but one, or the only one."""
    return max(layers - 2, 0)


def layers_and_heads(config: PreTrainedConfig, stack: str) -> tuple[int, int]:
    """The numbers of layers and heads of the "encoder" or the "decoder", even if they have T5's
    names, or if each stack has its own configuration, as in `EncoderDecoderModel`.

    Raises:
        AttributeError: The configuration has neither.
    """
    part = getattr(config, stack, None)
    if isinstance(part, PreTrainedConfig):
        return part.num_hidden_layers, part.num_attention_heads
    if hasattr(config, f"{stack}_layers"):
        return getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_attention_heads")
    layers = config.num_decoder_layers if stack == "decoder" else config.num_layers
    return layers, config.num_heads


def _members(model: Any) -> Iterable[Any]:
    return getattr(model, "members", [model])


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use eager attention in this context, as no other returns its weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _AlignmentReader:
    """Turns aligned tokens into pairs of words or pieces."""

    def __init__(self, tokenizer: Any, unit: str, replace_unknown: bool):
        self.tokenizer, self.unit = tokenizer, unit
        unknown = unknown_id(tokenizer)
        self.unknown = unknown if replace_unknown else None
        self.source_special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        special = self.source_special  # includes languages
        if hasattr(tokenizer, "target_tokenizer"):  # the target has its own ids
            special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
        hidden = unknown if tokenizer.unk_token else None  # otherwise it is a word
        self.target_special = {*special, hidden} - {self.unknown, None}

    def words_of_texts(self, hypotheses: Sequence[Hypothesis]) -> list[list[int | None] | None]:
        """For each hypothesis, the index of the word that each token is in, None for special
        tokens; or None if its text has different tokens, for example without an unknown word."""
        if self.unit != "words":
            return [None] * len(hypotheses)
        encoded = self.tokenizer(
            text_target=[hypothesis.text for hypothesis in hypotheses],
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        names = ("input_ids", "offset_mapping", "special_tokens_mask")
        rows: list[list[int | None] | None] = []
        for h, ids, offsets, special in zip(hypotheses, *map(encoded.get, names), strict=True):
            words = zip(_words_at(h.text, offsets), special, strict=True)
            is_read = list(h.token_ids) == ids
            rows.append([None if hidden else word for word, hidden in words] if is_read else None)
        return rows

    def read(
        self,
        source: str,
        hypothesis: Hypothesis,
        source_ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        places: Sequence[int],
        target_words: list[int | None] | None,
    ) -> Hypothesis:
        """The hypothesis with its alignment and, where possible, with unknown words replaced."""
        ids = hypothesis.token_ids
        words = source.split()
        source_words = _words_at(source, offsets)
        replaced = {
            place: words[index]
            for place, (token, at) in enumerate(zip(ids, places, strict=False))
            if token == self.unknown and (index := source_words[at]) is not None
        }
        text = self._spell(ids, replaced) if replaced else hypothesis.text
        if self.unit == "words":
            rows = source_words
            if replaced or target_words is None:
                target_words = self._target_words(ids, replaced)
            columns = target_words
        else:
            rows = _count(source_ids, self.source_special)
            columns = _count(ids, self.target_special)
        pairs = {(rows[at], column) for at, column in zip(places, columns, strict=False)}
        alignment = tuple(sorted((s, t) for s, t in pairs if s is not None and t is not None))
        return hypothesis._replace(text=text, alignment=alignment)

    def _target_words(self, ids: Sequence[int], replaced: dict[int, str]) -> list[int | None]:
        """The index of the word that each token is in or, as white space, comes before; or None."""
        total = len(self._spell(ids, replaced).split())
        words: list[int | None] = []
        for place, token in enumerate(ids):
            count = len(self._spell(ids[: place + 1], replaced).split())
            word = count - (place in replaced or self._decode([token]) != "")
            is_special = token in self.target_special
            words.append(word if 0 <= word < total and not is_special else None)
        return words

    def _spell(self, ids: Sequence[int], replaced: dict[int, str]) -> str:
        """The text of token ids, in which words replace some tokens."""
        parts, start = [], 0
        for place, word in replaced.items():
            if place < len(ids):
                parts += [self._decode(ids[start:place]), word]
                start = place + 1
        return " ".join(filter(None, [*parts, self._decode(ids[start:])]))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def _words_at(text: str, offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """The index of the first word that each (start, end) in a text overlaps or, if there is only
    white space, precedes; None at the end."""
    word_at = {
        place: index
        for index, word in enumerate(re.finditer(r"\S+", text))
        for place in range(*word.span())
    }
    end = len(text)
    return [
        next((word_at[at] for at in range(start, end) if at in word_at), None)
        for start, _ in offsets
    ]


def _count(ids: Sequence[int], special: set[int]) -> list[int | None]:
    """The index of each token among those that are not special; None for special ones."""
    counts: list[int | None] = []
    number = 0
    for token in ids:
        counts.append(None if token in special else number)
        number += token not in special
    return counts
