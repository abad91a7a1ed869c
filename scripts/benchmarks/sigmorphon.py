"""Words and their phones: shared task 1 of SIGMORPHON 2020, https://github.com/sigmorphon/2020.

A folder contains LANG_train.tsv, LANG_dev.tsv and LANG_test.tsv: a word, a tab and its phones, with
spaces between them.
"""

from collections.abc import Sequence
from pathlib import Path

from vanilla_transformer.inference.metrics import score_translations

WORDS, PHONES = "test WER", "test PER"
METRICS = {WORDS: "ser", PHONES: "per"}  # a word is a line


def languages_of(folder: str | Path) -> list[str]:
    """The languages for which the folder has a training set."""
    ending = "_train.tsv"
    return sorted(path.name.removesuffix(ending) for path in Path(folder).glob(f"*{ending}"))


def read(folder: str | Path, language: str, split: str) -> list[tuple[str, str]]:
    """Words and their phones."""
    text = Path(folder, f"{language}_{split}.tsv").read_text(encoding="utf-8")
    return [(word, phones) for word, phones in (line.split("\t") for line in text.splitlines())]


def error_rates(
    found: Sequence[str], phones: Sequence[str], rates: Sequence[str] = (WORDS, PHONES)
) -> dict[str, float]:
    """Error rates of words and of phones, %."""
    references = [" ".join(each.split()) for each in phones]
    metrics = [METRICS[rate] for rate in rates]
    scores = score_translations(found, references, metrics=metrics)
    return {rate: scores[METRICS[rate]] for rate in rates}
