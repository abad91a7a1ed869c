"""The scores that benchmarks keep in results.json."""

import json
from types import SimpleNamespace

import pytest

from scripts.reports import Results


@pytest.fixture
def arguments(tmp_path):
    return SimpleNamespace(output_dir=tmp_path / "scores", options="")


def test_a_finished_run_is_not_repeated(arguments):
    Results(arguments, "options").run("base", 1, lambda: {"bleu": 39.0})
    Results(arguments, "options").run("base", 1, lambda: pytest.fail("ran again"))
    kept = json.loads((arguments.output_dir / "results.json").read_text())
    assert kept == {"options": "", "runs": [{"row": "base", "seed": 1, "bleu": 39.0}]}


def test_two_processes_keep_each_others_runs(arguments):
    first, second = (Results(arguments, "options") for _ in range(2))

    def meanwhile():
        second.run("base", 2, lambda: {"bleu": 38.0})
        return {"bleu": 39.0}

    first.run("base", 1, meanwhile)
    second.run("base", 1, lambda: pytest.fail("ran again"))
    for results in (first, second, Results(arguments, "options")):
        assert [run["bleu"] for run in results.of("base", [1, 2])] == [38.0, 39.0]


def test_a_run_that_fails_leaves_what_was_kept(arguments):
    results = Results(arguments, "options")
    results.run("base", 1, lambda: {"bleu": 39.0})
    with pytest.raises(ZeroDivisionError):
        results.run("base", 2, lambda: {"bleu": 1 / 0})
    assert Results(arguments, "options").of("base", [1, 2]) == results.of("base", [1])


def test_a_folder_with_different_settings_is_refused(arguments):
    Results(arguments, "options").run("base", 1, lambda: {"bleu": 39.0})
    arguments.options = "--seed 2"
    with pytest.raises(ValueError, match=r"is of --options , not --seed 2: choose another"):
        Results(arguments, "options")
