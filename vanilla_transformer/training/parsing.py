"""Reads the options of a training run from a command line, and from the recipe that it names."""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser

from ..data.data_options import SPLITS
from .arguments import TranslationTrainingArguments, TypedLoader
from .recipes import find_recipe

logger = logging.getLogger(__name__)

# Local files on the command line replace the data set that a recipe names, languages included; a
# data set on the command line replaces a recipe's files.
LOCAL_DATA_OPTIONS = {
    f"{split}_{side}" for split in SPLITS for side in ("source", "target", "file")
}
REMOTE_DATA_OPTIONS = {"dataset_name", "dataset_config_name", "source_lang", "target_lang"}

# Options that set the same thing. One on the command line replaces another in a recipe.
ALTERNATIVES = (
    {"max_steps", "num_train_epochs"},
    {"max_tokens", "per_device_train_batch_size"},
    {"batches_per_update", "gradient_accumulation_steps"},
    {"corpus_weights", "corpus_temperature"},
    *({f"{split}_file", f"{split}_{side}"} for split in SPLITS for side in ("source", "target")),
)

# `Trainer` uses these only in an evaluation after training, and no command makes one with it.
FOR_LATER_EVALUATIONS = ("bf16_full_eval", "fp16_full_eval")


def parse_arguments(
    dataclass_types: Iterable[Any],
    argv: Sequence[str] | None = None,
    make_parser: Callable[..., HfArgumentParser] = HfArgumentParser,
) -> tuple:
    """Parse a command line in which `--config RECIPE` sets defaults and flags override them, even
    if they set the same thing in different ways, such as `max_steps` and `num_train_epochs`.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        argv: The command line without the program's name. Default: that of `sys.argv`.
        make_parser: Makes the parser from the dataclasses, with `HfArgumentParser`'s arguments.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: The recipe is not a mapping, a name in it is not an option, or `do_train` is
            false.
        FileNotFoundError: `--config` is neither a file nor the name of a packaged recipe.
    """
    parser = make_parser(dataclass_types, allow_abbrev=False)
    parser.add_argument(
        "--config",
        help="Name of a packaged recipe (see `vanilla-transformer recipes`), or a YAML file of "
        "options. Other options override it.",
    )
    argv = sys.argv[1:] if argv is None else list(argv)
    if not torch.accelerator.is_available():
        # Otherwise, several processes on CPUs would each train a model of their own.
        parser.set_defaults(use_cpu=True)
    # The parser sets no defaults for attributes that exist, so only given options remain.
    blank = Namespace(**dict.fromkeys(action.dest for action in parser._actions))
    given = {
        k: v for k, v in vars(parser.parse_known_args(argv, blank)[0]).items() if v is not None
    }
    recipe: list[str] = []
    if "config" in given:
        recipe = _recipe_flags(find_recipe(given["config"]), parser, given)
    found = parser.parse_args_into_dataclasses([*recipe, *argv])
    for one in found:
        if isinstance(one, TranslationTrainingArguments):
            one.on_command_line = set(given)
            one.in_recipe = {flag.removeprefix("--").partition("=")[0] for flag in recipe}
            if not one.do_train and "do_train" in one.on_command_line | one.in_recipe:
                raise ValueError(
                    "do_train=False: expected true; `vanilla-transformer evaluate` scores a model "
                    "without training it"
                )
            for name in FOR_LATER_EVALUATIONS:
                if getattr(one, name):
                    logger.warning("%s=True has no effect: bf16 or fp16 decides", name)
    return found[: len(parser.dataclass_types)]


class _TextLoader(yaml.SafeLoader):
    """Reads all values except null as text, which options convert as on a command line. Norwegian
    stays "no", and 1e-3 is a number."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        """Reject a name that appears twice, as YAML does. PyYAML uses its last value."""
        names = [name.value for name, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} appears twice")
        return super().construct_mapping(node, deep)


def _recipe_flags(path: Path, parser: HfArgumentParser, given: Collection[str]) -> list[str]:
    """The options of a recipe as flags, without those that the `given` options replace. Values that
    a flag can't have, such as mappings, become the parser's defaults.

    Raises:
        ValueError: As `parse_arguments`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        recipe, typed = yaml.load(text, _TextLoader), yaml.load(text, TypedLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: expected YAML ({error})") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected a mapping from options to values")
    actions = {action.dest: action for action in parser._actions}
    unknown = sorted(set(map(str, recipe)) - (actions.keys() - {"config"}))
    if unknown:
        raise ValueError(f"{path}: unknown options {', '.join(unknown)}")
    replaced = {other for one in ALTERNATIVES if one & set(given) for other in one}
    if "dataset_name" in recipe and LOCAL_DATA_OPTIONS & set(given):
        replaced |= REMOTE_DATA_OPTIONS
    if "dataset_name" in given:
        replaced |= LOCAL_DATA_OPTIONS
    if "metric_for_best_model" in given:
        replaced.add("greater_is_better")  # it is about the recipe's metric; cards contain both
    flags: list[str] = []
    for name in recipe.keys() - replaced:
        value, action = recipe[name], actions[name]
        if value is None and action.default in (None, []):
            continue
        if name in _options_without_flag(parser, value):
            parser.set_defaults(**{name: typed[name]})
            continue
        is_list = action.nargs == "+"
        values = value if is_list and isinstance(value, list) else [value]
        if value is None or not all(isinstance(each, (str, NoneType)) for each in values):
            expected = "a list of single values" if is_list else "a single value"
            raise ValueError(f"{path}: {name}={typed[name]!r}: expected {expected}")
        texts = ["" if each is None else each for each in values]
        flags += [f"--{name}", *texts] if is_list else [f"--{name}={texts[0]}"]
    return flags


# Options of transformers that are a text or a list.
TEXT_OR_LIST = {"report_to", "optim_target_modules"}


def _options_without_flag(parser: HfArgumentParser, value: Any) -> set[str]:
    """The options that can have such a value in a recipe but not on a command line: a mapping, or a
    list where flags have one value."""
    if isinstance(value, dict):
        groups = (getattr(one, "_VALID_DICT_FIELDS", ()) for one in parser.dataclass_types)
        return {"config_overrides"}.union(*groups)
    return TEXT_OR_LIST if isinstance(value, list) else set()
