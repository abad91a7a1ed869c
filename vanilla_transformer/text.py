"""Lines of text files, ended by "\\n" or "\\r\\n" and nothing else.

A file opened as text also breaks at a lone "\\r", `str.splitlines` even at U+2028: then the lines
of two parallel files no longer match.
"""

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path


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
