"""Adds the options of `generate()` to a command, under their names in transformers."""

import json
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.hf_argparser import string_to_bool

from ..data.vocabularies import unknown_id
from ..model.generation_options import NUMBERS, OWN_OPTIONS

# The commands choose what `generate()` returns, constraints are objects, two options need a
# tokenizer, guidance needs a model without an encoder, and multi-token prediction its own weights.
NOT_OFFERED = {
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "transformers_version", "is_assistant",
    "continuous_batching_config", "constraints", "stop_strings", "token_healing", "guidance_scale",
    "use_mtp",
}  # fmt: skip

# Options whose value is true or false: any other would be true.
FLAGS = {
    "disable_compile", "do_sample", "low_memory", "remove_invalid_values", "renormalize_logits",
    "use_cache",
}  # fmt: skip

METHOD_FILE = "custom_generate/generate.py"
# Options that transformers moved out of the library, each with the repository that has them now.
MOVED = {
    "force_words_ids": "transformers-community/constrained-beam-search",
    "num_beam_groups": "transformers-community/group-beam-search",
    "diversity_penalty": "transformers-community/group-beam-search",
    "penalty_alpha": "transformers-community/contrastive-search",
    "low_memory": "transformers-community/contrastive-search",
    "dola_layers": "transformers-community/dola",
}

HELP = {
    "num_beams": "Beam size. Default: the model's own.",
    "max_new_tokens": "Longest translation, in tokens, without a prefix. Default: as saved with "
    "the model, or the source's length plus 50.",
    "extra_output_tokens": "Maximum length of a translation, in tokens beyond its source's length.",
    "max_length_factor": "Longest translation, as a multiple of the batch's longest source.",
    "length_penalty": "Exponent of the length, which divides the scores of hypotheses.",
    "length_penalty_type": "power, gnmt (the paper's), avg or wu.",
    "early_stopping": "When beam search stops: true, false, or never (only when no hypothesis can "
    "become better).",
    "do_sample": "Sample instead of searching for the most probable translation.",
    "temperature": "Divides the logits before sampling.",
    "top_k": "Sample from this many of the most probable tokens. 0: all. Default: 50, as in "
    "transformers.",
    "top_p": "Sample from the most probable tokens that together reach this probability.",
    "epsilon_cutoff": "Sample from tokens that are at least this probable.",
    "no_repeat_ngram_size": "Length of the n-grams that a translation may contain only once.",
}


def generation_option_names() -> list[str]:
    """All options: first those with a help text, then the others in alphabetical order."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return [*HELP, *sorted((known | {*OWN_OPTIONS}) - NOT_OFFERED - HELP.keys())]


def add_generation_options(parser: ArgumentParser) -> None:
    """Add the options to a parser. A value is JSON or a word; an option without one is true. The
    namespace has only the given ones: null turns off an option of the model."""
    parsers = dict.fromkeys(NUMBERS, parse_number) | dict.fromkeys(FLAGS, parse_flag)
    for name in generation_option_names():
        parser.add_argument(
            f"--{name}", nargs="?", const=True, metavar="VALUE", default=SUPPRESS,
            type=parsers.get(name, parse_value),
            help=HELP.get(name, "As in transformers' GenerationConfig."),
        )  # fmt: skip


def parse_value(text: str) -> Any:
    """A number, true, false, a list or an object, as JSON; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def parse_number(text: str) -> Any:
    """Same as `parse_value`, for an option for which transformers rejects integers."""
    value = parse_value(text)
    return float(value) if type(value) is int else value


def parse_flag(text: str) -> bool | None:
    """Null, or true or false in the words of the commands' own options, such as no."""
    return None if text == "null" else string_to_bool(text)


def find_method(name: str, trust_remote_code: bool) -> str:
    """The local folder of a method for `generate(custom_generate=...)`.

    Args:
        name: A folder, or the name of a repository on the Hub, with custom_generate/generate.py.
        trust_remote_code: Whether its code may run.

    Raises:
        ValueError: The code is not trusted, or there is none.
    """
    if not trust_remote_code:
        raise ValueError(
            f"custom_generate={name!r} runs the code of that repository: expected "
            "--trust_remote_code as well"
        )
    folder = Path(name)
    try:
        if not folder.is_dir():  # download once, instead of a check for each batch
            folder = Path(snapshot_download(name, allow_patterns=f"{Path(METHOD_FILE).parent}/*"))
        (folder / METHOD_FILE).open().close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"custom_generate={name!r}: expected a folder, or a repository on the Hub, with "
            f"{METHOD_FILE}"
        ) from error
    return str(folder.resolve())


def expect_method(options: dict[str, Any]) -> None:
    """Raise a ValueError if an option needs a method that is not given."""
    for name in options:
        if name in MOVED and "custom_generate" not in options:
            raise ValueError(
                f"{name}={options[name]!r}: expected --custom_generate {MOVED[name]} as well, or "
                "another method that has this option"
            )


def encode_forced_words(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The target's token ids of words or phrases, in the format of `force_words_ids`.

    Raises:
        ValueError: A word is empty, has a token that is not in the vocabulary, or one that ends or
            pads a target, as a stock tokenizer reads `</s>` in a text.
    """
    encoded = []
    refused = {unknown_id(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id}
    for word in words:
        ids = tokenizer(text_target=word, add_special_tokens=False)["input_ids"]
        if not ids or refused & set(ids):
            raise ValueError(f"force_words={word!r}: expected text in the target's vocabulary")
        encoded.append(ids)
    return encoded
