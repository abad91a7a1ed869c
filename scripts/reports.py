"""Helpers of benchmarks and checks: validate choices, write tables and files."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


def expect_known(flag: str, values: Collection[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"--{flag} {value}: expected one of {'; '.join(known)}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. None becomes an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |" for line in lines
    )


def write(folder: str | Path | None, name: str, results: Any, table: str | None = None) -> None:
    """Print the table, or the results if there is none. With a folder, also write NAME.json with
    the results and NAME.md with the table."""
    text = json.dumps(results, indent=2) + "\n"
    print(table or text)
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{name}.json").write_text(text)
    if table is not None:
        Path(folder, f"{name}.md").write_text(table + "\n")
