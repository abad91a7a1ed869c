"""Lines of text files, which end in "\\n" or "\\r\\n" and nothing else.

Python's text mode also breaks lines at a lone "\\r", and `str.splitlines` even at U+2028. Then the
lines of two parallel files would no longer match.
"""

import codecs
import gzip
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from .parquet_files import is_parquet, read_column
from .paths import as_path, is_no_file, is_url

READ_SIZE = 2**20  # bytes
# The first bytes of compressed files, by suffix.
COMPRESSED = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh[1-9]1AY&SY",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\x28\xb5\x2f\xfd",
    ".zip": rb"PK\x03\x04",
}
COMPRESSED_NAMES = {*COMPRESSED, ".zstd", ".lzma", ".7z", ".tgz"}
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")  # their lines are not sentences


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a binary file with their line endings, without a byte order mark.

    Raises:
        ValueError: The file is compressed, or a line is not UTF-8. The message contains `name` and
            the line number.
    """
    for number, line in enumerate(file, start=1):
        content = line
        if number == 1:
            content = line.removeprefix(codecs.BOM_UTF8)
            _expect_plain(line, name)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number}: not UTF-8 ({error.reason})") from error


def _expect_plain(line: bytes, name: str) -> None:
    for suffix, start in COMPRESSED.items():
        if re.match(start, line):
            raise ValueError(
                f"{name}: its content is that of a {suffix} file, expected plain text, or text "
                "that gzip has compressed once under a name that ends in .gz"
            )


def read_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Same as `decode_lines`, without line endings."""
    for line in decode_lines(file, name):
        yield line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")


def is_gzip(path: str | Path) -> bool:
    """Whether a file is compressed, by its name."""
    return str(path).lower().endswith(".gz")


@contextmanager
def open_text(path: str | Path) -> Iterator[Any]:
    """Open a local path or a URL to read bytes. A name in .gz is decompressed.

    Raises:
        ValueError: The compressed file is damaged.
    """
    with as_path(path).open("rb") as raw:
        if not is_gzip(path):
            yield raw
            return
        try:
            yield gzip.GzipFile(fileobj=raw)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: damaged gzip ({error})") from error


def read_file(path: str | Path, column: str | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without line endings, or the texts of a parquet file.

    Args:
        path: A local path, or a URL; plain or .gz.
        column: The column of a parquet file. Default: the only one with text.

    Raises:
        ValueError: As in `expect_text`, `open_text` and `decode_lines`, or there is no such column.
    """
    if is_parquet(path):
        yield from read_column(path, column)
        return
    expect_text(path)
    yield from read_lines_of(path)


def read_lines_of(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with any name, without line endings."""
    with open_text(path) as file:
        yield from read_lines(file, str(path))


def read_arrived(file: BufferedReader, name: str) -> Iterator[list[str]]:
    """Yield the lines of `read_lines` as soon as they arrive, in lists: one line from a terminal,
    all lines of one read from a pipe or a file. A line never waits for a later one."""
    arrived: deque[bytes] = deque()
    lines = read_lines(iter(arrived.popleft, None), name)
    unfinished: list[bytes] = []
    while piece := file.read1(READ_SIZE):
        complete, newline, rest = piece.rpartition(b"\n")
        if newline:
            arrived.extend(BytesIO(b"".join([*unfinished, complete, newline])))
            unfinished = []
            yield list(islice(lines, len(arrived)))
        unfinished.append(rest)
    if last := b"".join(unfinished):
        arrived.append(last)
        yield [next(lines)]


@contextmanager
def open_output(path: str | Path | None) -> Iterator[TextIO]:
    """Open a file, compressed if its name ends in .gz, or standard output for `None`, to write
    UTF-8."""
    if path is not None:
        opened: Any = gzip.open if is_gzip(path) else open
        with opened(path, "wt", encoding="utf-8", newline="\n") as file:
            yield file
        return
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    yield sys.stdout


def expect_inputs(**inputs: str | Path | None) -> None:
    """Raise a FileNotFoundError if one of these files does not exist, or a ValueError if it is a
    table. URLs are not checked."""
    for name, path in inputs.items():
        if path is None:
            continue
        if not is_url(path) and not Path(path).exists():
            raise FileNotFoundError(f"{name}={str(path)!r}: expected a file that exists")
        expect_text(path)


def expect_text(path: str | Path) -> None:
    """Raise a ValueError if a file has the name of a table other than parquet."""
    if str(path).lower().removesuffix(".gz").endswith(TABLE_SUFFIXES):
        raise ValueError(
            f"{path}: expected text, a sentence a line, or parquet; only --train_file, "
            "--validation_file and --test_file of `train` read other tables"
        )


def expect_output(
    output: str | Path | None,
    option: str = "output",
    **inputs: str | Path | list[str] | None,
) -> None:
    """Raise a ValueError if an output's name means compression other than gzip, or if it is one of
    these inputs, which it would replace."""
    if Path(str(output).lower()).suffix in COMPRESSED_NAMES - {".gz"}:
        raise ValueError(f"{option}={str(output)!r}: expected a plain text file or .gz")
    for name, paths in inputs.items():
        for path in paths if isinstance(paths, list) else [paths]:
            if None not in (path, output) and _same_file(str(path), str(output)):
                raise ValueError(f"{option}={str(output)!r}: expected another file than {name}")


def _same_file(source: str, output: str) -> bool:
    if is_url(source):
        return source == output
    # A terminal may be both.
    return Path(source).is_file() and Path(source).resolve() == Path(output).resolve()


def expect_several(**texts: Any) -> None:
    """Raise a TypeError for a single string, whose characters would count as texts."""
    for name, given in texts.items():
        if isinstance(given, (str, bytes)):
            raise TypeError(
                f"{name}={given[:60]!r}: expected an iterable of strings, got a single string"
            )


def expect_unicode(text: str, name: str) -> None:
    """Raise a ValueError if a text contains a surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has the surrogate {text[error.start]!r} at position {error.start}: expected "
            "valid Unicode"
        ) from None


def expect_parallel(source: str | Path, target: str | Path, column: str | None = None) -> None:
    """Raise a ValueError if two files have different numbers of lines, or can't be read again. The
    source may be a `column` of a parquet file."""
    for path in (source, target):
        if is_no_file(path):
            raise ValueError(f"{path}: expected a file, not a pipe, as it is read twice")
    lines = [sum(1 for _ in file) for file in (read_file(source, column), read_file(target))]
    if lines[0] != lines[1]:
        raise ValueError(
            f"{source} has {lines[0]} lines and {target} {lines[1]}: expected the same number"
        )
