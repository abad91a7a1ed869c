"""The built-in data set: what its phrases look like and what its splits guarantee."""

import os
import subprocess
import sys
import unicodedata
from collections import defaultdict
from datetime import date, time
from itertools import islice
from string import Formatter
from typing import Any

import pytest

from vanilla_transformer.data import phrases
from vanilla_transformer.data.phrases import (
    KINDS,
    SPLITS,
    TARGET_LANGUAGES,
    TEMPLATES,
    Combination,
    Phrase,
    iter_phrases,
    load_phrases,
)

TRAIN_SIZE, TEST_SIZE = 8_000, 300


@pytest.fixture(scope="module")
def train() -> list[tuple[Combination, Phrase]]:
    return list(islice(phrases._iter_combinations("de", "train", 0), TRAIN_SIZE))


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[tuple[Combination, Phrase]]]:
    return {
        split: list(islice(phrases._iter_combinations("de", split, 0), TEST_SIZE))
        for split in ("validation", "test")
    }


@pytest.fixture(scope="module")
def in_all_languages() -> dict[str, list[Phrase]]:
    return {
        language: list(iter_phrases(1_000, target_language=language, seed=7))
        for language in TARGET_LANGUAGES
    }


def translate(english: str, language: str, **slots: Any) -> tuple[str, str]:
    """Fills the template whose English text is `english` with `(value, style)` for each slot."""
    template = next(template for template in TEMPLATES if template.en == english)
    values = [(slot, slot.rstrip("2"), value, style) for slot, (value, style) in slots.items()]
    return (
        phrases._write(template.en, values, "en"),
        phrases._write(getattr(template, language), values, language),
    )


# Determinism ------------------------------------------------------------------------------------


def test_same_arguments_give_the_same_phrases() -> None:
    assert list(iter_phrases(200, seed=3)) == list(iter_phrases(200, seed=3))


def test_smaller_size_is_a_prefix_of_a_larger_one() -> None:
    assert list(iter_phrases(50)) == list(iter_phrases(120))[:50]


def test_a_different_seed_gives_different_phrases() -> None:
    assert list(iter_phrases(50, seed=1)) != list(iter_phrases(50, seed=2))


def test_languages_share_the_english_side(in_all_languages: dict[str, list[Phrase]]) -> None:
    sources = [[phrase["source"] for phrase in part] for part in in_all_languages.values()]
    assert all(part == sources[0] for part in sources)


def test_a_fresh_process_gives_the_same_phrases() -> None:
    # The file is run by itself: importing the package takes seconds and adds nothing here.
    code = (
        f"import runpy; module = runpy.run_path({phrases.__file__!r});"
        "print(ascii(list(module['iter_phrases'](300, target_language='fr', seed=5))))"
    )
    here = ascii(list(iter_phrases(300, target_language="fr", seed=5)))
    for hash_seed in ("1", "2"):
        fresh = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert fresh.stdout.strip() == here


def test_phrases_are_made_one_at_a_time() -> None:
    assert next(iter(iter_phrases(10**12))) == next(iter(iter_phrases(1)))


# Splits -----------------------------------------------------------------------------------------


def test_no_combination_of_values_is_in_two_splits(
    train: list[tuple[Combination, Phrase]],
    held_out: dict[str, list[tuple[Combination, Phrase]]],
) -> None:
    def combinations(part: list[tuple[Combination, Phrase]]) -> set[frozenset[Any]]:
        return {frozenset(combination) for combination, _ in part}

    test, validation = combinations(held_out["test"]), combinations(held_out["validation"])
    assert combinations(train).isdisjoint(test | validation)
    assert test.isdisjoint(validation)


def test_the_order_of_the_values_does_not_change_the_split() -> None:
    for hour in range(200):
        forth = (("count", hour), ("time", time(8, 30)))
        assert phrases._split_of(forth) == phrases._split_of(forth[::-1])


def test_two_per_cent_are_held_out() -> None:
    splits = [phrases._split_of((("count", value),)) for value in range(20_000)]
    assert splits.count("test") / len(splits) == pytest.approx(0.01, rel=0.25)
    assert splits.count("validation") / len(splits) == pytest.approx(0.01, rel=0.25)
    assert set(splits) == set(SPLITS)


def test_no_phrase_of_another_split_is_in_train(
    train: list[tuple[Combination, Phrase]],
    held_out: dict[str, list[tuple[Combination, Phrase]]],
) -> None:
    trained = {(phrase["source"], phrase["target"]) for _, phrase in train}
    for part in held_out.values():
        assert not any((phrase["source"], phrase["target"]) in trained for _, phrase in part)


