"""BPE-dropout: in each epoch a text is cut into other pieces (Provilkov et al., 2020,
https://arxiv.org/abs/1910.13267), which regularises a model and teaches it how words are spelt.

The dropout of `tokenizers` itself draws from a generator that nothing seeds. Here a seed, an epoch
and a text give the same tokens in any process, so that a run can be stopped and resumed.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise, product
from operator import itemgetter
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from .token_batches import iter_all_shards


class BPEDropout:
    """Encodes as a BPE tokenizer does, but at each step each possible merge is left out with
    probability `dropout`: 0 is the tokenizer's own encoding, 1 spells out every character.

    The tokenizer itself encodes each text. Its tokens are then taken back to the pieces that they
    were merged from, and merged anew. All else, such as special and added tokens, stays as it is.

    Args:
        tokenizer: A fast tokenizer over BPE, such as `train_tokenizer` makes.
        dropout: The probability; the paper's is 0.1.
        seed: Of all encodings.

    Raises:
        ValueError: `dropout` is no probability, the tokenizer is of another kind, or its encoding
            of a sample of its vocabulary is not what its merges make of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int = 0):
        if not 0 <= dropout <= 1:
            raise ValueError(f"bpe_dropout={dropout}: expected a probability")
        self.dropout, self.seed = dropout, seed
        self._tokenizer = tokenizer
        model = _read_model(tokenizer)
        vocab: dict[str, int] = model["vocab"]
        prefix = len(model.get("continuing_subword_prefix") or "")
        # Of two tokens side by side: how early they merge, and into what.
        self._merges = {
            (vocab[left], vocab[right]): (rank, vocab[left + right[prefix:]])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._origins: dict[int, list[tuple[int, int]]] = {}
        for pair, (_, merged) in self._merges.items():
            self._origins.setdefault(merged, []).append(pair)
        self._added = set(tokenizer.added_tokens_decoder)
        self._spelt: dict[int, list[int]] = {}
        self._probe()

    def encode(
        self, text: str, epoch: int = 0, max_length: int | None = None, *, as_target: bool = False
    ) -> list[int]:
        """The token ids of a text in this epoch.

        Args:
            text: What the tokenizer takes as `text`, or `as_target` as `text_target`.
            epoch: Decides, with the seed and the text, which merges are left out.
            max_length: Where to cut longer texts, special tokens included. As in the tokenizer,
                one that leaves those no room cuts nothing.
            as_target: Whether it is a target, which may have other special tokens.
        """
        draw = Random(f"{self.seed} {epoch} {text}").random
        return self._encode(text, max_length, as_target, lambda: draw() < self.dropout)

    def _encode(
        self, text: str, max_length: int | None, as_target: bool, drop: Callable[[], bool]
    ) -> list[int]:
        side = "text_target" if as_target else "text"
        encoding = self._tokenizer(**{side: text}, verbose=False).encodings[0]
        opening: list[int] = []
        body: list[int] = []
        closing: list[int] = []
        # A word is what no merge crosses; special tokens belong to none.
        for word, part in groupby(zip(encoding.word_ids, encoding.ids, strict=True), itemgetter(0)):
            tokens = [token for _, token in part]
            if word is not None:
                body += self._merge(self._split(tokens), drop)
            else:
                (closing if body else opening).extend(tokens)
        if max_length is not None:
            room = max_length - len(opening) - len(closing)
            if 0 <= room < len(body):
                left = self._tokenizer.truncation_side == "left"
                body = body[len(body) - room :] if left else body[:room]
        return opening + body + closing

    def _split(self, word: list[int]) -> list[int]:
        """The pieces that a word was merged from; an added token is whole."""
        if len(word) == 1 and word[0] in self._added:
            return word
        return [piece for token in word for piece in self._spell(token)]

    def _spell(self, token: int) -> list[int]:
        """The pieces of a token. Of several ways to merge it, the longest starts at characters."""
        if token not in self._spelt:
            pairs = self._origins.get(token, ())
            ways = (self._spell(left) + self._spell(right) for left, right in pairs)
            self._spelt[token] = max(ways, key=len, default=[token])
        return self._spelt[token]

    def _merge(self, pieces: list[int], drop: Callable[[], bool]) -> list[int]:
        """The paper's algorithm 1."""
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

    def _probe(self) -> None:
        """Refuse a tokenizer that does more than its merges say. The last call is the one without
        truncation, which a tokenizer keeps, and saves."""
        size = len(self._tokenizer)
        text = self._tokenizer.decode(range(0, size, 1 + size // 200), skip_special_tokens=True)
        for as_target, max_length in product((False, True), (20, None)):
            options = {"truncation": max_length is not None, "max_length": max_length}
            side = "text_target" if as_target else "text"
            expected = self._tokenizer(**{side: text}, **options, verbose=False)["input_ids"]
            if self._encode(text, max_length, as_target, lambda: False) != expected:
                raise ValueError(
                    f"bpe_dropout: without dropout the tokens of {side}={text[:50]!r} differ from "
                    f"those of {type(self._tokenizer).__name__}: expected a plain BPE tokenizer"
                )


def _read_model(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The vocabulary and merges of a BPE tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    kind = model.get("type", type(tokenizer).__name__)
    extras = [f"{name}={model[name]}" for name in ("dropout", "ignore_merges") if model.get(name)]
    if kind != "BPE" or extras:
        kind = " with ".join([kind, *extras])
        raise ValueError(f"bpe_dropout: expected a plain BPE tokenizer, not this {kind}")
    return model


def with_bpe_dropout(
    pairs: Any, tokenized: Any, encoder: BPEDropout, *limits: int | None
) -> "BPEDropoutDataset | BPEDropoutStream":
    """`pairs`, a data set or a stream, in tokens that differ from epoch to epoch; `tokenized` is
    the same without dropout. `limits` are of source and target, as below."""
    if has_length(pairs):
        return BPEDropoutDataset(pairs, tokenized, encoder, *limits)
    return BPEDropoutStream(pairs, encoder, *limits)


class _EncodedAnew:
    """What a data set and a stream of sentence pairs have in common."""

    def __init__(
        self,
        pairs: Any,
        encoder: BPEDropout,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
    ):
        self.pairs, self.encoder = pairs, encoder
        self.max_lengths = max_source_length, max_target_length
        # Loading processes that outlive an epoch share it.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this epoch."""
        self._epoch.fill_(epoch)
        if hasattr(self.pairs, "set_epoch"):
            self.pairs.set_epoch(epoch)

    def _encode(self, pairs: Iterable[tuple[str, str]]) -> Iterator[dict[str, list[int]]]:
        epoch = int(self._epoch)
        of_source, of_target = self.max_lengths
        for source, target in pairs:
            yield {
                "input_ids": self.encoder.encode(source, epoch, of_source),
                "labels": self.encoder.encode(target, epoch, of_target, as_target=True),
            }


class BPEDropoutDataset(_EncodedAnew, Dataset):
    """A data set with the columns `source` and `target`, as `input_ids` and `labels` that differ
    from epoch to epoch.

    Args:
        pairs: The data set.
        tokenized: The same pairs without dropout, for samplers that ask for lengths.
        encoder: What encodes the texts.
        max_source_length: Tokens to keep of longer sources, special tokens included.
        max_target_length: Likewise of targets.
    """

    def __init__(self, pairs: Any, tokenized: Any, encoder: BPEDropout, *limits: int | None):
        super().__init__(pairs, encoder, *limits)
        self.tokenized = tokenized

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, list[int]]]:
        """What a `DataLoader` looks for, to fetch a batch at once."""
        rows = self.pairs[indices]
        return list(self._encode(zip(rows["source"], rows["target"], strict=True)))


class BPEDropoutStream(_EncodedAnew, IterableDataset):
    """As `BPEDropoutDataset`, for a stream of pairs."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self._encode((pair["source"], pair["target"]) for pair in self.pairs)

    def iter_all_shards(self) -> Iterator[dict[str, list[int]]]:
        """All examples, as the function `iter_all_shards` expects."""
        pairs = iter_all_shards(self.pairs)
        return self._encode((pair["source"], pair["target"]) for pair in pairs)
