"""Token batches: the budget holds, no pair is lost, and a run can be resumed."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from conftest import REPOSITORY, needs, random_ids, run_ranks, small_config
from datasets import Dataset, IterableDataset
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.data import token_batches
from vanilla_transformer.data.bpe_dropout import BPEDropoutStream
from vanilla_transformer.data.token_batches import (
    RepeatedStream,
    TokenBudgetSampler,
    TokenBudgetStream,
    count_tokens,
)
from vanilla_transformer.training.token_batches import TokenBudgetArguments, TokenBudgetTrainer

MULTI30K = REPOSITORY.parent / "shared/data/multi30k"


def random_lengths(pairs=500, seed=0):
    """Sources as in Multi30k, about 14 words, and targets that are slightly longer or shorter."""
    random = np.random.default_rng(seed)
    source = random.normal(14, 4, pairs).round().clip(4, 45).astype(int)
    target = (source + random.normal(0, 2.5, pairs)).round().clip(3, 50).astype(int)
    return source, target


def samplers(processes, *, max_tokens=200, lengths=None, **options):
    source, target = lengths or random_lengths()
    return [
        TokenBudgetSampler(source, target, max_tokens, num_replicas=processes, rank=rank, **options)
        for rank in range(processes)
    ]


# ---------------------------------------------------------------- the sampler


even = needs("accelerate", "1.14", "even batches of a sampler without a batch size")


@pytest.mark.parametrize("even_batches", [pytest.param(True, marks=even), False])
def test_a_loader_that_accelerate_prepares_loses_no_pair(even_batches):
    (sampler,) = samplers(1, multiple_of=2)
    loader = DataLoader(range(500), batch_sampler=sampler, collate_fn=list)
    parts = [
        prepare_data_loader(
            loader, num_processes=2, process_index=rank, put_on_device=False,
            even_batches=even_batches, rng_types=[],
        )
        for rank in range(2)
    ]  # fmt: skip
    rows = [row for part in parts for batch in part for row in batch]
    assert sorted(rows) == list(range(500))


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("max_tokens", [50, 200, 4096])
def test_every_pair_comes_once_within_the_budget(processes, shuffle, max_tokens):
    source, target = random_lengths()
    parts = [
        list(sampler) for sampler in samplers(processes, max_tokens=max_tokens, shuffle=shuffle)
    ]
    batches = [batch for part in parts for batch in part]
    assert sorted(index for batch in batches for index in batch) == list(range(len(source)))
    for batch in batches:
        assert len(batch) * max(source[batch].max(), target[batch].max()) <= max_tokens
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == len(samplers(processes, max_tokens=max_tokens)[0])


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("pairs", [7, 8, 9, 500])
def test_gathered_batches_are_equally_large_and_in_the_samplers_order(processes, pairs):
    options = {"lengths": random_lengths(pairs), "shuffle": False, "even_rows": True}
    parts = samplers(processes, max_tokens=60, **options)
    source, target = parts[0].lengths
    gathered = []
    for batches in zip(*parts, strict=True):
        assert len({len(batch) for batch in batches}) == 1
        for batch in batches:
            assert len(batch) * max(source[batch].max(), target[batch].max()) <= 60
            gathered += batch
    assert processes == 1 or len(batch) == 1  # copies are counted in rows per process
    assert gathered == parts[0].order.tolist()
    assert sorted(gathered[:pairs]) == list(range(pairs))
    assert 0 <= len(gathered) - pairs < processes


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=40),
    max_tokens=st.integers(1, 40),
    processes=st.integers(1, 4),
    options=st.fixed_dictionaries(
        {
            "multiple_of": st.integers(1, 6),
            "even_rows": st.booleans(),
            "shuffle": st.booleans(),
            "oversized": st.sampled_from(["alone", "drop"]),
        }
    ),
)
@example([(5, 5)] * 3, 5, 2, {"multiple_of": 1, "even_rows": False, "shuffle": False})
@example([(3, 3)] * 7, 9, 2, {"multiple_of": 1, "even_rows": True, "shuffle": True})
@example([(3, 3)], 9, 2, {"multiple_of": 1, "even_rows": True, "shuffle": False})
@example([(3, 3)] * 5, 2, 2, {"multiple_of": 1, "even_rows": True, "shuffle": False})
def test_processes_get_equally_many_batches_of_any_pairs_and_no_empty_ones(
    pairs, max_tokens, processes, options
):
    lengths = tuple(np.array(pairs).T)
    longest = np.maximum(*lengths)
    divisor = math.lcm(processes, options["multiple_of"])
    kept = range(len(pairs))
    if options.get("oversized") == "drop":
        kept = np.flatnonzero(longest <= max_tokens).tolist()
    together = processes if options["even_rows"] else 1
    assume(-(-len(kept) // together) >= divisor // together)
    assume(options["even_rows"] or max_tokens >= longest.min())
    parts = samplers(processes, max_tokens=max_tokens, lengths=lengths, **options)
    for epoch in range(2):
        for part in parts:
            part.set_epoch(epoch)
        steps = list(zip(*parts, strict=True))
        assert len(steps) == len(parts[0])
        batches = [batch for step in steps for batch in step]
        assert all(batches)
        assert len(batches) % divisor == 0
        times = Counter(index for batch in batches for index in batch)
        copies = (times - Counter(kept)).values()
        if options["even_rows"]:
            assert all(len(batch) == len(step[0]) for step in steps for batch in step)
            assert list(copies) in ([], [-len(kept) % processes])
        else:
            assert not copies
        assert not Counter(kept) - times
        too_few = len(batches) + divisor > times.total() // together * together
        for batch in batches:
            fits = len(batch) * longest[batch].max() <= max_tokens
            assert fits or len(batch) == 1 or too_few


def test_the_order_of_an_epoch_only_depends_on_seed_and_number():
    (sampler,) = samplers(1)
    (other,) = samplers(1, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert second != first
    assert {frozenset(batch) for batch in second} != {frozenset(batch) for batch in first}
    assert len(second) == len(first)
    assert list(other) != first


def test_several_processes_share_the_batches_of_a_single_process():
    (alone,) = samplers(1, max_tokens=95)
    assert len(alone) == 88
    pair = samplers(2, max_tokens=95)
    together = [batch for batches in zip(*pair, strict=True) for batch in batches]
    assert together == list(alone)


def test_the_largest_batch_is_halved_if_the_number_of_batches_is_odd():
    (alone,) = samplers(1, max_tokens=100, shuffle=False)
    assert len(alone) == 83
    pair = samplers(2, max_tokens=100, shuffle=False)
    together = [batch for batches in zip(*pair, strict=True) for batch in batches]
    assert len(together) == 84
    (whole,) = (batch for batch in alone if batch not in together)
    assert len(whole) == max(map(len, alone))
    first, second = (batch for batch in together if batch not in list(alone))
    assert first + second == whole
    assert abs(len(first) - len(second)) <= 1


@pytest.mark.parametrize("oversized", ["alone", "drop"])
def test_pairs_above_the_budget_get_their_own_batch_or_are_dropped(oversized):
    source, target = np.array([5, 90, 4, 6]), np.array([5, 4, 80, 6])
    (sampler,) = samplers(1, max_tokens=40, lengths=(source, target), oversized=oversized)
    batches = sorted(sorted(batch) for batch in sampler)
    if oversized == "alone":
        assert [1] in batches
        assert [2] in batches
        assert sampler.num_dropped == 0
    else:
        assert batches == [[0, 3]]
        assert sampler.num_dropped == 2
    assert sampler.num_oversized == 2


def test_padding_is_counted():
    (sampler,) = samplers(1, max_tokens=12, lengths=(np.array([2, 4]), np.array([4, 4])))
    assert len(list(sampler)) == 1
    assert sampler.padding() == pytest.approx(1 - 14 / 16)


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="the Multi30k text is not there")
def test_batches_of_multi30k_are_padded_by_less_than_a_tenth():
    sides = [(MULTI30K / f"train.{suffix}").read_text().splitlines() for suffix in ("en", "de")]
    lengths = tuple(np.array([len(line.split()) + 1 for line in lines]) for lines in sides)
    (sampler,) = samplers(1, max_tokens=4096, lengths=lengths)
    assert sampler.padding() < 0.1


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ([3, 4], [3], {}, "2 sources and 1 targets: expected the same number"),
        ([], [], {}, "there is no sentence pair"),
        ([3, 0], [3, 4], {}, "the source of pair 2 has no token: expected at least </s>"),
        ([3, 5], [0, 0], {}, "the target of pair 1 has no token: expected at least </s>"),
        ([30], [9], {}, "max_tokens=20: expected at least 30, which the shortest pair takes"),
        ([3], [3], {"num_replicas": 2}, "1 sentence pairs for 2 processes"),
        ([3], [3], {"rank": 1}, "rank=1: expected one of 1 processes"),
        ([3], [3], {"oversized": "split"}, "oversized='split': expected one of alone, drop"),
    ],
)
def test_inputs_that_cannot_be_batched_are_refused(source, target, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenBudgetSampler(source, target, 20, **options)


# ---------------------------------------------------------------- streams


def examples(pairs=100, seed=0):
    source, target = random_lengths(pairs, seed)
    return [
        {
            "input_ids": random_ids(1, source[index], seed=index)[0].tolist(),
            "labels": random_ids(1, target[index], seed=index + 1)[0].tolist(),
        }
        for index in range(pairs)
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("buffer_size", [10, 33, 1000])
def test_a_stream_is_batched_completely_and_evenly(processes, buffer_size):
    pairs = examples()
    parts = [
        list(
            TokenBudgetStream(
                pairs, 200, buffer_size=buffer_size, num_replicas=processes, rank=rank
            )
        )
        for rank in range(processes)
    ]
    assert len({len(part) for part in parts}) == 1
    met = [example for part in parts for batch in part for example in batch]
    assert sorted(map(str, met)) == sorted(map(str, pairs))
    for batch in (batch for part in parts for batch in part):
        longest = max(len(ids) for example in batch for ids in example.values())
        assert len(batch) * longest <= 200


def test_workers_of_a_stream_share_its_batches_in_order():
    stream = TokenBudgetStream(examples(), 200, buffer_size=40)
    loaders = [
        torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers)
        for workers in (0, 2)
    ]
    alone, shared = (
        [[example["labels"] for example in batch] for batch in loader] for loader in loaders
    )
    assert str(alone) == str(shared)


def rows_of_shards(sizes):
    yield from ({"input_ids": [size, row]} for size in sizes for row in range(size))


def test_workers_see_each_row_of_uneven_shards_once_an_epoch():
    stream = IterableDataset.from_generator(rows_of_shards, gen_kwargs={"sizes": [9, 1]})
    loader = DataLoader(RepeatedStream(stream), batch_size=None, num_workers=2)
    seen = [str(row) for row in islice(loader, 20)]
    assert seen == 2 * [str(row) for row in stream]


def test_a_stream_is_repeated_in_a_different_order():
    stream = TokenBudgetStream(examples(), 200, repeat=True)
    batches = [str(batch) for batch, _ in zip(stream, range(3 * 15), strict=False)]
    epoch = list(TokenBudgetStream(examples(), 200))
    assert len(epoch) < len(batches)
    assert batches[: len(epoch)] != batches[len(epoch) : 2 * len(epoch)]


def test_each_part_of_a_stream_has_its_own_order():
    pairs = examples()
    batches = list(TokenBudgetStream([*pairs, *pairs], 200, buffer_size=len(pairs)))
    half = len(batches) // 2
    assert sorted(map(str, batches[:half])) != sorted(map(str, batches[half:]))


def test_an_empty_stream_ends():
    class Empty:
        times_read = 0

        def __iter__(self):
            self.times_read += 1
            assert self.times_read == 1
            return iter(())

    assert list(RepeatedStream(Empty())) == []


def test_a_stream_gets_the_epoch_and_is_read_lazily():
    class Shuffled(list):
        read, epochs = 0, ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

        def __iter__(self):
            for self.read, pair in enumerate(super().__iter__(), 1):
                yield pair

    pairs = Shuffled(examples())
    batches = iter(TokenBudgetStream(pairs, 200, buffer_size=10, repeat=True))
    next(batches)
    assert (pairs.read, pairs.epochs) == (20, (0,))
    while pairs.epochs == (0,):
        next(batches)
    assert pairs.epochs == (0, 1)


def test_a_pair_without_tokens_is_reported_with_its_number_in_the_stream():
    pairs = [*examples(30), {"input_ids": [], "labels": [5, 2]}]
    with pytest.raises(ValueError, match="the source of pair 31 has no token: expected"):
        list(TokenBudgetStream(pairs, 200, buffer_size=10))


def test_a_stream_that_can_only_be_read_once_is_reported():
    stream = TokenBudgetStream(iter(examples()), 200, repeat=True)
    with pytest.raises(ValueError, match="the stream holds no sentence pair in epoch 1"):
        list(stream)


def test_tokens_are_counted_the_same_in_tables_and_lists():
    pairs = examples()
    table = Dataset.from_list(pairs).shuffle(seed=0)
    for one, other in zip(count_tokens(table), count_tokens(list(table)), strict=True):
        assert one.tolist() == other.tolist()
    source, target = count_tokens(table.remove_columns("labels"))
    assert source.tolist() == target.tolist()


# ---------------------------------------------------------------- the trainer


@dataclass
class Arguments(TokenBudgetArguments, Seq2SeqTrainingArguments):
    pass


class Recorder(TokenBudgetTrainer, Seq2SeqTrainer):
    """Records what it was trained on."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), inputs["labels"].tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.fixture
