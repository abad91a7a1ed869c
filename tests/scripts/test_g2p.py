"""The grapheme-to-phoneme benchmark: every language and seed, with results kept for the next
run."""

import json
from importlib.util import find_spec
from itertools import product

import pytest
from conftest import run_module

from scripts.benchmarks.g2p import MEASURES, G2PArguments, to_markdown


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for language in ("fre", "kor"):
        for split in ("train", "dev", "test"):
            (folder / f"{language}_{split}.tsv").write_text("ab\ta b\nba\tb a\n" * 4)
    return folder


@pytest.mark.slow
def test_all_languages_are_trained_scored_and_kept(data, tiny_options, tmp_path):
    options = f"{tiny_options} --max_steps=2"
    flags = ["--data", data, "--output_dir", "out", "--seeds", 1, 2, "--options", options]
    table = run_module("scripts.benchmarks.g2p", *flags, cwd=tmp_path).stdout
    rows = [line.split(" | ")[0] for line in table.splitlines()]
    assert rows[2:5] == ["| fre", "| kor", "| mean"]
    results = tmp_path / "out/results.json"
    before = results.read_text()
    runs = json.loads(before)["runs"]
    assert [run["seed"] for run in runs] == [1, 1, 2, 2, "1 2", "1 2"]
    assert all(0 <= run["test WER"] <= 100 for run in runs)
    assert len((tmp_path / "out/fre-1/ensemble.output").read_text().splitlines()) == 8
    run_module("scripts.benchmarks.g2p", *flags, cwd=tmp_path)
    assert results.read_text() == before


def test_scores_without_models_have_no_ensemble(data, tmp_path):
    """Scores of earlier runs without models are shown unchanged."""
    runs = [
        {"row": row, "seed": seed, **dict.fromkeys(MEASURES, 50.0)}
        for row, seed in product(("fre", "kor"), (1, 2))
    ]
    results = json.dumps({"config": "g2p", "options": "", "runs": runs})
    (tmp_path / "results.json").write_text(results)
    flags = ["--data", data, "--output_dir", tmp_path, "--seeds", 1, 2]
    table = run_module("scripts.benchmarks.g2p", *flags, cwd=tmp_path).stdout
    assert table.splitlines()[-1] == "| mean |  | 50.00 | 50.00 | 50.00 |"
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == runs


def test_the_table_has_means_of_seeds_and_languages_and_the_ensembles():
    def rates(*words):
        return [dict(zip(MEASURES, (9.0, word, 1.0), strict=True)) for word in words]

    runs = {"fre": rates(6.0, 8.0), "kor": rates(20.0), "vie": []}
    lines = to_markdown(runs, {"fre": rates(5.0), "kor": [], "vie": []}).splitlines()
    assert lines[2:] == [
        "| fre | 2 | 9.00 ± 0.00 | 7.00 ± 1.41 | 1.00 ± 0.00 | 5.00 | 1.00 |",
        "| kor | 1 | 9.00 | 20.00 | 1.00 |  |  |",
        "| mean |  | 9.00 | 13.50 | 1.00 |  |  |",
    ]
    assert "ensemble" not in to_markdown({"kor": rates(20.0)}, {"kor": []})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fairseq") is None, reason="fairseq is not installed")
def test_fairseq_runs_the_same_task_and_resumes(data, tmp_path):
    flags = ["--data", data, "--output_dir", "out", "--languages", "fre", "--d_model", 16]
    written = []
    for max_steps in (1, 2):
        options = [*flags, "--save_epochs", 1, "--max_steps", max_steps]
        table = run_module("scripts.benchmarks.g2p_fairseq", *options, cwd=tmp_path).stdout
        assert "| fre | 1 |" in table
        written.append((tmp_path / "out/fre-1/checkpoint1.pt").stat().st_mtime_ns)
        (tmp_path / "out/results.json").unlink()
    assert written[0] == written[1]
    assert (tmp_path / "out/fre-1/checkpoint2.pt").exists()


def test_a_language_without_data_is_reported(data):
    with pytest.raises(ValueError, match="languages has 'xyz': expected of fre, kor"):
        G2PArguments(str(data), "out", languages=["xyz"])
