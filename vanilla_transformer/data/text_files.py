"""Lines of text files, ended by "\\n" or "\\r\\n" and nothing else.

A file opened as text also breaks at a lone "\\r", `str.splitlines` even at U+2028: then the lines
of two parallel files no longer match.
"""

import codecs
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import TextIO

READ_SIZE = 2**20  # bytes


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield a binary file's lines with their ends; a byte order mark at the start is dropped.

    Raises:
        ValueError: A line is not UTF-8; the message gives `name` and the line's number.
    """
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number}: not UTF-8 ({error.reason})") from error


def read_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """As `decode_lines`, without the ends of the lines."""
    for line in decode_lines(file, name):
        yield line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")


def read_file(path: str | Path) -> Iterator[str]:
    """`read_lines` of a file."""
    with Path(path).open("rb") as file:
        yield from read_lines(file, str(path))


def read_arrived(file: BufferedReader, name: str) -> Iterator[list[str]]:
    """Yield the lines of `read_lines` in lists of those that have arrived: one from a terminal,
    as many as one read gets from a pipe or a file. No line waits for a later one."""
    arrived: deque[bytes] = deque()
    lines = read_lines(iter(arrived.popleft, None), name)
    unfinished: list[bytes] = []
    while piece := file.read1(READ_SIZE):
        whole, newline, rest = piece.rpartition(b"\n")
        if newline:
            arrived.extend(BytesIO(b"".join([*unfinished, whole, newline])))
            unfinished = []
            yield list(islice(lines, len(arrived)))
        unfinished.append(rest)
    if last := b"".join(unfinished):
        arrived.append(last)
        yield [next(lines)]


@contextmanager
def open_output(path: str | Path | None) -> Iterator[TextIO]:
    """A file, or for `None` standard output, to write UTF-8 into. A program that stops reading
    standard output, as `head` does, ends this one without an error message."""
    if path is not None:
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        sys.exit(1)


def expect_unicode(text: str, name: str) -> None:
    """Raises ValueError if a text holds half a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds {text[error.start]!r} in place {error.start}: expected Unicode, in "
            "which surrogates are no characters"
        ) from None


def expect_parallel(source: str | Path, target: str | Path) -> None:
    """Raises ValueError if two files differ in the number of their lines."""
    lines = [sum(1 for _ in read_file(path)) for path in (source, target)]
    if lines[0] != lines[1]:
        raise ValueError(f"{source} has {lines[0]} lines and {target} {lines[1]}: expected as many")
