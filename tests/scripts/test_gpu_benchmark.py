"""The GPU benchmark, as far as it can be tested without a GPU."""

import json
import operator
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import REPOSITORY, random_ids, run_module, seq2seq, watch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from scripts.benchmarks.gpu import decoding, recipes, timing, training, varlen
from scripts.benchmarks.gpu.cells import Cell, Worker, measure_all
from scripts.benchmarks.gpu.goals import goal
from scripts.benchmarks.gpu.plan import DRY_RUN, Plan
from scripts.benchmarks.peers import PEERS, Size
from scripts.benchmarks.speed import training_batch
from vanilla_transformer.data.token_batches import TokenBudgetSampler
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerStack

PARTS = {"training": training, "decoding": decoding, "recipes": recipes}
# Cells that need a GPU, or an optional package.
MAY_LACK = ("varlen_attn", "flex", "flash", "liger", "ctranslate2", "linear_cross_entropy")


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.stop()


# ---------------------------------------------------------------- the whole benchmark, in a tiny
# form


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    for split in ("train", "test_2016_flickr"):
        for suffix in ("en", "de"):
            lines = [f"a man in a red shirt sees dog number {count}" for count in range(20)]
            (folder / f"{split}.{suffix}").write_text("\n".join(lines) + "\n")
    for split in ("train", "test"):
        (folder / f"fre_{split}.tsv").write_text("où\tu\nnous\tn u\n" * 10)
    flags = ["--output_dir", "results", "--data", ".", "--g2p_data", ".", "--dry_run"]
    process = run_module("scripts.benchmarks.gpu", *flags, cwd=folder)
    return folder / "results", process.stdout


def read(folder, part):
    return json.loads((folder / f"{part}.json").read_text()), (folder / f"{part}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_cell_has_numbers_or_a_reason(dry_run, part):
    folder, printed = dry_run
    result, table = read(folder, part)
    module, plan = PARTS[part], Plan(**DRY_RUN)
    expected = [cell.labels for cell in module.cells(plan, None)]
    rows = result["rows"]
    assert [{name: row[name] for name in module.LABELS} for row in rows] == expected
    for row in rows:
        if "reason" in row:
            assert any(name in row["what"] for name in MAY_LACK), row["reason"]
        else:
            assert all(row[name] > 0 for name in ("seconds", "updates") if name in row)
            assert row.keys() & module.COLUMNS.keys()
        cells = " | ".join(str(row[name]) for name in module.LABELS)
        assert f"\n| {cells} |" in table
    assert table.strip() in printed
    assert "A dry run: the figures mean nothing." in table
    assert all(f"| {one['goal']} | {one['wanted']} |" in table for one in result["goals"])


@pytest.mark.slow
def test_the_tests_that_need_a_gpu_are_among_the_cells(dry_run):
    result, table = read(dry_run[0], "tests")
    names = {row["test"].split("::")[0].split("/")[-1] for row in result["rows"]}
    assert names == {"test_gpu.py", "test_cache.py", "test_packing.py", "test_integrations.py"}
    for row in result["rows"]:
        passes = torch.cuda.is_available() and "flash" not in row.get("reason", "")
        assert row["outcome"] == ("passed" if passes else "skipped"), row
        assert row["outcome"] == "passed" or row["reason"]
        assert f"| {row['test']} | {row['outcome']} |" in table


@pytest.mark.slow
def test_the_recipes_train_and_score(dry_run):
    wmt, multi30k, g2p = read(dry_run[0], "recipes")[0]["rows"]
    assert wmt["updates"] == multi30k["updates"] == g2p["updates"] == 2
    assert wmt["tokens_per_second"] > 0 < wmt["days_to_100000_updates"]
    assert 0 <= multi30k["bleu"] <= 100
    assert "tok:none" in multi30k["bleu_signature"]
    assert g2p["language"] == "fre"
    assert 0 <= g2p["word_error_rate"] <= 100
    speeds = json.loads((dry_run[0] / "speeds.json").read_text())
    assert speeds == [row["speed"] for row in (wmt, multi30k, g2p)]
    for row, speed in zip((wmt, multi30k, g2p), speeds, strict=True):
        assert 0 < speed["target_tokens_per_second"] < row["tokens_per_second"]
    assert [speed["batch"] for speed in speeds] == [DRY_RUN["tokens"], 8192, 512]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "speed"], "--parts speed: expected one of tests; training"),
        (["--only", "("], "--only (: expected a regular expression: missing )"),
        (["--limit_s", 0], "--limit_s 0.0: expected a positive number"),
        (["--data", "."], "--data .: expected a file train.en in it"),
        (["--g2p_data", "."], "--g2p_data .: expected a file LANG_train.tsv in it"),
        pytest.param(
            [],
            "--dry_run is not given: expected an NVIDIA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_invalid_options_are_refused(tmp_path, flags, message):
    process = run_module(
        "scripts.benchmarks.gpu", "--output_dir", "gpu", *flags, cwd=tmp_path, check=False
    )
    assert process.returncode != 0
    assert message in process.stderr
    assert not (tmp_path / "gpu").exists()


@pytest.mark.slow
def test_no_part_needs_packages_that_only_read_or_score_data():
    absent = ("datasets", "babel", "num2words", "rapidfuzz")
    script = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    script += f"from scripts.benchmarks.gpu import tests, {', '.join(PARTS)}\n"
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)


