"""The benchmark that counts operations as on a GPU."""

import json
from itertools import islice

import torch
from conftest import run_module

from scripts.benchmarks.operations import GPU, count_on_gpu, on_gpu, training_rows
from scripts.benchmarks.peers import Size


def test_code_in_the_context_uses_the_code_paths_of_a_gpu():
    numbers = torch.arange(4.0)
    with on_gpu():
        assert numbers.device == GPU
        assert numbers.is_cuda
        assert not numbers.is_cpu
        moved = torch.ones(4, device="cuda") + numbers.to(numbers.device)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
    assert moved.tolist() == [1, 2, 3, 4]
    assert moved.device.type == "cpu"
    assert not torch.is_autocast_enabled("cuda")


def test_views_and_allocations_do_not_count_and_reading_a_result_counts_as_sync():
    numbers = torch.arange(4.0)

    def run():
        torch.empty(3)
        return (numbers.view(2, 2).t() * 2 + 1).sum().item(), numbers.nonzero(), numbers.tolist()

    assert count_on_gpu(run) == {"operations": 4, "syncs": 3}


def test_our_steps_have_fewer_operations_and_syncs_do_not_grow_with_layers(tmp_path):
    flags = ["--layers", 2, "--vocab_size", 100, "--sentences", 8, "--output_dir", "found"]
    printed = run_module("scripts.benchmarks.operations", *flags, cwd=tmp_path).stdout
    rows = json.loads((tmp_path / "found/operations.json").read_text())
    assert f"| training | ours | {rows[0]['operations']} | {rows[0]['syncs']} |" in printed
    found = {(row["step"], row["what"]): row for row in rows}
    for (step, what), row in found.items():
        if what == "ours":
            assert row["operations"] < found[step, "marian"]["operations"], step
    for fewer in islice(training_rows(Size(64, 128, 2, layers=1, vocab_size=100), 8), 2):
        more = found["training", fewer["what"]]
        assert fewer["syncs"] == more["syncs"] < fewer["operations"] < more["operations"]
