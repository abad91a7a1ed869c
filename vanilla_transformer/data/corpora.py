"""Mixes training corpora: which pairs to drop, the share of each corpus, tags and prefixes."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    interleave_datasets,
)
from transformers.hf_argparser import HfArg

logger = logging.getLogger(__name__)

PAIR_FEATURES = Features({"source": Value("string"), "target": Value("string")})
RULES = ("duplicates", "copies", "letterless", "broken")
UNITS: dict[str, Callable[[str], Sized]] = {"word": str.split, "char": str}
# U+FFFD, which marks wrongly decoded text, and control characters except tabs and line ends.
_BROKEN = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass
class CorpusArguments:
    """How to clean, mix and tag the training corpora before they are tokenized.

    Raises:
        ValueError: An option is out of range or not among its choices, or two contradict each
            other.
    """

    corpus_weights: list[float] | None = HfArg(
        default=None,
        help="The share of each training corpus, such as 3 1. Smaller corpora are repeated. "
        "Default: all pairs once.",
    )
    corpus_temperature: float | None = HfArg(
        default=None,
        help="In place of corpus_weights, shares that grow with size^(1/temperature), such as 5 "
        "for multilingual models. 1 keeps the original sizes.",
    )
    corpus_tags: list[str] | None = HfArg(
        default=None,
        help="A token before the sources of each training corpus, such as <2fr>; '' for none. "
        "Validation and test data get the tags if they have as many corpora.",
    )
    source_prefix: str | None = HfArg(
        default=None, help="Text before every source, such as T5's 'summarize: '."
    )
    drop_pairs: list[str] = HfArg(
        default_factory=list,
        help="Training pairs to drop: duplicates, copies (the target is the source), letterless "
        "(a side has no letters), broken (wrongly decoded or control characters).",
    )
    max_pair_length: int | None = HfArg(
        default=None, help="Drop training pairs with a side longer than this, in length_unit."
    )
    max_pair_ratio: float | None = HfArg(
        default=None,
        help="Drop training pairs with one side more than this many times as long as the other.",
    )
    length_unit: str = HfArg(
        default="word", help="Unit of max_pair_length and max_pair_ratio: word or char."
    )

    def check(self, corpora: int, streaming: bool) -> None:
        """Check the options for this number of training corpora."""
        for name in ("corpus_weights", "corpus_tags"):
            values = getattr(self, name)
            if values is not None and len(values) != corpora:
                raise ValueError(
                    f"{name}={values!r}: expected one for each of {corpora} training corpora"
                )
        for weight in self.corpus_weights or ():
            if not 0 < weight < float("inf"):
                raise ValueError(f"corpus_weights has {weight}: expected a positive number")
        if self.corpus_temperature is not None and not 0 < self.corpus_temperature < float("inf"):
            raise ValueError(
                f"corpus_temperature={self.corpus_temperature}: expected a positive number"
            )
        if self.corpus_weights is not None and self.corpus_temperature is not None:
            raise ValueError(
                f"corpus_temperature={self.corpus_temperature}: expected no corpus_weights as well"
            )
        for rule in self.drop_pairs:
            if rule not in RULES:
                raise ValueError(f"drop_pairs has {rule!r}: expected one of {', '.join(RULES)}")
        if self.max_pair_ratio is not None and not self.max_pair_ratio >= 1:
            raise ValueError(f"max_pair_ratio={self.max_pair_ratio}: expected 1 or more")
        if self.length_unit not in UNITS:
            raise ValueError(f"length_unit={self.length_unit!r}: expected word or char")
        if streaming and self._filters():
            raise ValueError(
                "streaming=True: expected no drop_pairs, max_pair_length or max_pair_ratio, which "
                "read all pairs before training"
            )
        if streaming and corpora > 1 and self.corpus_weights is None:
            raise ValueError("streaming=True: expected corpus_weights for several training corpora")

    def tags(self) -> list[str]:
        """The tags, without empty ones."""
        return list(dict.fromkeys(filter(None, self.corpus_tags or ())))

    def _filters(self) -> bool:
        return bool(self.drop_pairs or self.max_pair_length or self.max_pair_ratio)

    def combine(self, corpora: Sequence[Any], split: str, seed: int) -> Any:
        """Combine the corpora of a split, with tags and prefix.

        Args:
            corpora: Data sets or streams with the columns `source` and `target`.
            split: Pairs are dropped and weighted in "train" only.
            seed: The seed of the order in which corpora with weights alternate.

        Raises:
            ValueError: All pairs of a corpus are dropped, or with these shares an epoch, in which
                every pair is seen, would be more than a thousand times as long as all corpora.
        """
        if split == "train" and self._filters():
            corpora = list(self._without_bad_pairs(corpora))
        tags = self.corpus_tags or [""] * len(corpora)
        if len(tags) != len(corpora):
            # If all training data has tags, the model never learns from sources without one.
            logger.log(
                logging.WARNING if all(tags) else logging.INFO,
                "corpus_tags: the %s data gets none, as it has another number of corpora than the "
                "training data",
                split,
            )
            tags = [""] * len(corpora)
        openings = [(f"{tag} " if tag else "") + (self.source_prefix or "") for tag in tags]
        marked = [_mark(*each) for each in zip(corpora, openings, strict=True)]
        if len(marked) == 1:
            return marked[0]
        if split != "train" or not (self.corpus_weights or self.corpus_temperature):
            return concatenate_datasets(marked)
        sizes = [getattr(corpus, "num_rows", 0) for corpus in marked]
        shares = self.shares(sizes)
        longest = 1000 * sum(sizes)
        if any(n > longest * share for n, share in zip(sizes, shares, strict=True)):
            found = ", ".join(f"{share:.1e}" for share in shares)
            raise ValueError(
                f"training corpora of {', '.join(map(str, sizes))} pairs with shares of {found}: "
                "expected shares with which every pair is seen sooner"
            )
        mixed = interleave_datasets(
            marked, probabilities=shares, seed=seed, stopping_strategy="all_exhausted"
        )
        if isinstance(mixed, Dataset):
            logger.info(
                "Training corpora of %s pairs, with shares of %s, make %d pairs",
                ", ".join(map(str, sizes)),
                ", ".join(f"{share:.1%}" for share in shares),
                mixed.num_rows,
            )
        return mixed

    def shares(self, sizes: Sequence[int]) -> list[float]:
        """The probability of each corpus, from the weights, or from the sizes and the temperature
        (Arivazhagan et al., 2019, https://arxiv.org/abs/1907.05019)."""
        raw = np.array(self.corpus_weights or sizes, dtype=float)
        raw = (raw / raw.max()) ** (1 / (self.corpus_temperature or 1.0))
        return list(map(float, raw / raw.sum()))

    def _without_bad_pairs(self, corpora: Sequence[Dataset]) -> Iterator[Dataset]:
        seen: set[bytes] = set()
        for number, corpus in enumerate(corpora, start=1):
            dropped: Counter[str] = Counter()
            kept = []
            for index, (source, target) in enumerate(_iter_pairs(corpus)):
                reason = self._defect(source, target) or self._is_repeated(source, target, seen)
                if reason:
                    dropped[reason] += 1
                else:
                    kept.append(index)
            if not kept:
                raise ValueError(f"training corpus {number}: all pairs dropped: {dict(dropped)}")
            logger.info(
                "Training corpus %d: kept %d of %d pairs, dropped %s",
                number,
                len(kept),
                corpus.num_rows,
                ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none",
            )
            yield corpus.select(kept) if dropped else corpus

    def _defect(self, source: str, target: str) -> str | None:
        lengths = [len(UNITS[self.length_unit](text)) for text in (source, target)]
        if self.max_pair_length is not None and max(lengths) > self.max_pair_length:
            return "too long"
        if self.max_pair_ratio is not None and max(lengths) / min(lengths) > self.max_pair_ratio:
            return "of too different lengths"
        if "copies" in self.drop_pairs and source == target:
            return "copies"
        if "letterless" in self.drop_pairs and not all(
            any(map(str.isalpha, text)) for text in (source, target)
        ):
            return "letterless"
        if "broken" in self.drop_pairs and (_BROKEN.search(source) or _BROKEN.search(target)):
            return "broken"
        return None

    def _is_repeated(self, source: str, target: str, seen: set[bytes]) -> str | None:
        if "duplicates" not in self.drop_pairs:
            return None
        digest = blake2b(f"{source}\n{target}".encode(), digest_size=8).digest()
        if digest in seen:
            return "duplicates"
        seen.add(digest)
        return None


def _iter_pairs(corpus: Dataset) -> Iterator[tuple[str, str]]:
    for batch in corpus.iter(batch_size=1000):
        yield from zip(batch["source"], batch["target"], strict=True)


def _mark(corpus: Dataset | IterableDataset, opening: str) -> Dataset | IterableDataset:
    """The corpus with this text before each source."""
    if not opening:
        return corpus
    return corpus.map(
        _put_before, batched=True, features=PAIR_FEATURES, fn_kwargs={"opening": opening}
    )


def _put_before(batch: dict[str, list[str]], opening: str) -> dict[str, list[str]]:
    return {"source": [opening + text if text.strip() else text for text in batch["source"]]}
