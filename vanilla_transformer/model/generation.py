"""What the paper's decoding adds to transformers' `GenerationMixin`, and faster ways through it."""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    Cache,
    EncoderDecoderCache,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput

from .beam_search import best_tokens, shallow_copy, with_fast_projection
from .cache import (
    CACHE_NAME,
    generation_cache,
    is_generation_cache,
    rename_cache,
    repeat_for_each_beam,
    takes_either_name,
)
from .hooks import is_watched
from .pretrained import as_model_output
from .running_rows import WatchedCriteria, running_rows
from .validation import expect_generation_options, expect_in_range, expect_prompt

# What a generation config may hold besides transformers' own fields.
OWN_OPTIONS = ("length_penalty_type", "extra_output_tokens", "max_length_factor")
# Options that limit an output. If several are set in the same place, the first one applies.
LIMITS = ("max_new_tokens", "max_length", "max_length_factor", "extra_output_tokens")
# By `length_penalty_type`, a and b of (a + length) / b, which takes the length's place. "gnmt", the
# paper's, is equation 14 of https://arxiv.org/abs/1609.08144; "avg" and "wu" are OpenNMT-py's.
LENGTH_PENALTIES = {"power": (0, 1), "gnmt": (5, 6), "avg": (1, 1), "wu": (6, 6)}
# Options with which transformers makes another cache than a plain dynamic one, or rolls it back.
NO_PLAIN_CACHE = (
    "cache_implementation", "assistant_model", "custom_generate", "prompt_lookup_num_tokens",
    "prefill_chunk_size", "penalty_alpha", "dola_layers", "is_assistant",
)  # fmt: skip


class LengthPenalty(float):
    """The exponent alpha of ((a + length) / b)^alpha, for code that writes length ** alpha."""

    a: float
    b: float

    def __new__(cls, alpha: float, a: float, b: float) -> "LengthPenalty":
        penalty = super().__new__(cls, alpha)
        penalty.a, penalty.b = a, b
        return penalty

    def __getnewargs__(self) -> tuple[float, float, float]:  # type: ignore[override]
        return float(self), self.a, self.b  # to be copied with a generation config

    def __rpow__(self, length: Any, modulo: None = None) -> Any:
        return ((self.a + length) / self.b) ** float(self)


