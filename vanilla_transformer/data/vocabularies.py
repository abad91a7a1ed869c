"""Fast tokenizers from the vocabulary files of other toolkits, with the toolkits' ids.

    words, bpe_codes, sentencepiece, subwords   stock tokenizers, from `vocabulary_files`' results
    pair                                        the source's and the target's in one

Lower-casing and other preparation of text is not included, except Moses (`with_moses`).

BPE and Unigram models need an id for every symbol that can arise. If a toolkit's vocabulary lacks
one, the toolkit treats it as unknown. Here it gets an id from `size` on, and is called a clone. The
embedding must have `rows(tokenizer)` rows; those from `size` on are copies of the unknown token's.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splits
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .vocabulary_files import (
    BYTE,
    CONTROL,
    NORMAL,
    PRIVATE,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)

# More characters like `PRIVATE`: two replace "\" and "_" in a text, and the last surrounds
# characters that sentencepiece does not know.
BACKSLASH, UNDERSCORE, UNSEEN = "\ue001", "\ue002", "\ue003"
_FIRST_STAND_IN = 0xE010
WALLS = ("\ufdd0", "\ufdd1")  # noncharacters, which are for internal use
_COMPOSING_MARKS = (
    "\u0300-\u0345\u0653-\u0655\u093c\u09be\u09d7\u0b3e\u0b56\u0b57\u0bbe\u0bd7\u0c56\u0cc2\u0cd5"
    "\u0cd6\u0d3e\u0d57\u0dca\u0dcf\u0ddf\u102e\u1b35\u3099\u309a"
)
# White space for Python's str.split().
_WHITE_SPACE = "[\x09-\x0d\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"
# subword-nmt writes other white space inside a word as this and the separator.
_INSIDE_WORDS = _WHITE_SPACE[:-1].replace("\x20", "\x1f")
NO_BREAK_SPACE = "\u00a0"
# Characters of a word that `subwords` splits at once: the time grows with the cube of their number.
_LONGEST_WORD = 500


@dataclass(frozen=True)
class Specials:
    """The special tokens of a vocabulary; None for missing ones.

    Attributes:
        pad, bos, eos: Tokens that no text produces, and that decoding leaves out.
        unk: The toolkit's token for unknown ones.
        template: The tokens around a text, `$A`: "$A </s>", "<s> $A </s>", "$A".
        prints_unk: Whether `unk` is an ordinary token, which decoding prints. transformers' own
            tokenizers leave it out.
    """

    pad: str | None = "<pad>"
    bos: str | None = "<s>"
    eos: str | None = "</s>"
    unk: str | None = "<unk>"
    template: str = "$A </s>"
    prints_unk: bool = True

    @property
    def names(self) -> list[str]:
        """The special tokens that decoding leaves out."""
        names = (self.pad, self.bos, self.eos, None if self.prints_unk else self.unk)
        return [name for name in dict.fromkeys(names) if name is not None]


# ---------------------------------------------------------------- tokenizers


def rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of rows that an embedding needs for all ids of a tokenizer, clones included."""
    return max(tokenizer.get_vocab().values()) + 1


def words(
    vocab: Mapping[str, int],
    specials: Specials,
    *,
    size: int | None = None,
    spaces_only: bool = False,
    empty_words: bool = False,
) -> PreTrainedTokenizerFast:
    """Text split at white space, whose words are looked up.

    Args:
        vocab: Ids by token.
        specials: The special tokens. `unk` must be one of the vocabulary.
        size: The number of rows of the embedding, where it has more than the vocabulary.
        spaces_only: Split only at U+0020, as Marian does, and not at everything that Python treats
            as a space.
        empty_words: Make an empty word, which is unknown, at each extra space, as `text.split(" ")`
            does.

    Raises:
        ValueError: The vocabulary does not fit `size` or lacks a special token.
    """
    backend = Tokenizer(models.WordLevel(_filled(vocab, size), unk_token=_unknown(vocab, specials)))
    pattern = " " if spaces_only else _WHITE_SPACE
    backend.pre_tokenizer = splits.Split(Regex(pattern), behavior="removed")
    if empty_words:
        backend.normalizer = normalizers.Replace(Regex(r"(?:\A|(?<= ))(?= |\z)"), PRIVATE)
    return _wrap(backend, vocab, specials)


