"""The tokenizer of toolkits that split text at white space, or whose users split it before with
byte-pair codes or a SentencePiece model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.vocabularies import (
    Specials,
    bpe_codes,
    pair,
    rows,
    sentencepiece,
    strip,
    words,
)
from ..data.vocabulary_files import read_bpe_codes, read_sentencepiece
from .core import (
    PROJECTION,
    PROJECTION_BIAS,
    SHARED,
    SIDES,
    ConversionOptions,
    add_unknown_clones,
    matrix_of,
)

Vocabulary = Mapping[str, int]


def tokenizer_for(
    vocabularies: Sequence[Vocabulary],
    specials: Sequence[Specials],
    options: ConversionOptions,
    weights: dict[str, Tensor],
    *,
    splits_again: bool = True,
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """A tokenizer for source and target. The weights get a copy of the unknown token's row for each
    symbol that the codes produce and the source vocabulary lacks.

    Args:
        vocabularies: Ids by token of the source and of the target.
        specials: Their special tokens.
        options: Says which codes there are. The source's serve both sides if the target has none.
        weights: Under our names.
        splits_again: See `side_tokenizer`.

    Returns:
        The tokenizer, and `vocab_size`, `decoder_vocab_size` and `lm_head_bias`.

    Raises:
        ValueError: A vocabulary does not fit the weights, or lacks a special token.
    """
    matrices = [matrix_of(weights, side) for side in SIDES]
    codes = map(options.codes, SIDES)
    sizes = [len(weights[matrix]) for matrix in matrices]
    sides = [
        _side(*each, splits_again)
        for each in zip(SIDES, vocabularies, specials, codes, sizes, strict=True)
    ]
    unknown = [
        vocabulary[each.unk or ""] for vocabulary, each in zip(vocabularies, specials, strict=True)
    ]
    if (clones := rows(sides[0]) - sizes[0]) > 0:
        add_unknown_clones(weights, "source", clones, unknown[0])
    source, target = (len(weights[matrix]) for matrix in matrices)
    own = source != target or (SHARED not in weights and PROJECTION not in weights)
    fields = {
        "vocab_size": source,
        "decoder_vocab_size": target if own else None,
        "lm_head_bias": PROJECTION_BIAS in weights,
    }
    return pair(*sides, size=sizes[1], unk_id=unknown[1]), fields


def _side(
    name: str,
    vocabulary: Vocabulary,
    specials: Specials,
    codes: str | None,
    size: int,
    splits_again: bool,
) -> PreTrainedTokenizerFast:
    try:
        return side_tokenizer(vocabulary, specials, codes, size, splits_again)
    except ValueError as error:
        raise ValueError(f"{name} vocabulary: {error}") from error


def side_tokenizer(
    vocabulary: Vocabulary,
    specials: Specials,
    codes: str | Path | None,
    size: int,
    splits_again: bool = True,
) -> PreTrainedTokenizerFast:
    """The tokenizer of one side: words without codes, else SentencePiece or byte-pair codes, by the
    name of their file. `size` is the number of the embedding's rows. Without `splits_again` a text
    is split by `text.strip().split(" ")`; see also `vocabularies.bpe_codes`."""
    if codes is None and splits_again:
        return words(vocabulary, specials, size=size)
    if codes is None:
        return strip(words(vocabulary, specials, size=size, spaces_only=True, empty_words=True))
    if Path(codes).suffix in (".model", ".spm"):
        return sentencepiece(read_sentencepiece(codes), specials, vocab=vocabulary, size=size)
    merges = read_bpe_codes(codes)
    tokenizer = bpe_codes(merges, vocabulary, specials, size=size, splits_again=splits_again)
    return tokenizer if splits_again else strip(tokenizer)
