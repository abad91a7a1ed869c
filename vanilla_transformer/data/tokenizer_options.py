"""The options of a tokenizer, and a log of how well it covers the training text."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.hf_argparser import HfArg

from .parallel_text import iter_texts
from .token_batches import arrow_tables
from .tokenization import (
    BOS,
    BYTE_TOKENS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    TOKENIZER_TYPES,
    UNICODE_FORMS,
    check_choice,
    check_user_tokens,
    train_tokenizer,
)
from .vocabularies import Specials, bpe_codes, pair, sentencepiece, unknown_token
from .vocabulary_files import CONTROL, UNKNOWN, USER_DEFINED, read_bpe_codes, read_sentencepiece

logger = logging.getLogger(__name__)


@dataclass
class TokenizerArguments:
    """Which tokenizer to use: an existing one, or one that is trained on the data.

    Raises:
        ValueError: An option is not among its choices, contradicts another one, or names a missing
            file.
    """

    tokenizer_name: str | None = HfArg(
        default=None, help="Folder or Hub name of a tokenizer. Default: train one on the data."
    )
    vocab_size: int = HfArg(default=8000, help="Maximum vocabulary size of a new tokenizer.")
    tokenizer_type: str = HfArg(
        default="bpe",
        help=f"Type of a new tokenizer: {', '.join(TOKENIZER_TYPES)} (split at white space).",
    )
    separate_vocabularies: bool = HfArg(
        default=False, help="Train a tokenizer for the sources and another for the targets."
    )
    target_tokenizer_type: str | None = HfArg(
        default=None, help="With separate_vocabularies, the target's type. Default: the source's."
    )
    target_vocab_size: int | None = HfArg(
        default=None, help="With separate_vocabularies, the target's size. Default: the source's."
    )
    user_tokens: list[str] = HfArg(
        default_factory=list, help="Tokens that are never split, such as <2fr> or <num>."
    )
    lowercase: bool = HfArg(default=False, help="Lower-case all text, as a part of the tokenizer.")
    unicode_normalization: str = HfArg(
        default="nfc", help=f"Unicode normal form of all text: {', '.join(UNICODE_FORMS)}."
    )
    target_unicode_normalization: str | None = HfArg(
        default=None, help="With separate_vocabularies, the target's form. Default: the source's."
    )

    sentencepiece_model: list[str] | None = HfArg(
        default=None,
        help="A SentencePiece model to use in place of a new tokenizer, or two: the source's and "
        "the target's.",
    )
    bpe_codes: list[str] | None = HfArg(
        default=None,
        help="Codes of subword-nmt or fastBPE to use in place of a new tokenizer, for text that "
        "is split into words, or two files: the source's and the target's.",
    )

    def __post_init__(self) -> None:
        check_choice("tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        check_choice("unicode_normalization", self.unicode_normalization, UNICODE_FORMS)
        check_user_tokens(self.user_tokens)
        for name in ("vocab_size", "target_vocab_size"):
            if (size := getattr(self, name) or 0) >= 2**31:
                raise ValueError(f"{name}={size}: expected less than 2^31, as ids have 32 bits")
        self._check_target()
        self._check_imports()

    def _check_target(self) -> None:
        choices = {
            "target_tokenizer_type": TOKENIZER_TYPES,
            "target_unicode_normalization": UNICODE_FORMS,
        }
        for name in (*choices, "target_vocab_size"):
            value = getattr(self, name)
            if value is not None and name in choices:
                check_choice(name, value, choices[name])
            if value is not None and not self.separate_vocabularies:
                raise ValueError(f"{name}={value!r}: expected separate_vocabularies with it")

    def _check_imports(self) -> None:
        for name in ("sentencepiece_model", "bpe_codes"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
            files = getattr(self, name) or []
            if len(files) > 2:
                raise ValueError(f"{name}={files}: expected a file, or one for each side")
            for file in files:
                if not Path(file).is_file():
                    raise ValueError(f"{name}={file!r}: expected a file")
        if self.sentencepiece_model is not None and self.bpe_codes is not None:
            raise ValueError(f"bpe_codes={self.bpe_codes}: expected no sentencepiece_model as well")
        own_rules = {
            "lowercase": self.lowercase,
            "unicode_normalization": self.unicode_normalization != "nfc",
            "target_unicode_normalization": self.target_unicode_normalization is not None,
            "tokenizer_type": self.tokenizer_type != "bpe",
            "target_tokenizer_type": self.target_tokenizer_type is not None,
        }
        for name, given in own_rules.items():
            if given and (self.sentencepiece_model or self.bpe_codes):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected neither sentencepiece_model nor "
                    "bpe_codes, which say how text is split"
                )

    def train(self, pairs: Any) -> PreTrainedTokenizerFast:
        """A new tokenizer.

        Args:
            pairs: The training data, with the columns `source` and `target`.

        Raises:
            ValueError: As in `train_tokenizer`; or the files of both sides differ in the id of
                their padding token.
        """
        named = self.sentencepiece_model or self.bpe_codes
        files: list[str | None] = [None] if named is None else [*named]
        source = self.tokenizer_type, self.vocab_size, self.unicode_normalization
        if len(files) == 1 and not self.separate_vocabularies:
            return self._side(iter_texts(pairs), files[0], *source)
        target = (
            self.target_tokenizer_type or self.tokenizer_type,
            self.target_vocab_size or self.vocab_size,
            self.target_unicode_normalization or self.unicode_normalization,
        )
        sides = (
            self._side(iter_texts(pairs, ["source"]), files[0], *source),
            self._side(iter_texts(pairs, ["target"]), files[-1], *target),
        )
        ids = [side.pad_token_id for side in sides]
        if ids[0] != ids[1]:
            raise ValueError(
                f"{PAD} has the id {ids[0]} with {files[0]} and {ids[1]} with {files[-1]}: "
                "expected the same; SentencePiece's --pad_id=3 sets it, and otherwise it follows "
                "the pieces, so that models of the same size also work"
            )
        return pair(*sides)

    def _side(
        self, texts: Iterable[str], file: str | None, tokenizer_type: str, size: int, form: str
    ) -> PreTrainedTokenizerFast:
        """A tokenizer from a file, or trained on the texts."""
        if file is not None and self.sentencepiece_model is not None:
            return import_sentencepiece(file, self.user_tokens)
        if file is not None:
            return import_bpe_codes(file, texts, self.user_tokens)
        logger.info("Training a tokenizer with at most %d tokens", size)
        return train_tokenizer(
            texts,
            size,
            tokenizer_type=tokenizer_type,
            user_tokens=self.user_tokens,
            lowercase=self.lowercase,
            unicode_normalization=form,
        )


def import_sentencepiece(path: str, user_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer that splits text as a SentencePiece model does, with its ids.

    `<pad>` and `</s>`, if the model lacks them, and the user's tokens follow its pieces.

    Raises:
        ValueError: The file is not a SentencePiece model, or fast tokenizers don't support its
            type.
    """
    model = read_sentencepiece(path)
    listed = {piece for piece, _, _ in model.pieces}
    more = [(token, 0.0, CONTROL) for token in (PAD, EOS) if token not in listed]
    more += [(token, 0.0, USER_DEFINED) for token in user_tokens if token not in listed]
    whole = [
        (piece, score, USER_DEFINED if piece in user_tokens and kind != UNKNOWN else kind)
        for piece, score, kind in model.pieces
    ]
    model = replace(model, pieces=[*whole, *more])
    unk = next((piece for piece, _, kind in model.pieces if kind == UNKNOWN), None)
    return sentencepiece(model, Specials(pad=PAD, bos=model.special(BOS), eos=EOS, unk=unk))