def strip(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer, which first removes white space around a text, as `str.strip()` does."""
    backend = tokenizer.backend_tokenizer
    # A search that began inside white space would take the square of its length.
    end = rf"(?<!{_WHITE_SPACE[:-1]}){_WHITE_SPACE}\z"
    ends = normalizers.Replace(Regex(rf"\A{_WHITE_SPACE}|{end}"), "")
    own = [backend.normalizer] if backend.normalizer else []
    backend.normalizer = normalizers.Sequence([ends, *own])
    return tokenizer


def bpe_codes(
    merges: Sequence[tuple[str, str]],
    vocab: Mapping[str, int],
    specials: Specials,
    *,
    size: int | None = None,
    separator: str | None = "@@",
    restrict: bool = False,
    splits_again: bool = True,
    whole: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Words split by subword-nmt or fastBPE, whose pieces are looked up.

    Args:
        merges: From `read_bpe_codes`.
        vocab: Ids by piece.
        specials: The special tokens. `unk` must be one of the vocabulary.
        size: The number of rows of the embedding, where it has more than the vocabulary.
        separator: The end of a piece inside a word. With None, `</w>` ends a word instead, as in
            FSMT's vocabularies.
        restrict: Leave out merges that lead to no piece of the vocabulary. JoeyNMT instead splits
            such pieces again, which gives the same except in rare cases.
        splits_again: The toolkit splits the text of pieces at white space, which turns other white
            space inside a word into a separator alone. Otherwise it stays a piece.
        whole: Words of the vocabulary that are never split, such as language tags.

    Raises:
        ValueError: The vocabulary does not fit `size` or lacks a special token.
    """
    alone = NO_BREAK_SPACE if splits_again else f"{PRIVATE}{separator}"
    plain = {*specials.names, specials.unk, *whole}
    named = _with_word_ends(_filled(vocab, size), plain, separator, alone)
    if restrict:
        merges = _leading_to(merges, named)
    for left, right in merges:
        for symbol in (left, right, left + right):
            named.setdefault(symbol, len(named))
    backend = Tokenizer(
        models.BPE(
            vocab=named,
            merges=list(merges),
            unk_token=_unknown(vocab, specials),
            end_of_word_suffix="</w>",
            fuse_unk=False,
        )
    )
    if separator is None:  # FSMT splits at all white space
        backend.pre_tokenizer = splits.WhitespaceSplit()
    else:  # subword-nmt treats other white space as characters
        backend.pre_tokenizer = splits.Split(Regex(" "), behavior="removed")
    decoding: list[decoders.Decoder] = []
    if separator in vocab:
        decoding.append(decoders.Replace(alone, ""))
        if splits_again:
            backend.normalizer = normalizers.Replace(Regex(_INSIDE_WORDS), NO_BREAK_SPACE)
    # A word ends with an unknown unit, as after `s/@@ //g`.
    ends = whole if specials.unk is None else [specials.unk, *whole]
    decoding += [decoders.Replace(token, f"{token}</w>") for token in ends]
    backend.decoder = decoders.Sequence([*decoding, decoders.BPEDecoder(suffix="</w>")])
    backend.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in whole])
    return _wrap(backend, vocab, specials)


def _with_word_ends(
    vocab: Mapping[str, int], plain: set[str | None], separator: str | None, alone: str
) -> dict[str, int]:
    """The vocabulary with the names that `models.BPE` uses: no separator inside a word, `</w>` at
    its end. `alone` is the name of the separator itself."""
    named: dict[str, int] = {}
    for token, number in vocab.items():
        if token in plain or separator is None or token.startswith(PRIVATE):
            name = token
        elif token == separator:
            name = alone
        elif token.endswith(separator):
            name = token.removesuffix(separator)
        else:
            name = f"{token}</w>"
        named[name if name not in named else f"{PRIVATE}{number}{name}"] = number
    return named


