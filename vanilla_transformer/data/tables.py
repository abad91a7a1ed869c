"""Reads the records of tables of sentence pairs, and chooses the columns of both sides."""

import csv
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .text_files import TABLE_SUFFIXES, decode_lines, open_text, read_lines_of

logger = logging.getLogger(__name__)

SIDES = ("source", "target")
SHORT_SIDES = (("src", "tgt"), ("src", "trg"))
FILE_SUFFIXES = (*TABLE_SUFFIXES, ".parquet")
# A field with quotes as csv writers quote it: "he said ""hi"", ok".
IN_QUOTES = re.compile(r'".+"')
QUOTED = re.compile(r'"(?:[^"]*"")+[^"]*"')


def suffix_of(path: str) -> str:
    """The suffix that tells a file's format, such as .csv for a.csv.gz."""
    return Path(path.lower().removesuffix(".gz")).suffix


def read_table(path: str) -> Iterator[dict[str, Any]]:
    """The records of a csv or tsv file as dictionaries, with the names in its first record."""
    records = _read_tsv(path) if suffix_of(path) == ".tsv" else _read_csv(path)
    header = next(records, [])
    twice = next((name for name in filter(None, header) if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: expected a header with each name once, not {twice!r} twice")
    for number, record in enumerate(records, start=2):
        if len(record) != len(header):
            raise ValueError(
                f"{path}, record {number}: {len(record)} fields, but the header has {len(header)}"
            )
        yield dict(zip(header, record, strict=True))


def _read_tsv(path: str) -> Iterator[list[str]]:
    for number, line in enumerate(filter(None, read_lines_of(path)), start=1):
        record = line.split("\t")
        # All names are in quotes, or a quoted field contains quotes.
        if (number == 1 and all(map(IN_QUOTES.fullmatch, record))) or (
            '""' in line and any(map(QUOTED.fullmatch, record))
        ):
            _warn_of_quotes(path)
        yield record


@cache  # a table is read several times
def _warn_of_quotes(path: str) -> None:
    logger.warning(
        "%s: some fields are in quotes, which are read as text, as tsv files have no quoted "
        "fields; use .csv for these, with commas between the fields",
        path,
    )


def _read_csv(path: str) -> Iterator[list[str]]:
    with open_text(path) as file:
        # If the space before it were kept, "b" in `"a", "b"` would not count as quoted.
        reader = csv.reader(decode_lines(file, path), strict=True, skipinitialspace=True)
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def read_json(path: str) -> Iterator[dict[str, Any]]:
    """The objects of a file, one per line or (which takes memory) in one list."""
    start = next((line for line in read_lines_of(path) if line.strip()), "")
    if start.lstrip().startswith("["):
        texts: Iterable[str] = ["\n".join(read_lines_of(path))]
    else:
        texts = read_lines_of(path)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            raise ValueError(f"{path}, line {line}: not valid JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:  # a number is too long, or nesting too deep
            raise ValueError(f"{path}, line {number}: not readable JSON ({error})") from error
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: {type(row).__name__} is not an object")
            yield flatten(row)


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """Flatten dictionaries in a row: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for column, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{column}.{key}": inner for key, inner in value.items()})
        else:
            flat[column] = value
    return flat


class ColumnChoice:
    """Chooses the source and target columns of the tables of a data set.

    Args:
        columns: The columns that the user has named.
        languages: The languages of source and target, which may be names of columns.
        by_order: Whether the first of two columns, of any names, is the source.
    """

    def __init__(
        self, columns: tuple[str, str] | None, languages: tuple[str, str] | None, by_order: bool
    ):
        self.columns, self.languages, self.by_order = columns, languages, by_order
        self.chosen: dict[tuple[str, str], str] = {}

    def __call__(self, present: list[str], name: str) -> tuple[str, str]:
        """Return the source and target columns among those present in the table of this name. A key
        b in a dictionary a is named a.b.

        Raises:
            ValueError: There are no such columns, or an earlier table has them in the opposite
                order.
        """
        source, target = self._choose(present, name)
        if other := self.chosen.get((target, source)):
            raise ValueError(
                f"{name} has the columns {source!r}, {target!r}, and {other} has them the other "
                "way round: expected source_column and target_column, which say the direction"
            )
        self.chosen[source, target] = name
        return source, target

    def _choose(self, present: list[str], name: str) -> tuple[str, str]:
        candidates = [self.columns] if self.columns else self._by_name(present)
        for source, target in candidates:
            if source in present and target in present:
                return source, target
        has_order = self.by_order and self.columns is None and len(present) == 2
        if has_order and not present[0].startswith("translation."):
            self._log_order(present, name)
            return present[0], present[1]
        source, target = self.columns or self.languages or SIDES
        names = ", ".join(map(repr, present))
        raise ValueError(f"{name}: there are no columns {source!r} and {target!r}, only: {names}")

    def _by_name(self, present: list[str]) -> Iterator[tuple[str, str]]:
        if self.languages is not None:
            source, target = self.languages
            yield f"translation.{source}", f"translation.{target}"
            yield source, target
            yield from _columns_of(self.languages, present, _language_code)
        yield SIDES  # preferred to Source and Target, if a table has both
        for sides in (SIDES, *SHORT_SIDES):
            yield from _columns_of(sides, present, str.lower)
        if self.languages is not None:  # keys of any dictionary, such as translation.en for en_XX
            yield from _columns_of(
                self.languages, present, lambda name: _language_code(name.rpartition(".")[2])
            )

    def _log_order(self, present: list[str], name: str) -> None:
        is_table = suffix_of(name) in (".csv", ".tsv")
        is_text = is_table and any(" " in column.strip() for column in present)
        sources, targets = zip(SIDES, *SHORT_SIDES, strict=True)
        is_reversed = present[0].lower() in targets or present[1].lower() in sources
        is_suspicious = is_text or is_reversed or self.languages is not None
        logger.log(
            logging.WARNING if is_suspicious else logging.INFO,
            "%s: its column %r is the source, and %r the target, by their order%s; source_column "
            "and target_column choose others",
            name, *present, " in its first line" if is_table else "",
        )  # fmt: skip


def _columns_of(
    names: tuple[str, str], present: list[str], key: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """The columns with the same keys as two names, if each name has exactly one."""
    of_source, of_target = (
        [column for column in present if key(column) == key(name)] for name in names
    )
    if len(of_source) == len(of_target) == 1 and of_source != of_target:
        yield of_source[0], of_target[0]


def _language_code(name: str) -> str:
    """The language without case, region or script, such as en for EN, en_XX or en-US."""
    return re.split("[-_]", name.lower())[0]
