"""The scores that benchmarks keep in results.json."""

import json
from types import SimpleNamespace

import pytest

from scripts.benchmarks import back_translation, decoding, multi30k
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


def test_a_failing_run_keeps_earlier_results(arguments):
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


def test_a_file_without_a_newer_setting_adopts_the_current_value(arguments):
    Results(arguments, "options").run("base", 1, lambda: {"bleu": 39.0})
    arguments.data = "raw"
    Results(arguments, "data", "options").run("base", 2, lambda: {"bleu": 38.0})
    arguments.data = "tokenized"
    with pytest.raises(ValueError, match="is of --data raw, not tokenized: choose another"):
        Results(arguments, "data", "options")


@pytest.mark.parametrize("benchmark", [back_translation, multi30k])
def test_scores_for_different_data_are_not_reused(
    benchmark, multi30k_folder, tmp_path, monkeypatch
):
    """As with the tokenized text of Multi30k after the raw one."""
    (tmp_path / "results.json").write_text('{"data": "elsewhere", "runs": []}')
    flags = ["--data", str(multi30k_folder), "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["benchmark", *flags])
    with pytest.raises(ValueError, match="is of --data elsewhere, not "):
        benchmark.main()


@pytest.mark.parametrize("benchmark", [back_translation, decoding])
def test_files_of_another_seed_are_not_overwritten(
    benchmark, multi30k_folder, tmp_path, monkeypatch
):
    """Scores of one seed would be computed from texts, or a model, of the other."""
    (tmp_path / "results.json").write_text('{"seed": 7, "runs": []}')
    text = str(multi30k_folder / "val.en")
    flags = {
        back_translation: ["--data", str(multi30k_folder)],
        decoding: ["--model", "model", "--source", text, "--target", text],
    }
    flags = [*flags[benchmark], "--output_dir", str(tmp_path), "--seed", "8"]
    monkeypatch.setattr("sys.argv", ["benchmark", *flags])
    with pytest.raises(ValueError, match="is of --seed 7, not 8: choose another"):
        benchmark.main()