def make_trainer(tmp_path, tokenizer):
    def make(data, **options):
        torch.manual_seed(0)
        defaults = {
            "max_tokens": 200,
            "max_steps": 8,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "output_dir": str(tmp_path),
        }
        model = VanillaTransformerForConditionalGeneration(small_config())
        return Recorder(
            model=model,
            args=Arguments(**{**defaults, **options}),
            train_dataset=data,
            eval_dataset=data,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        )

    return make


@pytest.fixture
def data():
    return Dataset.from_list(examples(60))


def test_a_trainer_sees_every_pair_once_an_epoch(make_trainer, data):
    trainer = make_trainer(data, max_steps=-1, num_train_epochs=2)
    trainer.train()
    labels = [tuple(id for id in row if id != -100) for batch in trainer.seen for row in batch]
    assert sorted(labels) == sorted(2 * [tuple(ids) for ids in data["labels"]])
    assert trainer.state.global_step == len(trainer.seen) == 2 * len(trainer.get_train_dataloader())


def test_samples_per_second_count_the_pairs_trained_on(make_trainer, data):
    trainer = make_trainer(data)
    updates = len(trainer.get_train_dataloader())
    trainer.args.max_steps = 3 * updates
    found = trainer.train().metrics
    samples = found["train_samples_per_second"] * found["train_runtime"]
    assert samples == pytest.approx(3 * len(data), rel=0.02)


