"""The options of `generate()`: where each is set, and errors for those that can't work."""

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig

from .validation import is_a

# What a generation config may hold besides transformers' own fields.
OWN_OPTIONS = ("length_penalty_type", "extra_output_tokens", "max_length_factor")
# Options that limit an output. If several are set in the same place, the first one applies.
LIMITS = ("max_new_tokens", "max_length", "max_length_factor", "extra_output_tokens")


class GenerationOptions:
    """The options of a call of `generate()`: its keywords override its generation config, which
    overrides the model's. None means unset.

    Args:
        default: The model's generation config.
        given: The call's, which is not changed.
        kwargs: The call's keywords.
    """

    def __init__(
        self, default: GenerationConfig, given: GenerationConfig | None, kwargs: dict[str, Any]
    ):
        self.default = default
        self.given = copy.deepcopy(given)
        self.kwargs = dict(kwargs)
        for name in ("num_beams", "num_return_sequences"):  # transformers (5.17 to 5.24) needs it
            if kwargs.get(name, 1) is None:
                self.kwargs[name] = 1

    def all(self) -> dict[str, Any]:
        """All options."""
        given = {} if self.given is None else vars(self.given)
        given = {name: value for name, value in given.items() if value is not None}
        return {**vars(self.default), **given, **self.kwargs}

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:  # None turns an option off
            return self.kwargs[name]
        return first_given(*(place.get(name) for place in self._places()))

    def _places(self) -> list[Mapping[str, Any]]:
        configs = (config for config in (self.given, self.default) if config is not None)
        return [self.kwargs, *(vars(config) for config in configs)]

    def __setitem__(self, name: str, value: Any) -> None:
        if self.given is None:
            self.kwargs[name] = value
        else:  # transformers warns if it gets both a config and keywords
            setattr(self.given, name, value)

    def first_of(self, names: Sequence[str]) -> str | None:
        """The first of these options that is set, from the first place that sets any."""
        names = [name for name in names if self[name] is not None]
        return first_given(
            *(name for place in self._places() for name in names if place.get(name) is not None)
        )

    def take(self, name: str) -> Any:
        """The value of an option that transformers does not know, removed from the keywords."""
        value = self.kwargs.pop(name, None)
        return self[name] if value is None else value

    def mask_padding(self, source: torch.Tensor | None) -> None:
        """Hide every `pad_token_id` in the token ids (sources, source_length) of a call without a
        mask. transformers (5.17 to 5.24) does so only without an encoder."""
        pad = self["pad_token_id"]
        if source is None or self["attention_mask"] is not None or pad in (None, *self.ends()):
            return
        if (source == pad).any():
            self.kwargs["attention_mask"] = (source != pad).long()

    def ends(self) -> list[int]:
        """The ids of the tokens that end a target."""
        return [id_ for id_ in _flat(self["eos_token_id"]) if id_ is not None]

    def cache_size(self, prompt_length: int) -> tuple[int, int]:
        """The rows of each source, and the largest number of positions of a target."""
        rows = max(self["num_beams"] or 1, self["num_return_sequences"] or 1)
        new_tokens = self["max_new_tokens"]
        return rows, self["max_length"] if new_tokens is None else prompt_length + new_tokens

    def prompt_length(self) -> int:
        """The number of target tokens to begin with. transformers adds the start token to a prompt
        that lacks it."""
        prompt = self.kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = first_given(self["decoder_start_token_id"], self["bos_token_id"])
        starts = torch.as_tensor(start, device=prompt.device)
        return prompt.shape[1] + int((prompt[:, 0] != starts).all())


def first_given(*values: Any) -> Any:
    """The first value that is not None, if any."""
    return next((value for value in values if value is not None), None)


# ---------------------------------------------------------------- Errors

LONGEST, MOST_ROWS = 2**31 - 1, 2**20
COUNTS = {
    "num_beams": (1, MOST_ROWS), "num_return_sequences": (1, MOST_ROWS),
    "max_new_tokens": (1, LONGEST), "max_length": (1, LONGEST),
    "min_length": (0, LONGEST), "min_new_tokens": (0, LONGEST), "top_k": (0, LONGEST),
    "no_repeat_ngram_size": (0, LONGEST),
    "encoder_no_repeat_ngram_size": (0, 1000),  # transformers copies the source that often
    "extra_output_tokens": (0, LONGEST),
}  # fmt: skip
NUMBERS = (
    "length_penalty", "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "diversity_penalty",
    "max_length_factor", "max_time",
)  # fmt: skip
SHARES = ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
POSITIVE = ("repetition_penalty", "encoder_repetition_penalty", "max_length_factor")
TOKENS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
)  # fmt: skip
LISTS = TOKENS[-3:]


def expect_generation_options(
    options: dict[str, Any], vocab_size: int, is_encoder_decoder: bool = True
) -> None:
    """Raise a ValueError unless counts are integers in their range, numbers are finite, tokens are
    in the vocabulary, and guidance is only used with a decoder alone. None is allowed everywhere,
    and transformers checks the rest."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & COUNTS.keys():
        value, (least, most) = given[name], COUNTS[name]
        if not is_a(Integral, value) or not least <= value <= most:
            raise ValueError(f"{name}={value!r}: expected a whole number from {least} to {most}")
    for name in given.keys() & set(NUMBERS):
        value = given[name]
        if not is_a(Real, value) or not abs(value) < 1e30:
            raise ValueError(f"{name}={value!r}: expected a finite number")
        if name in SHARES and not 0 <= value <= 1:
            raise ValueError(f"{name}={value!r}: expected a number from 0 to 1")
        is_used = name in POSITIVE or (name == "temperature" and given.get("do_sample"))
        if is_used and value <= 0:
            raise ValueError(f"{name}={value!r}: expected a number above 0")
    guidance = given.get("guidance_scale", 1)
    if is_encoder_decoder and guidance != 1:  # transformers would encode the target
        raise ValueError(f"guidance_scale={guidance}: expected None or 1 for an encoder-decoder")
    for name in given.keys() & set(TOKENS):
        least = -1 if name in ("eos_token_id", "pad_token_id") else 0  # -1 is customary for none
        ids = _flat(given[name])
        if not all(is_a(Integral, id_) and least <= id_ < vocab_size for id_ in ids):
            raise ValueError(f"{name}={given[name]!r}: expected {least} <= id < {vocab_size}")
        if name in LISTS and is_a(Integral, given[name]):
            raise ValueError(f"{name}={given[name]!r}: expected a list")
        if name == "pad_token_id" and isinstance(given[name], (list, tuple)):
            raise ValueError(f"{name}={given[name]!r}: expected one token id")
    watermark = given.get("watermarking_config", {})
    if not (isinstance(watermark, dict) or hasattr(watermark, "validate")):
        raise ValueError(f"watermarking_config={watermark!r}: expected a WatermarkingConfig")
    stopping = given.get("early_stopping", False)
    if not isinstance(stopping, bool) and stopping != "never":
        raise ValueError(f"early_stopping={stopping!r}: expected True, False or 'never'")
    decay = given.get("exponential_decay_length_penalty", (0, 1.0))
    is_pair = isinstance(decay, (tuple, list)) and len(decay) == 2
    if not (is_pair and is_a(Integral, decay[0]) and is_a(Real, decay[1])):
        raise ValueError(
            f"exponential_decay_length_penalty={decay!r}: expected a length and a factor"
        )


def _flat(ids: Any) -> list[Any]:
    """The ids in one id, a tensor or list of them, or a list of lists."""
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    if not isinstance(ids, (list, tuple)):
        return [ids]
    return [inner for id_ in ids for inner in _flat(id_)]
