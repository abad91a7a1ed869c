"""Batches of so many tokens (section 5.1): sentence pairs of similar length together.

    TokenBudgetSampler   batches of a data set whose lengths are known, for any `DataLoader`
    TokenBudgetStream    batches of a stream, whose lengths are met on the way
    TokenBudgetTrainer   a `Trainer` with both, on any number of processes

The budget holds for source and target each, and counts padding, as memory does.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

logger = logging.getLogger(__name__)

OVERSIZED = ("alone", "drop")
Lengths = tuple[np.ndarray, np.ndarray]  # of sources and of targets, in tokens


class TokenBudgetSampler(Sampler[list[int]]):
    """Indices of batches in which rows times the longest source, and rows times the longest target,
    are at most `max_tokens`; it takes the place of a `DataLoader`'s `batch_sampler`.

    Pairs are sorted by length and cut into batches once. Each epoch deals out anew which of the
    pairs of equal length go where, and shuffles the batches; the same seed and epoch give the same
    batches in the same order. All processes get equally many, none of them empty, with no pair
    twice and none left out: for that, the largest batches are halved as needed. Where there are
    fewer pairs than the batches that this would take, the smallest neighbours are put together
    instead, beyond the budget. They are the same batches for any number of processes that
    `multiple_of` is a multiple of.

    Args:
        source_lengths: Tokens of each pair's source.
        target_lengths: Tokens of each pair's target.
        max_tokens: The budget.
        oversized: What becomes of pairs longer than the budget: "alone", each a batch by itself, or
            "drop", counted in `dropped`.
        shuffle: Whether to shuffle; else batches come by growing length.
        even_rows: Whether batches that processes work on at a time have as many rows, as gathered
            predictions must. Copies of the last pair fill up the last of them.
        seed: Of the shuffling.
        num_replicas: Processes that share the batches.
        rank: Which of them this is.
        multiple_of: Batches are a multiple of so many, as they are of `num_replicas`.

    Raises:
        ValueError: There are no pairs, or fewer than processes; a side is empty; lengths are not as
            many; the budget fits no pair; an argument is out of range.
    """

    batch_size = 1  # a rest is what `num_replicas` leaves: accelerate cuts gathered ones to it

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
        self.lengths = _checked(source_lengths, target_lengths, max_tokens)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.num_processes, self.rank = num_replicas, rank
        fits = np.maximum(*self.lengths) <= max_tokens
        self.oversized = int((~fits).sum())
        self.dropped = self.oversized if oversized == "drop" else 0
        self._kept = fits.nonzero()[0] if self.dropped else np.arange(len(fits))
        divisor = math.lcm(num_replicas, multiple_of)
        if len(self._kept) < divisor:
            raise ValueError(
                f"{len(self._kept)} sentence pairs for {num_replicas} processes, in multiples of "
                f"{divisor} batches: expected one for each at least"
            )
        self._together = num_replicas if even_rows else 1
        self.order = self._ordered()
        edges = _cut(self._lengths_of(self.order), max_tokens, self._together)
        edges = _make_divisible(edges, divisor // self._together)
        starts, rows = np.array(edges[:-1]) * self._together, np.diff(edges)
        each = np.arange(self._together)  # of the processes that work on a batch of even rows
        self._cuts = (starts[:, None] + rows[:, None] * each).ravel()[1:]

    def __len__(self) -> int:
        """Batches of an epoch, for this process."""
        return (len(self._cuts) + 1) // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        """This process's batches of the epoch."""
        random = np.random.default_rng((self.seed, self.epoch))
        order = self.order
        places = np.arange(len(self._cuts) + 1).reshape(-1, self._together)
        if self.shuffle:
            order = self._ordered(random)
            random.shuffle(places)
        batches = np.split(order, self._cuts)
        for place in places.ravel()[self.rank :: self.num_processes]:
            yield batches[place].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this epoch."""
        self.epoch = epoch

    @property
    def sampler(self) -> "TokenBudgetSampler":
        """Where accelerate looks for `set_epoch` once it skips the batches before a checkpoint."""
        return self

    def padding(self) -> float:
        """The share of padding among all tokens of an epoch, sources and targets together."""
        starts = np.concatenate([[0], self._cuts])
        rows = np.diff(np.concatenate([starts, [len(self.order)]]))
        sides = self._lengths_of(self.order)
        padded = sum(int((np.maximum.reduceat(side, starts) * rows).sum()) for side in sides)
        return 1 - sum(int(side.sum()) for side in sides) / padded

    def _ordered(self, random: np.random.Generator | None = None) -> np.ndarray:
        """All pairs by length, and what copies of the last it takes."""
        order = self._kept[_by_length(self._lengths_of(self._kept), random)]
        return np.pad(order, (0, -len(order) % self._together), mode="edge")

    def _lengths_of(self, pairs: np.ndarray) -> Lengths:
        source, target = self.lengths
        return source[pairs], target[pairs]


def _checked(source_lengths: Any, target_lengths: Any, max_tokens: int) -> Lengths:
    source, target = np.asarray(source_lengths), np.asarray(target_lengths)
    if len(source) != len(target):
        raise ValueError(f"{len(source)} sources and {len(target)} targets: expected as many")
    if len(source) == 0:
        raise ValueError("there is no sentence pair to make batches of")
    for side, lengths in (("source", source), ("target", target)):
        empty = (lengths < 1).nonzero()[0]
        if len(empty):
            raise ValueError(
                f"the {side} of pair {empty[0]} has no token ({len(empty)} such pairs): "
                "expected at least </s>"
            )
    shortest = int(np.maximum(source, target).min())
    if max_tokens < shortest:
        raise ValueError(
            f"max_tokens={max_tokens} fits no pair: the shortest takes {shortest} tokens"
        )
    return source, target


def _by_length(lengths: Lengths, random: np.random.Generator | None = None) -> np.ndarray:
    """The order of pairs by source, then by target, in which targets grow and shrink by turns: a
    batch that goes from one source length to the next meets no jump."""
    source, target = lengths
    ties = np.arange(len(source)) if random is None else random.random(len(source))
    return np.lexsort((ties, np.where(source % 2 == 0, target, -target), source))


def _cut(lengths: Lengths, max_tokens: int, together: int) -> list[int]:
    """The edges of batches, each as large as the budget lets it be, and as many rows for each of
    the processes that work `together`; they count so many rows as one. Rows that are there to make
    their number even must not be in one batch."""
    source, target = lengths
    edges = [0]
    while edges[-1] * together < len(source):
        start = edges[-1] * together
        # not more rows than fit by the shortest source, which is the first
        end = start + together * max(1, max_tokens // int(source[start]))
        if together > 1:
            end = min(end, max(len(source) - together, start + together))
        longest = np.maximum(
            np.maximum.accumulate(source[start:end]), np.maximum.accumulate(target[start:end])
        )
        rows = np.arange(1, len(longest) + 1) / together
        fitting = int(np.searchsorted(longest * rows, max_tokens, side="right"))
        edges.append(edges[-1] + max(1, fitting // together))
    return edges


def _make_divisible(edges: list[int], divisor: int) -> list[int]:
    """Halve the largest batches until there are a multiple of so many. Where there are too few rows
    for it, put the smallest neighbours together instead, the last batch with none."""
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

    So many examples at a time are read, and batches made of them as by `TokenBudgetSampler`, whose
    arguments these are. All processes read the whole stream, and each takes its share of batches.
    With `repeat` the end is followed by the next epoch: a trainer, which does not know how long an
    epoch is, then finds the batch where it stopped.

    Raises:
        ValueError: See `TokenBudgetSampler`; on the way, where it concerns the data.
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
        TokenBudgetSampler(one_each, one_each, max_tokens, **options)  # raises now what it would

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this epoch, also for a stream that shuffles."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """This process's batches of the epoch, or of all epochs from there."""
        worker = get_worker_info()
        every, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        epochs = count(self.epoch) if self.repeat else (self.epoch,)
        batches = chain.from_iterable(map(self._batches_of, epochs))
        yield from islice(batches, first, None, every)

    def _batches_of(self, epoch: int) -> Iterator[list[dict[str, Any]]]:
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)
        part = None
        for part, buffer in enumerate(_chunks(read_whole(self.examples), self.buffer_size)):
            source, target = count_tokens(buffer)
            sampler = TokenBudgetSampler(source, target, self.max_tokens, **self.options)
            sampler.set_epoch(epoch + 2**32 * part)
            for batch in sampler:
                yield [buffer[place] for place in batch]
        if part is None:
            raise ValueError(f"the stream holds no sentence pair in epoch {epoch}")