@pytest.mark.parametrize("options", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 1}])
def test_dropped_pairs_do_not_count_as_samples(make_trainer, data, options):
    trainer = make_trainer(data, max_tokens=12, oversized="drop", **options)
    found = trainer.train().metrics
    samples = found["train_samples_per_second"] * found["train_runtime"]
    assert samples == pytest.approx(sum(map(len, trainer.seen)), rel=0.3)


@pytest.mark.parametrize(("oversized", "drops"), [("alone", False), ("cut", False), ("drop", True)])
def test_a_trainer_drops_pairs_above_the_budget_on_request(make_trainer, data, oversized, drops):
    """Truncation happens earlier, when the text is tokenized."""
    loader = make_trainer(data, max_tokens=12, oversized=oversized).get_train_dataloader()
    assert (sum(len(batch["labels"]) for batch in loader) < len(data)) == drops


def test_samples_per_second_are_not_logged_for_a_stream(make_trainer, data):
    trainer = make_trainer(data.to_iterable_dataset())
    found = trainer.train().metrics
    assert "train_samples_per_second" not in {**found, **trainer.state.log_history[-1]}
    assert found["train_steps_per_second"] > 0


@pytest.mark.parametrize(("budget", "is_logged"), [(None, True), (40, False)])
def test_steps_per_second_of_an_evaluation_are_only_logged_for_rows(
    make_trainer, data, budget, is_logged
):
    trainer = make_trainer(data, eval_max_tokens=budget)
    found = trainer.evaluate()
    for log in (found, trainer.state.log_history[-1]):
        assert ("eval_steps_per_second" in log) == is_logged
    assert found["eval_samples_per_second"] > 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_run_resumed_in_mid_epoch_continues_with_the_next_batch(
    make_trainer, data, tmp_path, streaming, options
):
    # dropout's random state is resumed too, so that the weights are bit-for-bit the same
    options = {**options, "max_steps": 9, "save_strategy": "steps", "save_steps": 5}
    source = data.to_iterable_dataset() if streaming else data
    whole = make_trainer(source, **options)
    whole.train()
    again = make_trainer(source, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert again.seen == whole.seen[-len(again.seen) :]
    assert len(again.seen) < len(whole.seen)
    for (name, weight), (_, other) in zip(
        whole.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(weight, other), name


@pytest.mark.parametrize("shards", [1, 3])
def test_data_loader_workers_share_a_stream_and_lose_nothing(make_trainer, data, shards):
    stream = data.to_iterable_dataset(num_shards=shards)
    seen = []
    for workers in (0, 2):
        trainer = make_trainer(stream, max_steps=12, dataloader_num_workers=workers)
        trainer.train()
        seen.append(trainer.seen)
    assert seen[0] == seen[1]


def test_a_data_loader_worker_only_changes_its_own_epoch(data, monkeypatch):
    """Two that change a shared one at the same time would read the pairs in different orders."""
    stream = data.to_iterable_dataset()
    shared = stream._epoch
    monkeypatch.setattr(token_batches, "get_worker_info", lambda: SimpleNamespace(id=0))
    pairs = BPEDropoutStream(stream, encoder=None)
    for epoch in (3, 1):
        token_batches.set_epoch(pairs, epoch)
        assert (stream.epoch, int(pairs._epoch), int(shared)) == (epoch, epoch, 0)


@pytest.mark.parametrize("budget", [None, 200])
def test_workers_start_with_the_method_of_the_options(make_trainer, data, budget):
    options = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"}
    trainer = make_trainer(data, max_tokens=budget, eval_max_tokens=budget, **options)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        inner = getattr(loader, "base_dataloader", loader)
        assert inner.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize("budget", [None, 200])
def test_training_batches_can_be_loaded_out_of_order(make_trainer, data, budget):
    options = {"dataloader_num_workers": 2, "dataloader_in_order": False}
    trainer = make_trainer(data, max_tokens=budget, eval_max_tokens=200, **options)
    loader = trainer.get_train_dataloader()
    assert getattr(loader, "base_dataloader", loader).in_order is False
    assert trainer.get_eval_dataloader().in_order is True  # as its predictions must be


def test_data_seed_determines_the_order(make_trainer, data):
    orders = []
    for seeds in ({"seed": 5, "data_seed": 0}, {"seed": 6, "data_seed": 0}, {"seed": 6}):
        loader = make_trainer(data, **seeds).get_train_dataloader()
        orders.append([batch["labels"].tolist() for batch in loader])
    assert orders[0] == orders[1] != orders[2]


def test_predictions_come_in_the_order_of_the_data(make_trainer, data):
    trainer = make_trainer(data, eval_max_tokens=150)
    trainer.model.eval()
    output = trainer.predict(data)
    for row, labels in zip(output.label_ids, data["labels"], strict=True):
        assert [id for id in row if id != -100] == labels
    plain = make_trainer(data, per_device_eval_batch_size=1)
    plain.model.load_state_dict(trainer.model.state_dict())
    expected = plain.predict(data)
    for actual, wanted, labels in zip(
        output.predictions[0], expected.predictions[0], data["labels"], strict=True
    ):
        np.testing.assert_allclose(
            actual[: len(labels)], wanted[: len(labels)], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    "options", [{"eval_max_tokens": 150}, {"train_sampling_strategy": "group_by_length"}], ids=str
)
def test_metrics_get_predictions_in_the_order_of_the_data(make_trainer, data, options):
    trainer = make_trainer(data, max_tokens=None, include_for_metrics=["inputs"], **options)
    seen = []
    trainer.compute_metrics = lambda found: seen.append(found) or {}
    expected = trainer.predict(data).predictions[0]
    for rows, name in ((seen[0].label_ids, "labels"), (seen[0].inputs, "input_ids")):
        for row, ids in zip(rows, data[name], strict=True):
            assert row[: len(ids)].tolist() == ids
    np.testing.assert_array_equal(seen[0].predictions[0], expected)


def test_metrics_get_the_losses_of_batches_of_tokens(make_trainer, data):
    """There are fewer than pairs, so they can't be in the order of the data."""
    options = {"include_for_metrics": ["loss"], "per_device_eval_batch_size": 1}
    trainer = make_trainer(data, eval_max_tokens=150, **options)
    batches = len(trainer.get_eval_dataloader())
    seen = []
    trainer.compute_metrics = lambda found: seen.append(found) or {}
    trainer.evaluate()
    assert len(np.unique(seen[0].losses)) == batches < len(data)


@pytest.mark.parametrize("budget", [30, 1000])
def test_the_loss_of_a_causal_model_is_the_mean_over_predicted_tokens(tmp_path, tokenizer, budget):
    torch.manual_seed(0)
    model = VanillaTransformerForCausalLM(small_config(initializer="tensor2tensor")).eval()
    rows = [{"input_ids": random_ids(1, n, seed=n)[0].tolist()} for n in [2] * 9 + [3] * 5 + [12]]
    arguments = Arguments(
        str(tmp_path), eval_max_tokens=budget, report_to="none", disable_tqdm=True, use_cpu=True
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Recorder(model, arguments, data_collator=collate, eval_dataset=rows)
    total = labels = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        predicted = ids.shape[1] - 1
        total, labels = total + model(ids, labels=ids).loss.item() * predicted, labels + predicted
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / labels, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"eval_max_tokens": 40}, {"eval_max_tokens": 150}, {"per_device_eval_batch_size": 7}],
    ids=str,
)
def test_the_evaluation_loss_is_the_mean_over_all_labels(make_trainer, data, options):
    """Not over batches, which have different sizes."""
    trainer = make_trainer(data, **options)
    model = trainer.model.eval()
    total = labels = 0
    for row in data:
        batch = trainer.data_collator([row])
        with torch.no_grad():
            total += model(**batch).loss.item() * len(row["labels"])
        labels += len(row["labels"])
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(total / labels, rel=1e-5)