def _leading_to(
    merges: Sequence[tuple[str, str]], listed: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges that are used to make a listed piece."""
    needed, kept = set(listed), []
    for left, right in reversed(merges):
        if left + right in needed:
            needed |= {left, right}
            kept.append((left, right))
    return kept[::-1]


def sentencepiece(
    model: SentencePieceModel,
    specials: Specials,
    *,
    vocab: Mapping[str, int] | None = None,
    size: int | None = None,
    restrict: bool = False,
    whole: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Text split by sentencepiece.

    Args:
        model: From `read_sentencepiece`.
        specials: The special tokens. `unk` must be one of the vocabulary.
        vocab: Ids by piece, if these are not the model's own.
        size: The number of rows of the embedding, where it has more than the vocabulary.
        restrict: Split only into characters and pieces of `vocab`, like JoeyNMT, which calls
            `SetVocabulary`. Otherwise a piece that `vocab` lacks is unknown.
        whole: Tokens of the vocabulary that are never split, such as OPUS-MT's `>>fra<<`.

    Raises:
        ValueError: The vocabulary does not fit `size` or lacks a special token.
    """
    own = vocab is None
    model, symbols = _with_stand_ins(model, specials)
    vocab = model.vocab() if vocab is None else vocab
    named = {symbols.get(token, token): number for token, number in vocab.items()}
    unk = _unknown(vocab, specials)
    names = {*specials.names, *([] if unk is None else [unk])}
    build = _unigram if model.model_type == "unigram" else _sentencepiece_bpe
    backend = build(model, _filled(named, size), {*names, *whole}, unk, restrict)

    rules = _sentencepiece_rules(model, symbols)
    if not own and not model.byte_fallback:
        rules.append(_mark_unseen(model))
    backend.normalizer = normalizers.Sequence(rules)
    scheme = "always" if model.dummy_prefix and model.squeezes_spaces else "never"
    split = not any(SPACE in piece[1:] for piece, _, _ in model.pieces)
    backend.pre_tokenizer = splits.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    if model.model_type == "unigram":
        # "</s>" in a text is not a token: a piece can't cross a boundary.
        guard = splits.Split(_first_characters(model, names), behavior="merged_with_previous")
        backend.pre_tokenizer = splits.Sequence([backend.pre_tokenizer, guard])
    backend.decoder = decoders.Sequence(
        [
            *([decoders.Replace(unk, model.unk_surface)] if own and unk else []),
            decoders.Replace(Regex(f"[{PRIVATE}{UNSEEN}]"), ""),
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []),
            *(decoders.Replace(stand_in, symbol) for symbol, stand_in in symbols.items()),
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=False, rstrip=True) for token in whole])
    return _wrap(backend, named, specials)


def _sentencepiece_rules(
    model: SentencePieceModel, symbols: Mapping[str, str]
) -> list[normalizers.Normalizer]:
    """The model's own normalization of a text. `symbols` are from `_with_stand_ins`."""
    rules: list[normalizers.Normalizer] = [
        normalizers.Replace(symbol, stand_in) for symbol, stand_in in symbols.items()
    ]
    if model.composes:
        rules += _composing(model.charsmap)
    elif model.charsmap:
        rules.append(normalizers.Precompiled(model.charsmap))
    if model.squeezes_spaces:
        rules.append(normalizers.Replace(Regex(" {2,}"), " "))
        rules.append(normalizers.Replace(Regex("^ | $"), ""))
    elif model.dummy_prefix:  # Metaspace puts no space before a space
        rules.append(normalizers.Prepend(" "))
    return rules


def _composing(charsmap: bytes) -> list[normalizers.Normalizer]:
    """NFKC as in sentencepiece. `Precompiled` drops a mark after a character that it replaces, and
    composes one mark at a time or none. So it gets each mark separately, and `NFC` composes. `NFC`
    also sorts marks, such as those of Arabic, so marks that compose with nothing are kept apart."""
    marks = r"(?<=.)(?=\p{M})"  # not at the start: `Replace` there breaks the rules after it
    return [
        normalizers.Replace(Regex(f"{marks}(?![{_COMPOSING_MARKS}])"), WALLS[0]),
        normalizers.NFC(),
        normalizers.Replace(Regex(marks), WALLS[1]),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(WALLS[1], ""),
        normalizers.NFC(),
        normalizers.Replace(WALLS[0], ""),
    ]


def _with_stand_ins(
    model: SentencePieceModel, specials: Specials
) -> tuple[SentencePieceModel, dict[str, str]]:
    """The model with a private character in place of each user-defined symbol, inside which text is
    never split, and these characters by symbol, the longest first."""
    own = {*specials.names, SPACE}
    symbols = [p for p, _, kind in model.pieces if kind == USER_DEFINED and p not in own]
    symbols.sort(key=len, reverse=True)
    stand_ins = {symbol: chr(_FIRST_STAND_IN + n) for n, symbol in enumerate(symbols)}
    pieces = [(stand_ins.get(piece, piece), score, kind) for piece, score, kind in model.pieces]
    return replace(model, pieces=pieces), stand_ins


