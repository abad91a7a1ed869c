"""What the paper's decoding adds to transformers' `GenerationMixin`."""

import copy
import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .cache import (
    copies_less,
    copy_less,
    give_each_beam_its_own,
    is_plain,
    masks_itself,
)
from .logits import BEST_TOKENS, BestTokens
from .validation import expect_generation_options, expect_prompt

LENGTH_PENALTY_TYPES = ("power", "gnmt")
NOT_AS_THEY_ARE = {"decoder_position_ids", "labels"}
SHARED_BY_BEAMS = ("encoder_outputs", "attention_mask")
# transformers 5.17 takes the size of the vocabulary from the configuration instead.
_continuations = getattr(GenerationMixin, "_get_top_k_continuations", None)
COUNTS_TOKENS_BY_SCORES = (
    _continuations is not None and "vocab_size" not in inspect.signature(_continuations).parameters
)


class GNMTLengthPenalty(float):
    """The exponent alpha of ((5 + length) / 6)^alpha, for code that writes length ** alpha: eq. 14
    of Wu et al. (2016), https://arxiv.org/abs/1609.08144, which section 6.1 refers to."""

    def __rpow__(self, length: Any, modulo: None = None) -> Any:
        return ((5 + length) / 6) ** float(self)


class SourceLengthCriteria(StoppingCriteria):
    """Ends each row at its own length, which follows from its source, whatever else is in the
    batch.

    Args:
        max_lengths: Of the targets of each source, the prompt included, (sources,). A source may
            have several targets, beams or samples, one after another.
    """

    eos_token_id = None  # its presence makes transformers pad rows that have ended

    def __init__(self, max_lengths: torch.Tensor):
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of (rows, length) targets has ended, (rows,)."""
        ended = input_ids.shape[1] >= self.max_lengths
        return ended.repeat_interleave(input_ids.shape[0] // len(ended))


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` with the paper's default output length, and the paper's length penalty where the
    generation config, or a call, has `length_penalty_type="gnmt"`: hypotheses are ranked by their
    log-probability over ((5 + length) / 6)^`length_penalty`, not over length^`length_penalty`.

    The best is sure to be found with `early_stopping="never"`; else transformers stops by a guess.
    """

    # Section 6.1: "we set the maximum output length during inference to input length + 50"
    extra_output_tokens = 50

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and for a model in FSDP's shards: FSDP gathers weights for `forward`
        alone, unless told otherwise, but the encoder is called by itself here.

        Raises:
            TypeError, ValueError: Something to read or an option is what no model reads or does.
        """
        if _in_shards(self) and "generate" not in vars(self):
            torch.distributed.fsdp.register_fsdp_forward_method(self, "generate")
            with torch.no_grad():
                return self.generate(*args, **kwargs)
        expect_prompt({**dict(zip(["inputs"], args, strict=False)), **kwargs})
        config = kwargs.get("generation_config") or self.generation_config
        expect_generation_options({**vars(config), **kwargs}, self.config.target_vocab_size)
        output = GenerationMixin.generate(self._with_target_vocabulary(), *args, **kwargs)
        give_each_beam_its_own(getattr(output, "past_key_values", None))
        return output

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As transformers', which knows no `length_penalty_type`.

        Raises:
            ValueError: It is none of its choices, or GNMT's alpha is negative or no number.
        """
        given = {name: kwargs.pop(name) for name in ("length_penalty_type",) if name in kwargs}
        config, kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        kind = given.get("length_penalty_type", getattr(config, "length_penalty_type", "power"))
        if kind not in LENGTH_PENALTY_TYPES:
            choices = ", ".join(LENGTH_PENALTY_TYPES)
            raise ValueError(f"length_penalty_type={kind!r}: expected one of {choices}")
        alpha = config.length_penalty
        if kind == "gnmt" and not (alpha is None or 0 <= alpha < math.inf):
            raise ValueError(
                f"length_penalty={alpha} with length_penalty_type='gnmt': expected a number from 0"
            )
        if kind == "gnmt":
            config.length_penalty = GNMTLengthPenalty(1.0 if alpha is None else alpha)
        return config, kwargs

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        has_default_min_length: bool,
        model_input_name: str,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
        **kwargs: Any,
    ) -> GenerationConfig:
        """Input length + 50 where the caller set no limit; transformers' own default is 20 tokens.
        This is the longest source's limit: `_sample` and `_beam_search` end each row at its own.
        Learned positions end where their table does.

        Args:
            inputs_tensor: The encoder's input, of shape (batch, source_length) or
                (batch, source_length, d_model).
        """
        unlimited = has_default_max_length and generation_config.max_new_tokens is None
        if unlimited and self.config.is_encoder_decoder:
            limit = inputs_tensor.shape[1] + self.extra_output_tokens
            if self.config.position_encoding == "learned":
                limit = min(limit, self.config.max_position_embeddings - input_ids_length)
            generation_config.max_new_tokens = limit
            generation_config.limited_by_source = True
        return super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            has_default_min_length=has_default_min_length,
            model_input_name=model_input_name,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, **inputs: Any
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """A source is not repeated for each of its beams or samples: they share what is encoded."""
        shared = {}
        if self.config.is_encoder_decoder:
            shared = {name: inputs[name] for name in SHARED_BY_BEAMS if name in inputs}
            inputs["encoder_outputs"] = {}  # transformers expects something to repeat
            inputs["attention_mask"] = None
        input_ids, inputs = super()._expand_inputs_for_generation(expand_size, **inputs)
        return input_ids, inputs | shared

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if not self.config.is_encoder_decoder or cache is None:
            return
        if given is None and is_plain(cache):
            copy_less(cache, generation_config.max_length)
            return
        # Another kind of cache is reordered with the beams, so that each needs a source of its own.
        beams = max(generation_config.num_beams, generation_config.num_return_sequences)
        shared = {name: model_kwargs.get(name) for name in SHARED_BY_BEAMS}
        _, repeated = super()._expand_inputs_for_generation(
            beams, is_encoder_decoder=True, **shared
        )
        model_kwargs.update(repeated)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As transformers', which looks in each step for whatever any model might take, and hides
        the padding of a target behind the mask that it makes for a static cache."""
        given = {"past_key_values": past_key_values, "attention_mask": attention_mask, **kwargs}
        as_they_are = not NOT_AS_THEY_ARE & given.keys() and input_ids.device == self.device
        if masks_itself(past_key_values) and as_they_are:
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
        self._end_each_row(input_ids, kwargs)
        with self._without_autograd(kwargs):
            output = super()._sample(input_ids, **kwargs)
        return _fit_for_training(output)

    def _beam_search(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        self._end_each_row(input_ids, kwargs)
        best = self._best_tokens(kwargs)
        if best is not None:
            processors = LogitsProcessorList([best])
            kwargs |= {"logits_to_keep": best, "logits_processor": processors}
        before = BEST_TOKENS.set(best)
        try:
            with self._without_autograd(kwargs):
                output = super()._beam_search(input_ids, **kwargs)
        finally:
            BEST_TOKENS.reset(before)
        output = _fit_for_training(output)
        config = kwargs["generation_config"]
        if config._eos_token_tensor is None and config._pad_token_tensor is not None:
            sequences = getattr(output, "sequences", output)
            sequences[sequences < 0] = config._pad_token_tensor  # what transformers fills up with
        return output

    def _end_each_row(self, input_ids: torch.LongTensor, options: dict[str, Any]) -> None:
        """Add a `SourceLengthCriteria` where the caller set no limit and sources differ in length.

        Args:
            input_ids: The prompts, (rows, prompt_length).
            options: The other arguments of a decoding method.
        """
        config, mask = options["generation_config"], options.get("attention_mask")
        is_limited = getattr(config, "limited_by_source", False)
        if not is_limited or mask is None or mask.ndim != 2 or config._pad_token_tensor is None:
            return
        lengths = mask.count_nonzero(1)
        if lengths.min() < mask.shape[1]:
            limits = (input_ids.shape[1] + lengths + self.extra_output_tokens).to(input_ids.device)
            criteria = SourceLengthCriteria(limits.clamp(max=config.max_length))
            options["stopping_criteria"] = StoppingCriteriaList(
                [*options["stopping_criteria"], criteria]
            )

    def _best_tokens(self, options: dict[str, Any]) -> BestTokens | None:
        """What beam search may look at instead of all tokens, on a CPU: where none of their scores
        is asked for, changed or drawn by chance."""
        config = options["generation_config"]
        asked_for = config.output_scores or config.output_logits
        changed = options["logits_processor"] or config.do_sample
        elsewhere = options.get("synced_gpus") or self.device.type != "cpu"
        # A subclass, a hook, or who replaces `forward`, may do something to logits.
        ours = "_auto_class" in vars(type(self)) and "forward" not in vars(self)
        if asked_for or changed or elsewhere or not ours or self._forward_hooks:
            return None
        if not COUNTS_TOKENS_BY_SCORES:
            return None
        ends = config._eos_token_tensor
        beams_to_keep = max(2, 1 + (0 if ends is None else len(ends))) * config.num_beams
        return BestTokens(min(beams_to_keep, self.config.target_vocab_size))

    def _get_top_k_continuations(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """As transformers', whose tokens are places among the best where it looks at those."""
        found = super()._get_top_k_continuations(*args, **kwargs)
        best = BEST_TOKENS.get()
        if best is not None:
            _, sequences, beams = found
            now = kwargs["cur_len"]
            rows = beams[:, :, now - kwargs["decoder_prompt_len"]]
            sequences[:, :, now] = best.tokens[rows, sequences[:, :, now]]
        return found

    def _without_autograd(self, options: dict[str, Any]) -> AbstractContextManager:
        """torch's inference mode, which takes a twentieth less time, but whose tensors take no part
        in training: only where token ids are all that is left of a generation."""
        if options["generation_config"].return_dict_in_generate or options.get("synced_gpus"):
            return nullcontext()
        kind = self.device.type
        if "forward" in vars(self) or kind == "meta":  # compiled, or weights come and go
            return nullcontext()
        keeps_weights = torch.is_autocast_enabled(kind)  # those that autocast has cast
        if keeps_weights or not copies_less(options.get("past_key_values")):
            return nullcontext()
        return torch.inference_mode()

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As transformers', for two vocabularies as well: (batch, generated_length) scores."""
        model = self._with_target_vocabulary()
        return GenerationMixin.compute_transition_scores(model, *args, **kwargs)

    def _with_target_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model or, where the target has a vocabulary of its own, one of the same weights
        whose `config.vocab_size` is the target's: transformers (5.17 to 5.23) reads the number of
        tokens to generate from there."""
        if self.config.decoder_vocab_size in (None, self.config.vocab_size):
            return self
        model = object.__new__(type(self))  # copy.copy would build one of FSDP's anew
        model.__dict__.update(self.__dict__)
        model.config = copy.copy(self.config)
        model.config.vocab_size = self.config.decoder_vocab_size
        return model


def _fit_for_training(output: Any) -> Any:
    is_of_inference = isinstance(output, torch.Tensor) and output.is_inference()
    return output.clone() if is_of_inference else output


def _in_shards(model: torch.nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # not in every build of torch

    return isinstance(model, FSDPModule)
