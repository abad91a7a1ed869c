"""The card of a model that is made from another: its languages and licence, without its scores."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load, metadata_save
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# How to use a folder without the model's code. `push` adds a download before these commands.
TRANSLATE = "vanilla-transformer translate --model FOLDER --source FILE"
SHOW_PAGE = "python -m http.server --directory FOLDER"
OF_ONE_MODEL = {"model-index", "metrics", "model_name"}


def card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a model's card, without its scores; empty without a card. The card of a
    trainer's checkpoint is in the folder above it.

    Raises:
        ValueError: The card can't be read.
    """
    place = folder.resolve()
    above = [place.parent] if place.name.startswith(PREFIX_CHECKPOINT_DIR) else []
    card = next((card for at in (place, *above) if (card := at / "README.md").is_file()), None)
    if card is None:
        return {}
    try:
        metadata = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{card}: expected YAML between two lines of ---, but {error}") from error
    return {name: value for name, value in metadata.items() if name not in OF_ONE_MODEL}


def language_codes(languages: Sequence[str]) -> dict[str, Any]:
    """The languages as ISO 639 codes, which the Hub requires in a card, and with region and script
    if they have these. mBART's XX is no region."""
    tags = list(dict.fromkeys(code.replace("_", "-").removesuffix("-XX") for code in languages))
    codes = list(dict.fromkeys(tag.partition("-")[0].lower() for tag in tags))
    codes = [code for code in codes if re.fullmatch("[a-z]{2,3}", code)]
    return {"language": codes or None, "language_bcp47": tags if tags != codes else None}


def write_card(folder: Path, metadata: dict[str, Any], text: str) -> None:
    """Write a card with the folder's name as its title."""
    card = folder / "README.md"
    card.write_text(f"# {folder.resolve().name}\n\n{text}\n", encoding="utf-8")
    if metadata:
        metadata_save(card, metadata)
