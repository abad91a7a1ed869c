"""The options of a new tokenizer, and what it makes of the training text."""

import logging
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from .parallel_text import iter_texts
from .tokenization import (
    TOKENIZER_TYPES,
    UNICODE_FORMS,
    check_choice,
    check_user_tokens,
    train_tokenizer,
)
from .vocabularies import pair

logger = logging.getLogger(__name__)


@dataclass
class TokenizerArguments:
    """Which tokenizer to use: an existing one, or one that is trained on the data.

    Raises:
        ValueError: An option is not among its choices, contradicts another one, or names a missing
            file.
    """

    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to use. Default: train one on the data."}
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "Size of the tokenizer trained on the data."}
    )
    tokenizer_type: str = field(
        default="bpe",
        metadata={
            "help": f"What to train: {', '.join(TOKENIZER_TYPES)}. Words are split at white space."
        },
    )
    separate_vocabularies: bool = field(
        default=False,
        metadata={"help": "Train a tokenizer for the sources and another for the targets."},
    )
    target_tokenizer_type: str | None = field(
        default=None,
        metadata={"help": "With separate_vocabularies, the target's type. Default: the same."},
    )
    target_vocab_size: int | None = field(
        default=None,
        metadata={"help": "With separate_vocabularies, the target's size. Default: the same."},
    )
    user_tokens: list[str] = field(
        default_factory=list,
        metadata={"help": "Tokens that are never split, such as <2fr> or <num>."},
    )
    lowercase: bool = field(
        default=False, metadata={"help": "Lower-case all text. The tokenizer keeps this."}
    )
    unicode_normalization: str = field(
        default="nfc",
        metadata={
            "help": f"Unicode normal form of all text: {', '.join(UNICODE_FORMS)}. The tokenizer "
            "keeps this."
        },
    )

    def __post_init__(self) -> None:
        check_choice("tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        check_choice("unicode_normalization", self.unicode_normalization, UNICODE_FORMS)
        check_user_tokens(self.user_tokens)
        if self.target_tokenizer_type is not None:
            check_choice("target_tokenizer_type", self.target_tokenizer_type, TOKENIZER_TYPES)
        for name in ("target_tokenizer_type", "target_vocab_size"):
            if getattr(self, name) is not None and not self.separate_vocabularies:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected separate_vocabularies with it"
                )

    def train(self, pairs: Any) -> PreTrainedTokenizerFast:
        """A new tokenizer.

        Args:
            pairs: The training data, with the columns `source` and `target`.

        Raises:
            ValueError: As in `train_tokenizer`.
        """
        if not self.separate_vocabularies:
            return self._train(iter_texts(pairs), self.tokenizer_type, self.vocab_size)
        kind = self.target_tokenizer_type or self.tokenizer_type
        size = self.target_vocab_size or self.vocab_size
        return pair(
            self._train(iter_texts(pairs, ["source"]), self.tokenizer_type, self.vocab_size),
            self._train(iter_texts(pairs, ["target"]), kind, size),
        )

    def _train(self, texts: Any, tokenizer_type: str, size: int) -> PreTrainedTokenizerFast:
        return train_tokenizer(
            texts,
            size,
            tokenizer_type=tokenizer_type,
            user_tokens=self.user_tokens,
            lowercase=self.lowercase,
            unicode_normalization=self.unicode_normalization,
        )
