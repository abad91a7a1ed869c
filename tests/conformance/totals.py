"""A pytest plugin that prints a line of totals at the end of a run, to quote in the
documentation."""

import os

import torch
import transformers

COUNTED = ("passed", "failed", "error", "skipped")


def pytest_terminal_summary(terminalreporter):
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in COUNTED}
    counts["failed"] += counts.pop("error")
    totals = ", ".join(f"{count} {name}" for name, count in counts.items())
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    terminalreporter.write_line(f"{os.environ['CONFORMANCE_SUBJECT']}, {versions}: {totals}")
