"""Goals, compared with the measurements."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def is_ours(row: Row) -> bool:
    return row["what"].startswith("ours")


def is_peer(row: Row) -> bool:
    return not is_ours(row)


def best(rows: list[Row], figure: str, among: Callable[[Row], bool]) -> float | None:
    """The highest figure among the rows that have one."""
    values = [row[figure] for row in rows if row.get(figure) is not None and among(row)]
    return max(values, default=None)


def goal(name: str, value: float | None, reference: float | None, wanted: float) -> Row:
    """The value relative to a reference; `reached` is None if one of them was not measured."""
    found = None if value is None or reference is None else value / reference
    reached = None if found is None else found >= wanted
    return {"goal": name, "wanted": wanted, "found": found, "reached": reached}