def _first_characters(model: SentencePieceModel, names: set[str]) -> Regex:
    """Matches the first character where a text spells a token that no text may produce."""
    names = names | {piece for piece, _, kind in model.pieces if kind in (CONTROL, UNKNOWN)}
    literal = [f"{re.escape(n[0])}(?={re.escape(n[1:])})" for n in sorted(names) if len(n) > 1]
    return Regex("|".join([*literal, "<(?=0x[0-9A-F]{2}>)"]))


def _seen(model: SentencePieceModel) -> set[str]:
    """The characters in a model's pieces."""
    pieces = (piece for piece, _, kind in model.pieces if kind in (NORMAL, USER_DEFINED))
    return {SPACE, " "}.union(*pieces)


def _mark_unseen(model: SentencePieceModel) -> normalizers.Normalizer:
    """Mark runs of unknown characters. Sentencepiece makes each run one piece, which toolkits look
    up, so its characters must not be found one by one."""
    seen = any_of(_seen(model))
    if model.model_type != "unigram":
        return normalizers.Replace(Regex(f"[^{seen}]{{2,}}"), UNSEEN)
    start, end = rf"(?:\A|(?<=[{seen}]))(?=[^{seen}])", rf"(?<=[^{seen}])(?=[{seen}]|\z)"
    return normalizers.Replace(Regex(f"{start}|{end}"), UNSEEN)


