"""CTranslate2, a compiled engine for CPUs and NVIDIA GPUs."""

from pathlib import Path

NAME = "ctranslate2"


def recognizes(folder: Path) -> bool:
    """Whether this folder was exported for CTranslate2."""
    return (folder / "model.bin").is_file() and (folder / "config.json").is_file()
