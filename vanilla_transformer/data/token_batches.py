"""Batches of at most `max_tokens` tokens (section 5.1): sentence pairs of similar length together.

    TokenBudgetSampler   batches of a map-style data set, for any `DataLoader`
    TokenBudgetStream    batches of a stream

The budget applies to sources and to targets separately. It includes padding, as memory does.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, get_worker_info

OVERSIZED = ("alone", "drop")
Lengths = tuple[np.ndarray, np.ndarray]  # of sources and of targets, in tokens


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of indices. In each batch, rows times the longest source and rows times the longest
    target are at most `max_tokens`. Use it as the `batch_sampler` of a `DataLoader`.

    Pairs are sorted by length and split into batches once. Each epoch reorders pairs of equal
    length at random and shuffles the batches; the same seed and epoch give the same batches in the
    same order.

    Every process gets the same number of batches, no batch is empty, and every pair occurs exactly
    once. For this, the largest batches are halved as needed. If there are too few pairs, the
    smallest neighbouring batches are merged instead, which may exceed the budget. The batches are
    the same for any number of processes that divides `multiple_of`.

    Args:
        source_lengths: The number of tokens of each source.
        target_lengths: The number of tokens of each target.
        max_tokens: The budget.
        oversized: What to do with pairs longer than the budget: "alone" makes each a batch of its
            own, "drop" leaves them out and counts them in `num_dropped`.
        shuffle: Whether to shuffle. Otherwise batches are in order of length.
        even_rows: Whether all processes load the same number of rows at the same time, as needed to
            gather predictions. Copies of the last pair fill the last batch.
        seed: The seed of the shuffling.
        num_replicas: The number of processes that share the batches.
        rank: The index of this process.
        multiple_of: The number of batches is a multiple of this and of `num_replicas`.

    Raises:
        ValueError: There are no pairs; without `even_rows`, there are fewer pairs than processes,
            or no pair fits the budget; a source or target is empty; the numbers of sources and
            targets differ; an argument is out of range.
    """

    batch_size: int | None = None  # accelerate leaves out batches of any other size

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        oversized: str = "alone",
        shuffle: bool = True,
        even_rows: bool = False,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        multiple_of: int = 1,
    ):
        if oversized not in OVERSIZED:
            raise ValueError(f"oversized={oversized!r}: expected one of {', '.join(OVERSIZED)}")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}: expected one of {num_replicas} processes, from 0")
        self.lengths = _validated_lengths(source_lengths, target_lengths)
        shortest = int(np.maximum(*self.lengths).min())
        if max_tokens < shortest and not even_rows:
            raise ValueError(
                f"max_tokens={max_tokens}: expected at least {shortest}, which the shortest pair "
                "takes"
            )
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.num_replicas, self.rank = num_replicas, rank
        fits = np.maximum(*self.lengths) <= max_tokens
        self.num_oversized = int((~fits).sum())
        self.num_dropped = self.num_oversized if oversized == "drop" else 0
        self._kept = fits.nonzero()[0] if self.num_dropped else np.arange(len(fits))
        divisor = math.lcm(num_replicas, multiple_of)
        self._group_size = num_replicas if even_rows else 1
        if -(-len(self._kept) // self._group_size) < divisor // self._group_size:
            raise ValueError(
                f"{len(self._kept)} sentence pairs for {num_replicas} processes, in multiples of "
                f"{divisor} batches: expected at least {divisor} pairs"
            )
        self.order = self._sorted_pairs()
        edges = _batch_edges(self._lengths_of(self.order), max_tokens, self._group_size)
        edges = _make_divisible(edges, divisor // self._group_size)
        starts, rows = np.array(edges[:-1]) * self._group_size, np.diff(edges)
        process = np.arange(self._group_size)  # within a group of batches with even rows
        self._cuts = (starts[:, None] + rows[:, None] * process).ravel()[1:]

    def __len__(self) -> int:
        """The number of batches that this process gets in an epoch."""
        return (len(self._cuts) + 1) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this process in the current epoch."""
        random = np.random.default_rng((self.seed, self.epoch))
        order = self.order
        places = np.arange(len(self._cuts) + 1).reshape(-1, self._group_size)
        if self.shuffle:
            order = self._sorted_pairs(random)
            random.shuffle(places)
        batches = np.split(order, self._cuts)
        for place in places.ravel()[self.rank :: self.num_replicas]:
            yield batches[place].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def sampler(self) -> "TokenBudgetSampler":
        """This sampler. accelerate calls its `set_epoch` while it skips batches before a
        checkpoint."""
        return self

    def padding(self) -> float:
        """The fraction of padding among all tokens of an epoch, sources and targets together."""
        starts = np.concatenate([[0], self._cuts])
        rows = np.diff(np.concatenate([starts, [len(self.order)]]))
        sides = self._lengths_of(self.order)
        padded = sum(int((np.maximum.reduceat(side, starts) * rows).sum()) for side in sides)
        return 1 - sum(int(side.sum()) for side in sides) / padded

    def _sorted_pairs(self, random: np.random.Generator | None = None) -> np.ndarray:
        """Indices of all pairs in order of length, padded with copies of the last one."""
        order = self._kept[_sort_by_length(self._lengths_of(self._kept), random)]
        return np.pad(order, (0, -len(order) % self._group_size), mode="edge")

    def _lengths_of(self, pairs: np.ndarray) -> Lengths:
        source, target = self.lengths
        return source[pairs], target[pairs]


def _validated_lengths(source_lengths: Any, target_lengths: Any) -> Lengths:
    source, target = np.asarray(source_lengths), np.asarray(target_lengths)
    if len(source) != len(target):
        raise ValueError(
            f"{len(source)} sources and {len(target)} targets: expected the same number"
        )
    if len(source) == 0:
        raise ValueError("there is no sentence pair to make batches of")
    expect_tokens(source, target)
    return source, target


def expect_tokens(
    source_lengths: Sequence[int] | np.ndarray,
    target_lengths: Sequence[int] | np.ndarray,
    first: int = 1,
) -> None:
    """Raise a ValueError if a source or target has no token. It names the number of the pair, which
    is `first` for the first of these pairs."""
    for side, lengths in (("source", source_lengths), ("target", target_lengths)):
        empty = (np.asarray(lengths) < 1).nonzero()[0]
        if len(empty):
            raise ValueError(
                f"the {side} of pair {first + empty[0]} has no token: expected at least </s>"
            )


def _sort_by_length(lengths: Lengths, random: np.random.Generator | None = None) -> np.ndarray:
    """The order of pairs by source length, then by target length. Target lengths increase for even
    source lengths and decrease for odd ones, so that they don't jump where the source length
    changes within a batch."""
    source, target = lengths
    ties = np.arange(len(source)) if random is None else random.random(len(source))
    return np.lexsort((ties, np.where(source % 2 == 0, target, -target), source))


def _batch_edges(lengths: Lengths, max_tokens: int, group_size: int) -> list[int]:
    """The edges of batches, each as large as the budget allows, in units of `group_size` rows: one
    row for each process of a group. The copies that pad the last group must not share a batch."""
    source, target = lengths
    edges = [0]
    while edges[-1] * group_size < len(source):
        start = edges[-1] * group_size
        # no more rows than fit with the shortest source, which is the first
        end = start + group_size * (max_tokens // int(source[start]))
        if group_size > 1:
            end = min(end, len(source) - group_size)
        longest = np.maximum(
            np.maximum.accumulate(source[start:end]), np.maximum.accumulate(target[start:end])
        )
        rows = np.arange(1, len(longest) + 1) / group_size
        fitting = int(np.searchsorted(longest * rows, max_tokens, side="right"))
        edges.append(edges[-1] + max(1, fitting // group_size))
    return edges


def _make_divisible(edges: list[int], divisor: int) -> list[int]:
    """Halve the largest batches until their number is a multiple of `divisor`. If there are too few
    rows for that, merge the smallest neighbours instead, but never the last batch."""
    batches, rows = len(edges) - 1, edges[-1]
    if batches + -batches % divisor <= rows:
        while (len(edges) - 1) % divisor:
            place = int(np.argmax(np.diff(edges)))
            edges.insert(place + 1, (edges[place] + edges[place + 1]) // 2)
    while (len(edges) - 1) % divisor:
        place = int(np.argmin(np.subtract(edges[2:-1], edges[:-3])))
        del edges[place + 1]
    return edges


class TokenBudgetStream(IterableDataset):
    """Batches of a stream of examples with `input_ids` and `labels`, as lists of examples.

    It reads `buffer_size` examples at a time, and batches them as `TokenBudgetSampler` does. Every
    process reads the complete stream and takes its share of the batches.

    Args:
        examples: The stream. Its `set_epoch`, if any, is called before each epoch.
        max_tokens: The budget.
        buffer_size: The number of examples that are batched by length together.
        repeat: Whether the next epoch follows the end of the stream. A trainer needs this to find
            the batch at which to resume, as it does not know the length of an epoch.
        options: Other arguments of `TokenBudgetSampler`.

    Raises:
        ValueError: As `TokenBudgetSampler`. Errors in the data are raised during iteration.
    """

    def __init__(
        self,
        examples: Iterable[dict[str, Any]],
        max_tokens: int,
        *,
        buffer_size: int = 20_000,
        repeat: bool = False,
        **options: Any,
    ):
        self.examples = examples
        self.max_tokens = max_tokens
        self.buffer_size = buffer_size
        self.repeat = repeat
        self.options = options
        self.epoch = 0
        one_each = [1] * options.get("num_replicas", 1) * options.get("multiple_of", 1)
        TokenBudgetSampler(one_each, one_each, max_tokens, **options)  # validates the arguments

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and of a stream that shuffles."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """The batches of this process in the current epoch, or in all epochs from this one on."""
        epochs = count(self.epoch) if self.repeat else (self.epoch,)
        batches = chain.from_iterable(map(self._batches_of, epochs))
        yield from islice(batches, *_share_of_worker())

    def _batches_of(self, epoch: int) -> Iterator[list[dict[str, Any]]]:
        set_epoch(self.examples, epoch)
        part = None
        for part, buffer in enumerate(_buffers(iter_all_shards(self.examples), self.buffer_size)):
            source, target = count_tokens(buffer)
            expect_tokens(source, target, first=1 + part * self.buffer_size)
            sampler = TokenBudgetSampler(source, target, self.max_tokens, **self.options)
            sampler.set_epoch(epoch + 2**32 * part)
            for batch in sampler:
                yield [buffer[place] for place in batch]
        if part is None:
            raise ValueError(f"the stream holds no sentence pair in epoch {epoch}")


class RepeatedStream(IterableDataset):
    """An endless stream of examples, epoch after epoch. `Trainer` (5.17 to 5.24) can only resume
    within the first epoch of a stream, and at the end of an epoch it adds the gradients of the
    remaining batches to those of the next update.

    Each loading process reads the complete stream and takes its share of the examples. If each had
    its own shards, the one with fewer examples would repeat them more often."""

    def __init__(self, examples: Iterable[dict[str, Any]]):
        self.examples = examples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from islice(self._all_epochs(), *_share_of_worker())

    def _all_epochs(self) -> Iterator[dict[str, Any]]:
        for epoch in count():
            set_epoch(self.examples, epoch)
            is_empty = True
            for example in iter_all_shards(self.examples):
                is_empty = False
                yield example
            if is_empty:
                return


def _share_of_worker() -> tuple[int, None, int]:
    """The share of a loading process, as arguments of `islice`."""
    worker = get_worker_info()
    return (0, None, 1) if worker is None else (worker.id, None, worker.num_workers)


def set_epoch(examples: Any, epoch: int) -> None:
    """Set the epoch of a stream that has one, in a loading process only for that process.
    `datasets` (4.0 to 5.2) has it in shared memory, and two processes that change it at the same
    time would both add to it, and read the pairs in different orders."""
    if get_worker_info() is not None and isinstance(getattr(examples, "_epoch", None), Tensor):
        examples._epoch = examples._epoch.clone()
    if hasattr(examples, "set_epoch"):
        examples.set_epoch(epoch)


def iter_all_shards(stream: Any) -> Iterator[dict[str, Any]]:
    """All examples of a stream. In a `DataLoader` worker, an `IterableDataset` of `datasets` yields
    only the shards of that worker. A class that wraps one defines `iter_all_shards()`."""
    if hasattr(stream, "iter_all_shards"):
        yield from stream.iter_all_shards()
    elif _is_from_datasets(stream, "IterableDataset"):
        for batch in stream.iter(1000):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))
    else:
        yield from stream


def _is_from_datasets(data: Any, name: str) -> bool:
    """Whether this is an instance of a class of `datasets`, which may not be installed."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, getattr(datasets, name))


def _buffers(examples: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` examples. The last one also has the remainder, which alone may be too small
    for batches."""
    buffer: list[Any] = []
    for example in examples:
        buffer.append(example)
        if len(buffer) == 2 * size:
            yield buffer[:size]
            del buffer[:size]
    if buffer:
        yield buffer


def count_tokens(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens of each source (`input_ids`) and each target (`labels`) of a data set,
    two arrays. Without `labels`, the lengths of the sources are used for both. With BPE-dropout,
    they are estimates."""
    if hasattr(dataset, "growth"):
        source, target = count_tokens(dataset.tokenized)
        of_source, of_target = dataset.growth
        return np.ceil(source * of_source).astype(int), np.ceil(target * of_target).astype(int)
    if _is_from_datasets(dataset, "Dataset"):
        import pyarrow.compute

        columns = [name for name in ("input_ids", "labels") if name in dataset.column_names]
        parts: list[list[np.ndarray]] = [[] for _ in columns]
        for table in arrow_tables(dataset, columns):
            for part, name in zip(parts, columns, strict=True):
                part.append(pyarrow.compute.list_value_length(table[name]).to_numpy())
        counts = [np.concatenate(part) for part in parts]
    else:
        pairs = [(example["input_ids"], example.get("labels")) for example in dataset]
        has_labels = all(labels is not None for _, labels in pairs)
        sides = zip(*pairs, strict=True) if has_labels else [[ids for ids, _ in pairs]]
        counts = [np.array([len(ids) for ids in side]) for side in sides]
    return counts[0], counts[-1]


def count_distinct_labels(dataset: Any) -> int:
    """The number of different tokens in the targets (`labels`) of a data set."""
    distinct: set[int] = set()
    if _is_from_datasets(dataset, "Dataset"):
        import pyarrow.compute

        for table in arrow_tables(dataset, ["labels"]):
            tokens = pyarrow.compute.list_flatten(table["labels"])
            distinct.update(pyarrow.compute.unique(tokens).to_pylist())
    else:
        for example in dataset:
            distinct.update(example["labels"])
    return len(distinct)


def arrow_tables(dataset: Any, columns: list[str]) -> Iterator[Any]:
    """Columns of a `datasets.Dataset` as pyarrow tables of at most 10,000 rows."""
    return dataset.select_columns(columns).with_format("arrow").iter(10_000)
