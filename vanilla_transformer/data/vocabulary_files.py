"""Reads the vocabulary files of other toolkits.

    read_fairseq_dict, read_subwords, read_..._vocab   token -> id
    read_bpe_codes, read_sentencepiece                 how text is split

`vocabularies.py` makes tokenizers from them.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .protobuf import read_fields

# A character of Unicode's private use area, which does not occur in text. Names that must not match
# a text start with it.
PRIVATE = "\ue000"
SPACE = "▁"  # sentencepiece's

# ---------------------------------------------------------------- token -> id


def _lines(path: str | Path) -> list[str]:
    """Lines that end in "\\n" and nothing else, as toolkits count them."""
    try:
        lines = Path(path).read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, but {error.reason}") from None
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _numbered(path: str | Path, tokens: Iterable[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocab.setdefault(token, number) != number:
            raise ValueError(f"{path}: {token!r} has ids {vocab[token]} and {number}, expected one")
    return vocab


def read_plain_vocab(path: str | Path) -> dict[str, int]:
    """One token per line; its id is the number of the line, from 0."""
    return _numbered(path, _lines(path))


def read_fairseq_dict(path: str | Path) -> dict[str, int]:
    """fairseq's `dict.txt`: lines "symbol count", after `<s> <pad> </s> <unk>` = 0 to 3.

    Raises:
        ValueError: A line has no count, or a symbol is repeated.
    """
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    specials = set(vocab)
    for number, line in enumerate(_lines(path), start=1):
        line = line.rstrip()
        overwrite = line.endswith(" #fairseq:overwrite")
        symbol, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not symbol or not re.fullmatch(r"-?\d+", count):
            raise ValueError(f"{path}: line {number} is {line!r}, expected 'symbol count'")
        if symbol in vocab and not overwrite:
            raise ValueError(f"{path}: line {number} holds {symbol!r} again, expected it once")
        # The row of an overwritten symbol stays, but no text leads to it. Special tokens stay.
        row = len(vocab)
        if symbol in specials:
            symbol = f"{PRIVATE}{row}{symbol}"
        elif symbol in vocab:
            old = vocab.pop(symbol)
            vocab[f"{PRIVATE}{old}{symbol}"] = old
        vocab[symbol] = row
    return vocab


def read_json_vocab(path: str | Path) -> dict[str, int]:
    """A JSON object of ids by token, as Sockeye and transformers save it."""
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, but {error}") from None
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        raise ValueError(f"{path}: expected a JSON object of ids by token")
    return vocab


_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "e": "\x1b"}
_ESCAPED |= {"f": "\f", "v": "\v", "_": "\xa0", "N": "\x85", "L": "\u2028", "P": "\u2029"}


def read_marian_vocab(path: str | Path) -> dict[str, int]:
    """Marian's vocabulary: lines `key: id` (YAML), JSON, or a token per line.

    YAML libraries read keys such as `no` or `007` as other types, and reject some characters.

    Raises:
        ValueError: A line has no id, or a token is repeated.
    """
    if Path(path).suffix == ".json":
        return read_json_vocab(path)
    lines = _lines(path)
    if Path(path).suffix not in (".yml", ".yaml"):
        return _numbered(path, lines)
    vocab: dict[str, int] = {}
    key = None
    for number, line in enumerate(lines, start=1):
        if line in ("---", "...", "") or (line.startswith("#") and ": " not in line):
            continue
        if line.startswith("? "):
            key = line[2:]
            continue
        name, colon, value = line.rpartition(":")
        name = key if key is not None and not name.strip() else name
        if name is None or not colon or not re.fullmatch(r"\s*\d+\s*", value):
            raise ValueError(f"{path}: line {number} is {line!r}, expected 'token: id'")
        key, token = None, _unquote(name.strip(" "))
        if vocab.setdefault(token, int(value)) != int(value):
            raise ValueError(f"{path}: line {number} holds {token!r} again, expected it once")
    return vocab


def _unquote(key: str) -> str:
    """The text of a YAML key."""
    if len(key) > 1 and key[0] == key[-1] == "'":
        return key[1:-1].replace("''", "'")
    if len(key) > 1 and key[0] == key[-1] == '"':

        def character(match: re.Match[str]) -> str:
            code = match[1]
            return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)

        return _ESCAPE.sub(character, key[1:-1])
    return key


def read_subwords(path: str | Path) -> dict[str, int]:
    """tensor2tensor's `vocab.*.subwords`: one subtoken per line, usually in single quotes."""

    def bare(line: str) -> str:
        line = line.rstrip()  # without quotes, a space in front is part of a subtoken
        quoted = len(line) > 1 and line[0] == line[-1] and line[0] in "'\""
        return line[1:-1] if quoted else line

    # A subtoken may be repeated, and the last line counts.
    vocab: dict[str, int] = {}
    for number, token in enumerate(map(bare, _lines(path))):
        if token in vocab:
            vocab[f"{PRIVATE}{vocab[token]}{token}"] = vocab[token]
        vocab[token] = number
    return vocab


# ---------------------------------------------------------------- how text is split


