"""Helpers of benchmarks and checks: read options, validate choices, write tables and files."""

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from vanilla_transformer.cli.parser import CommandParser

Options = TypeVar("Options")


def read_options(kind: type[Options], description: str | None) -> Options:
    """The options of a command line. Its `--help` starts with the description. A wrong option ends
    the process with a one-line error."""
    parser = CommandParser(kind, description=description)
    try:
        (options,) = parser.parse_args_into_dataclasses()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


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
    """Print the table, or the results if there is none. With a folder, also `save` both."""
    print(table or as_json(results))
    if folder is not None:
        save(folder, name, results, table)


def save(folder: str | Path, name: str, results: Any, table: str | None = None) -> None:
    """Write NAME.json with the results and, if there is one, NAME.md with the table."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{name}.json").write_text(as_json(results), encoding="utf-8")
    if table is not None:
        Path(folder, f"{name}.md").write_text(table + "\n", encoding="utf-8")


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    """Write a text file."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def spread(values: Sequence[float], digits: int) -> str:
    """The mean and, for several values, the standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


class Results:
    """The scores of finished runs, in results.json of an output folder, so that an interrupted
    command can be repeated. Processes with different rows or seeds may share a folder.

    Args:
        arguments: The options of the command. `output_dir` is the folder, which is created.
        settings: The names of options that are the same for all runs of a folder.

    Raises:
        ValueError: The folder holds runs with different settings.
    """

    def __init__(self, arguments: Any, *settings: str):
        self.folder = Path(arguments.output_dir).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.json"
        self.settings = {name: getattr(arguments, name) for name in settings}
        self.content = {**self.settings, "runs": []}
        self._read()
        for name, value in self.settings.items():
            if self.content[name] != value:
                raise ValueError(
                    f"{self.path} is of --{name} {self.content[name]}, not {value}: "
                    "choose another --output_dir"
                )

    def of(self, row: str, seeds: Collection[int | str]) -> list[dict[str, Any]]:
        """The scores of a row with these seeds."""
        return [run for run in self.content["runs"] if run["row"] == row and run["seed"] in seeds]

    def run(self, row: str, seed: int | str, job: Callable[[], dict[str, Any]]) -> None:
        """Run a job and save the scores that it returns, unless the file has them."""
        self._read()
        if not self.of(row, [seed]):
            scores = job()
            with FileLock(f"{self.path}.lock"):
                self._read()
                self.content["runs"].append({"row": row, "seed": seed, **scores})
                complete = self.path.with_suffix(".new")
                complete.write_text(json.dumps(self.content, indent=1))
                complete.replace(self.path)

    def _read(self) -> None:
        """Read the current file, with the runs of other processes. Older files lack settings."""
        if self.path.exists():
            self.content = {**self.settings, **json.loads(self.path.read_text())}

    def write(self, name: str, table: str) -> str:
        """Write the table to NAME.md in the folder. Returns it."""
        (self.folder / f"{name}.md").write_text(table + "\n", encoding="utf-8")
        return table


def as_json(results: Any) -> str:
    return json.dumps(results, indent=2) + "\n"
