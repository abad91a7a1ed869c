"""The files of Multi30k that `--data` names."""

from pathlib import Path

from vanilla_transformer.data.text_files import expect_parallel, read_file

TRAINING, TEST = "train", "test_2016_flickr"


def expect_multi30k(folder: str) -> None:
    """Raise a ValueError unless all files exist, and both sides of a split have as many lines."""
    for split in (TRAINING, TEST):
        for path in paths(folder, split):
            if not path.is_file():
                raise ValueError(f"--data {folder}: expected a file {path.name} in it")
        expect_parallel(*paths(folder, split))


def read_split(folder: str, split: str) -> list[list[str]]:
    """All sources, and all targets."""
    return [list(read_file(path)) for path in paths(folder, split)]


def paths(folder: str, split: str) -> tuple[Path, Path]:
    return Path(folder, f"{split}.en"), Path(folder, f"{split}.de")