def test_a_classifier_can_be_evaluated(tmp_path, data):
    """Each row has one label, not one for each token."""
    config = BertConfig(
        vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    rows = [{"input_ids": [5, 6, 7], "labels": n % 2} for n in range(5)]
    arguments = Arguments(
        str(tmp_path), per_device_eval_batch_size=2, report_to="none", use_cpu=True
    )
    trainer = Recorder(BertForSequenceClassification(config), arguments, eval_dataset=rows)
    losses = trainer.predict(rows)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(losses.predictions), torch.tensor(losses.label_ids)
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_balanced_batches_are_those_of_the_trainers_current_epoch(make_trainer, data):
    """If several processes resume in mid-epoch, the sampler is not told the epoch."""
    options = {"train_sampling_strategy": "batch_rebalance", "per_device_train_batch_size": 4}
    trainer = make_trainer(data, max_tokens=None, **options)
    found, expected = trainer._get_train_sampler(), Seq2SeqTrainer._get_train_sampler(trainer)
    for epoch in (0, 1):
        trainer.state.epoch = epoch + 0.25
        expected.set_epoch(epoch)
        assert list(found) == list(expected)


def test_balanced_batches_follow_the_seed(make_trainer, data):
    options = {"train_sampling_strategy": "batch_rebalance", "per_device_train_batch_size": 4}

    def batches(**seeds):
        return list(make_trainer(data, max_tokens=None, **options, **seeds)._get_train_sampler())

    assert batches(seed=1) == batches(seed=2, data_seed=1) != batches(seed=2)


def test_each_of_several_evaluation_sets_has_batches_of_tokens(make_trainer, data):
    trainer = make_trainer(data, eval_max_tokens=40)
    trainer.eval_dataset = {"short": data.select(range(9)), "all": data}
    for name, rows in trainer.eval_dataset.items():
        batches = list(trainer.get_eval_dataloader(name))
        assert max(batch["labels"].numel() for batch in batches) <= 40
        assert sum(len(batch["labels"]) for batch in batches) == len(rows)


def test_metrics_of_batches_get_them_as_they_come(make_trainer, data):
    trainer = make_trainer(data, eval_max_tokens=150, batch_eval_metrics=True)
    rows = []
    trainer.compute_metrics = lambda found, compute_result: rows.append(len(found.label_ids)) or {}
    trainer.evaluate()
    assert len(rows) == len(trainer.get_eval_dataloader())
    assert sum(rows) == len(data)


def test_without_a_budget_batches_are_transformers_own(make_trainer, data):
    trainer = make_trainer(data, max_tokens=None, per_device_train_batch_size=7)
    assert trainer.get_train_dataloader().batch_sampler.batch_size == 7
    assert trainer.get_eval_dataloader().batch_sampler.batch_size == 8


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_evaluation_uses_all_rows_even_with_dataloader_drop_last(make_trainer, data, max_tokens):
    trainer = make_trainer(data, max_tokens=max_tokens, dataloader_drop_last=True)
    trainer.args.per_device_eval_batch_size = len(data) - 1
    for loader in (trainer.get_eval_dataloader(), trainer.get_test_dataloader(data)):
        assert sum(len(batch["labels"]) for batch in loader) == len(data)
    assert trainer.args.dataloader_drop_last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected a positive number of tokens"),
        ({"eval_max_tokens": -1}, "eval_max_tokens=-1: expected a positive number of tokens"),
        ({"oversized": "split"}, "oversized='split': expected alone, cut or drop"),
    ],
)
def test_invalid_budgets_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Arguments(output_dir=str(tmp_path), use_cpu=True, **options)


