"""The tests that need a GPU, `pytest -m gpu`, one by one."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from scripts.benchmarks.gpu.cells import Cell, Worker, one_line
from scripts.benchmarks.gpu.plan import Plan

REPOSITORY = Path(__file__).parents[3]
MARKED = re.compile(r"\bmark\.gpu\b")
WORKERS = 6  # processes: half of the tests compile kernels, which takes a CPU almost a minute
LABELS = ("test",)
COLUMNS = {"outcome": "{}", "seconds": "{:.2f}"}
NOTES = "`python -m pytest -m gpu` runs the same tests."


def cells(plan: Plan, worker: Worker) -> list[Cell]:
    """A cell for each test.

    Raises:
        RuntimeError: The tests can't be collected.
    """
    labels = {"test": "collection"}
    collected = worker.measure(Cell(labels, collect), plan.limits["tests"])
    if "reason" in collected:
        raise RuntimeError(collected["reason"])
    # Compiled tests last, as they take longest and there may not be time for all.
    tests = sorted(collected["tests"], key=lambda name: "flex" in name or "compiled" in name)
    return [Cell({"test": name}, run, (name,)) for name in tests]


class Recorder:
    """A plugin that records the tests and their outcomes."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.reports: list[Any] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.tests = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)


def run_pytest(*flags: str) -> tuple[Recorder, str]:
    """The recorded tests, and the output of pytest."""
    import pytest

    recorder, printed = Recorder(), io.StringIO()
    with contextlib.chdir(REPOSITORY), contextlib.redirect_stdout(printed):
        pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *flags], plugins=[recorder])
    return recorder, printed.getvalue()


def collect() -> dict[str, Any]:
    """The tests of the files that have any with the marker; other files may need other packages."""
    files = [
        str(path.relative_to(REPOSITORY))
        for path in sorted(Path(REPOSITORY, "tests").rglob("test_*.py"))
        if MARKED.search(path.read_text(encoding="utf-8"))
    ]
    recorder, printed = run_pytest("--collect-only", "--continue-on-collection-errors", *files)
    if not recorder.tests:
        raise RuntimeError(f"pytest found no test: {printed[-2000:]}")
    return {"tests": recorder.tests}


def run(name: str) -> dict[str, Any]:
    """The outcome of a test and, unless it passed, the reason."""
    recorder, printed = run_pytest(name)
    if not recorder.reports:
        raise RuntimeError(f"pytest ran nothing: {printed[-2000:]}")
    seconds = sum(report.duration for report in recorder.reports)
    for report in recorder.reports:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            return {"outcome": "skipped", "reason": str(reason), "seconds": seconds}
        if report.failed:
            print(printed)
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext
            return {"outcome": "failed", "reason": one_line(reason), "seconds": seconds}
    return {"outcome": "passed", "seconds": seconds}


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tests pass. A test without an outcome has broken its process, or taken too long."""
    wanted = [row for row in rows if row.get("outcome") != "skipped"]
    passed = [row for row in wanted if row.get("outcome") == "passed"]
    share = len(passed) / len(wanted) if wanted else None
    return [
        {
            "goal": "share of the tests, without those skipped, that passed",
            "wanted": 1,
            "found": share,
            "reached": None if share is None else share == 1,
        }
    ]