def read_whole(stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All examples of a stream, also in one of several loading processes, where a stream of
    `datasets` gives only those of the process's shards. What wraps such a stream has `whole()`."""
    if hasattr(stream, "whole"):
        yield from stream.whole()
    elif isinstance(stream, datasets.IterableDataset):
        for batch in stream.iter(1000):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))
    else:
        yield from stream


def _chunks(examples: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """So many at a time, and with the last ones what would be too few for themselves."""
    buffer: list[Any] = []
    for example in examples:
        buffer.append(example)
        if len(buffer) == 2 * size:
            yield buffer[:size]
            del buffer[:size]
    if buffer:
        yield buffer


def count_tokens(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each source (`input_ids`) and target (`labels`) of a data set; where there are no
    targets, a source's length stands for its target's. BPE-dropout has no part in it."""
    dataset = getattr(dataset, "tokenized", dataset)
    if isinstance(dataset, datasets.Dataset):
        columns = [name for name in ("input_ids", "labels") if name in dataset.column_names]
        parts: list[list[np.ndarray]] = [[] for _ in columns]
        for table in dataset.select_columns(columns).with_format("arrow").iter(10_000):
            for part, name in zip(parts, columns, strict=True):
                part.append(pyarrow.compute.list_value_length(table[name]).to_numpy())
        counts = [np.concatenate(part) for part in parts]
    else:
        pairs = [(example["input_ids"], example.get("labels")) for example in dataset]
        has_labels = all(labels is not None for _, labels in pairs)
        sides = zip(*pairs, strict=True) if has_labels else [[ids for ids, _ in pairs]]
        counts = [np.array([len(ids) for ids in side]) for side in sides]
    return counts[0], counts[-1]


@dataclass
class TokenBudgetArguments:
    """What `TokenBudgetTrainer` looks for among its arguments; put it before `TrainingArguments`.

    Raises:
        ValueError: A budget is not positive, or `oversized` none of its choices.
    """

    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Batches of at most so many source and so many target tokens for each device, "
            "padding included, in place of per_device_train_batch_size. The paper: 25000 in all."
        },
    )
    eval_max_tokens: int | None = field(
        default=None, metadata={"help": "Likewise in evaluation and prediction."}
    )
    oversized: str = field(
        default="alone",
        metadata={
            "help": "Pairs longer than max_tokens: 'alone' in a batch, 'cut' to it, or 'drop'."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of TrainingArguments
        for name in ("max_tokens", "eval_max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive number of tokens")
        if self.oversized not in (*OVERSIZED, "cut"):
            raise ValueError(f"oversized={self.oversized!r}: expected alone, cut or drop")


class TokenBudgetTrainer(Trainer):
    """Batches of so many tokens, for any trainer: `class Mine(TokenBudgetTrainer, Seq2SeqTrainer)`.

    Its arguments are to have `max_tokens`, for training, `eval_max_tokens`, for evaluation and
    prediction, and `oversized`, as those of `TokenBudgetArguments`. Without a budget batches are
    transformers' own. Predictions come in the order of the data set.
    """

    def get_train_dataloader(self) -> DataLoader:
        """As the trainer's, with batches of `max_tokens` source and as many target tokens."""
        args = self.args
        if getattr(args, "max_tokens", None) is None:
            return super().get_train_dataloader()
        oversized = "alone" if args.oversized == "cut" else args.oversized
        seed = args.seed if args.data_seed is None else args.data_seed
        options = {"oversized": oversized, "seed": seed}
        options["multiple_of"] = getattr(args, "batches_per_update", None) or 1
        return self._load(self.train_dataset, "Training", args.max_tokens, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As the trainer's, with batches of `eval_max_tokens`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if getattr(self.args, "eval_max_tokens", None) is None or not has_length(dataset):
            return super().get_eval_dataloader(eval_dataset)
        return self._load_in_order(dataset, "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As the trainer's, with batches of `eval_max_tokens`."""
        if getattr(self.args, "eval_max_tokens", None) is None or not has_length(test_dataset):
            return super().get_test_dataloader(test_dataset)
        return self._load_in_order(test_dataset, "Prediction")

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the trainer's, and back in the order of the data set."""
        if not isinstance(dataloader.batch_sampler, TokenBudgetSampler):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        before = self.gather_function  # type: ignore[has-type]
        if self._processes_of_a_batch() > 1:
            self.gather_function = self._gather_once
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.gather_function = before
        places = np.argsort(dataloader.batch_sampler.order[: output.num_samples])
        return output._replace(
            predictions=_in_order(output.predictions, places),
            label_ids=_in_order(output.label_ids, places),
        )

    def _processes_of_a_batch(self) -> int:
        """How many work on the same batch, each with its part of the model."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    def _gather_once(self, values: Any) -> Any:
        """One of the copies that the processes of a batch have; the last batch without what it has
        been filled up with."""
        copies, state = self._processes_of_a_batch(), self.accelerator.gradient_state
        rest = None
        if state.end_of_dataloader:
            sampler = state.active_dataloader.batch_sampler
            rest = len(sampler.lengths[0]) % sampler.num_processes or None

        def once(gathered: torch.Tensor) -> torch.Tensor:
            parts = gathered.unflatten(0, (self.args.world_size, -1))
            return parts[::copies].flatten(0, 1)[:rest]

        return recursively_apply(once, self.accelerator.gather(values))

    def _load_in_order(self, dataset: Any, description: str) -> DataLoader:
        options = {"shuffle": False, "even_rows": True}
        return self._load(dataset, description, self.args.eval_max_tokens, **options)

    def _load(self, dataset: Any, description: str, max_tokens: int, **options: Any) -> DataLoader:
        args = self.args
        copies = self._processes_of_a_batch()
        options |= {"num_replicas": args.world_size // copies, "rank": args.process_index // copies}
        loading = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "device": args.device,
        }
        collate = self._get_collator_with_removed_columns(self.data_collator, description)
        if not has_length(dataset):
            stream = TokenBudgetStream(dataset, max_tokens, repeat=True, **options)
            return DataLoaderShard(stream, batch_size=None, collate_fn=collate, **loading)
        source, target = count_tokens(dataset)
        sampler = TokenBudgetSampler(source, target, max_tokens, **options)
        logger.info(
            "%s: %d batches of up to %d tokens, %.1f%% of them padding; %d longer pairs %s",
            description,
            len(sampler),
            max_tokens,
            100 * sampler.padding(),
            sampler.oversized,
            "left out" if sampler.dropped else "alone",
        )
        return DataLoaderShard(dataset, batch_sampler=sampler, collate_fn=collate, **loading)


def _in_order(values: Any, places: np.ndarray) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)(_in_order(value, places) for value in values)
    if isinstance(values, dict):
        return {name: _in_order(value, places) for name, value in values.items()}
    return None if values is None else values[places]
