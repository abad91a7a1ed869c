"""The options of `generate()` as options of a command, by their names in transformers."""

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..model.generation import OWN_OPTIONS, GenerationOptions
from ..model.validation import expect_generation_options

# The commands decide what `generate()` returns, and transformers moved the last ones elsewhere.
NOT_OFFERED = {
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "transformers_version", "is_assistant",
    "continuous_batching_config", "low_memory", "penalty_alpha", "dola_layers",
    "diversity_penalty", "num_beam_groups", "constraints", "force_words_ids",
}  # fmt: skip

HELP = {
    "num_beams": "Beam size. Default: the model's own.",
    "max_new_tokens": "Longest translation, in tokens. Default: the source's length plus 50.",
    "length_penalty": "Exponent of the length by which scores are divided.",
    "length_penalty_type": "power, gnmt (the paper's), avg or wu.",
    "early_stopping": "true, false, or never: search on until no hypothesis can become better.",
    "do_sample": "Draw translations at random.",
    "temperature": "Divides the logits before sampling.",
    "top_k": "Sample among this many of the most probable tokens. 0: all.",
    "top_p": "Sample among the most probable tokens that reach this probability together.",
    "epsilon_cutoff": "Sample among tokens that are at least this probable.",
    "no_repeat_ngram_size": "Length of the n-grams that a translation may contain only once.",
}


def generation_option_names() -> list[str]:
    """All options: those with help first, then the others in alphabetical order."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return [*HELP, *sorted((known | {*OWN_OPTIONS}) - NOT_OFFERED - HELP.keys())]


def add_generation_options(parser: ArgumentParser) -> None:
    """Add the options to a parser. A value is JSON or a word; an option without one is true."""
    for name in generation_option_names():
        parser.add_argument(
            f"--{name}", nargs="?", const=True, type=parse_value, metavar="VALUE",
            help=HELP.get(name, "As in transformers' GenerationConfig."),
        )  # fmt: skip


def parse_value(text: str) -> Any:
    """A number, true, false, a list or an object, as JSON; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def given_options(namespace: Namespace) -> dict[str, Any]:
    """The options that a command line sets."""
    return {name: value for name, value in vars(namespace).items() if value is not None}


def expect_valid_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Raise a ValueError unless the model can generate with these options, and what its generation
    config sets beside."""
    config = {**model.generation_config.to_dict(), **options}
    expect_generation_options(config, getattr(model.config, "target_vocab_size", 2**31))
    GenerationOptions(model.generation_config, None, options).use_length_penalty_type()
    GenerationConfig(**config)