def any_of(characters: Iterable[str]) -> str:
    """The content of a regular expression's brackets."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in sorted(characters))


def _unigram(
    model: SentencePieceModel,
    vocab: dict[str, int],
    names: set[str],
    unk: str | None,
    restrict: bool,
) -> Tokenizer:
    low = min((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0)
    scores = {piece: score for piece, score, kind in model.pieces if kind != UNUSED}
    seen = _seen(model)
    entries = {}
    for token in sorted(vocab, key=vocab.__getitem__):
        if token in scores or token in names:
            entries[token] = scores.get(token, 0.0)
        elif seen.isdisjoint(token):
            entries[f"{UNSEEN}{token}{UNSEEN}"] = low
        else:
            entries[f"{PRIVATE}{token}"] = low
    for piece, _, kind in model.pieces:
        if kind in (NORMAL, USER_DEFINED, BYTE) and (not restrict or len(piece) == 1):
            entries.setdefault(piece, scores[piece])
    unk_id = None if unk is None else vocab[unk]
    return Tokenizer(models.Unigram(list(entries.items()), unk_id, model.byte_fallback))


def _sentencepiece_bpe(
    model: SentencePieceModel,
    vocab: dict[str, int],
    names: set[str],
    unk: str | None,
    restrict: bool,
) -> Tokenizer:
    scores = {piece: score for piece, score, kind in model.pieces if kind in (NORMAL, UNUSED)}
    kept = [piece for piece, _, kind in model.pieces if kind in (BYTE, USER_DEFINED)]
    products = [piece for piece in scores if len(piece) > 1] if model.model_type == "bpe" else []
    # Any two neighbours that make a piece merge, and how a piece is made does not change its score.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(products, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if all(len(part) == 1 or part in scores for part in (piece[:cut], piece[cut:]))
    ]
    if restrict:
        merges = _leading_to(merges, vocab)
    symbols = dict(vocab)
    for symbol in [*(s for s in scores if len(s) == 1), *kept, *(s for m in merges for s in m)]:
        symbols.setdefault(symbol, len(symbols))
    for left, right in merges:
        symbols.setdefault(left + right, len(symbols))
    return Tokenizer(
        models.BPE(
            vocab=symbols,
            merges=merges,
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )


_ALNUM = r"[\p{L}\p{N}]"
_OTHER = r"[^\p{L}\p{N}]"
_LAST = 0x1FFFF  # the planes above have rare ideographs, tags and private use
MARK = "\U000f0000"


def subwords(
    vocab: Mapping[str, int], specials: Specials, *, size: int | None = None
) -> PreTrainedTokenizerFast:
    r"""Text split by tensor2tensor's `SubwordTextEncoder`.

    A character that no subtoken spells is written as its number: `\233;`. One above U+1FFFF becomes
    U+FFFD before. Decoding does not change numbers. After 500 characters, a word is split in any
    case; tensor2tensor may have a subtoken across that place.

    Args:
        vocab: From `read_subwords`.
        specials: The special tokens: pad and eos, no bos and no unk.
        size: The number of rows of the embedding, where it has more than the vocabulary.

    Raises:
        ValueError: The vocabulary does not fit `size`, or lacks a special token or a character that
            spells others.
    """
    alphabet = {token for token in vocab if len(token) == 1}
    if lacking := set("\\_u;0123456789") - alphabet:
        raise ValueError(f"the vocabulary lacks {''.join(sorted(lacking))!r}, expected them all")
    borders = f"(?<={_ALNUM})(?={_OTHER})|(?<={_OTHER})(?={_ALNUM})|(?<=.)\\z"
    backend = Tokenizer(
        models.WordPiece(
            _filled(vocab, size),
            unk_token=specials.names[0],  # nothing is unknown
            continuing_subword_prefix="",
            max_input_chars_per_word=_LONGEST_WORD + 1,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("\\", BACKSLASH),
            normalizers.Replace("_", UNDERSCORE),
            normalizers.Replace(Regex(borders), "_"),
            normalizers.Replace(Regex("_ _(?=.)"), "_"),  # a single space between two words
            normalizers.Replace("\n", r"\10;"),
            *_escapes({*alphabet, BACKSLASH, UNDERSCORE}),
            normalizers.Replace(BACKSLASH, "\\\\"),
            normalizers.Replace(UNDERSCORE, "\\u"),
        ]
    )
    word = f"[^_]{{1,{_LONGEST_WORD}}}_?|_"
    backend.pre_tokenizer = splits.Split(Regex(word), behavior="isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace("\\\\", BACKSLASH),
            decoders.Replace("\\u", UNDERSCORE),
            decoders.Replace(Regex(f"(?<={_ALNUM})_(?={_ALNUM})"), " "),
            decoders.Replace("_", ""),
            decoders.Replace(UNDERSCORE, "_"),
            decoders.Replace(BACKSLASH, "\\"),
        ]
    )
    return _wrap(backend, vocab, specials)


def _escapes(alphabet: set[str]) -> list[normalizers.Normalizer]:
    r"""Write each character outside the alphabet as `\233;`. A normalizer can't compute a number,
    but it can find the characters with a certain digit. Each character has a mark before it while
    its digits are written, the highest first."""
    known = any_of(alphabet)
    digits = [
        normalizers.Replace(Regex(f"{MARK}(?={having})"), f"{digit}{MARK}")
        for power in reversed(range(len(str(_LAST))))
        for digit in range(10)
        if (having := _having(digit, 10**power))
    ]
    return [
        normalizers.Replace(Regex(rf"[^\x{{0}}-\x{{{_LAST:x}}}{known}]"), "\ufffd"),
        normalizers.Replace(Regex(f"(?=[^{known}])"), f"\\{MARK}"),
        *digits,
        normalizers.Replace(Regex(f"{MARK}."), ";"),
    ]


@cache
def _having(digit: int, power: int) -> str:
    """A regular expression for the characters whose number has this digit at this power of ten, and
    not as a leading zero. There are two classes, because one can have at most 10,000 ranges."""
    first = max(digit, 10 * (power > 1 and not digit)) * power
    starts = range(first, _LAST + 1, 10 * power)
    ranges = [_characters(start, min(start + power - 1, _LAST)) for start in starts]
    halves = ranges[: len(ranges) // 2], ranges[len(ranges) // 2 :]
    return "|".join(f"[{''.join(half)}]" for half in halves if any(half))


def _characters(first: int, last: int) -> str:
    """A range for the inside of brackets, without surrogates, which are no characters."""
    first = 0xE000 if 0xD800 <= first <= 0xDFFF else first
    last = 0xD7FF if 0xD800 <= last <= 0xDFFF else last
    ends = (rf"\x{{{each:x}}}" if each < 128 else chr(each) for each in (first, last))
    return "-".join(dict.fromkeys(ends)) if first <= last else ""


# ---------------------------------------------------------------- shared


def lower_case() -> normalizers.Normalizer:
    """Lower case as in `str.lower`. `Lowercase` treats each character separately, but a Greek sigma
    has a different form at the end of a word."""
    letter = r"[\p{L}\p{M}]"
    final = normalizers.Replace(Regex(f"(?<={letter})Σ(?!{letter})"), "ς")
    return normalizers.Sequence([final, normalizers.Lowercase()])


def _filled(vocab: Mapping[str, int], size: int | None) -> dict[str, int]:
    """The vocabulary in the order of its ids. Unused rows get names that no text contains."""
    names: dict[int, str] = {}
    for token, number in vocab.items():
        if names.setdefault(number, token) != token:
            raise ValueError(f"{names[number]!r} and {token!r} share the id {number}")
    last = max(names, default=-1)
    size = last + 1 if size is None else size
    if min(names, default=0) < 0 or last >= size:
        raise ValueError(
            f"the vocabulary has {len(vocab)} tokens and ids up to {last}, which does not match an "
            f"embedding of {size} rows"
        )
    return {names.get(number, f"{PRIVATE}{number}"): number for number in range(size)}


def unknown_token(tokenizer: Any) -> str | None:
    """The token that a fast tokenizer or its backend uses for unknown ones, even if it is an
    ordinary token that decoding prints and not transformers' `unk_token`."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return None
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def unknown_id(tokenizer: Any) -> int | None:
    """The target's id of the unknown token, even if decoding prints it as an ordinary token."""
    target = getattr(tokenizer, "target_tokenizer", tokenizer)
    unknown = tokenizer.unk_token or unknown_token(target)
    return None if unknown is None else target.get_vocab().get(unknown)


