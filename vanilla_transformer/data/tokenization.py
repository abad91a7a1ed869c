"""One byte-pair vocabulary for both languages (section 5.1 of the paper), as a fast tokenizer.

What `train_tokenizer` returns is a plain `PreTrainedTokenizerFast`: once saved, it loads with
`AutoTokenizer.from_pretrained` wherever transformers is installed, without this package.
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

# No merge crosses a boundary of this pattern: a word or a run of punctuation takes along the one
# space before it, digits stand alone, further white space stands alone. That a piece never mixes
# letters, digits and punctuation also keeps text such as "<0x41>" or "</s>" from ever becoming the
# token of the same name.
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

    Ids 0 to 3 are `<pad> <s> </s> <unk>`, the next 256 are the bytes `<0x00>` to `<0xFF>`, which
    spell every character that the vocabulary lacks: nothing maps to `<unk>`. `</s>` closes each
    encoded sequence. The names of special tokens have no meaning inside a text, and
    `decode(encode(text), skip_special_tokens=True)` gives back the text in Unicode's NFC form.

    Args:
        texts: sentences of either language in any order; read once, never held in memory.
        vocab_size: the number of ids, special tokens and bytes included. A corpus with too few
            pairs of pieces gives a smaller vocabulary.
        min_frequency: how often a pair of pieces must occur to become one piece.
        model_max_length: where `truncation=True` cuts when it names no length; None: nowhere.
        show_progress: whether to print progress bars.

    Raises:
        ValueError: `vocab_size` has no room beyond special tokens and bytes; there is no text, or
            one that is not Unicode.
        TypeError: `texts` is one string, or one of the texts is not a string.
    """
    reserved = len(SPECIAL_TOKENS) + len(BYTE_TOKENS)
    if vocab_size < reserved + 2:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens, "
            f"{len(BYTE_TOKENS)} bytes and an alphabet need at least {reserved + 2}"
        )
    if isinstance(texts, str | bytes):
        raise TypeError("texts must be an iterable of strings, got a single string")

    learner = _pipeline(models.BPE())
    with TemporaryFile("w+", encoding="utf-8") as spool:
        # A script of thousands of characters must leave room for merges; the rarest become bytes.
        alphabet = _spool(_checked(texts), spool, limit=(vocab_size - reserved) // 2)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            show_progress=show_progress,
            # These get the first ids; in the finished tokenizer bytes are not special.
            special_tokens=[*SPECIAL_TOKENS, *BYTE_TOKENS],
            # Of itself it leaves out rare characters by chance where some are as rare as others.
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
        )
        learner.train_from_iterator(map(json.loads, spool), trainer)
    model = json.loads(learner.to_str())["model"]
    if len(model["vocab"]) < vocab_size:
        logger.info("The corpus gives %d tokens of %d", len(model["vocab"]), vocab_size)
    return _finish(model["vocab"], model["merges"], model_max_length)


def _spool(texts: Iterable[str], spool: IO[str], limit: int) -> list[str]:
    """The most frequent characters of texts, which go into a file to be read once more."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalize("NFC", text))
        spool.write(json.dumps(text) + "\n")
    if not counts:
        raise ValueError("there is no text to train a tokenizer on")
    spool.seek(0)
    counts[" "] += 1  # each text is given one
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _finish(
    vocab: dict[str, int], merges: list[list[str]], model_max_length: int | None
) -> PreTrainedTokenizerFast:
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for left, right in merges],
        unk_token=UNK,
        byte_fallback=True,
    )
    backend = _pipeline(model)
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
        split_special_tokens=True,  # "</s>" in a text is four characters, not the end of it
        **limit,
    )


def _pipeline(model: models.Model) -> Tokenizer:
    """Text to pieces and back without loss, but for NFC.

    Spaces stay spaces: the customary stand-in "▁" could not be told from a "▁" in the text. Every
    text is given one space in front, which the decoder takes away again, so that a word has the
    same pieces at the start of a sentence as inside it.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"text {number} is not a string but {type(text).__name__}")
        expect_unicode(text, f"text {number}")
        yield text
