"""Paths on this machine and in any file system that fsspec supports."""

import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL, such as s3://bucket/in.txt."""
    return "://" in str(path)


def is_no_file(path: str | Path) -> bool:
    """Whether a path on this machine exists and is not a regular file: a pipe, a device or a
    folder."""
    return not is_url(path) and Path(path).exists() and not Path(path).is_file()


def is_no_longer_read(pipe: int, milliseconds: int = 0) -> bool:
    """Whether the reader of a pipe, such as `head`, has stopped, or stops within this time."""
    poll = select.poll()
    poll.register(pipe, 0)
    closed = select.POLLERR | select.POLLHUP
    return any(event & closed for _, event in poll.poll(milliseconds))


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


@contextmanager
def staged(output_dir: str | Path, name: str = "output_dir") -> Iterator[Path]:
    """An empty folder for files that go to the output folder together, once all are written. A
    failure leaves nothing behind.

    Args:
        output_dir: The output folder, new or empty.
        name: The name of the option, for the message.

    Raises:
        FileExistsError: As `expect_unused`.
    """
    place = expect_unused(output_dir, name).resolve()
    # A folder that exists may be where a volume is mounted, which nothing can replace.
    nearest = place if place.exists() else place.parent
    nearest.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=nearest, prefix=f".{place.name}-") as staging:
        written = Path(staging, place.name)  # a card's title is the name of its folder
        written.mkdir()
        yield written
        if nearest == place:
            for path in list(written.iterdir()):
                path.replace(place / path.name)
        else:
            written.replace(place)