def read_bpe_codes(path: str | Path) -> list[tuple[str, str]]:
    """The merges of subword-nmt 0.2 or fastBPE, the most frequent first; only the first of
    duplicates.

    Raises:
        ValueError: The file has subword-nmt's format 0.1, in which `</w>` is a separate symbol, or
            a line is not a merge.
    """
    lines = _lines(path)
    lines[:1] = [line.removeprefix("\ufeff") for line in lines[:1]]  # a byte order mark
    version = re.fullmatch(r"#version: *(\S+)\s*", lines[0]) if lines else None
    if version and version[1] != "0.2":
        raise ValueError(f"{path}: the codes have version {version[1]}, expected 0.2")
    merges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines[1:] if version else lines, start=2 if version else 1):
        fields = line.strip(" \r").split(" ")
        # fastBPE has the count of each merge in a third field.
        if len(fields) not in (2, 3) or not all(fields):
            raise ValueError(f"{path}: line {number} is {line!r}, expected two symbols to merge")
        if fields[1] == "</w>":
            raise ValueError(
                f"{path}: line {number} merges a symbol '</w>', as version 0.1 does: expected 0.2"
            )
        merges[fields[0], fields[1]] = None
    return list(merges)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a sentencepiece `.model` (`.spm`) about splitting text.

    Attributes:
        pieces: (piece, score, type) by id.
        model_type: "unigram", "bpe", "word" or "char".
        charsmap: Compiled normalization rules, or empty.
        composes: Whether these are NFKC, possibly with additions.
        dummy_prefix: Whether a space is added in front of a text.
        squeezes_spaces: Whether spaces at the ends and runs of them are removed.
        byte_fallback: Whether unknown characters are spelled in bytes.
        unk_surface: The text of the unknown piece in decoding.
    """

    pieces: list[tuple[str, float, int]]
    model_type: str = "unigram"
    charsmap: bytes = b""
    composes: bool = False
    dummy_prefix: bool = True
    squeezes_spaces: bool = True
    byte_fallback: bool = False
    unk_surface: str = " ⁇ "

    def vocab(self) -> dict[str, int]:
        """The model's own ids by piece."""
        return {piece: number for number, (piece, _, _) in enumerate(self.pieces)}

    def special(self, name: str) -> str | None:
        """The name, if it belongs to a control piece."""
        return name if any(p == name and kind == CONTROL for p, _, kind in self.pieces) else None


def _message(data: bytes) -> dict[int, list[Any]]:
    """The values of each field of a protocol buffer, by its number."""
    fields: dict[int, list[Any]] = {}
    for number, value in read_fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def read_sentencepiece(path: str | Path) -> SentencePieceModel:
    """Read a sentencepiece model, without the library.

    Raises:
        ValueError: The file is not such a model or is truncated, or needs what no fast tokenizer
            supports: spaces at the ends of words, whole words, symbols with spaces, case as tokens,
            or denormalization.
    """
    try:
        model = _message(Path(path).read_bytes())
        trainer, normalizer, denormalizer = (
            _message(b"".join(model.get(number, []))) for number in (2, 3, 5)
        )
        pieces = []
        for raw in model[1]:
            piece = _message(raw)
            score = struct.unpack("<f", piece.get(2, [bytes(4)])[-1])[0]
            text = piece.get(1, [b""])[-1].decode("utf-8")
            pieces.append((text, score, int(piece.get(3, [NORMAL])[-1])))
    except (KeyError, AttributeError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"{path}: expected a sentencepiece model, but {error!r}") from None

    def flag(fields: Mapping[int, list[Any]], number: int, default: bool) -> bool:
        return bool(fields.get(number, [default])[-1])

    model_type = _MODEL_TYPES.get(int(trainer.get(3, [1])[-1]), "unknown")
    if model_type in ("word", "unknown"):
        raise ValueError(f"{path}: model_type={model_type}: expected unigram, bpe or char")
    if flag(trainer, 24, False) or not flag(normalizer, 5, True):
        raise ValueError(
            f"{path}: treat_whitespace_as_suffix or escape_whitespaces=false: expected a model "
            "that marks the start of words"
        )
    if flag(normalizer, 7, False) or flag(normalizer, 8, False) or flag(denormalizer, 2, False):
        raise ValueError(
            f"{path}: encode_unicode_case (of Marian's sentencepiece) or a denormalization rule: "
            "expected a model without, which no fast tokenizer can have"
        )
    for symbol in (piece for piece, _, kind in pieces if kind == USER_DEFINED and piece != SPACE):
        if SPACE in symbol and not (flag(normalizer, 4, True) and SPACE * 2 in symbol):
            raise ValueError(
                f"{path}: user_defined_symbols has {symbol!r}: expected symbols without a space, "
                "across which no fast tokenizer keeps a symbol whole"
            )
    charsmap, surface = normalizer.get(2, [b""])[-1], trainer.get(44, [" ⁇ ".encode()])[-1]
    return SentencePieceModel(
        pieces=pieces,
        model_type=model_type,
        charsmap=bytes(charsmap),
        composes=b"nfkc" in normalizer.get(1, [b""])[-1],
        dummy_prefix=flag(normalizer, 3, True),
        squeezes_spaces=flag(normalizer, 4, True),
        byte_fallback=flag(trainer, 35, False),
        unk_surface=surface.decode("utf-8"),
    )