@pytest.mark.parametrize("kind", ["country", "language"])
def test_every_name_in_the_test_split_is_in_the_training_split(
    kind: str,
    train: list[tuple[Combination, Phrase]],
    held_out: dict[str, list[tuple[Combination, Phrase]]],
) -> None:
    def names(part: list[tuple[Combination, Phrase]]) -> set[str]:
        return {value for combination, _ in part for name, value in combination if name == kind}

    assert names(held_out["test"])
    assert names(held_out["test"]) <= names(train)


def test_country_and_language_names_are_never_a_whole_phrase() -> None:
    for slots in phrases._SLOTS:
        kinds = [kind for _, kind in slots]
        assert kinds not in (["country"], ["language"])


# One source, one target -------------------------------------------------------------------------


def test_a_source_has_one_target(train: list[tuple[Combination, Phrase]]) -> None:
    targets = defaultdict(set)
    for _, phrase in train:
        targets[phrase["source"]].add(phrase["target"])
    assert max(map(len, targets.values())) == 1


@pytest.mark.parametrize("language", TARGET_LANGUAGES)
@pytest.mark.parametrize("kind", ["date", "weekday_date", "month_day", "month", "time"])
def test_styles_with_the_same_english_text_have_the_same_target(kind: str, language: str) -> None:
    targets = defaultdict(set)
    for month in range(1, 13):
        for day in (1, 5, 12):
            value = time(month, day) if kind == "time" else date(2005, month, day)
            for style in KINDS[kind].styles:
                english = phrases._render(kind, value, style, "en")
                targets[english].add(phrases._render(kind, value, style, language))
    assert all(len(alternatives) == 1 for alternatives in targets.values())


def test_a_template_has_the_same_slots_in_all_languages() -> None:
    def slots(text: str) -> list[str]:
        return sorted(slot for _, slot, _, _ in Formatter().parse(text) if slot)

    for template in TEMPLATES:
        assert all(slots(text) == slots(template.en) for text in template), template.en


def test_templates_have_different_english_texts() -> None:
    assert len({template.en for template in TEMPLATES}) == len(TEMPLATES)


def test_most_phrases_are_different(train: list[tuple[Combination, Phrase]]) -> None:
    assert len({phrase["source"] for _, phrase in train}) > 0.97 * len(train)


# Text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", TARGET_LANGUAGES)
def test_text_is_nfc_with_plain_single_spaces(
    language: str, in_all_languages: dict[str, list[Phrase]]
) -> None:
    for phrase in in_all_languages[language]:
        for text in (phrase["source"], phrase["target"]):
            assert unicodedata.is_normalized("NFC", text)
            assert " ".join(text.split()) == text
            assert all(unicodedata.category(char)[0] != "C" for char in text)


@pytest.mark.parametrize("language", TARGET_LANGUAGES)
def test_no_phrase_contains_a_raw_key_of_a_table(
    language: str, in_all_languages: dict[str, list[Phrase]]
) -> None:
    for phrase in in_all_languages[language]:
        for text in (phrase["source"], phrase["target"]):
            assert not any(raw in text for raw in ("{", "}", "duration-", "length-", "mass-"))


