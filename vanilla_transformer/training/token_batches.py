"""A trainer whose batches hold at most `max_tokens` tokens, and its arguments."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, has_length

from ..data.token_batches import OVERSIZED, TokenBudgetSampler, TokenBudgetStream, count_tokens

logger = logging.getLogger(__name__)


@dataclass
class TokenBudgetArguments:
    """The arguments of `TokenBudgetTrainer`, a mixin that goes before `TrainingArguments`.

    Raises:
        ValueError: A budget is not positive, or `oversized` is not one of its choices.
    """

    max_tokens: int | None = HfArg(
        default=None,
        help="Maximum number of source tokens, and of target tokens, in a batch, per device and "
        "with padding. Replaces per_device_train_batch_size. `train` chooses 1,000 to 25,000 per "
        "update, by the size of the text. The paper uses 25,000 over all devices.",
    )
    eval_max_tokens: int | None = HfArg(
        default=None, help="The same as max_tokens, for evaluation and prediction."
    )
    oversized: str = HfArg(
        default="alone",
        help="What to do with pairs longer than max_tokens: 'alone' (a batch of their own), 'cut' "
        "(truncate) or 'drop'.",
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
    """Batches by number of tokens, for any trainer: `class Mine(TokenBudgetTrainer, Trainer)`.

    Its arguments have the fields of `TokenBudgetArguments`. Without a budget, batches are as in
    transformers. `oversized="cut"` only works in `train`, whose tokenizer truncates; here it is the
    same as "alone". Predictions are in the order of the data set, on any number of processes.
    """

    _loss_and_labels: torch.Tensor | None = None  # the sum over an evaluation so far

    def get_train_dataloader(self) -> DataLoader:
        """Same as `Trainer.get_train_dataloader`, with batches of at most `max_tokens`."""
        dataloader = self._make_train_dataloader()
        if dataloader.persistent_workers:
            # Starting workers draws a random number. A resumed training starts them twice, so with
            # torch's generator its numbers would differ from those of an uninterrupted one.
            inner = getattr(dataloader, "base_dataloader", dataloader)
            inner.generator = torch.Generator().manual_seed(_data_seed(self.args))
        return dataloader

    def _make_train_dataloader(self) -> DataLoader:
        args = self.args
        if getattr(args, "max_tokens", None) is None:
            return super().get_train_dataloader()
        oversized = "alone" if args.oversized == "cut" else args.oversized
        options = {"oversized": oversized, "seed": _data_seed(args)}
        options["multiple_of"] = getattr(args, "batches_per_update", None) or 1
        return self._make_dataloader(self.train_dataset, "Training", args.max_tokens, **options)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader
    ) -> tuple[Any, ...]:
        """Same as `Trainer.set_initial_training_values`, but with the samples that token batches
        hold: transformers (5.17 to 5.24) also counts dropped ones, and with `max_steps` it
        multiplies by `per_device_train_batch_size`."""
        epochs, updates, examples, samples, *others = super().set_initial_training_values(
            args, dataloader
        )
        sampler = dataloader.batch_sampler
        if isinstance(sampler, TokenBudgetSampler):
            examples -= sampler.num_dropped
            done = args.max_steps / updates if args.max_steps > 0 else args.num_train_epochs
            samples = round(done * examples)
        return epochs, updates, examples, samples, *others

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Same as `Trainer.log`, without what transformers (5.17 to 5.24) computes from numbers of
        rows that batches of tokens don't have: the samples per second of a stream, and the steps
        per second of an evaluation. The train_loss of a summary is the mean of all processes: since
        the last log, transformers only adds those of its own."""
        if "train_loss" in logs and self.args.world_size > 1:
            loss = torch.tensor(logs["train_loss"], device=self.args.device)
            logs["train_loss"] = self.accelerator.reduce(loss, "mean").item()
        if getattr(self.args, "max_tokens", None) and not has_length(self.train_dataset):
            logs.pop("train_samples_per_second", None)
        if getattr(self.args, "eval_max_tokens", None):
            logs.pop("eval_steps_per_second", None)
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Same as in `Trainer` (5.17 to 5.24), except that with `group_by_length` and
        `batch_rebalance` the order depends on the seed and the epoch only, so that training resumes
        in the same order."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return _SeededLengthGroupedSampler(sampler, self)
        if isinstance(sampler, BatchRebalanceSampler):
            return _ResumableBatchRebalanceSampler(sampler, self)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Same as in `Trainer` (5.17 to 5.24), except that with `group_by_length` an evaluation
        keeps the order of the data set."""
        sampler = super()._get_eval_sampler(eval_dataset)
        grouped = isinstance(sampler, LengthGroupedSampler)
        return SequentialSampler(eval_dataset) if grouped else sampler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Same as `Trainer.get_eval_dataloader`, with batches of at most `eval_max_tokens`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if getattr(self.args, "eval_max_tokens", None) is None or not has_length(dataset):
            return self._of_all_rows(super().get_eval_dataloader, eval_dataset)
        return self._make_ordered_dataloader(dataset, "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Same as `Trainer.get_test_dataloader`, with batches of at most `eval_max_tokens`."""
        if getattr(self.args, "eval_max_tokens", None) is None or not has_length(test_dataset):
            return self._of_all_rows(super().get_test_dataloader, test_dataset)
        return self._make_ordered_dataloader(test_dataset, "Prediction")

    def _of_all_rows(self, make: Callable[[Any], DataLoader], dataset: Any) -> DataLoader:
        """A data loader that has all rows: `dataloader_drop_last` is for training alone."""
        before, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return make(dataset)
        finally:
            self.args.dataloader_drop_last = before

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Same as `Trainer.evaluation_loop`, except that on several processes metrics exclude the
        copies of pairs that fill the last batch, which `Seq2SeqTrainer` (5.17 to 5.24) counts, and
        that the loss is the mean of all labels: transformers' mean of the batches depends on their
        sizes. With `eval_max_tokens`, predictions are in the order of the data set."""
        args = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.gather_function == self.accelerator.gather:  # type: ignore[has-type]
            self.gather_function = self.accelerator.gather_for_metrics
        average = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # each process divides by its own labels
        self._loss_and_labels = torch.zeros(2, device=self.args.device)
        try:
            in_order = isinstance(dataloader.batch_sampler, TokenBudgetSampler)
            output = (self._evaluate_in_order if in_order else super().evaluation_loop)(*args)
            loss, labels = self.accelerator.reduce(self._loss_and_labels).tolist()
        finally:
            self.args.average_tokens_across_devices = average
            self._loss_and_labels = None
        if labels:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / labels
        return output

    def _evaluate_in_order(self, *args: Any) -> EvalLoopOutput:
        sampler = args[0].batch_sampler
        places = np.argsort(sampler.order[: len(sampler.lengths[0])])
        compute: Any = self.compute_metrics  # type: ignore[has-type]
        before, self.gather_function = self.gather_function, self._gather_without_copies
        if compute is not None and not self.args.batch_eval_metrics:
            self.compute_metrics = partial(_compute_in_order, compute, places)
        try:
            output = super().evaluation_loop(*args)
        finally:
            self.gather_function, self.compute_metrics = before, compute
        return output._replace(
            predictions=_reorder(output.predictions, places),
            label_ids=_reorder(output.label_ids, places),
        )

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Same as the trainer's, noting the loss and the number of labels."""
        labels = inputs.get("labels")
        if self._loss_and_labels is None or labels is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        own = self._own_rows(len(labels))
        if 0 < own < len(labels):  # without any label, the loss would be nan
            labels = labels.clone()
            labels[own:] = -100
            inputs = {**inputs, "labels": labels}
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            # Causal models shift their labels, and the first is not predicted.
            first = int(labels.ndim > 1 and getattr(self, "_loss_shifts_labels", False))
            number = (labels[:own][..., first:] != -100).sum().to(loss.device)
            self._loss_and_labels += torch.stack([loss.float() * number, number])
        return loss, *rest

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Same as in `Trainer` (5.17 to 5.24), but in an evaluation with several processes per
        batch None, for the mean of the batch: transformers divides the number by theirs, which
        multiplies the loss."""
        if self._loss_and_labels is not None and self._processes_per_batch() > 1:
            return None
        return super()._get_num_items_in_batch(*args, **kwargs)

    def _own_rows(self, rows: int) -> int:
        """How many of this process's `rows` come from the data set. They come first; the others are
        copies that fill the last batch."""
        rest = self._rows_of_last_batch()
        before = rows * self.share_of_batches()
        return rows if rest is None else min(max(rest - before, 0), rows)

    def _rows_of_last_batch(self) -> int | None:
        """How many rows of all processes' current batches come from the data set; None if all."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return None
        sampler = state.active_dataloader.batch_sampler
        if isinstance(sampler, TokenBudgetSampler):
            return len(sampler.lengths[0]) % sampler.num_replicas or None
        return state.remainder if state.remainder > 0 else None

    def _processes_per_batch(self) -> int:
        """The number of processes that work on the same batch, each with a part of the model."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    def share_of_batches(self) -> int:
        """The index of this process among those that work on different batches."""
        return self.args.process_index // self._processes_per_batch()

    def _gather_without_copies(self, values: Any) -> Any:
        """Gather predictions from one process per batch, without the rows that pad the last one."""
        copies, rest = self._processes_per_batch(), self._rows_of_last_batch()

        def without_copies(gathered: torch.Tensor) -> torch.Tensor:
            parts = gathered.unflatten(0, (self.args.world_size, -1))
            return parts[::copies].flatten(0, 1)[:rest]

        return recursively_apply(without_copies, self.accelerator.gather(values))

    def _make_ordered_dataloader(self, dataset: Any, description: str) -> DataLoader:
        options = {"shuffle": False, "even_rows": True}
        return self._make_dataloader(dataset, description, self.args.eval_max_tokens, **options)

    def _make_dataloader(
        self, dataset: Any, description: str, max_tokens: int, **options: Any
    ) -> DataLoader:
        args = self.args
        copies = self._processes_per_batch()
        options |= {"num_replicas": args.world_size // copies, "rank": self.share_of_batches()}
        loading = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order or not options.get("shuffle", True),
            "device": args.device,
        }
        collate = self._get_collator_with_removed_columns(self.data_collator, description)
        if not has_length(dataset):
            stream = TokenBudgetStream(dataset, max_tokens, repeat=True, **options)
            return DataLoaderShard(stream, batch_size=None, collate_fn=collate, **loading)
        source, target = count_tokens(dataset)
        sampler = TokenBudgetSampler(source, target, max_tokens, **options)
        sampler.batch_size = 1  # accelerate multiplies it
        logger.info(
            "%s: %d batches of at most %d tokens, %.1f%% padding%s; %d longer pairs %s",
            description,
            len(sampler),
            max_tokens,
            100 * sampler.padding(),
            " (more of both, as BPE-dropout varies lengths)" if hasattr(dataset, "growth") else "",
            sampler.num_oversized,
            "dropped" if sampler.num_dropped else "in batches of their own",
        )
        return DataLoaderShard(dataset, batch_sampler=sampler, collate_fn=collate, **loading)


def _data_seed(args: TrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed


class _SeededLengthGroupedSampler(LengthGroupedSampler):
    """The sampler of a trainer, whose order depends on the trainer's seed and epoch."""

    def __init__(self, sampler: LengthGroupedSampler, trainer: Trainer):
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        seed = _data_seed(self.trainer.args) + int(self.trainer.state.epoch or 0)
        self.generator = torch.Generator().manual_seed(seed)
        return super().__iter__()


class _ResumableBatchRebalanceSampler(BatchRebalanceSampler):
    """The sampler of a trainer, which takes the seed and the epoch from the trainer. transformers
    (5.17 to 5.24) leaves its seed at 42. If several processes resume within an epoch, accelerate
    (1.15) does not tell it."""

    def __init__(self, sampler: BatchRebalanceSampler, trainer: Trainer):
        self.__dict__.update(vars(sampler))
        self.seed = _data_seed(trainer.args)
        self.trainer = trainer

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch = int(self.trainer.state.epoch or 0)
        return super().__iter__()


def _compute_in_order(
    compute: Callable[[EvalPrediction], dict], places: np.ndarray, found: EvalPrediction
) -> dict:
    names = ("predictions", "label_ids", "inputs")
    ordered = {name: _reorder(getattr(found, name), places) for name in names}
    return compute(EvalPrediction(**ordered, losses=found.losses))  # of batches, not of rows


def _reorder(values: Any, places: np.ndarray) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)(_reorder(value, places) for value in values)
    if isinstance(values, dict):
        return {name: _reorder(value, places) for name, value in values.items()}
    return None if values is None else values[places]
