# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""A tokenizer with a vocabulary for the source and another for the target, or with Moses.

For one shared vocabulary, a plain `PreTrainedTokenizerFast` is enough.
"""

import os
import threading
from typing import Any

from transformers import PreTrainedTokenizerFast

from .moses import Moses

TARGET_FILE = "target_tokenizer.json"
# The source's tokenizer next to a model of transformers, in place of tokenizer.json, which
# transformers' own tokenizer would read for both sides where this class is not loaded.
SOURCE_FILE = "source_tokenizer.json"

_mode = threading.local()  # in each thread, the tokenizer that is reading a target


class VanillaTransformerTokenizer(PreTrainedTokenizerFast):
    """Two fast tokenizers in one: the source's reads `text`, the target's reads `text_target` and
    decodes.

    `tokenizer(text, text_target=...)` returns `input_ids` and `attention_mask` of the source, and
    the target's ids as `labels`; `tokenizer(text_target=...)` returns those as `input_ids`.
    `decode` and `batch_decode` read target ids, or source ids with `use_source_tokenizer=True`.
    `vocab_size`, `len()`, `get_vocab`, `convert_tokens_to_ids`, `convert_ids_to_tokens`, `tokenize`
    and `backend_tokenizer` are the source's; `target_tokenizer` and `target_vocab_size` give access
    to the target. `add_tokens` adds to the source.

    `bos_token_id` and `eos_token_id` are ids of the target, which is where a model needs them; the
    source may lack these tokens. `pad_token_id` is the same on both sides. Which tokens surround a
    source and a target is part of each fast tokenizer (its post-processor).

    Args:
        tokenizer_file, source_tokenizer_file: The source's tokenizer: the path of a file that
            `tokenizers` saved, by one of two names.
        target_tokenizer_file: The target's.
        tokenizer_object: The source's `tokenizers.Tokenizer`, in place of a file.
        target_tokenizer_object: The target's.
        target_size: Target ids from this one on are symbols that the model does not know: a target
            gets `target_unk_id` in their place. By default the model knows all symbols.
        target_unk_id: The id of the target's unknown token.
        moses: The arguments of `Moses`, which then splits text before a tokenizer reads it, and
            joins what `decode` returns. Offsets refer to the text that Moses returns.
        kwargs: As for every fast tokenizer: `pad_token`, `eos_token`, `model_max_length`, ...

    Raises:
        ValueError: A side has neither a file nor an object, the ids of `pad_token` differ, or one
            side lacks `unk_token`.
        ImportError: `moses` is given, and sacremoses is not installed.
    """

    vocab_files_names = {
        "tokenizer_file": "tokenizer.json",
        "source_tokenizer_file": SOURCE_FILE,
        "target_tokenizer_file": TARGET_FILE,
    }
    model_input_names = ["input_ids", "attention_mask"]
    _auto_class = "AutoTokenizer"  # saved folders carry this file
    _source: Any = None
    _target: Any = None

    def __init__(
        self,
        *,
        tokenizer_file: str | None = None,
        source_tokenizer_file: str | None = None,
        target_tokenizer_file: str | None = None,
        tokenizer_object: Any = None,
        target_tokenizer_object: Any = None,
        target_size: int | None = None,
        target_unk_id: int | None = None,
        moses: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        tokenizer_file = tokenizer_file or source_tokenizer_file
        for name, given in (
            ("tokenizer", tokenizer_file or tokenizer_object),
            ("target_tokenizer", target_tokenizer_file or target_tokenizer_object),
        ):
            if given is None:
                raise ValueError(
                    f"{type(self).__name__} got neither {name}_file nor {name}_object, expected "
                    f"one: a saved folder holds tokenizer.json and {TARGET_FILE}"
                )
        if (target_size is None) != (target_unk_id is None):
            raise ValueError(
                f"target_size={target_size}, target_unk_id={target_unk_id}: expected both or none"
            )
        self.target_size: Any = target_size
        self.target_unk_id = target_unk_id
        # Special tokens that a side lacks are added to the target alone.
        super().__init__(
            tokenizer_file=target_tokenizer_file,
            tokenizer_object=target_tokenizer_object,
            target_size=target_size,
            target_unk_id=target_unk_id,
            moses=moses,
            **kwargs,
        )
        self._moses = Moses(**moses) if moses else None
        self._source = PreTrainedTokenizerFast(
            tokenizer_file=tokenizer_file,
            tokenizer_object=tokenizer_object,
            split_special_tokens=self.split_special_tokens,
        ).backend_tokenizer
        for kind in ("pad_token", "unk_token"):
            token = self.special_tokens_map.get(kind)
            ids = [side.token_to_id(token) for side in (self._source, self._target) if token]
            if None in ids or (kind == "pad_token" and len(set(ids)) > 1):
                raise ValueError(
                    f"{kind}={token!r} has id {ids[0]} in the source and {ids[1]} in the target, "
                    f"expected {'the same id' if kind == 'pad_token' else 'an id'} in both"
                )

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """The files, unchanged. Each lists its added tokens, so those that transformers read from
        the source's are dropped: the target would get them."""
        kwargs.pop("added_tokens_decoder", None)
        return kwargs

    @property
    def _tokenizer(self) -> Any:
        """The side that this thread uses; the target until there is a source."""
        is_at_target = getattr(_mode, "at_target", None) is self
        return self._target if is_at_target or self._source is None else self._source

    @_tokenizer.setter
    def _tokenizer(self, tokenizer: Any) -> None:
        self._target = tokenizer  # the base class sets it, before there is a source

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Same as transformers', to the source. Special tokens are also added to the target, as
        they are when it is loaded."""
        added = super()._add_tokens(new_tokens, special_tokens)
        if special_tokens and self._source is not None:
            self._target.add_special_tokens(new_tokens)
        return added

    def _switch_to_input_mode(self) -> None:
        """Called by transformers before it reads `text`, and after `text_target`."""
        _mode.at_target = None

    def _switch_to_target_mode(self) -> None:
        """Called by transformers before it reads `text_target`."""
        _mode.at_target = self

    def __call__(self, text: Any = None, *args: Any, text_target: Any = None, **kwargs: Any) -> Any:
        """Same as every tokenizer; arguments after `text_target` are given by name. After an error
        it reads sources again."""
        try:
            encoded = super().__call__(text, *args, text_target=text_target, **kwargs)
        finally:
            self._switch_to_input_mode()
        if text_target is not None and self.target_size is not None:
            ids = "input_ids" if text is None else "labels"
            encoded[ids] = self._known(encoded[ids])
        return encoded

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by `__call__`, `encode` and `tokenize`."""
        if self._moses is not None and not kwargs.get("is_split_into_words"):
            side = "target" if self._tokenizer is self._target else "source"
            text = self._moses.split(text, side)
        return super()._encode_plus(text, *args, **kwargs)

    def _known(self, ids: Any) -> Any:
        """Target ids (a number, lists of lists, an array) without those that the model lacks."""
        if isinstance(ids, list):
            return [self._known(part) for part in ids]
        if isinstance(ids, int):
            return ids if ids < self.target_size else self.target_unk_id
        ids[ids >= self.target_size] = self.target_unk_id
        return ids

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        use_source_tokenizer: bool = False,
        **kwargs: Any,
    ) -> str | list[str]:
        """Turns ids of the target, or with `use_source_tokenizer` of the source, into text."""
        if not use_source_tokenizer:
            self._switch_to_target_mode()
        try:
            text = super().decode(token_ids, skip_special_tokens, **kwargs)
        finally:
            self._switch_to_input_mode()
        if self._moses is None:
            return text
        return self._moses.join(text, "source" if use_source_tokenizer else "target")

    @property
    def target_tokenizer(self) -> Any:
        """The target's `tokenizers.Tokenizer`, as `backend_tokenizer` is the source's."""
        return self._target

    @property
    def target_vocab_size(self) -> int:
        """The number of ids in the target's vocabulary, added tokens included: a model's
        `decoder_vocab_size`."""
        return self._target.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The target's id of `bos_token`."""
        return self._target_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The target's id of `eos_token`."""
        return self._target_id(self.eos_token)

    def _target_id(self, token: str | None) -> int | None:
        return None if token is None else self._target.token_to_id(token)

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """Writes both files, before `save_pretrained` looks for files to upload."""
        saved = super()._save_pretrained(
            save_directory, file_names, legacy_format=legacy_format, filename_prefix=filename_prefix
        )
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target_file = os.path.join(save_directory, prefix + TARGET_FILE)
        self._target.save(target_file)
        return (*saved, target_file)