class SourceLengthCriteria(StoppingCriteria):
    """Ends each row at its own length, which follows from its source, whatever else is in the
    batch.

    Args:
        max_lengths: Of the targets of each source, the prompt included, (sources,). The targets of
            a source, beams or samples, follow one another.
    """

    eos_token_id = None  # its presence makes transformers pad rows that have ended

    def __init__(self, max_lengths: torch.Tensor):
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of (rows, length) targets has ended, (rows,)."""
        ended = input_ids.shape[1] >= self.max_lengths.to(input_ids.device)
        return ended.repeat_interleave(input_ids.shape[0] // len(ended))


class SourceLengthForcedEnd(LogitsProcessor):
    """Forces the last token of each row at the row's own length, as transformers' processor does at
    the length of the batch.

    Args:
        ends: The lengths.
        token_ids: `forced_eos_token_id`.
    """

    def __init__(self, ends: SourceLengthCriteria, token_ids: int | list[int]):
        self.ends, self.token_ids = ends, token_ids

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Scores (rows, vocabulary) after (rows, length) targets."""
        with_next: Any = F.pad(input_ids, (0, 1))
        force = ForcedEOSTokenLogitsProcessor(
            with_next.shape[1], self.token_ids, device=scores.device
        )
        is_last = self.ends(with_next, scores)
        return torch.where(is_last[:, None], force(input_ids, scores), scores)


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` with the paper's default output length, and the paper's length penalty where the
    generation config, or a call, has `length_penalty_type="gnmt"`: hypotheses are ranked by their
    log-probability over ((5 + length) / 6)^`length_penalty`, not over length^`length_penalty`.

    With `early_stopping="never"` the best hypothesis is found; otherwise transformers may stop
    before it.
    """

    # Section 6.1: "we set the maximum output length during inference to input length + 50"
    extra_output_tokens = 50
    _max_length_before_trainer: int | None = None

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers', with the paper's defaults, and the faster paths of this package.

        Args:
            kwargs: As for transformers, and `length_penalty_type`, "power", "gnmt", "avg" or "wu";
                `extra_output_tokens`, by which an output may be longer than its source (50), or
                `max_length_factor`, by which an output may be longer than the longest source.

        Raises:
            TypeError, ValueError: An input or an option is not what a model can read or do.
            IndexError: A token id is outside the vocabulary (on the CPU).
        """
        if _is_sharded(self) and "generate" not in vars(self):
            # FSDP gathers weights for `forward` alone, but the encoder is called by itself here.
            torch.distributed.fsdp.register_fsdp_forward_method(self, "generate")
            with torch.no_grad():
                return self.generate(inputs, generation_config, **kwargs)
        self._forget_limit_of_trainer()
        encoded = as_model_output(kwargs.get("encoder_outputs"))
        if isinstance(encoded, ModelOutput):  # whose rows transformers repeats in place
            kwargs["encoder_outputs"] = type(encoded)(**encoded)
        expect_prompt(self, {"inputs": inputs, **kwargs})
        kwargs = read_target_vocabulary(rename_cache(kwargs, CACHE_NAME))
        options = GenerationOptions(self.generation_config, generation_config, kwargs)
        is_encoder_decoder = self.config.is_encoder_decoder
        expect_generation_options(options.all(), self.config.target_vocab_size, is_encoder_decoder)
        options.use_length_penalty_type()
        if is_encoder_decoder:
            options.mask_padding(first_given(inputs, kwargs.get("input_ids")))
            prompt_length = self._prompt_length(options)
            self._limit_by_source(inputs, prompt_length, options)
            self._use_fast_cache(prompt_length, options)
        try:
            with self._without_autograd(options):
                model = self._with_target_vocabulary()
                config, kwargs = options.given, options.kwargs
                output = GenerationMixin.generate(model, inputs, config, **kwargs)
        except IndexError:
            expect_in_range(self, {"input_ids": inputs, **rename_cache(kwargs, "cache")})
            raise
        repeat_for_each_beam(getattr(output, CACHE_NAME, None))
        is_inference = isinstance(output, torch.Tensor) and output.is_inference()
        return output.clone() if is_inference else output  # the clone takes part in training

    def _forget_limit_of_trainer(self) -> None:
        """Undo the limit of 20 tokens that `Seq2SeqTrainer` (5.17 to 5.24) writes into the model's
        generation config after its first batch, with all other defaults of transformers."""
        config, defaults = self.generation_config, GenerationConfig._get_default_generation_params()
        if any(
            getattr(config, name, None) is None
            for name, value in defaults.items()
            if value is not None
        ):
            if self._max_length_before_trainer != config.max_length:  # threads share the model
                self._max_length_before_trainer = config.max_length
        elif config.max_length == defaults["max_length"]:
            config.max_length = self._max_length_before_trainer

    def _limit_by_source(
        self, inputs: torch.Tensor | None, prompt_length: int, options: "GenerationOptions"
    ) -> None:
        """Input length + `extra_output_tokens` where nothing sets another limit; transformers' own
        default is 20 tokens. Each row ends at its own limit, or with `max_length_factor`, Marian's,
        at that multiple of the batch's longest source. Learned positions end where their table
        does."""
        limiting = options.first_of(LIMITS)
        extra = first_given(options.take("extra_output_tokens"), self.extra_output_tokens)
        if not isinstance(extra, int) or extra < 0:
            raise ValueError(f"extra_output_tokens={extra!r}: expected an integer from 0")
        factor = options.take("max_length_factor")
        if factor is not None and not factor > 0:
            raise ValueError(f"max_length_factor={factor!r}: expected a number above 0")
        if limiting in ("max_new_tokens", "max_length"):
            return
        kwargs = options.kwargs
        encoded = first_given(kwargs.get("encoder_outputs"), [torch.ones(1, 1)])[0]
        source = first_given(inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), encoded)
        by_factor = limiting == "max_length_factor"
        limit = max(1, int(factor * source.shape[1])) if by_factor else source.shape[1] + extra
        if self.config.position_encoding == "learned":
            positions = self.config.max_position_embeddings
            if prompt_length >= positions:
                raise ValueError(
                    f"decoder_input_ids of {prompt_length} tokens, the first included: expected "
                    f"fewer than max_position_embeddings={positions}"
                )
            limit = min(limit, positions - prompt_length)
        options["max_new_tokens"] = limit
        mask = options["attention_mask"]
        has_ends = options["pad_token_id"] is not None or options["eos_token_id"] is not None
        if by_factor or mask is None or mask.ndim != 2 or not has_ends:
            return
        lengths = (mask.count_nonzero(1) + extra).clamp(min=1, max=limit)
        limits = set(lengths.tolist())
        if len(limits) == 1:  # a limit of all rows, which assisted decoding keeps to the token
            options["max_new_tokens"] = limits.pop()
        else:
            options.end_rows_at(prompt_length + lengths)

    def _prompt_length(self, options: "GenerationOptions") -> int:
        """Target tokens to begin with: transformers puts the start token before a prompt that lacks
        it."""
        prompt = options.kwargs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start = first_given(options["decoder_start_token_id"], options["bos_token_id"])
        starts = torch.as_tensor(start, device=prompt.device)
        return prompt.shape[1] + int((prompt[:, 0] != starts).all())

    def _use_fast_cache(self, prompt_length: int, options: "GenerationOptions") -> None:
        """Pass a cache that copies less, where transformers would make a plain dynamic one, and no
        hook expects the rows of all beams."""
        if any(options[name] for name in NO_PLAIN_CACHE) or CACHE_NAME in options.kwargs:
            return
        if options["use_cache"] is False or self.config._attn_implementation != "sdpa":
            return
        if is_watched(self):
            return
        size = options.cache_size(prompt_length)
        options.kwargs[CACHE_NAME] = generation_cache(self.config, *size)

    def _without_autograd(self, options: "GenerationOptions") -> AbstractContextManager:
        """torch's inference mode, which saves a twentieth of the time, but whose tensors can't take
        part in training: only where nothing but token ids remains of a generation."""
        kwargs, kind = options.kwargs, self.device.type
        if not is_generation_cache(kwargs.get(CACHE_NAME)):
            return nullcontext()
        if options["return_dict_in_generate"] or kwargs.get("synced_gpus") or _is_sharded(self):
            return nullcontext()
        if options.shows_what_may_be_kept():
            return nullcontext()
        if "forward" in vars(self) or kind == "meta":  # compiled, or weights come and go
            return nullcontext()
        if _is_quantized(self):  # to a type that inference mode may not handle
            return nullcontext()
        # autocast keeps the weights that it has cast
        return nullcontext() if torch.is_autocast_enabled(kind) else torch.inference_mode()

    @takes_either_name
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As transformers', which looks in each step for all that any model might take, and hides
        the padding of a target behind the mask that it makes for a static cache."""
        given = {CACHE_NAME: cache, "attention_mask": attention_mask, **kwargs}
        ours = isinstance(cache, EncoderDecoderCache) and (
            cache.is_compileable or is_generation_cache(cache)
        )
        plain = not {"decoder_position_ids", "labels"} & given.keys()
        if ours and plain and input_ids.device == self.device:
            first = 0 if next_sequence_length is None else -next_sequence_length
            new = input_ids[:, first:].clone(memory_format=torch.contiguous_format)
            return {**given, "decoder_input_ids": new}
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **given,
        )

    def _sample(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """As transformers' (5.17 to 5.24), with a faster projection onto a large vocabulary, and
        without the rows that have ended."""
        model, criteria = with_fast_projection(self), kwargs["stopping_criteria"]
        rows = running_rows(self, input_ids, kwargs)
        # Without such criteria transformers lets a row go on until all have ended.
        if rows is not None and any(hasattr(each, "eos_token_id") for each in criteria):
            model, kwargs["stopping_criteria"] = rows.of(model), WatchedCriteria(criteria, rows)
        return GenerationMixin._sample(model, input_ids, **kwargs)

    def _beam_search(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """As transformers' (5.17 to 5.24), looking at the best tokens alone where these decide, and
        without the rows of sources that have ended."""
        config, rows = kwargs["generation_config"], running_rows(self, input_ids, kwargs)
        pad = config._pad_token_tensor
        if pad is not None:
            # transformers (5.17 to 5.24) takes id 0 for no padding, and fills up with </s> instead.
            config = kwargs["generation_config"] = copy.copy(config)
            config._pad_token_tensor = torch.full_like(pad, -1)
        best = best_tokens(self, kwargs, nn.Identity() if rows is None else rows.expand)
        if best is not None:
            kwargs["logits_processor"] = LogitsProcessorList([best])
        model = with_fast_projection(self) if best is None else best.model
        model = model if rows is None else rows.of(model)
        output = GenerationMixin._beam_search(model, input_ids, **kwargs)
        if pad is not None:
            sequences = getattr(output, "sequences", output)
            sequences[sequences < 0] = pad
        return output

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As transformers', for two vocabularies as well: (batch, generated_length) scores."""
        model = self._with_target_vocabulary()
        return GenerationMixin.compute_transition_scores(model, *args, **kwargs)

    def _with_target_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model or, where the target has a vocabulary of its own, one of the same weights
        whose `config.vocab_size` is the target's: transformers (5.17 to 5.24) reads the number of
        tokens to generate from there."""
        if self.config.decoder_vocab_size in (None, self.config.vocab_size):
            return self
        model = shallow_copy(self)
        model.config = copy.copy(self.config)
        model.config.vocab_size = self.config.decoder_vocab_size
        return model


def read_target_vocabulary(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `generate()`, with the target's vocabulary where transformers would read the
    source's: in the tokenizer, for `stop_strings`, and in an assistant, which it compares."""
    target = getattr(kwargs.get("tokenizer"), "target_tokenizer", None)
    if target is not None:
        kwargs = {**kwargs, "tokenizer": PreTrainedTokenizerFast(tokenizer_object=target)}
    assistant = kwargs.get("assistant_model")
    if isinstance(assistant, VanillaTransformerGenerationMixin):
        kwargs = {**kwargs, "assistant_model": assistant._with_target_vocabulary()}
    return kwargs


class GenerationOptions:
    """The options of a call of `generate()`: its keywords go before its generation config, and that
    before the model's. None is unset.

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
        for name in ("num_beams", "num_return_sequences"):  # transformers (5.17 to 5.24) needs one
            if name in kwargs and kwargs[name] is None:
                self.kwargs[name] = 1

    def all(self) -> dict[str, Any]:
        """All options."""
        return {**vars(self.given or self.default), **self.kwargs}

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
        else:  # transformers warns where there are both a config and keywords
            setattr(self.given, name, value)

    def first_of(self, names: Sequence[str]) -> str | None:
        """Of these options the first that is set, in the first place where any is."""
        names = [name for name in names if self[name] is not None]
        return first_given(
            *(name for place in self._places() for name in names if place.get(name) is not None)
        )

    def take(self, name: str) -> Any:
        """The value of an option that transformers does not know, which is no keyword any more."""
        value = self.kwargs.pop(name, None)
        return self[name] if value is None else value

    def mask_padding(self, source: torch.Tensor | None) -> None:
        """Hide what is `pad_token_id` in the token ids (sources, source_length) of a call without a
        mask. transformers (5.17 to 5.24) does so only without an encoder."""
        pad = self["pad_token_id"]
        if source is None or self["attention_mask"] is not None or pad in (None, *self.ends()):
            return
        if (source == pad).any():
            self.kwargs["attention_mask"] = (source != pad).long()

    def ends(self) -> set[int]:
        """The ids of the tokens that end a target."""
        eos = self["eos_token_id"]
        return {eos} if isinstance(eos, int) else set(eos or ())

    def cache_size(self, prompt_length: int) -> tuple[int, int]:
        """The rows of each source, and the most positions of a target."""
        rows = max(self["num_beams"] or 1, self["num_return_sequences"] or 1)
        new_tokens = self["max_new_tokens"]
        return rows, self["max_length"] if new_tokens is None else prompt_length + new_tokens

    def end_rows_at(self, lengths: torch.Tensor) -> None:
        """End the targets of each source at its length, the prompt included, (sources,)."""
        ends, forced = SourceLengthCriteria(lengths), self["forced_eos_token_id"]
        criteria = self.kwargs.get("stopping_criteria") or []
        self.kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, ends])
        if forced is not None:
            processors = self.kwargs.get("logits_processor") or []
            force = SourceLengthForcedEnd(ends, forced)
            self.kwargs["logits_processor"] = LogitsProcessorList([*processors, force])

    def shows_what_may_be_kept(self) -> bool:
        """Whether the caller's own objects see tokens or scores."""
        if self["streamer"] is not None or self["prefix_allowed_tokens_fn"] is not None:
            return True
        given = (self.kwargs.get(name) or [] for name in ("logits_processor", "stopping_criteria"))
        ours = (SourceLengthCriteria, SourceLengthForcedEnd)
        return not all(isinstance(each, ours) for every in given for each in every)

    def use_length_penalty_type(self) -> None:
        """Replace `length_penalty` by the one that `length_penalty_type` names.

        Raises:
            ValueError: It names none, or alpha is negative or no number.
        """
        kind, alpha = self.take("length_penalty_type") or "power", self["length_penalty"]
        if kind not in LENGTH_PENALTIES:
            choices = ", ".join(LENGTH_PENALTIES)
            raise ValueError(f"length_penalty_type={kind!r}: expected one of {choices}")
        if kind == "power":
            return
        alpha = 1.0 if alpha is None else alpha
        if not 0 <= alpha < math.inf:
            raise ValueError(
                f"length_penalty={alpha} with length_penalty_type={kind!r}: expected a number from "
                "0"
            )
        self["length_penalty"] = LengthPenalty(alpha, *LENGTH_PENALTIES[kind])


def new_token_limits(
    model: Any, source: torch.Tensor, prompt_length: int, options: GenerationOptions
) -> list[int]:
    """The most new tokens for each of the (sources, source_length) by the rules of
    `_limit_by_source`, for code that does not call `generate()` of our models."""
    VanillaTransformerGenerationMixin._limit_by_source(model, source, prompt_length, options)
    for criteria in options.kwargs.get("stopping_criteria") or []:
        if isinstance(criteria, SourceLengthCriteria):
            limits: list[int] = (criteria.max_lengths - prompt_length).tolist()
            return limits
    most = options["max_new_tokens"]
    return [options["max_length"] - prompt_length if most is None else most] * len(source)


def first_given(*values: Any) -> Any:
    """The first value that is not None, if any."""
    return next((value for value in values if value is not None), None)


def _is_quantized(model: torch.nn.Module) -> bool:
    """Whether a library has made the matrices of all layers a type of its own."""
    layers = getattr(model.get_decoder(), "layers", nn.Module())  # an engine has none
    first = next(layers.parameters(), None)
    return first is not None and type(first) is not nn.Parameter


def _is_sharded(model: torch.nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # not in every build of torch

    return isinstance(model, FSDPModule)
