"""Fast tokenizers: a byte-pair encoding with one vocabulary for both languages (section 5.1), or
unigrams, characters or words.

`train_tokenizer` returns a plain `PreTrainedTokenizerFast`. Once saved, it loads with
`AutoTokenizer.from_pretrained`, without this package.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as splits
from transformers import PreTrainedTokenizerFast

from .text_files import expect_several, expect_unicode
from .vocabularies import WALLS, any_of, lower_case

logger = logging.getLogger(__name__)

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _jamo() -> normalizers.Normalizer:
    """NFC, except that Hangul syllables become their letters (jamo). A noncharacter, intended for
    internal use like this, prevents NFC from joining them again."""
    between_letters = Regex("(?<=[\u1100-\u11ff])(?=[\u1160-\u11ff])")
    return normalizers.Sequence(
        [
            normalizers.NFD(),
            normalizers.Replace(between_letters, WALLS[0]),
            normalizers.NFC(),
            normalizers.Replace(WALLS[0], ""),
        ]
    )


TOKENIZER_TYPES = ("bpe", "unigram", "char", "word")
UNICODE_FORMS: dict[str, Callable[[], normalizers.Normalizer] | None] = {
    "nfc": normalizers.NFC,
    "nfd": normalizers.NFD,
    "nfkc": normalizers.NFKC,
    "nfkd": normalizers.NFKD,
    "jamo": _jamo,
    "none": None,
}

# Merges do not cross the boundaries of this pattern. A word or a run of punctuation includes one
# space before it; digits and other white space are pieces of their own. "_" counts as a letter, as
# in "I_TURN_LEFT". No piece mixes letters, digits and punctuation, so text such as "<0x41>" or
# "</s>" never becomes the token of the same name.
_PIECE = r" ?[\p{L}\p{M}_]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+|\s+(?!\S)|\s"


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 8000,
    *,
    tokenizer_type: str = "bpe",
    user_tokens: Sequence[str] = (),
    lowercase: bool = False,
    unicode_normalization: str = "nfc",
    min_frequency: int = 2,
    model_max_length: int | None = None,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer; by default a byte-pair encoding on the texts of both languages together.

    Ids 0 to 3 are `<pad> <s> </s> <unk>`. Except for words, the next 256 are the bytes `<0x00>` to
    `<0xFF>`, which spell characters that are not in the vocabulary, so that nothing maps to
    `<unk>`. `</s>` ends every encoded sequence. The names of special tokens have no special meaning
    in a text: `decode(encode(text), skip_special_tokens=True)` returns the normalized text. Words
    are the exception: they return with single spaces, and unknown ones as `<unk>`.

    Args:
        texts: Sentences of both languages in any order. They are read once and not kept in memory.
        vocab_size: The number of ids, including special tokens, bytes and user tokens. The
            vocabulary is smaller if the corpus has too few pieces.
        tokenizer_type: "bpe"; "unigram", the language model of Kudo (2018,
            https://arxiv.org/abs/1804.10959); "char", the most frequent characters; or "word", the
            most frequent words, split at white space.
        user_tokens: Tokens that are never split, such as tags and placeholders.
        lowercase: Whether to lower-case all texts.
        unicode_normalization: "nfc", "nfd", "nfkc", "nfkd", "jamo" (NFC, except that Hangul
            syllables become letters) or "none".
        min_frequency: How often a pair of pieces must occur to be merged ("bpe").
        model_max_length: The default length of `truncation=True`; no limit by default.
        show_progress: Whether to show progress bars.

    Raises:
        ValueError: An option is not among its choices, a user token is empty, has white space or is
            repeated, `vocab_size` leaves no room besides special tokens, bytes and user tokens,
            there is no text, or a text is not valid Unicode.
        TypeError: `texts` is a single string, or one of the texts is not a string.
    """
    check_choice("tokenizer_type", tokenizer_type, TOKENIZER_TYPES)
    check_choice("unicode_normalization", unicode_normalization, UNICODE_FORMS)
    byte_tokens = () if tokenizer_type == "word" else BYTE_TOKENS
    first_tokens = [*SPECIAL_TOKENS, *byte_tokens]
    form = UNICODE_FORMS[unicode_normalization]
    rules = [*([form()] if form else []), *([lower_case()] if lowercase else [])]
    check_user_tokens(user_tokens)
    normalized = map(normalizers.Sequence(rules).normalize_str, user_tokens)
    backend_of = partial(_make_backend, tokenizer_type, rules, "|".join(map(re.escape, normalized)))
    size = vocab_size - len(user_tokens)
    if size < len(first_tokens) + 2:
        raise ValueError(
            f"vocab_size={vocab_size}: expected at least "
            f"{len(first_tokens) + len(user_tokens) + 2}, for {len(SPECIAL_TOKENS)} special "
            f"tokens, {len(byte_tokens)} bytes, {len(user_tokens)} user tokens and an alphabet"
        )
    expect_several(texts=texts)
    with TemporaryFile("w+", encoding="utf-8") as spool:
        room = size - len(first_tokens)
        # A script with thousands of characters must leave room for merges; rare ones become bytes.
        limit = room if tokenizer_type == "char" else room // 2
        alphabet = _spool_texts(_validated(texts), spool, normalizers.Sequence(rules), limit)
        # Special tokens get the first ids. In the final tokenizer bytes are not special.
        options = {
            "vocab_size": size,
            "show_progress": show_progress,
            "special_tokens": first_tokens,
        }
        learner = _Learner(
            backend_of, map(json.loads, spool), first_tokens, alphabet, options, min_frequency
        )
        model = getattr(learner, tokenizer_type)()
    backend = backend_of(model)
    if backend.get_vocab_size() < size:
        logger.info("The corpus yields only %d tokens of %d", backend.get_vocab_size(), size)
    return _make_fast_tokenizer(backend, user_tokens, model_max_length)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ValueError if an option's value is not among its choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def check_user_tokens(tokens: Sequence[str]) -> None:
    """Raise a ValueError if a token is empty, has white space, is a special one or is repeated."""
    for number, token in enumerate(tokens):
        if not token or token != "".join(token.split()) or token in (*SPECIAL_TOKENS, *BYTE_TOKENS):
            raise ValueError(
                f"user_tokens has {token!r}: expected a token without white space, other than the "
                f"special tokens {' '.join(SPECIAL_TOKENS)} and bytes"
            )
        if token in tokens[:number]:
            raise ValueError(f"user_tokens has {token!r} twice: expected it once")


