"""Other engines than torch, which run an exported model behind the interface of one of ours.

An engine is a module with

- `NAME`: what the option `--engine` calls it;
- `recognizes(folder)`: whether the folder was exported for it;
- `load(folder, *, device, dtype)`: an object with `generate()`, `config`, `generation_config`,
  `device`, `dtype`, `eval()` and `to()`, which `translate`, `translate_n_best` and
  `TranslationPipeline` take in place of a model.

A module is imported with its engine's package only when it loads something.
"""

from pathlib import Path
from types import ModuleType

from . import ctranslate2_engine

ENGINES: list[ModuleType] = [ctranslate2_engine]


def find_engine(folder: str | Path) -> ModuleType | None:
    """The engine that a folder was exported for, or None: the folder is none of theirs."""
    return next((engine for engine in ENGINES if engine.recognizes(Path(folder))), None)