def test_all_parts_take_less_than_25_minutes_and_each_less_than_9():
    limits = Plan().limits.values()
    assert sum(limits) < 25 * 60
    assert max(limits) < 9 * 60


@pytest.mark.slow
def test_only_selects_rows_by_their_labels(tmp_path):
    flags = ["--parts", "decoding", "training", "--only", r"^base .*ours dynamic$", "--dry_run"]
    run_module("scripts.benchmarks.gpu", "--output_dir", "gpu", *flags, cwd=tmp_path)
    rows = read(tmp_path / "gpu", "decoding")[0]["rows"]
    assert [(row["size"], row["what"], row["cache"]) for row in rows] == [
        ("base", "ours", "dynamic")
    ] * 2
    (row,) = read(tmp_path / "gpu", "training")[0]["rows"]
    assert row["reason"] == r"ValueError: --only ^base .*ours dynamic$: in the labels of no row"


# ---------------------------------------------------------------- cells


def test_a_cell_that_fails_does_not_stop_the_rest(worker):
    cells = [
        Cell({"what": "error"}, operator.truediv, (1, 0)),
        Cell({"what": "exit"}, os._exit, (3,)),
        Cell({"what": "hangs"}, time.sleep, (60,), 1.0),
        Cell({"what": "good"}, dict, ((("speed", 2),),)),
    ]
    kept = []
    rows = measure_all(cells, [worker], 60, lambda rows: kept.append(list(rows)))
    assert rows == kept[-1]
    assert rows == [
        {"what": "error", "reason": "ZeroDivisionError: division by zero"},
        {"what": "exit", "reason": "its process ended with exit code 3"},
        {"what": "hangs", "reason": "took longer than 1 s"},
        {"what": "good", "speed": 2},
    ]
    assert kept[1][2:] == [
        {"what": name, "reason": "not measured yet"} for name in ("hangs", "good")
    ]


def test_a_process_serves_many_cells_until_the_gpu_fails(worker):
    def process_of(*arguments):
        return worker.measure(Cell({}, *arguments), 60)

    first = worker.measure(Cell({}, os.getpid), 60)
    assert worker.measure(Cell({}, os.getpid), 60) == first
    reason = "CUDA error: an illegal memory access was encountered"
    process_of(dict, ((("reason", reason),),))
    assert worker.measure(Cell({}, os.getpid), 60) != first


def test_several_workers_measure_in_parallel_and_rows_keep_their_order():
    class Pair:
        meeting = threading.Barrier(2)

        def measure(self, cell, seconds):
            self.meeting.wait(10)
            return {"by": self}

    workers = [Pair(), Pair()]
    cells = [Cell({"what": place}, dict) for place in range(4)]
    rows = measure_all(cells, workers, 60, lambda rows: None)
    assert [row["what"] for row in rows] == [0, 1, 2, 3]
    assert {row["by"] for row in rows[:2]} == {row["by"] for row in rows[2:]} == set(workers)


def test_a_cell_can_get_the_time_at_which_it_is_stopped(worker):
    worker.measure(Cell({}, os.getpid), 60)
    begun = time.monotonic()
    end = worker.measure(Cell({}, max, (0.0,), gets_end=True), 30)
    assert begun + 30 <= end <= time.monotonic() + 30


def test_no_cell_starts_when_the_time_is_up(worker):
    cells = [Cell({"what": "late"}, time.sleep, (60,))]
    rows = measure_all(cells, [worker], 0, lambda rows: None)
    assert rows == [{"what": "late", "reason": "not measured: the time of this part was up"}]


def test_a_goal_is_reached_missed_or_not_measured():
    assert goal("speed", 3.0, 2.0, 1.5)["reached"] is True
    assert goal("speed", 2.0, 2.0, 1.5)["reached"] is False
    assert goal("speed", None, 2.0, 1.5)["reached"] is None


# ---------------------------------------------------------------- training


def test_flops_are_those_of_the_matrix_products_of_a_step():
    size, generator = Size(32, 64, 2, 3, 100), torch.Generator().manual_seed(0)
    lengths = torch.full((4,), 7), torch.full((4,), 5)
    batch = training_batch(*lengths, size.vocab_size, generator)
    model = PEERS["vanilla_transformer"](size).train()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert training.training_flops(size, *lengths) == counter.get_total_flops()


