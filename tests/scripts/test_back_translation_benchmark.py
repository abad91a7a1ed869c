"""The back-translation benchmark: three models, their texts and their table."""

import json

import pytest
from conftest import run_module
from transformers import AutoTokenizer

from scripts.benchmarks.back_translation import BackTranslationArguments, to_markdown


@pytest.mark.slow
def test_the_rest_is_back_translated_and_added_to_the_pairs(
    multi30k_folder, tiny_options, tmp_path
):
    flags = ["--data", multi30k_folder, "--output_dir", "out"]
    flags += ["--pairs", 6, "--updates", 4, "--every", 2]
    flags += ["--method", "sampling", "--options", f"{tiny_options} --vocab_size=300"]
    module = "scripts.benchmarks.back_translation"
    table = run_module(module, *flags, cwd=tmp_path).stdout
    rows = [line.split(" | ")[0] for line in table.splitlines()]
    assert rows[2:5] == ["| reverse", "| pairs", "| back translation"]
    out = tmp_path / "out"
    sizes = {name: len((out / name).read_text().split("\n")) - 1 for name in (
        "pairs.en", "pairs.de", "rest.de", "synthetic.en", "back_translation/test.output",
    )}  # fmt: skip
    assert list(sizes.values()) == [6, 6, 10, 10, 16]
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [run["row"] for run in runs] == ["reverse", "pairs", "back_translation"]
    tokenizer = AutoTokenizer.from_pretrained(out / "back_translation")
    assert "<BT>" in tokenizer.get_vocab()


def test_the_table_has_a_row_for_each_model():
    runs = {
        row: {"bleu": score, "chrf": 2 * score}
        for row, score in (("reverse", 20.0), ("pairs", 21.0), ("back_translation", 25.0))
    }
    assert to_markdown(runs).splitlines()[2:] == [
        "| reverse | 20.0 | 40.0 |",
        "| pairs | 21.0 | 42.0 |",
        "| back translation | 25.0 | 50.0 |",
    ]


def test_missing_text_is_reported(multi30k_folder):
    (multi30k_folder / "val.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a folder with val\.de"):
        BackTranslationArguments(str(multi30k_folder), "out")
