"""Engines other than torch, which run exported models behind the interface of our models.

An engine is a module with

- `NAME`: what the option `--engine` calls it;
- `TARGET`: what `export --to` calls it;
- `recognizes(folder)`: whether the folder was exported for it;
- `load(folder, *, device, dtype)`: an object with `generate()`, `config`, `generation_config`,
  `device`, `dtype`, `eval()` and `to()`, which `translate`, `translate_n_best` and
  `TranslationPipeline` accept in place of a model; `token_scores()` for `score_pairs`, or the
  `forward` of a model; and for `fingerprint`, `version`, a string, and `weight_files`, paths.

A module imports its engine's package only when it loads a model.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from . import ctranslate2_engine, onnxruntime_engine

ENGINES: list[ModuleType] = [ctranslate2_engine, onnxruntime_engine]


def find_engine(folder: str | Path) -> ModuleType | None:
    """The engine that a folder was exported for, or None."""
    return next((engine for engine in ENGINES if engine.recognizes(Path(folder))), None)


def named_engine(name: str) -> ModuleType | None:
    """The engine of this name, or None for torch and for unknown names."""
    return next((engine for engine in ENGINES if name == engine.NAME), None)


def load(folder: str | Path, *, device: str = "cpu", dtype: str | None = None) -> Any:
    """Open a folder that `export` wrote, with the engine that it was exported for.

    ```py
    engine = load("outputs/ctranslate2")
    tokenizer = AutoTokenizer.from_pretrained("outputs/ctranslate2")
    pipeline = TranslationPipeline(engine, tokenizer=tokenizer)
    ```

    Args:
        folder: The folder.
        device: Such as "cpu" or "cuda:0".
        dtype: The type to compute in. Default: as the folder was exported.

    Raises:
        ImportError: The engine needs a package that is not installed.
        ValueError: The folder was not exported for an engine, or the engine lacks the device or
            the dtype.
    """
    engine = find_engine(folder)
    if engine is None:
        names = ", ".join(engine.NAME for engine in ENGINES)
        raise ValueError(f"{folder}: expected a folder that was exported for one of {names}")
    return engine.load(Path(folder), device=device, dtype=dtype)
