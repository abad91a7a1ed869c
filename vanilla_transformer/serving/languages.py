"""Finds the languages that a model translates, and the language of a text."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.utils import cached_file

from ..inference.loading import expect_model_folder

Pair = tuple[str, str]

# A language with its script or region, if any: "de", "pt-BR", "zh-Hant-TW".
CODE = "[^-]+(?:-(?:[A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3}))*"


def find_pairs(models: Iterable[str]) -> dict[Pair, str]:
    """The model of each language pair, source first.

    Args:
        models: Folders or Hub names of models whose card names two languages, or "en-de=MODEL".

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The languages of a model are unknown, or two models have the same languages.
    """
    pairs: dict[Pair, str] = {}
    for argument in models:
        languages, equals, name = argument.partition("=")
        is_named = equals and not Path(argument).is_dir()  # a folder's name may contain "="
        pair = _parse(languages, name) if is_named else None
        name = name if is_named else argument
        _expect_model(name)
        pair = pair or _pair_of_card(name)
        if pair in pairs:
            raise ValueError(f"{'-'.join(pair)}: expected one model, got {pairs[pair]} and {name}")
        pairs[pair] = name
    return pairs


def _parse(languages: str, name: str) -> Pair:
    found = re.fullmatch(f"({CODE})-({CODE})", languages)
    if found is None:
        raise ValueError(
            f"'{languages}={name}': expected SOURCE-TARGET=MODEL, such as en-de={name} or "
            f"pt-BR-en={name}"
        )
    return found[1], found[2]


def _expect_model(name: str) -> None:
    expect_model_folder(name)
    if Path(name).is_dir():
        return
    try:
        cached_file(name, "config.json")
    except OSError as error:
        raise FileNotFoundError(f"{name}: expected a model folder or a name on the Hub") from error


def _pair_of_card(name: str) -> Pair:
    try:
        pair = languages_of_card(cached_file(name, "README.md"))
    except (OSError, ValueError):
        pair = None
    if pair is None:
        raise ValueError(
            f"{name}: its README.md does not name two languages, expected those of the "
            f"translation; or name them on the command line, such as en-de={name}"
        )
    return pair


def languages_of_card(card: str | Path) -> Pair | None:
    """The languages of a model card that names two, the source first, with region and script if
    given. YAML reads `no`, Norwegian, as false."""
    header: dict[str, Any] = ModelCard.load(card).data.to_dict()
    for languages in (header.get("language_bcp47"), header.get("language")):
        if isinstance(languages, list) and len(languages) == 2:
            source, target = ("no" if code is False else str(code) for code in languages)
            return source, target
    return None


def language_name(code: str) -> str:
    """The English name of a language: "German" for "de"."""
    from babel import Locale, UnknownLocaleError  # optional for a demo

    try:
        return Locale.parse(code, sep="-").english_name or code
    except (UnknownLocaleError, ValueError):
        return code


def main_language(code: str) -> str:
    """The language of a code without script and region, in two letters if ISO 639 has these: "de"
    for "de-AT" and for "deu-Latn", a code of NLLB."""
    from babel.core import get_global  # optional for a demo

    language = code.partition("-")[0]
    short: str = get_global("language_aliases").get(language, "")
    return short if len(language) == 3 and len(short) == 2 else language


def detect(text: str, languages: Iterable[str]) -> list[tuple[str, float]]:
    """The probability of each language, ignoring its script or region, the most probable first. The
    probabilities add up to less than 1 if the text may be in other languages.

    Raises:
        ModuleNotFoundError: py3langid is not installed.
    """
    known = dict(_identifier().rank(text))
    found = [(code, known.get(main_language(code), 0.0)) for code in languages]
    return sorted(found, key=lambda pair: -pair[1])


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
