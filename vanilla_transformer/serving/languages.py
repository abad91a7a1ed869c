"""Finds the languages that a model translates, and the language of a text."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from babel import Locale, UnknownLocaleError
from huggingface_hub import ModelCard
from transformers.utils import cached_file

Pair = tuple[str, str]


def find_pairs(models: Iterable[str]) -> dict[Pair, str]:
    """The model of each language pair, source first.

    Args:
        models: Folders or Hub names with a model card that names two languages, or "en-de=MODEL".

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The languages of a model are unknown, or two models have the same.
    """
    pairs: dict[Pair, str] = {}
    for argument in models:
        languages, equals, name = argument.partition("=")
        pair = _parse(languages, argument) if equals else None
        name = name if equals else argument
        _expect_model(name)
        pair = pair or _pair_of_card(name)
        if pair in pairs:
            raise ValueError(f"{'-'.join(pair)}: expected one model, got {pairs[pair]} and {name}")
        pairs[pair] = name
    return pairs


def _parse(languages: str, argument: str) -> Pair:
    source, _, target = languages.partition("-")
    if not source or not target or "-" in target:
        raise ValueError(f"{argument!r}: expected SOURCE-TARGET=MODEL, such as en-de={argument}")
    return source, target


def _expect_model(name: str) -> None:
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise FileNotFoundError(f"{name}: expected a model folder, with a config.json")
        return
    try:
        cached_file(name, "config.json")
    except OSError as error:
        raise FileNotFoundError(f"{name}: expected a model folder or a name on the Hub") from error


def _pair_of_card(name: str) -> Pair:
    try:
        card = Path(cached_file(name, "README.md"))
        languages: Any = ModelCard.load(card).data.to_dict().get("language")
    except (OSError, ValueError):
        languages = None
    if not isinstance(languages, list) or len(languages) != 2:
        raise ValueError(
            f"{name}: its README.md has language={languages!r}, expected the two languages of the "
            f"translation; or name them on the command line, such as en-de={name}"
        )
    return languages[0], languages[1]


def language_name(code: str) -> str:
    """The English name of a language: "German" of "de"."""
    try:
        return Locale.parse(code, sep="-").english_name or code
    except (UnknownLocaleError, ValueError):
        return code


def detect(text: str, languages: Iterable[str]) -> list[tuple[str, float]]:
    """The probability of each language, the most probable first. The probabilities add up to less
    than 1 if the text may be in other languages.

    Raises:
        ModuleNotFoundError: py3langid is not installed.
    """
    known = dict(_identifier().rank(text))
    found = [(language, known.get(language, 0.0)) for language in languages]
    return sorted(found, key=lambda pair: -pair[1])


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
