"""The small tasks, and the benchmark that trains on them with the default options."""

import json

import pytest
from conftest import run_module

from scripts.benchmarks.out_of_the_box import TASKS, to_markdown
from scripts.benchmarks.tasks import scan, scan_commands, symbols
from vanilla_transformer.data.phrases import TARGET_LANGUAGES


def test_scan_has_all_sentences_of_its_grammar():
    """Lake and Baroni (2018): 20,910 commands; examples of figure 1, and the longest output."""
    commands = dict(scan_commands())
    assert len(commands) == 20_910
    assert commands["jump left"] == "I_TURN_LEFT I_JUMP"
    assert commands["jump around right"] == " ".join(["I_TURN_RIGHT I_JUMP"] * 4)
    assert commands["turn left twice"] == "I_TURN_LEFT I_TURN_LEFT"
    assert commands["jump thrice"] == "I_JUMP I_JUMP I_JUMP"
    assert commands["jump opposite left after walk around left"] == " ".join(
        ["I_TURN_LEFT I_WALK"] * 4 + ["I_TURN_LEFT I_TURN_LEFT I_JUMP"]
    )
    assert max(len(actions.split()) for actions in commands.values()) == 48


def test_scans_simple_split_has_the_published_size_and_no_overlap():
    task = scan()
    assert (len(task.train), len(task.test)) == (16_728, 4182)
    assert not set(task.train) & set(task.test)


def test_sequences_of_symbols_in_the_test_set_are_not_in_the_training_set():
    task = symbols(sorted)
    assert (len(task.train), len(task.test)) == (20_000, 1000)
    assert not set(task.train) & set(task.test)
    assert all(sorted(source.split()) == target.split() for source, target in task.test)


def test_the_phrases_task_has_three_languages():
    languages = [name.removeprefix("phrases_") for name in TASKS if name.startswith("phrases_")]
    assert len(languages) == 3
    assert set(languages) <= set(TARGET_LANGUAGES)


def test_the_table_shows_each_seed_and_how_many_warned():
    runs = [
        {"exact_match": score, "bleu": 0.0, "ignores": late}
        for score, late in ((90.0, 0), (100.0, 2))
    ]
    lines = to_markdown({"scan": runs, "sort": []}).splitlines()
    assert lines[2:] == ["| scan | exact_match | 90.0, 100.0 | 95.0 ± 7.1 | 1 of 2 |"]


@pytest.mark.slow
def test_a_run_starts_training_with_the_default_options(tmp_path):
    shape = "encoder_layers=1,decoder_layers=1,d_model=8,head_dim=2"
    words = [
        "--tasks", "reverse", "--seeds", 1, "--max_steps", 2, "--output_dir", "runs",
        "--options", f"--config_overrides={shape} --max_train_samples=200 "
        "--max_predict_samples=8 --vocab_size=300 --use_cpu",
    ]  # fmt: skip
    run_module("scripts.benchmarks.out_of_the_box", *words, cwd=tmp_path)
    (run,) = json.loads((tmp_path / "runs/results.json").read_text())["runs"]
    assert (run["row"], run["seed"]) == ("reverse", 1)
    assert 0 <= run["exact_match"] <= 100
    assert "| reverse |" in (tmp_path / "runs/out_of_the_box.md").read_text()


def test_an_unknown_task_is_refused(tmp_path):
    words = ["--tasks", "cogs", "--output_dir", "runs"]
    process = run_module("scripts.benchmarks.out_of_the_box", *words, cwd=tmp_path, check=False)
    assert "--tasks cogs: expected one of scan; reverse" in process.stderr
