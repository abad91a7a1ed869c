"""Argument parsers with readable help, in groups of options."""

from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import HfArgumentParser


class CommandHelpFormatter(RawDescriptionHelpFormatter):
    """Adds a default to the help of an option that has one and does not mention it."""

    def _get_help_string(self, action: Action) -> str | None:
        """Overridden as in argparse's own `ArgumentDefaultsHelpFormatter`, in every version."""
        text = action.help or ""
        says_nothing = action.default is None or action.default is False or action.default == []
        if says_nothing or action.default == SUPPRESS or "default" in text.lower():
            return text
        return f"{text} Default: %(default)s."


def integer(text: str) -> int:
    """An integer that the libraries below accept, which are not written in Python."""
    if abs(number := int(text)) < 2**63:
        return number
    raise ArgumentTypeError(f"{text}: expected a number of at most 64 bits")


class CommandParser(HfArgumentParser):
    """`HfArgumentParser` with readable help.

    The help shows each option under one name; `--max-steps` still means `--max_steps`.

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
            if action.type is int:
                action.type = integer

    def parse_args_into_dataclasses(
        self, args: Any = None, return_remaining_strings: bool = False, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Same as `HfArgumentParser`, but reports an unknown option as argparse does.

        Raises:
            ValueError: An option is out of range or contradicts another one, with a message of this
                package or of transformers.
        """
        try:
            found = super().parse_args_into_dataclasses(
                args, return_remaining_strings=True, **kwargs
            )
        except ValueError as error:
            raise ValueError(str(error)) from error
        if found[-1] and not return_remaining_strings:
            self.error(f"unrecognized arguments: {' '.join(found[-1])}")
        return found if return_remaining_strings else found[:-1]


def expect_needed(arguments: Any, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Raise a ValueError about the first option that is given without one that it needs.

    Args:
        arguments: The dataclass of the options.
        needs: For each option, whether the other is given, and its description.
    """
    for name, (is_there, needed) in needs.items():
        value = getattr(arguments, name)
        if value != getattr(type(arguments), name) and not is_there:  # the default
            raise ValueError(f"{name}={value!r}: expected {needed}")


class GroupedParser(CommandParser):
    """`CommandParser` for more options than fit on a screen.

    `--help` shows the main groups, and `--help_all` shows all of them.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        groups: The names of the options in each group, by the title of the group.
        more_groups: The same, for `--help_all`. Options that are in no group are not shown.
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
        """The help, from the groups. argparse's own groups stay unused: `HfArgumentParser` makes
        one for each dataclass."""
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
