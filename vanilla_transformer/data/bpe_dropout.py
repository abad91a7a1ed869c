"""BPE-dropout (Provilkov et al., 2020, https://arxiv.org/abs/1910.13267): each epoch segments a
text differently, which regularizes a model and teaches it how words are spelled.

The dropout of `tokenizers` uses a generator that cannot be seeded. Here the same seed, epoch and
text give the same tokens in any process, so that a run can be stopped and resumed.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import groupby, pairwise, product
from operator import itemgetter
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from .token_batches import iter_all_shards, set_epoch

SAMPLE = 1000  # pairs from which to estimate how much longer texts become


class BPEDropout:
    """Encodes as a BPE tokenizer does, but at each step skips each possible merge with probability
    `dropout`: 0 is the tokenizer's own encoding, 1 spells out every character.

    The tokenizer encodes each text. Its tokens are then split into the pieces that they were merged
    from, and merged again. Everything else, such as special and added tokens, is unchanged.

    Args:
        tokenizer: A fast BPE tokenizer, for instance from `train_tokenizer`.
        dropout: The probability of skipping a merge; 0.1 in the paper.
        seed: The seed of all encodings.

    Raises:
        ValueError: `dropout` is not a probability, the tokenizer is not a plain BPE tokenizer or
            has no merges (characters), or its encoding of a sample of its vocabulary does not
            follow from its merges.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int = 0):
        if not 0 <= dropout <= 1:
            raise ValueError(f"bpe_dropout={dropout}: expected a probability")
        self.dropout, self.seed = dropout, seed
        self._tokenizer = tokenizer
        source = getattr(tokenizer, "backend_tokenizer", None)
        target = getattr(tokenizer, "target_tokenizer", source)
        self._merges = {
            "text": _Merges(source, type(tokenizer).__name__),
            "text_target": _Merges(target, type(tokenizer).__name__),
        }
        if dropout and not any(map(len, self._merges.values())):
            raise ValueError(
                f"bpe_dropout={dropout}: expected a BPE tokenizer with merges to skip, such as one "
                "of tokenizer_type='bpe'"
            )
        self._check_tokenizer()

    def encode(
        self, text: str, epoch: int = 0, max_length: int | None = None, *, as_target: bool = False
    ) -> list[int]:
        """The token ids of a text in an epoch.

        Args:
            text: The tokenizer's argument `text` or, `as_target`, its `text_target`.
            epoch: Determines, together with the seed and the text, which merges are skipped.
            max_length: Truncate to this many tokens, special tokens included. As in the tokenizer,
                a length with no room for special tokens truncates nothing.
            as_target: Whether the text is a target, which may have different special tokens.
        """
        draw = Random(f"{self.seed} {epoch} {text}").random
        return self._encode(text, max_length, as_target, lambda: draw() < self.dropout)

    def _encode(
        self, text: str, max_length: int | None, as_target: bool, drop: Callable[[], bool]
    ) -> list[int]:
        side = "text_target" if as_target else "text"
        merges = self._merges[side]
        encoding = self._tokenizer(**{side: text}, verbose=False).encodings[0]
        opening: list[int] = []
        body: list[int] = []
        closing: list[int] = []
        # No merge crosses a word. Special tokens belong to no word.
        for word, part in groupby(zip(encoding.word_ids, encoding.ids, strict=True), itemgetter(0)):
            tokens = [token for _, token in part]
            if word is not None:
                body += merges.merge(merges.split_word(tokens), drop)
            else:
                (closing if body else opening).extend(tokens)
        if max_length is not None:
            room = max_length - len(opening) - len(closing)
            if 0 <= room < len(body):
                left = self._tokenizer.truncation_side == "left"
                body = body[len(body) - room :] if left else body[:room]
        return opening + body + closing

    def _check_tokenizer(self) -> None:
        """Reject a tokenizer that does more than its merges define. A tokenizer keeps and saves the
        truncation of its last call, so the last call here is without truncation."""
        for side, max_length in product(self._merges, (20, None)):
            text = self._merges[side].sample()
            options = {"truncation": max_length is not None, "max_length": max_length}
            expected = self._tokenizer(**{side: text}, **options, verbose=False)["input_ids"]
            if self._encode(text, max_length, side == "text_target", lambda: False) != expected:
                raise ValueError(
                    f"bpe_dropout: without dropout the tokens of {side}={text[:50]!r} differ from "
                    f"those of {type(self._tokenizer).__name__}: expected a plain BPE tokenizer"
                )