@pytest.mark.parametrize(
    ("kind", "value", "style", "expected"),
    [
        pytest.param(
            "date",
            date(2019, 6, 5),
            "long",
            {
                "en": "June 5, 2019",
                "de": "5. Juni 2019",
                "fr": "5 juin 2019",
                "es": "5 de junio de 2019",
                "it": "5 giugno 2019",
                "nl": "5 juni 2019",
            },
            id="long date",
        ),
        pytest.param(
            "date",
            date(2031, 1, 1),
            "yMMMd",
            {
                "en": "Jan 1, 2031",
                "de": "1. Jan. 2031",
                "fr": "1er janv. 2031",
                "es": "1 ene 2031",
                "it": "1º gen 2031",
                "nl": "1 jan 2031",
            },
            id="first of a month",
        ),
        pytest.param(
            "date",
            date(2020, 5, 9),
            "yMMMd",
            {
                "en": "May 9, 2020",
                "de": "9. Mai 2020",
                "fr": "9 mai 2020",
                "es": "9 de mayo de 2020",
                "it": "9 maggio 2020",
                "nl": "9 mei 2020",
            },
            id="May is not abbreviated",
        ),
        pytest.param(
            "weekday_date",
            date(2019, 6, 5),
            "full",
            {
                "en": "Wednesday, June 5, 2019",
                "de": "Mittwoch, 5. Juni 2019",
                "fr": "mercredi 5 juin 2019",
                "es": "miércoles, 5 de junio de 2019",
                "it": "mercoledì 5 giugno 2019",
                "nl": "woensdag 5 juni 2019",
            },
            id="full date",
        ),
        pytest.param(
            "time",
            time(15, 7),
            "",
            {"en": "3:07 PM", **dict.fromkeys(TARGET_LANGUAGES, "15:07")},
            id="time of day",
        ),
        pytest.param(
            "money",
            (123450, "EUR"),
            "symbol",
            {
                "en": "€1,234.50",
                "de": "1.234,50 €",
                "fr": "1 234,50 €",
                "es": "1.234,50 €",
                "it": "1.234,50 €",
                "nl": "€ 1.234,50",
            },
            id="symbol of a currency",
        ),
        pytest.param(
            "money",
            (2500, "GBP"),
            "name",
            {
                "en": "25 British pounds",
                "de": "25 Britische Pfund",
                "fr": "25 livres sterling",
                "es": "25 libras esterlinas",
                "it": "25 sterline britanniche",
                "nl": "25 Britse pond",
            },
            id="name of a currency",
        ),
        pytest.param(
            "duration",
            ((3, "hour"), (20, "minute")),
            "",
            {
                "en": "3 hours and 20 minutes",
                "de": "3 Stunden und 20 Minuten",
                "fr": "3 heures et 20 minutes",
                "es": "3 horas y 20 minutos",
                "it": "3 ore e 20 minuti",
                "nl": "3 uur en 20 minuten",
            },
            id="duration",
        ),
        pytest.param(
            "past",
            (-3, "day"),
            "",
            {
                "en": "3 days ago",
                "de": "vor 3 Tagen",
                "fr": "il y a 3 jours",
                "es": "hace 3 días",
                "it": "3 giorni fa",
                "nl": "3 dagen geleden",
            },
            id="relative time",
        ),
        pytest.param(
            "distance",
            (25, "length-kilometer"),
            "long",
            {
                "en": "2.5 kilometers",
                "de": "2,5 Kilometer",
                "fr": "2,5 kilomètres",
                "es": "2,5 kilómetros",
                "it": "2,5 chilometri",
                "nl": "2,5 kilometer",
            },
            id="unit in full",
        ),
        pytest.param(
            "percent",
            125,
            "",
            {
                "en": "12.5%",
                "de": "12,5 %",
                "fr": "12,5 %",
                "es": "12,5 %",
                "it": "12,5%",
                "nl": "12,5%",
            },
            id="percentage",
        ),
        pytest.param(
            "cardinal",
            1123,
            "",
            {
                "en": "one thousand, one hundred and twenty-three",
                "de": "eintausendeinhundertdreiundzwanzig",
                "fr": "mille cent vingt-trois",
                "es": "mil ciento veintitrés",
                "it": "millecentoventitré",
                "nl": "duizend honderddrieëntwintig",
            },
            id="cardinal",
        ),
        pytest.param(
            "ordinal",
            80,
            "",
            {
                "en": "eightieth",
                "de": "achtzigste",
                "fr": "quatre-vingtième",
                "es": "octogésimo",
                "it": "ottantesimo",
                "nl": "tachtigste",
            },
            id="ordinal",
        ),
        pytest.param(
            "year",
            1905,
            "",
            {
                "en": "nineteen oh-five",
                "de": "neunzehnhundertfünf",
                "fr": "mille neuf cent cinq",
                "es": "mil novecientos cinco",
                "it": "millenovecentocinque",
                "nl": "negentienhonderdvijf",
            },
            id="year",
        ),
        pytest.param(
            "country",
            "DE",
            "",
            {
                "en": "Germany",
                "de": "Deutschland",
                "fr": "Allemagne",
                "es": "Alemania",
                "it": "Germania",
                "nl": "Duitsland",
            },
            id="country",
        ),
        pytest.param(
            "language",
            "zh",
            "",
            {
                "en": "Chinese",
                "de": "Chinesisch",
                "fr": "chinois",
                "es": "chino",
                "it": "cinese",
                "nl": "Chinees",
            },
            id="language",
        ),
    ],
)
def test_values_follow_the_locale(
    kind: str, value: Any, style: str, expected: dict[str, str]
) -> None:
    shown = {language: phrases._render(kind, value, style, language) for language in expected}
    assert shown == expected


