"""The help of the commands: what a command does, how it is called, then its options in groups."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser


class CommandHelpFormatter(RawDescriptionHelpFormatter):
    """Adds a default to the help of an option that has one and does not mention it."""

    def _get_help_string(self, action: Action) -> str | None:
        """As argparse's own `ArgumentDefaultsHelpFormatter` overrides it, in every version."""
        text = action.help or ""
        is_switch = action.default is None or action.default is False
        if is_switch or action.default == SUPPRESS or "default" in text.lower():
            return text
        return f"{text} Default: %(default)s."


class CommandParser(HfArgumentParser):
    """`HfArgumentParser` with readable help.

    It shows an option under one name, though `--max-steps` still means `--max_steps`.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        kwargs: As for `ArgumentParser`. The description may have several lines.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", CommandHelpFormatter)
        kwargs.setdefault("usage", "%(prog)s [options]")
        super().__init__(dataclass_types, **kwargs)
        for action in self._actions:
            if action.dest != "help":
                action.option_strings = action.option_strings[:1]

    def parse_args_into_dataclasses(
        self, args: Any = None, return_remaining_strings: bool = False, **kwargs: Any
    ) -> tuple[Any, ...]:
        """As `HfArgumentParser`, but an unknown option is an error in argparse's form."""
        found = super().parse_args_into_dataclasses(args, return_remaining_strings=True, **kwargs)
        if found[-1] and not return_remaining_strings:
            self.error(f"unrecognized arguments: {' '.join(found[-1])}")
        return found if return_remaining_strings else found[:-1]


class GroupedParser(CommandParser):
    """`CommandParser` for more options than fit on a screen.

    `--help` shows the first groups, `--help_all` shows them all.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        groups: Titles, each with the names of its options.
        more_groups: The same, for `--help_all`. An option in no group appears in neither help.
        kwargs: As for `ArgumentParser`.
    """

    def __init__(
        self,
        dataclass_types: Any,
        *,
        groups: dict[str, list[str]],
        more_groups: dict[str, list[str]],
        **kwargs: Any,
    ):
        super().__init__(dataclass_types, **kwargs)
        self.groups, self.more_groups, self.shows_all = groups, more_groups, False
        self.add_argument(
            "--help_all", action=_HelpAll, nargs=0, default=SUPPRESS, help="Show all options."
        )

    def format_help(self) -> str:
        """The help, from the groups. argparse's own groups remain as `HfArgumentParser` fills
        them: it offers one for each dataclass."""
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        groups = {**self.groups, **(self.more_groups if self.shows_all else {})}
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(self._named(names))
            formatter.end_section()
        if not self.shows_all:
            formatter.add_text(self.epilog)
        return formatter.format_help()

    def _named(self, names: Iterable[str]) -> list[Action]:
        return [action for name in names for action in self._actions if action.dest == name]


class _HelpAll(Action):
    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, GroupedParser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()