def _unknown(vocab: Mapping[str, int], specials: Specials) -> str | None:
    if specials.unk is not None and specials.unk not in vocab:
        raise ValueError(f"the vocabulary lacks the unknown token {specials.unk!r}")
    return specials.unk


def _wrap(
    backend: Tokenizer, vocab: Mapping[str, int], specials: Specials
) -> PreTrainedTokenizerFast:
    """A stock tokenizer with the special tokens, which a text can't contain."""
    around = [token for token in specials.template.split() if token != "$A"]
    for token in dict.fromkeys([*specials.names, *around]):
        if token not in vocab:
            raise ValueError(f"the vocabulary lacks the special token {token!r}")
    backend.post_processor = processors.TemplateProcessing(
        single=specials.template,
        pair=None,
        special_tokens=[(token, vocab[token]) for token in dict.fromkeys(around)],
    )
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in specials.names]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=specials.pad,
        bos_token=specials.bos,
        eos_token=specials.eos,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def pair(
    source: PreTrainedTokenizerFast,
    target: PreTrainedTokenizerFast,
    *,
    size: int | None = None,
    unk_id: int | None = None,
) -> PreTrainedTokenizerFast:
    """One tokenizer for both sides: the source's alone if the target's is the same and has no
    clones.

    Args:
        source: The source's tokenizer.
        target: The target's.
        size: The `size` that the target was built with, if it may have clones.
        unk_id: With `size`, the id of the target's unknown token, which replaces clones in a
            target.

    Raises:
        ValueError: The padding token has different ids on both sides.
    """
    has_clones = size is not None and rows(target) > size
    same = source.backend_tokenizer.to_str() == target.backend_tokenizer.to_str()
    if same and source.special_tokens_map == target.special_tokens_map and not has_clones:
        return source
    return _two_sided(
        source.backend_tokenizer,
        target.backend_tokenizer,
        target_size=size if has_clones else None,
        target_unk_id=unk_id if has_clones else None,
        **target.special_tokens_map,
    )


def with_moses(
    tokenizer: PreTrainedTokenizerFast,
    source_lang: str | None,
    target_lang: str | None,
    **options: bool,
) -> VanillaTransformerTokenizer:
    """The same tokenizer with Moses around it: it reads plain text, and decodes to plain text.

    Args:
        tokenizer: One for both sides, or one with two.
        source_lang, target_lang, options: As for `Moses`.

    Raises:
        ImportError: sacremoses is not installed.
    """
    target = getattr(tokenizer, "target_tokenizer", tokenizer.backend_tokenizer)
    return _two_sided(
        tokenizer.backend_tokenizer,
        target,
        target_size=getattr(tokenizer, "target_size", None),
        target_unk_id=getattr(tokenizer, "target_unk_id", None),
        moses={"source_lang": source_lang, "target_lang": target_lang, **options},
        **tokenizer.special_tokens_map,
    )


def _two_sided(source: Tokenizer, target: Tokenizer, **options: Any) -> VanillaTransformerTokenizer:
    """A tokenizer with these two sides, whose special tokens a text can't contain."""
    return VanillaTransformerTokenizer(
        tokenizer_object=source,
        target_tokenizer_object=target,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **options,
    )