@pytest.mark.parametrize(
    ("kind", "value", "language", "expected"),
    [
        ("ordinal", 12, "es", "duodécimo"),
        ("ordinal", 40, "es", "cuadragésimo"),
        ("cardinal", 3, "it", "tre"),
        ("cardinal", 343, "it", "trecentoquarantatré"),
        ("year", 1918, "it", "millenovecentodiciotto"),
        ("year", 2021, "nl", "tweeduizend eenentwintig"),
        ("year", 2001, "en", "two thousand and one"),
    ],
)
def test_words_for_numbers_have_the_usual_spelling(
    kind: str, value: int, language: str, expected: str
) -> None:
    assert phrases._render(kind, value, "", language) == expected


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("de", "Der Zug fährt am 8. Juni 2019 um 09:05 Uhr ab."),
        ("fr", "Le train part le 8 juin 2019 à 09:05."),
        ("es", "El tren sale el 8 de junio de 2019 a las 9:05."),
        ("it", "Il treno parte l’8 giugno 2019 alle 09:05."),
        ("nl", "De trein vertrekt op 8 juni 2019 om 09:05 uur."),
    ],
)
def test_sentences_are_translated(language: str, expected: str) -> None:
    source, target = translate(
        "The train leaves on {date} at {time}.",
        language,
        date=(date(2019, 6, 8), "long"),
        time=(time(9, 5), ""),
    )
    assert source == "The train leaves on June 8, 2019 at 9:05 AM."
    assert target == expected


def test_full_stop_merges_with_that_of_an_abbreviation() -> None:
    _, target = translate(
        "The holidays last from {month_day} to {month_day2}.",
        "fr",
        month_day=(date(2000, 12, 20), "MMMd"),
        month_day2=(date(2000, 1, 3), "MMMd"),
    )
    assert target == "Les vacances durent du 20 déc. au 3 janv."


@pytest.mark.parametrize(
    ("ordinal", "expected"),
    [(3, "Il terzo"), (8, "L’ottavo"), (11, "L’undicesimo"), (80, "L’ottantesimo")],
)
def test_italian_elides_the_article_before_a_vowel(ordinal: int, expected: str) -> None:
    _, target = translate(
        "The {ordinal} chapter has {count} words.", "it", ordinal=(ordinal, ""), count=(1200, "")
    )
    assert target == f"{expected} capitolo conta 1.200 parole."


def test_phrases_are_short(train: list[tuple[Combination, Phrase]]) -> None:
    lengths = [len(phrase["target"]) for _, phrase in train]
    assert sum(lengths) / len(lengths) < 50
    assert max(lengths) < 120


# Arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [iter_phrases, load_phrases])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1, "target_language": "pt"}, "target_language='pt': expected one of de, fr"),
        ({"size": 1, "split": "dev"}, "split='dev': expected one of train, valid"),
        ({"size": 0}, "size=0: expected a positive integer"),
        ({"size": 2.5}, "size=2.5: expected a positive"),
        ({"size": True}, "size=True: expected a positive"),
        ({"size": 1, "seed": -1}, "seed=-1: expected an integer from 0"),
    ],
)
def test_an_invalid_argument_is_reported(
    function: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(**arguments)


# The data set -----------------------------------------------------------------------------------


def test_data_set_is_a_memory_mapped_file_of_the_phrases(tmp_path: Any) -> None:
    data = load_phrases(64, target_language="nl", split="validation", seed=2, cache_dir=tmp_path)
    assert data.cache_files
    assert all(str(tmp_path) in file["filename"] for file in data.cache_files)
    assert str(data.split) == "validation"
    expected = iter_phrases(64, target_language="nl", split="validation", seed=2)
    assert list(data) == list(expected)


@pytest.mark.parametrize(
    "changed", [{"size": 9}, {"seed": 1}, {"split": "test"}, {"target_language": "es"}]
)
def test_different_arguments_do_not_reuse_the_cached_file(
    changed: dict[str, Any], tmp_path: Any
) -> None:
    arguments: dict[str, Any] = {"size": 8, "target_language": "de", "split": "train", "seed": 0}
    load_phrases(**arguments, cache_dir=tmp_path)
    data = load_phrases(**{**arguments, **changed}, cache_dir=tmp_path)
    assert list(data) == list(iter_phrases(**{**arguments, **changed}))


def test_cached_file_is_reused_until_the_version_of_the_data_changes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file() -> str:
        return load_phrases(8, cache_dir=tmp_path).cache_files[0]["filename"]

    first = file()
    assert file() == first
    monkeypatch.setattr(phrases, "_data_version", lambda: "another version")
    assert file() != first
