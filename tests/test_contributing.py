"""CONTRIBUTING.md is up to date with the code."""

import re

import pytest

from scripts.structure import DOCUMENT, REPOSITORY, purpose, with_structure

MODULES = sorted((REPOSITORY / "vanilla_transformer").rglob("*.py"))
TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_the_structure_is_up_to_date_with_the_code():
    assert with_structure(TEXT) == TEXT, "run `python -m scripts.structure --write`"


def test_every_file_it_mentions_exists():
    names = re.findall(r"`([\w./]+/[\w.]+)`", TEXT)
    assert len(names) > 10
    for name in names:
        roots = (REPOSITORY, REPOSITORY / "vanilla_transformer")
        assert any((root / name).exists() for root in roots), name


def test_the_path_of_a_batch_has_ten_steps():
    walk = TEXT.partition("## How a batch is processed")[2].partition("## ")[0]
    assert re.findall(r"^\d+(?=\.)", walk, re.MULTILINE) == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "vanilla_transformer").rglob("*.py")), ids=str
)
def test_every_module_has_a_description(path):
    assert purpose(path)
