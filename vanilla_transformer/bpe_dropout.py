"""BPE-dropout: in each epoch a text is cut into other pieces (Provilkov et al., 2020,
https://arxiv.org/abs/1910.13267), which regularises a model and teaches it how words are spelt.

The dropout of `tokenizers` itself draws from a generator that nothing seeds. Here a seed, an epoch
and a text give the same tokens in any process, so that a run can be stopped and resumed.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from .batching import read_whole


class BPEDropout:
    """Encodes as a BPE tokenizer does, but at each step each possible merge is left out with
    probability `dropout`: 0 is the tokenizer's own encoding, 1 spells out every character.

    Args:
        tokenizer: A fast tokenizer over BPE, such as `train_tokenizer` makes.
        dropout: The probability; the paper's is 0.1.
        seed: Of all encodings.

    Raises:
        ValueError: `dropout` is no probability, or the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int = 0):
        if not 0 <= dropout <= 1:
            raise ValueError(f"bpe_dropout={dropout}: expected a probability")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model.get("type") != "BPE" or affixes or model.get("ignore_merges"):
            kind = model.get("type", type(tokenizer).__name__)
            raise ValueError(f"bpe_dropout: expected a plain BPE tokenizer, not this {kind}")
        self.dropout, self.seed = dropout, seed
        self._backend: Any = backend
        self._closing: list[int] = tokenizer("")["input_ids"]
        self._vocab: dict[str, int] = model["vocab"]
        self._unknown = [self._vocab[model["unk_token"]]] if model["unk_token"] else []
        # Of two tokens side by side: how early they merge, and into what.
        self._merges = {
            (self._vocab[left], self._vocab[right]): (rank, self._vocab[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }

    def encode(self, text: str, epoch: int = 0, max_length: int | None = None) -> list[int]:
        """The text's token ids in this epoch, closed like the tokenizer's own, and with that closed
        after at most `max_length` tokens."""
        draw = Random(f"{self.seed} {epoch} {text}").random
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        pieces = self._backend.pre_tokenizer.pre_tokenize_str(text)
        ids = [token for piece, _ in pieces for token in self._merge(piece, draw)]
        if max_length is not None:
            ids = ids[: max_length - len(self._closing)]
        return ids + self._closing

    def _merge(self, piece: str, draw: Callable[[], float]) -> list[int]:
        tokens = [token for character in piece for token in self._spell(character)]
        while True:
            best: tuple[int, int] | None = None
            for position, pair in enumerate(pairwise(tokens)):
                merge = self._merges.get(pair)
                if merge and (best is None or merge < best) and draw() >= self.dropout:
                    best, place = merge, position
            if best is None:
                return tokens
            tokens[place : place + 2] = [best[1]]

    def _spell(self, character: str) -> list[int]:
        """The token of a character, or those of its bytes."""
        token = self._vocab.get(character)
        if token is not None:
            return [token]
        spelt = [self._vocab.get(f"<0x{byte:02X}>") for byte in character.encode()]
        known = [token for token in spelt if token is not None]
        return known if len(known) == len(spelt) else self._unknown


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
        for source, target in pairs:
            yield {
                "input_ids": self.encoder.encode(source, epoch, self.max_lengths[0]),
                "labels": self.encoder.encode(target, epoch, self.max_lengths[1]),
            }


class BPEDropoutDataset(_EncodedAnew, Dataset):
    """A data set with the columns `source` and `target`, as `input_ids` and `labels` that differ
    from epoch to epoch.

    Args:
        pairs: The data set.
        tokenized: The same pairs without dropout, for samplers that ask for lengths.
        encoder: What encodes the texts.
        max_source_length: Tokens to keep of longer sources, the final </s> included.
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

    def whole(self) -> Iterator[dict[str, list[int]]]:
        """As `read_whole`."""
        return self._encode((pair["source"], pair["target"]) for pair in read_whole(self.pairs))