# ---------------------------------------------------------------- several processes

PROGRAM = """
import sys
import numpy, torch
from safetensors.torch import load_file, save_file
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq
from conftest import small_config
from test_token_batches import Arguments, Recorder, examples
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.training.distributed import end_training

folder, accumulation = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
data = Dataset.from_list(examples(61))
model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.0))
tokenizer = train_tokenizer(["a b", "c d"], 300, show_progress=False)
trainer = Recorder(
    model=model,
    args=Arguments(
        output_dir=folder,
        max_tokens=int(sys.argv[3]),
        eval_max_tokens=150,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        logging_steps=7,  # which leaves a rest at the end
        use_cpu=True,
    ),
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
)
trainer.train()
assert trainer.state.global_step % 7
output = trainer.predict(data)
for row, labels in zip(output.label_ids, data["labels"], strict=True):
    assert [id for id in row if id != -100] == labels
tested = [output.metrics["test_loss"]]
trainer.args.eval_max_tokens, trainer.args.per_device_eval_batch_size = None, 4
tested.append(trainer.evaluate(data)["eval_loss"])
if trainer.is_world_process_zero():
    logs = trainer.state.log_history
    losses = [entry[name] for entry in logs for name in ("loss", "train_loss") if name in entry]
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    scores = {"losses": torch.tensor(losses), "tested": torch.tensor(tested)}
    save_file({**scores, **tensors}, folder + "/trained.safetensors")
torch.save(trainer.seen, f"{folder}/seen-{trainer.args.process_index}.pt")
end_training(trainer)
"""


