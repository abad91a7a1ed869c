"""Trained models for other engines: one module for each target.

A target is a module with

- `QUANTIZATIONS`: the names of the quantizations that it can write;
- `write(model_folder, output, quantization)`: writes into an empty folder. `export` adds a card.

A module is imported only when its target is used, because most need a package that few users have.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from ..data.paths import expect_unused, staged
from ..inference.derived_cards import SHOW_PAGE, TRANSLATE, card_metadata, write_card
from .source import expect_model

# The modules by the names of their targets.
TARGETS = {
    "ctranslate2": "to_ctranslate2",
    "marian": "to_marian",
    "pegasus": "to_pegasus",
    "onnx": "onnx_graphs",
    "transformers.js": "transformers_js",
}

CARD = """Exported for {target} with [vanilla_transformer]({site}).

```bash
{command}
```"""
SITE = "https://github.com/vanilla-transformer/vanilla_transformer"


def export(
    model_folder: str | Path, output_dir: str | Path, to: str, quantization: str | None = None
) -> Path:
    """Write a model for another engine. A failure leaves nothing behind.

    Args:
        model_folder: A model and its tokenizer, written by `train`, `average` or `convert`.
        output_dir: A new or empty folder.
        to: "ctranslate2", "onnx", "transformers.js", "marian" or "pegasus".
        quantization: Such as "int8", if the target has it. Default: float32.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError: The folder holds no finished model.
        FileExistsError: The output folder is in use.
        ImportError: The target needs a package that is not installed.
        ValueError: The target or the quantization is unknown, or the target does not support the
            model.
    """
    folder, output = Path(model_folder), expect_unused(output_dir)
    target = find_target(to)
    if quantization is not None and quantization not in target.QUANTIZATIONS:
        known = ", ".join(target.QUANTIZATIONS)
        expected = f"one of {known}" if known else "none"
        raise ValueError(f"quantization={quantization!r} with {to}: expected {expected}")
    expect_model(folder)
    metadata = card_metadata(folder)
    with staged(output) as written:
        target.write(folder, written, quantization)
        _write_card(written, metadata, to)
    return output


def _write_card(folder: Path, metadata: dict[str, Any], target: str) -> None:
    """The card of the model, with the target's name and how to use the folder."""
    classes = ("marian", "pegasus")
    metadata |= {
        "library_name": "transformers" if target in classes else target,
        "pipeline_tag": "translation",
        "tags": [target],
    }
    command = SHOW_PAGE if target == "transformers.js" else TRANSLATE
    write_card(folder, metadata, CARD.format(target=target, site=SITE, command=command))


def find_target(name: str) -> ModuleType:
    """The module of a target.

    Raises:
        ImportError: It needs a package that is not installed.
        ValueError: No target has this name.
    """
    if name not in TARGETS:
        raise ValueError(f"to={name!r}: expected one of {', '.join(TARGETS)}")
    try:
        return importlib.import_module(f"{__name__}.{TARGETS[name]}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vanilla_transformer"):
            raise
        raise ImportError(
            f"to={name!r} needs the package {error.name}: pip install 'vanilla-transformer[export]'"
        ) from error
