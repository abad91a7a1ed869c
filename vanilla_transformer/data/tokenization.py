"""A byte-pair encoding with one vocabulary for both languages (section 5.1), as a fast tokenizer.

`train_tokenizer` returns a plain `PreTrainedTokenizerFast`. Once saved, it loads with
`AutoTokenizer.from_pretrained`, without this package.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile
from typing import IO
from unicodedata import normalize

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from .text_files import expect_unicode

logger = logging.getLogger(__name__)

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

# Merges do not cross the boundaries of this pattern. A word or a run of punctuation includes one
# space before it; digits and further white space stand alone. As no piece mixes letters, digits and
# punctuation, text such as "<0x41>" or "</s>" never becomes the token of the same name.
_PIECE = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s"


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 8000,
    *,
    min_frequency: int = 2,
    model_max_length: int | None = None,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train a byte-pair encoding on the texts of both languages together.

    Ids 0 to 3 are `<pad> <s> </s> <unk>`. The next 256 are the bytes `<0x00>` to `<0xFF>`, which
    spell characters that are not in the vocabulary, so that nothing maps to `<unk>`. `</s>` ends
    every encoded sequence. The names of special tokens have no special meaning in a text:
    `decode(encode(text), skip_special_tokens=True)` returns the text in Unicode normal form C.

    Args:
        texts: Sentences of both languages in any order. They are read once and not kept in memory.
        vocab_size: The number of ids, including special tokens and bytes. The vocabulary is smaller
            if the corpus has too few pairs of pieces.
        min_frequency: How often a pair of pieces must occur to be merged.
        model_max_length: The default length of `truncation=True`; no limit by default.
        show_progress: Whether to show progress bars.

    Raises:
        ValueError: `vocab_size` has no room beyond special tokens and bytes, there is no text, or a
            text is not valid Unicode.
        TypeError: `texts` is a single string, or one of the texts is not a string.
    """
    reserved = len(SPECIAL_TOKENS) + len(BYTE_TOKENS)
    if vocab_size < reserved + 2:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens, "
            f"{len(BYTE_TOKENS)} bytes and an alphabet need at least {reserved + 2}"
        )
    if isinstance(texts, str | bytes):
        raise TypeError("texts must be an iterable of strings, got a single string")

    learner = _make_backend(models.BPE())
    with TemporaryFile("w+", encoding="utf-8") as spool:
        # A script with thousands of characters must leave room for merges; rare ones become bytes.
        alphabet = _spool_texts(_validated(texts), spool, limit=(vocab_size - reserved) // 2)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            show_progress=show_progress,
            # They get the first ids. In the final tokenizer bytes are not special.
            special_tokens=[*SPECIAL_TOKENS, *BYTE_TOKENS],
            # By default the trainer chooses at random among equally rare characters.
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
        )
        learner.train_from_iterator(map(json.loads, spool), trainer)
    model = json.loads(learner.to_str())["model"]
    if len(model["vocab"]) < vocab_size:
        logger.info("The corpus yields only %d tokens of %d", len(model["vocab"]), vocab_size)
    return _make_fast_tokenizer(model["vocab"], model["merges"], model_max_length)


def _spool_texts(texts: Iterable[str], spool: IO[str], limit: int) -> list[str]:
    """Write the texts to a file to read again, and return their most frequent characters."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalize("NFC", text))
        spool.write(json.dumps(text) + "\n")
    if not counts:
        raise ValueError("there is no text to train a tokenizer on")
    spool.seek(0)
    counts[" "] += 1  # each text gets one in front
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _make_fast_tokenizer(
    vocab: dict[str, int], merges: list[list[str]], model_max_length: int | None
) -> PreTrainedTokenizerFast:
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for left, right in merges],
        unk_token=UNK,
        byte_fallback=True,
    )
    backend = _make_backend(model)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}",
        pair=f"$A {EOS} $B {EOS}",
        special_tokens=[(EOS, vocab[EOS])],
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


def _make_backend(model: models.Model) -> Tokenizer:
    """A tokenizer that is lossless except for normalization to NFC.

    Spaces remain spaces: the usual substitute "▁" could not be distinguished from a "▁" in the
    text. Every text gets one space in front, which the decoder removes, so that a word has the same
    pieces at the start of a sentence as inside it.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _validated(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"text {number} is not a string but {type(text).__name__}")
        expect_unicode(text, f"text {number}")
        yield text