@pytest.mark.parametrize("max_tokens", [pytest.param(100, marks=pytest.mark.slow), 120])
def test_two_processes_learn_the_same_as_one_with_gradient_accumulation(tmp_path, max_tokens):
    (tmp_path / "program.py").write_text(PROGRAM)
    trained, seen = [], []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        options = [folder, 3 - processes, max_tokens]
        failed, output = run_ranks(processes, tmp_path / "program.py", *options, cwd=tmp_path)
        assert not failed, output
        trained.append(load_file(folder / "trained.safetensors"))
        seen.append([torch.load(folder / f"seen-{rank}.pt") for rank in range(processes)])
    alone, pair = seen[0][0], [batch for both in zip(*seen[1], strict=True) for batch in both]
    assert pair == alone
    torch.testing.assert_close(trained[1], trained[0], atol=1e-4, rtol=1e-3)


def test_two_processes_can_evaluate_during_training_on_a_stream(tmp_path):
    """accelerate would read a stream in only one process, and cannot join batches of tokens."""
    texts = [" ".join(["a house", "the lake", "deep"][: 1 + n % 3]) for n in range(13)]
    (tmp_path / "text").write_text("".join(f"{text}\n" for text in texts))
    files = [
        f"--{split}_{side}=text"
        for split in ("train", "validation")
        for side in ("source", "target")
    ]
    failed, output = run_ranks(
        2, "-m", "vanilla_transformer", "train", *files, "--streaming", "--max_tokens", 20,
        "--preset", "tiny", "--vocab_size", 300, "--max_steps", 2, "--output_dir", "out",
        "--config_overrides", "d_model=16,encoder_layers=1,decoder_layers=1",
        "--eval_strategy", "steps", "--eval_steps", 1, "--save_strategy", "no", "--use_cpu",
        "--report_to", "none", cwd=tmp_path,
    )  # fmt: skip
    assert not failed, output
    log = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [1, 2]