def import_bpe_codes(
    path: str, texts: Iterable[str], user_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer that splits words as subword-nmt does. Its vocabulary has the characters of the
    texts, inside and at the end of words, and everything that the codes merge.

    Raises:
        ValueError: The file is not in subword-nmt's format 0.2 or fastBPE's.
    """
    merges = read_bpe_codes(path)
    seen: set[str] = set()
    for text in texts:  # one at a time: a corpus may be larger than memory
        seen.update(text)
    characters = sorted(seen - {" "})
    symbols = [*SPECIAL_TOKENS, *characters, *(f"{character}</w>" for character in characters)]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = bpe_codes(merges, vocab, Specials(), separator=None)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_tokens])
    if user_tokens:  # they are words
        ends = [decoders.Replace(token, f"{token}</w>") for token in user_tokens]
        backend = tokenizer.backend_tokenizer
        backend.decoder = decoders.Sequence([*ends, backend.decoder])
    return tokenizer


def warn_of_split_tokens(tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn about user tokens that an existing tokenizer splits or does not know."""
    decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
    for token in tokens:
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if all(decode([number], skip_special_tokens=False).strip() != token for number in ids):
            logger.warning(
                "The tokenizer reads the user token %r as %s: train a new one to keep it whole",
                token,
                " ".join(tokenizer.tokenize(token)),
            )


def log_coverage(dataset: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the mean number of tokens in a sentence, and how many of them the vocabulary covers: all
    except unknown tokens and single bytes.

    Args:
        dataset: A data set with columns `input_ids` and `labels`. A stream is not read.
        tokenizer: The tokenizer that made them.
    """
    if not isinstance(dataset, Dataset):
        return
    sources, targets = tokenizer, getattr(tokenizer, "target_tokenizer", tokenizer)
    for name, column, side in (("Source", "input_ids", sources), ("Target", "labels", targets)):
        vocab = side.get_vocab()
        unknown = {tokenizer.unk_token, unknown_token(side)}
        lacking = [vocab[token] for token in (*unknown, *BYTE_TOKENS) if token in vocab]
        uncovered = pa.array(lacking, pa.int32())
        tokens = missing = 0
        for table in arrow_tables(dataset, [column]):
            ids = pc.list_flatten(table[column])
            tokens += len(ids)
            missing += pc.sum(pc.is_in(ids, value_set=uncovered)).as_py() or 0
        logger.info(
            "%s: %d tokens in the vocabulary, %.1f in a sentence, coverage %.3f%%",
            name,
            len(vocab),
            tokens / max(1, len(dataset)),
            100 * (1 - missing / max(1, tokens)),
        )
