"""The Multi30k benchmark: stages of a run, its table and its picture."""

import json
import subprocess

import pytest
from conftest import run_module

from scripts.benchmarks import multi30k
from scripts.benchmarks.multi30k import Multi30kArguments, draw, stage_hours, to_markdown

STAGES = {
    1000: [
        {"bleu": 30.0, "chrf": 50.0, "cpu_hours": 1.0, "hours": 0.5},
        {"bleu": 32.0, "chrf": 54.0, "cpu_hours": 2.0, "hours": 1.0},
    ],
    2000: [{"bleu": 40.0, "chrf": 60.0, "cpu_hours": 2.5, "hours": 1.25}],
}


@pytest.mark.slow
def test_a_run_is_evaluated_at_each_stage_and_its_results_are_kept(
    multi30k_folder, tiny_options, tmp_path
):
    options = f"{tiny_options} --vocab_size=300 --eval_strategy=no"
    flags = ["--data", multi30k_folder, "--output_dir", "out", "--seeds", 1, "--options", options]
    module = "scripts.benchmarks.multi30k"
    run_module(module, *flags, "--updates", 2, cwd=tmp_path)
    table = run_module(module, *flags, "--updates", 2, 4, cwd=tmp_path).stdout
    assert [line.split(" | ")[0] for line in table.splitlines()[2:4]] == ["| 2", "| 4"]
    runs = json.loads((tmp_path / "out/results.json").read_text())["runs"]
    assert [run["row"] for run in runs] == ["2", "4"]
    assert all(run["hours"] > 0 for run in runs)
    assert (tmp_path / "out/multi30k.svg").exists()
    assert len((tmp_path / "out/1/test.output").read_text().splitlines()) == 16


@pytest.fixture
def commands(monkeypatch):
    """Records the commands of the trainings, which return at once."""
    commands = []

    def started(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(multi30k, "score", lambda *_: {})
    return commands


def test_several_processes_train_together(multi30k_folder, commands, tmp_path):
    arguments = Multi30kArguments(str(multi30k_folder), "out", updates=[2], processes=2)
    found = multi30k.run(tmp_path, 1, 2, arguments)
    assert set(found) == {"cpu_hours", "hours"}
    (command,) = commands
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[4:8] == ["--nproc_per_node=2", "-m", "vanilla_transformer", "train"]


def test_options_can_contain_the_seed(multi30k_folder, commands, tmp_path):
    options = "--model_name_or_path=base/{seed} --bf16"
    arguments = Multi30kArguments(str(multi30k_folder), "out", updates=[2], options=options)
    for seed in (1, 2):
        multi30k.run(tmp_path, seed, 2, arguments)
        assert commands[-1][-2:] == [f"--model_name_or_path=base/{seed}", "--bf16"]


def test_a_folder_that_is_trained_further_has_no_model_of_an_earlier_stage(
    multi30k_folder, commands, tmp_path
):
    (tmp_path / "checkpoint-4").mkdir()
    arguments = Multi30kArguments(str(multi30k_folder), "out", updates=[3, 4])
    with pytest.raises(ValueError, match=r"--updates 3: .* is at update 4: choose another"):
        multi30k.run(tmp_path, 1, 3, arguments)
    assert not commands
    multi30k.run(tmp_path, 1, 4, arguments)


def test_hours_include_earlier_stages_of_the_folder(multi30k_folder, tmp_path, monkeypatch):
    scores = {"bleu": 30.0, "chrf": 50.0, "cpu_hours": 1.0, "hours": 0.5}
    runs = [{"row": row, "seed": 1, **scores} for row in ("2", "4", "6")]
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    flags = ["--data", str(multi30k_folder), "--output_dir", str(tmp_path), "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["multi30k", *flags, "--updates", "4"])
    multi30k.main()
    assert (tmp_path / "multi30k.md").read_text().splitlines()[2:] == [
        "| 2 | 1 | 1.00 | 0.50 | 30.0 | 50.0 |",
        "| 4 | 1 | 2.00 | 1.00 | 30.0 | 50.0 |",
    ]


def test_the_table_has_cumulative_hours_and_the_deviation_over_seeds():
    rows = to_markdown(STAGES).splitlines()
    assert rows[2] == "| 1,000 | 2 | 1.50 | 0.75 | 31.0 ± 1.4 | 52.0 ± 2.8 |"
    assert rows[3] == "| 2,000 | 1 | 4.00 | 2.00 | 40.0 | 60.0 |"


def test_hours_of_an_interrupted_stage_are_extrapolated_from_its_last_updates():
    assert stage_hours(3600, begin=2000, done=2000, updates=4000) == 1
    assert stage_hours(3600, begin=2000, done=3000, updates=4000) == 2
    assert stage_hours(36, begin=2000, done=4000, updates=4000) > 0  # only the scores were missing


@pytest.mark.parametrize(("tokenize", "lines"), [("none", 2), ("13a", 1)])
def test_the_picture_shows_the_published_score_if_the_text_is_the_same(tokenize, lines):
    (axes,) = draw(STAGES, tokenize).axes
    assert len(axes.get_lines()) == lines
    assert axes.get_lines()[0].get_xydata().tolist() == [[1.5, 31.0], [4.0, 40.0]]


def test_invalid_options_are_reported(multi30k_folder):
    with pytest.raises(ValueError, match=r"updates=\[4, 2\]: expected positive numbers that rise"):
        Multi30kArguments(str(multi30k_folder), "out", updates=[4, 2])
    with pytest.raises(ValueError, match="processes=0: expected a positive number"):
        Multi30kArguments(str(multi30k_folder), "out", processes=0)
    (multi30k_folder / "val.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a folder with val\.de"):
        Multi30kArguments(str(multi30k_folder), "out")
