"""The grapheme-to-phoneme benchmark: every language and seed, kept when it is repeated."""

import json

import pytest
from conftest import run_module

from scripts.benchmarks.g2p import G2PArguments

SHAPE = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=16,decoder_ffn_dim=16"
QUICK = f"--max_steps=2 --use_cpu --config_overrides={SHAPE}"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for language in ("fre", "kor"):
        for split in ("train", "dev", "test"):
            (folder / f"{language}_{split}.tsv").write_text("ab\ta b\nba\tb a\n" * 4)
    return folder


@pytest.mark.slow
def test_all_languages_are_trained_scored_and_kept(data, tmp_path):
    flags = ["--data", data, "--output_dir", "out", "--seeds", 1, "--options", QUICK]
    table = run_module("scripts.benchmarks.g2p", *flags, cwd=tmp_path).stdout
    rows = [line.split(" | ")[0] for line in table.splitlines()]
    assert rows[2:5] == ["| fre", "| kor", "| mean"]
    results = tmp_path / "out/results.json"
    before = results.read_text()
    for run in json.loads(before)["runs"]:
        assert 0 <= run["test WER"] <= 100
    run_module("scripts.benchmarks.g2p", *flags, cwd=tmp_path)
    assert results.read_text() == before


def test_a_language_without_data_is_named(data):
    with pytest.raises(ValueError, match="languages has 'xyz': expected of fre, kor"):
        G2PArguments(str(data), "out", languages=["xyz"])
