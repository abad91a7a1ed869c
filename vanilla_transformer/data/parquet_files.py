"""Reads and adds columns of text in parquet files, which may be larger than memory."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from .paths import as_path

TEXT_TYPES = ("string", "large_string", "string_view")


def is_parquet(path: str | Path) -> bool:
    """Whether a file has the name of a parquet file."""
    return str(path).lower().endswith(".parquet")


def inspect(path: str | Path) -> tuple[Any, int]:
    """The schema of a parquet file, and its number of rows.

    Raises:
        ValueError: It is not a parquet file, or two columns have the same name.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with as_path(path).open("rb") as file:
        try:
            table = ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: expected a parquet file ({error})") from error
        schema, rows = table.schema_arrow, table.metadata.num_rows
    if twice := [name for name, number in Counter(schema.names).items() if number > 1]:
        raise ValueError(f"{path} has several columns {twice[0]!r}: expected one of each name")
    return schema, rows


def find_text_column(path: str | Path, column: str | None, new_column: str | None = None) -> str:
    """The name of a column of text: the given one, or the only one.

    Args:
        path: A parquet file.
        column: The column, or `None` for the only one.
        new_column: A column that will be added, and must not exist yet.

    Raises:
        ValueError: There is no such column, it does not contain text, or the new column exists;
            also as in `inspect`.
    """
    schema, _ = inspect(path)
    texts = [field.name for field in schema if _type_of(field) in TEXT_TYPES]
    if column is None and len(texts) == 1:
        column = texts[0]
    if column is None or column not in texts:
        raise ValueError(
            f"source_column={column!r}: expected a column of text in {path}, one of "
            f"{', '.join(texts) or 'none'}"
        )
    if new_column in schema.names:
        raise ValueError(f"target_column={new_column!r}: expected a column that {path} lacks")
    return column


def _type_of(field: Any) -> str:
    """The type of a column. One that repeats few values may store numbers of these."""
    import pyarrow

    is_numbered = pyarrow.types.is_dictionary(field.type)
    return str(field.type.value_type if is_numbered else field.type)


def read_column(path: str | Path, column: str | None = None) -> Iterator[str]:
    """Yield the texts of a column, chosen as in `find_text_column`; null is an empty text."""
    from pyarrow.parquet import ParquetFile

    column = find_text_column(path, column)
    with as_path(path).open("rb") as file:
        for batch in ParquetFile(file).iter_batches(columns=[column]):
            yield from (text or "" for text in batch.column(column).to_pylist())


def add_column(path: str | Path, column: str, texts: Iterable[str], file: BinaryIO) -> None:
    """Write a parquet file that has one more column.

    Args:
        path: The parquet file with the other columns.
        column: The name of the new column.
        texts: The new texts, one for each row.
        file: Where to write.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile, ParquetWriter

    texts = iter(texts)
    with as_path(path).open("rb") as source:
        table = ParquetFile(source)
        schema = table.schema_arrow.append(pyarrow.field(column, pyarrow.string()))
        with ParquetWriter(file, schema) as writer:
            for batch in table.iter_batches():
                added = pyarrow.array(list(islice(texts, batch.num_rows)), pyarrow.string())
                writer.write_batch(
                    pyarrow.RecordBatch.from_arrays([*batch.columns, added], schema=schema)
                )