class _Merges:
    """The merges of a BPE tokenizer.

    Args:
        backend: The `tokenizers.Tokenizer`; None if there is none.
        name: The name of the tokenizer in the error if there is none.
    """

    def __init__(self, backend: Any, name: str):
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        kind = model.get("type", name)
        extras = [f"{key}={model[key]}" for key in ("dropout", "ignore_merges") if model.get(key)]
        if kind != "BPE" or extras:
            kind = " with ".join([kind, *extras])
            raise ValueError(f"bpe_dropout: expected a plain BPE tokenizer, not this {kind}")
        self._backend = backend
        vocab: dict[str, int] = model["vocab"]
        prefix = len(model.get("continuing_subword_prefix") or "")
        # For each pair of adjacent tokens: the rank of their merge, and the merged token.
        self._merges = {
            (vocab[left], vocab[right]): (rank, vocab[left + right[prefix:]])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._parents: dict[int, list[tuple[int, int]]] = {}
        for pair, (_, merged) in self._merges.items():
            self._parents.setdefault(merged, []).append(pair)
        self._added = set(backend.get_added_tokens_decoder())
        self._pieces: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._merges)

    def sample(self) -> str:
        """A text of 200 tokens from all parts of the vocabulary."""
        size = self._backend.get_vocab_size()
        ids = list(range(0, size, 1 + size // 200))
        return self._backend.decode(ids, skip_special_tokens=True)

    def split_word(self, word: list[int]) -> list[int]:
        """The pieces that a word was merged from. An added token is not split."""
        if len(word) == 1 and word[0] in self._added:
            return word
        return [piece for token in word for piece in self._split_token(token)]

    def _split_token(self, token: int) -> list[int]:
        """The pieces that a token was merged from. If several merges give the same token, the one
        with the most pieces starts from characters."""
        if token not in self._pieces:
            pairs = self._parents.get(token, ())
            ways = (self._split_token(left) + self._split_token(right) for left, right in pairs)
            self._pieces[token] = max(ways, key=len, default=[token])
        return self._pieces[token]

    def merge(self, pieces: list[int], drop: Callable[[], bool]) -> list[int]:
        """Algorithm 1 of the paper."""
        tokens = list(pieces)
        while True:
            best: tuple[int, int] | None = None
            for position, pair in enumerate(pairwise(tokens)):
                merge = self._merges.get(pair)
                if merge and (best is None or merge < best) and not drop():
                    best, place = merge, position
            if best is None:
                return tokens
            tokens[place : place + 2] = [best[1]]


def with_bpe_dropout(
    pairs: Any, tokenized: Any, encoder: BPEDropout, *limits: int | None
) -> "BPEDropoutDataset | BPEDropoutStream":
    """A data set or a stream of `pairs`, segmented differently in each epoch. `tokenized` has the
    same pairs without dropout. `limits` are the maximum lengths of sources and of targets."""
    if has_length(pairs):
        return BPEDropoutDataset(pairs, tokenized, encoder, *limits)
    return BPEDropoutStream(pairs, encoder, *limits)


class _BPEDropoutPairs:
    """The common part of `BPEDropoutDataset` and `BPEDropoutStream`."""

    def __init__(
        self,
        pairs: Any,
        encoder: BPEDropout,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
    ):
        self.pairs, self.encoder = pairs, encoder
        self.max_lengths = max_source_length, max_target_length
        # Persistent workers of a `DataLoader` share it.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch.fill_(epoch)
        set_epoch(self.pairs, epoch)

    def _encode(self, pairs: Iterable[dict[str, str]]) -> Iterator[dict[str, list[int]]]:
        epoch, encode = int(self._epoch), self.encoder.encode
        of_source, of_target = self.max_lengths
        for pair in pairs:
            yield {
                "input_ids": encode(pair["source"], epoch, of_source),
                "labels": encode(pair["target"], epoch, of_target, as_target=True),
            }


class BPEDropoutDataset(_BPEDropoutPairs, Dataset):
    """A data set with `input_ids` and `labels` that are segmented differently in each epoch.

    Args:
        pairs: A data set with the columns `source` and `target`.
        tokenized: The same pairs without dropout, a `datasets.Dataset`. Samplers estimate lengths
            from its lengths and the mean `growth`.
        encoder: Encodes the texts.
        max_source_length: Truncate longer sources to this many tokens, special tokens included.
        max_target_length: The same for targets.
    """

    def __init__(self, pairs: Any, tokenized: Any, encoder: BPEDropout, *limits: int | None):
        super().__init__(pairs, encoder, *limits)
        self.tokenized = tokenized

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def growth(self) -> tuple[float, float]:
        """The factors by which dropout increases the number of tokens in sources and targets."""
        rows = list(range(0, len(self), 1 + len(self) // SAMPLE))
        dropped, plain = self.__getitems__(rows), self.tokenized.select(rows)

        def ratio(side: str) -> float:
            return sum(len(row[side]) for row in dropped) / sum(map(len, plain[side]))

        return ratio("input_ids"), ratio("labels")

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, list[int]]]:
        """Fetch a batch at once; `DataLoader` uses this method if it exists."""
        return list(self._encode(self.pairs.__getitems__(indices)))


class BPEDropoutStream(_BPEDropoutPairs, IterableDataset):
    """The same as `BPEDropoutDataset`, for a stream of pairs."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self._encode(self.pairs)

    def iter_all_shards(self) -> Iterator[dict[str, list[int]]]:
        """All examples, as the function `iter_all_shards` expects."""
        return self._encode(iter_all_shards(self.pairs))