def _spool_texts(
    texts: Iterable[str], spool: IO[str], rules: normalizers.Normalizer, limit: int
) -> list[str]:
    """Write the texts to a file, to read them again, and return their most frequent characters."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(rules.normalize_str(text))
        spool.write(json.dumps(text) + "\n")
    if not counts:
        raise ValueError("there is no text to train a tokenizer on")
    spool.seek(0)
    counts[" "] += 1  # each text starts with one
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


class _Learner(NamedTuple):
    """Learns a model from texts: the type of tokenizer is the name of a method.

    Attributes:
        backend_of: `_make_backend` for this type.
        texts: What to learn from, read once.
        first_tokens: The tokens with the first ids.
        alphabet: The most frequent characters of the texts.
        options: Arguments of all trainers.
        min_frequency: Of pairs.
    """

    backend_of: Callable[..., Tokenizer]
    texts: Iterator[str]
    first_tokens: list[str]
    alphabet: list[str]
    options: dict[str, Any]
    min_frequency: int

    def bpe(self) -> models.Model:
        learner = self.backend_of(models.BPE(), learns=True)
        trainer = trainers.BpeTrainer(
            **self.options,
            min_frequency=self.min_frequency,
            # By default the trainer chooses at random among equally rare characters.
            initial_alphabet=self.alphabet,
            limit_alphabet=len(self.alphabet),
        )
        learner.train_from_iterator(self.texts, trainer)
        model = json.loads(learner.to_str())["model"]
        merges = [(left, right) for left, right in model["merges"]]
        return models.BPE(vocab=model["vocab"], merges=merges, unk_token=UNK, byte_fallback=True)

    def unigram(self) -> models.Model:
        learner = self.backend_of(models.Unigram(), learns=True)
        # The trainer keeps every character that it sees.
        rare = splits.Split(Regex(f"[^{any_of(self.alphabet)}]"), behavior="removed")
        learner.pre_tokenizer = splits.Sequence([learner.pre_tokenizer, rare])
        trainer = trainers.UnigramTrainer(
            **self.options, initial_alphabet=self.alphabet, unk_token=UNK
        )
        learner.train_from_iterator(self.texts, trainer)
        model = json.loads(learner.to_str())["model"]
        # If text has only user tokens, characters have no score: NaN, which is null in JSON.
        pieces = [(piece, 0.0 if score is None else score) for piece, score in model["vocab"]]
        return models.Unigram(pieces, self.first_tokens.index(UNK), byte_fallback=True)

    def char(self) -> models.Model:
        vocab = {token: id_ for id_, token in enumerate([*self.first_tokens, *self.alphabet])}
        return models.BPE(vocab=vocab, merges=[], unk_token=UNK, byte_fallback=True)

    def word(self) -> models.Model:
        learner = self.backend_of(models.WordLevel(unk_token=UNK))
        learner.train_from_iterator(self.texts, trainers.WordLevelTrainer(**self.options))
        learned: dict[str, int] = json.loads(learner.to_str())["model"]["vocab"]
        # In a text with the word "<unk>", the trainer gives this token a later id.
        words = dict.fromkeys([*self.first_tokens, *sorted(learned, key=learned.__getitem__)])
        return models.WordLevel({word: number for number, word in enumerate(words)}, UNK)


def _make_fast_tokenizer(
    backend: Tokenizer, user_tokens: Sequence[str], model_max_length: int | None
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.add_tokens([AddedToken(token, normalized=True) for token in user_tokens])
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}",
        pair=f"$A {EOS} $B {EOS}",
        special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))],
    )
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in a text is four characters, not its end
        **limit,
    )


def _make_backend(
    tokenizer_type: str,
    rules: list[normalizers.Normalizer],
    user_tokens: str,
    model: models.Model,
    learns: bool = False,
) -> Tokenizer:
    """A tokenizer that is lossless except for normalization, and for the white space of words.

    Spaces remain spaces: the usual substitute "▁" could not be distinguished from a "▁" in the
    text. Except for words and characters, every text gets a space in front, which the decoder
    removes, so that a word has the same pieces at the start of a sentence as inside it.

    Args:
        tokenizer_type: As for `train_tokenizer`.
        rules: How text is normalized.
        user_tokens: A regular expression for the user's tokens; empty if there are none.
        model: The model.
        learns: Whether the model will be trained, on text without the user's tokens.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(rules)
    if tokenizer_type == "word":
        # A word such as "</s>" is not a special token.
        guard = splits.Split(Regex("^<(?=(?:pad|/?s)>$)"), behavior="isolated")
        tokenizer.pre_tokenizer = splits.Sequence([splits.WhitespaceSplit(), guard])
        return tokenizer
    from_bytes = [decoders.ByteFallback(), decoders.Fuse()]
    if tokenizer_type == "char":
        tokenizer.decoder = decoders.Sequence(from_bytes)
        return tokenizer
    rules = [*rules, normalizers.Prepend(" ")]
    if user_tokens:  # they are normalized too, and must not get a space
        rules.append(normalizers.Replace(Regex(f"\\A (?={user_tokens})"), ""))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = splits.Split(Regex(_PIECE), behavior="isolated")
    if user_tokens and learns:
        without = splits.Split(Regex(user_tokens), behavior="removed")
        tokenizer.pre_tokenizer = splits.Sequence([without, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.Sequence([*from_bytes, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _validated(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"text {number} is not a string but {type(text).__name__}")
        expect_unicode(text, f"text {number}")
        yield text
