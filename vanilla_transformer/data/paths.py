"""Paths on this machine and in any file system that fsspec supports."""

from pathlib import Path
from typing import cast


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL, such as s3://bucket/in.txt."""
    return "://" in str(path)


def is_no_file(path: str | Path) -> bool:
    """Whether a path on this machine exists and is not a regular file: a pipe, a device or a
    folder."""
    return not is_url(path) and Path(path).exists() and not Path(path).is_file()


def as_path(path: str | Path) -> Path:
    """A path for the name of a local file, or an object with the same methods for a URL.

    Raises:
        ImportError: It is a URL, and universal-pathlib or the package for its file system is not
            installed.
    """
    if not is_url(path):
        return Path(path)
    try:
        from upath import UPath
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{path} needs the package universal-pathlib: pip install 'vanilla-transformer[ray]'"
        ) from error
    return cast(Path, UPath(path))


def expect_unused(output_dir: str | Path, name: str = "output_dir") -> Path:
    """The folder, if it is empty or does not exist.

    Args:
        name: The name of the option, for the message.

    Raises:
        FileExistsError: It is a file or contains files.
    """
    output = Path(output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{name}={str(output_dir)!r}: expected a new or empty folder")
    return output
