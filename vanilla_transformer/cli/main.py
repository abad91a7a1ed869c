"""`vanilla-transformer COMMAND ...`."""

import importlib
import sys

COMMANDS = ("train", "translate", "evaluate", "score", "average", "plot")


def main() -> None:
    """Run the command that the first argument names."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: vanilla-transformer {{{','.join(COMMANDS)}}} ...")
    command = sys.argv.pop(1)
    importlib.import_module(f"vanilla_transformer.cli.{command}").main()
