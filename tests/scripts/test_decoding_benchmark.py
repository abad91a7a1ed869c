"""The decoding benchmark: a command for each row, and a table with p-values."""

import json

import pytest
from conftest import run_module

from scripts.benchmarks.decoding import DecodingArguments, commands, to_markdown


@pytest.fixture
def files(tmp_path):
    for side, text in (("en", "a b\nb a\n"), ("de", "c d\nd c\n")):
        (tmp_path / f"test.{side}").write_text(text)
    return {"source": str(tmp_path / "test.en"), "target": str(tmp_path / "test.de")}


@pytest.mark.slow
def test_every_row_is_decoded_once_and_compared(checkpoint, files, tmp_path):
    flags = [f"--{name}={path}" for name, path in files.items()]
    flags += ["--model", checkpoint, checkpoint, "--reverse_model", checkpoint]
    flags += ["--candidates", 4, "--utilities", "bleu", "--output_dir", "out"]
    flags += ["--options=--max_new_tokens=6"]
    module = "scripts.benchmarks.decoding"
    table = run_module(module, *flags, cwd=tmp_path).stdout
    rows = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert rows == [
        "| beam 5", "| greedy", "| ensemble 2 beam 5", "| mbr bleu 4 samples", "| mbr bleu beam 4",
        "| reverse model beam 4",
    ]  # fmt: skip
    out = tmp_path / "out"
    one, two = ((out / f"{name}.txt").read_text() for name in ("beam_5", "ensemble_2_beam_5"))
    assert one == two
    before = (out / "results.json").read_text()
    more = run_module(module, *flags, "--utilities", "bleu", "chrf", cwd=tmp_path).stdout
    assert len(more.splitlines()) == len(table.splitlines()) + 2
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert runs[:6] == json.loads(before)["runs"]


def test_each_row_has_its_options(files):
    rows = commands(DecodingArguments(["a"], **files, output_dir="out", options="--dtype=bfloat16"))
    assert list(rows) == [
        "beam_5", "greedy", "mbr_chrf_32_samples", "mbr_chrf_beam_32", "mbr_bleu_32_samples",
        "mbr_bleu_beam_32",
    ]  # fmt: skip
    assert all(flags[-1] == "--dtype=bfloat16" for flags in rows.values())
    models = commands(DecodingArguments(["a", "b"], **files, output_dir="out", reverse_model="c"))
    assert models["ensemble_2_beam_5"][1:4] == ["--model", "a", "b"]
    some = DecodingArguments(["a", "b"], **files, output_dir="out", rows=["beam_5"])
    assert list(commands(some)) == ["beam_5", "ensemble_2_beam_5"]
    assert models["beam_5"][1:3] == ["--model", "a"]
    some = DecodingArguments(["a"], **files, output_dir="out", rows=["greedy"])
    assert list(commands(some)) == ["beam_5", "greedy"]  # p-values and times are relative to beams
    assert "b" not in models["beam_5"]
    assert "--reverse_model=c" in models["reverse_model_beam_32"]


def test_the_table_compares_with_the_first_row():
    scores = {
        "beam_5": {"bleu": 40.0, "chrf": 60.0},
        "greedy": {"bleu": 39.0, "bleu_p": 1 / 10001, "chrf": 59.0, "chrf_p": 0.251},
    }
    assert to_markdown(scores, {"beam_5": 2.0, "greedy": 1.0}).splitlines()[2:] == [
        "| beam 5 | 40.00 |  | 60.00 |  | 1.0 |",
        "| greedy | 39.00 | 0.0001 | 59.00 | 0.25 | 0.5 |",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 1}, "candidates=1: expected at least 2"),
        ({"num_beams": 1}, "num_beams=1: expected at least 2"),
        ({"utilities": ["ter"]}, "ter"),
        ({"rows": ["beam_4"]}, "rows='beam_4': in none of beam_5, greedy, mbr_chrf_32_samples"),
    ],
)
def test_options_that_no_row_can_use_are_refused_before_decoding(files, options, message):
    with pytest.raises(ValueError, match=message):
        DecodingArguments(["a"], **files, output_dir="out", **options)


def test_files_that_are_not_parallel_are_refused(files, tmp_path):
    (tmp_path / "test.de").write_text("c d\n")
    with pytest.raises(ValueError, match=r"test\.de"):
        DecodingArguments(["a"], **files, output_dir="out")
