# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Moses tokenization around a tokenizer, for models of other toolkits that were trained on it.

sacremoses (https://github.com/hplt-project/sacremoses) does the work.
"""

from functools import lru_cache, partial
from typing import Any

from transformers.models.fsmt.tokenization_fsmt import (
    remove_non_printing_char,
    replace_unicode_punct,
)


class Moses:
    """Splits text into words and punctuation before a tokenizer reads it, and joins translations.

    Args:
        source_lang, target_lang: The languages, such as "de". None leaves a side unchanged.
        normalize: Whether punctuation is normalized first, and non-printing characters are removed,
            as `FSMTTokenizer` does.
        lowercase: Whether text is lower-cased before all of this.
        aggressive_dash_splits, escape: As for `sacremoses.MosesTokenizer.tokenize`.

    Raises:
        ImportError: sacremoses is not installed.
    """

    def __init__(
        self,
        source_lang: str | None,
        target_lang: str | None,
        *,
        normalize: bool = False,
        lowercase: bool = False,
        aggressive_dash_splits: bool = True,
        escape: bool = True,
    ) -> None:
        try:
            import sacremoses
        except ImportError as error:
            raise ImportError(
                "this tokenizer needs the package sacremoses; 'vanilla-transformer[moses]' "
                "brings it"
            ) from error
        self.normalize, self.lowercase = normalize, lowercase
        self.options = {"aggressive_dash_splits": aggressive_dash_splits, "escape": escape}
        languages = {"source": source_lang, "target": target_lang}
        given = {side: language for side, language in languages.items() if language is not None}
        self.normalizers = {k: sacremoses.MosesPunctNormalizer(v) for k, v in given.items()}
        self.tokenizers = {k: sacremoses.MosesTokenizer(v) for k, v in given.items()}
        self.detokenizers = {k: sacremoses.MosesDetokenizer(v) for k, v in given.items()}
        for tokenizer in self.tokenizers.values():
            # sacremoses (0.1 and 0.2) makes a set of all letters for each word like "i.e."
            tokenizer.isanyalpha = partial(_has_any, tokenizer.IsAlpha)

    def split(self, text: Any, side: str) -> Any:
        """A text, or a list of texts, with spaces between words and punctuation.

        Args:
            side: "source" or "target".
        """
        if side not in self.tokenizers or text is None:
            return text
        if isinstance(text, (list, tuple)):
            return [self.split(one, side) for one in text]
        if self.lowercase:
            text = text.lower()
        if self.normalize:
            text = self.normalizers[side].normalize(replace_unicode_punct(text))
            text = remove_non_printing_char(text)
        return self.tokenizers[side].tokenize(text, return_str=True, **self.options)

    def join(self, text: str | list[str], side: str) -> str | list[str]:
        """Ordinary text, from one or several texts as `split` returns them."""
        if side not in self.detokenizers:
            return text
        if isinstance(text, list):
            return [self.detokenizers[side].detokenize(one.split()) for one in text]
        return self.detokenizers[side].detokenize(text.split())


def _has_any(characters: str, text: str) -> bool:
    """Whether a text has one of the characters."""
    return not _set_of(characters).isdisjoint(text)


@lru_cache(4)
def _set_of(characters: str) -> frozenset[str]:
    return frozenset(characters)
