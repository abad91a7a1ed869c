"""The tokenizer for toolkits that split text at white space, possibly after users have applied
byte-pair codes or a SentencePiece model."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.vocabularies import Specials, bpe_codes, pair, rows, sentencepiece, strip, words
from ..data.vocabulary_files import read_bpe_codes, read_sentencepiece
from .core import SIDES, ConversionOptions

Vocabulary = Mapping[str, int]

TAG = re.compile(r"<[^<>\s]+>|>>\S+<<|__\S+__|｟\S+｠")  # a language, such as <2de>
SYMBOLS = {"<s>", "</s>", "<pad>", "<unk>", "<blank>"}  # can't be written in a text


def tokenizer_for(
    vocabularies: Sequence[Vocabulary],
    specials: Sequence[Specials],
    options: ConversionOptions,
    sizes: Sequence[int],
    *,
    splits_again: bool = True,
) -> tuple[PreTrainedTokenizerBase, int]:
    """A tokenizer for source and target, and the number of rows that the source's embedding needs,
    as the codes may produce symbols that the vocabulary lacks (see `Conversion.fill_with_clones`).

    Args:
        vocabularies: Ids by token of the source and of the target.
        specials: Their special tokens.
        options: Names the codes. The source's are used for both sides if the target has none.
        sizes: The rows of both embeddings.
        splits_again: See `side_tokenizer`.

    Raises:
        ValueError: A vocabulary does not fit its embedding, or lacks a special token.
    """
    sides = []
    for side, vocab, names, size in zip(SIDES, vocabularies, specials, sizes, strict=True):
        try:
            sides.append(side_tokenizer(vocab, names, options.codes(side), size, splits_again))
        except ValueError as error:
            raise ValueError(f"{side} vocabulary: {error}") from error
    unk_id = vocabularies[1][specials[1].unk or ""]
    return pair(*sides, size=sizes[1], unk_id=unk_id), rows(sides[0])


def side_tokenizer(
    vocabulary: Vocabulary,
    specials: Specials,
    codes: str | Path | None,
    size: int,
    splits_again: bool = True,
) -> PreTrainedTokenizerFast:
    """The tokenizer of one side: words without codes, otherwise SentencePiece or byte-pair codes,
    by the name of their file. `size` is the number of the embedding's rows. Without `splits_again`,
    a text is split by `text.strip().split(" ")`; see also `vocabularies.bpe_codes`."""
    if codes is None and splits_again:
        return words(vocabulary, specials, size=size)
    if codes is None:
        return strip(words(vocabulary, specials, size=size, spaces_only=True, empty_words=True))
    tags = {token for token in vocabulary if TAG.fullmatch(token)} - {*SYMBOLS, specials.unk}
    whole = sorted(tags.difference(specials.names))
    if Path(codes).suffix in (".model", ".spm"):
        model = read_sentencepiece(codes)
        whole = [tag for tag in whole if tag not in model.vocab()]
        return sentencepiece(model, specials, vocab=vocabulary, size=size, whole=whole)
    build = partial(
        bpe_codes, read_bpe_codes(codes), vocabulary, specials, size=size, splits_again=splits_again
    )
    plain = build()
    whole = [tag for tag in whole if len(plain.tokenize(tag)) > 1]
    tokenizer = build(whole=whole) if whole else plain
    return tokenizer if splits_again else strip(tokenizer)