def test_random_sentences_have_the_lengths_of_wmt():
    source, target = training.wmt_lengths(100_000, seed=0)
    assert source.mean() == pytest.approx(training.SOURCE_MEAN, rel=0.02)
    assert target.mean() == pytest.approx(training.TARGET_MEAN, rel=0.02)
    batches = training.wmt_batches(Size(32, 64, 2, 1, 100), 3000, 4, "cpu")
    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert len(widths) == 4
    assert widths == sorted(widths)
    for batch in batches:
        assert max(batch[name].numel() for name in ("input_ids", "labels")) <= 3000


def test_batches_are_filled_as_with_a_text_of_the_size_of_wmt():
    # A fourth of the tokens in batches of a small text would be padding.
    batches = training.wmt_batches(Size(32, 64, 2, 1, 100), 25_000, 6, "cpu")
    padding = [1 - (batch["labels"] != -100).double().mean() for batch in batches]
    padding += [1 - batch["attention_mask"].double().mean() for batch in batches]
    assert sum(padding) / len(padding) < 0.05
    assert min(batch["input_ids"].numel() for batch in batches) > 15_000


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX A1000", None),  # not that of the A100
    ],
)
def test_the_peak_speed_of_a_gpu_is_found_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert timing.peak_flops() == peak


def test_most_batches_of_a_text_have_a_unique_shape():
    """So that kernels which plan each shape take longer than in a benchmark of a few batches."""
    source, target = training.wmt_lengths(900_000, seed=0)
    batches = TokenBudgetSampler(source, target, 25_000, seed=1)
    shapes = {(len(rows), max(source[rows]), max(target[rows])) for rows in batches}
    assert len(shapes) > 0.8 * len(batches)


def attend_row_by_row(causal_option, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """The same as torch's kernel, (tokens, heads, dim)."""
    is_causal = options.get(*causal_option[:1]) == causal_option[1]
    assert is_causal or not options
    rows = []
    for (start, end), (first, last) in zip(
        cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        heads = (part.transpose(0, 1) for part in (q[start:end], k[first:last], v[first:last]))
        output = F.scaled_dot_product_attention(*heads, is_causal=is_causal)
        rows.append(output.transpose(0, 1))
    return torch.cat(rows)


def with_flag(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """The signature of torch 2.10."""
    options = {"is_causal": True} if is_causal else {}
    ends = (cu_seq_q, cu_seq_k, max_q, max_k)
    return attend_row_by_row(("is_causal", True), q, k, v, *ends, **options)


@pytest.mark.parametrize(
    "kernel", [with_flag, partial(attend_row_by_row, ("window_size", (-1, 0)))]
)
def test_rows_packed_for_torchs_kernel_train_the_same_as_padded_rows(monkeypatch, kernel):
    monkeypatch.setattr(varlen.varlen, "varlen_attn", kernel)
    varlen.register()
    ids, labels, mask = random_ids(3, 9), random_ids(3, 6, seed=1), torch.ones(3, 9).long()
    mask[1, 4:] = mask[2, 1:] = 0
    labels[0, 3:] = -100
    results, shapes = [], []
    for name in ("sdpa", varlen.NAME):
        model = seq2seq(dropout=0.0).train()
        model.set_attn_implementation(name)
        for part in model.modules():
            if isinstance(part, VanillaTransformerStack):
                watch(part.layers[0], lambda *seen: shapes.append(seen[-1].shape[:2]))
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        results.append([loss, *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert shapes == [(3, 9), (3, 6), (1, 14), (1, 15)]


def test_the_largest_batch_is_the_last_that_fits_into_memory(monkeypatch):
    plan, tried = replace(Plan(**DRY_RUN), doublings=5), []

    def steps(plan, size, contender, model, tokens, count):
        tried.append(tokens)
        if tokens > 800:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return {"tokens": tokens}

    monkeypatch.setattr(training, "steps", steps)
    figures = training.measure_largest(plan, "base", training.Contender(), time.monotonic() + 60)
    assert tried == [400, 800, 1600]
    assert figures["tokens"] == 800
    assert figures["stopped"].startswith("OutOfMemoryError: CUDA out of memory")
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(("end", "largest"), [(100, 3200), (50, 1600)])
def test_the_search_of_the_largest_batch_ends_in_time(monkeypatch, end, largest):
    # If it were killed, its results would be lost.
    plan, clock = replace(Plan(**DRY_RUN), doublings=6), [0.0]

    def steps(plan, size, contender, model, tokens, count):
        clock[0] += tokens / 100
        return {"tokens": tokens}

    monkeypatch.setattr(training, "steps", steps)
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    figures = training.measure_largest(plan, "base", training.Contender(), end)
    assert figures == {"tokens": largest, "stopped": "no time for a larger one"}
    torch.compiler.set_stance("default")
