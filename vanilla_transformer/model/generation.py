"""The paper's decoding, added to transformers' `GenerationMixin`, and faster paths through it."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)
from transformers.utils import ModelOutput

from .attention import is_our_sdpa
from .cache import (
    CACHE_NAME,
    generation_cache,
    is_generation_cache,
    rename_cache,
    repeat_for_each_beam,
    takes_either_name,
)
from .decoding_steps import best_tokens, shallow_copy, with_fast_steps
from .generation_options import GenerationOptions, expect_generation_options, first_given
from .hooks import is_position_wise, is_watched
from .output_length import (
    SourceLengthCriteria,
    SourceLengthForcedEnd,
    limit_by_source,
    use_length_penalty_type,
)
from .pretrained import as_model_output
from .running_rows import WatchedCriteria, running_rows
from .validation import expect_in_range, expect_prompt

# Options with which transformers does not use a plain dynamic cache, or rolls it back.
NO_PLAIN_CACHE = (
    "cache_implementation", "assistant_model", "custom_generate", "prompt_lookup_num_tokens",
    "prefill_chunk_size", "penalty_alpha", "dola_layers", "is_assistant",
)  # fmt: skip

# Fields of the generation config that `Seq2SeqTrainer` sets to defaults that our models don't have.
SET_BY_TRAINER = ("max_length", "num_beams")


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` with the paper's default output length, and the paper's length penalty if the
    generation config, or a call, has `length_penalty_type="gnmt"`: hypotheses are ranked by their
    log-probability over ((5 + length) / 6)^`length_penalty`, not over length^`length_penalty`.

    With `early_stopping="never"` the search finds the best hypothesis; otherwise transformers may
    stop before it.
    """

    # Section 6.1: "we set the maximum output length during inference to input length + 50"
    extra_output_tokens = 50
    # Those that were not set before
    _set_by_trainer = frozenset(SET_BY_TRAINER)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate()`, with the paper's limit of length and its length penalty.

        Args:
            kwargs: As for transformers, and `length_penalty_type`, "power", "gnmt", "avg" or "wu";
                `extra_output_tokens`, how many tokens longer than its source an output may be (50),
                or `max_length_factor`, how many times as long as the longest source it may be.

        Raises:
            TypeError, ValueError: The model can't read an input or use an option.
            IndexError: A token id is outside the vocabulary (on the CPU).
        """
        if _is_sharded(self) and "generate" not in vars(self):
            # FSDP gathers weights for `forward` alone, but the encoder is called by itself here.
            torch.distributed.fsdp.register_fsdp_forward_method(self, "generate")
            with torch.no_grad():
                return self.generate(inputs, generation_config, **kwargs)
        self.forget_defaults_of_trainer()
        encoded = as_model_output(kwargs.get("encoder_outputs"))
        if isinstance(encoded, ModelOutput):  # transformers repeats its rows in place
            kwargs["encoder_outputs"] = type(encoded)(**encoded)
        expect_prompt(self, {"inputs": inputs, **kwargs})
        kwargs = read_target_vocabulary(rename_cache(kwargs, CACHE_NAME))
        kwargs.pop("labels", None)  # of `Seq2SeqTrainer`: transformers ignores them too
        options = GenerationOptions(self.generation_config, generation_config, kwargs)
        is_encoder_decoder = self.config.is_encoder_decoder
        expect_generation_options(options.all(), self.config.target_vocab_size, is_encoder_decoder)
        use_length_penalty_type(options)
        if is_encoder_decoder:
            options.mask_padding(first_given(inputs, kwargs.get("input_ids")))
            prompt_length = options.prompt_length()
            limit_by_source(self, inputs, prompt_length, options)
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
        return output.clone() if is_inference else output  # a clone can take part in training

    def forget_defaults_of_trainer(self) -> None:
        """Undo the limit of 20 tokens and the single beam, in place of a pipeline's 4.
        `Seq2SeqTrainer` (5.17 to 5.24) writes them into the model's generation config after its
        first batch, with all other defaults of transformers, where nothing was set before."""
        config, defaults = self.generation_config, GenerationConfig._get_default_generation_params()
        if any(
            getattr(config, name, None) is None
            for name, value in defaults.items()
            if value is not None
        ):
            unset = frozenset(name for name in SET_BY_TRAINER if getattr(config, name) is None)
            if self._set_by_trainer != unset:  # threads share the model
                self._set_by_trainer = unset
            return
        for name in self._set_by_trainer:
            if getattr(config, name) == defaults[name]:
                setattr(config, name, None)

    def _use_fast_cache(self, prompt_length: int, options: GenerationOptions) -> None:
        """Pass a cache that copies less, if transformers would make a plain dynamic one and no hook
        or module of a user expects the rows of all beams, or keeps tensors."""
        if any(options[name] for name in NO_PLAIN_CACHE) or CACHE_NAME in options.kwargs:
            return
        if options["use_cache"] is False or not is_our_sdpa(self.config._attn_implementation):
            return
        if is_watched(self) or not is_position_wise(self.base_model):
            return
        size = options.cache_size(prompt_length)
        options.kwargs[CACHE_NAME] = generation_cache(self.config, *size)

    def _without_autograd(self, options: GenerationOptions) -> AbstractContextManager:
        """torch's inference mode, which saves a twentieth of the time. Its tensors can't take part
        in training, so it is only used if a generation returns nothing but token ids."""
        kwargs, kind = options.kwargs, self.device.type
        if not is_generation_cache(kwargs.get(CACHE_NAME)):
            return nullcontext()
        if options["return_dict_in_generate"] or kwargs.get("synced_gpus") or _is_sharded(self):
            return nullcontext()
        if _shows_what_may_be_kept(options):
            return nullcontext()
        if "forward" in vars(self) or kind == "meta":  # compiled, or its weights are offloaded
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
        """Same as transformers', which checks in each step for all that any model might take, and
        hides the padding of a target with the mask that it makes for a static cache."""
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
        """Same as transformers' (5.17 to 5.24), with a faster projection onto a large vocabulary,
        and without the rows that have ended."""
        model, criteria = with_fast_steps(self, kwargs.get(CACHE_NAME)), kwargs["stopping_criteria"]
        rows = running_rows(self, input_ids, kwargs)
        # Without such criteria transformers continues a row until all have ended.
        if rows is not None and any(hasattr(each, "eos_token_id") for each in criteria):
            model, kwargs["stopping_criteria"] = rows.of(model), WatchedCriteria(criteria, rows)
        return GenerationMixin._sample(model, input_ids, **kwargs)

    def _beam_search(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """Same as transformers' (5.17 to 5.24), but computes the best tokens alone where these are
        enough, and no rows of sources that have ended."""
        config, rows = kwargs["generation_config"], running_rows(self, input_ids, kwargs)
        pad = config._pad_token_tensor
        if pad is not None:
            # transformers (5.17 to 5.24) ignores a padding id of 0 and pads with </s> instead.
            config = kwargs["generation_config"] = copy.copy(config)
            config._pad_token_tensor = torch.full_like(pad, -1)
        best = best_tokens(self, kwargs, nn.Identity() if rows is None else rows.expand)
        if best is not None:
            kwargs["logits_processor"] = LogitsProcessorList([best])
        model = with_fast_steps(self, kwargs.get(CACHE_NAME)) if best is None else best.model
        model = model if rows is None else rows.of(model)
        output = GenerationMixin._beam_search(model, input_ids, **kwargs)
        if pad is not None:
            sequences = getattr(output, "sequences", output)
            sequences[sequences < 0] = pad
        return output

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Same as transformers', for two vocabularies as well: (batch, generated_length) scores."""
        model = self._with_target_vocabulary()
        return GenerationMixin.compute_transition_scores(model, *args, **kwargs)

    def _with_target_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model or, if the target has a vocabulary of its own, one with the same weights whose
        `config.vocab_size` is the target's. transformers (5.17 to 5.24) reads from there how many
        tokens there are to choose from."""
        if self.config.decoder_vocab_size in (None, self.config.vocab_size):
            return self
        model = shallow_copy(self)
        model.config = copy.copy(self.config)
        model.config.vocab_size = self.config.decoder_vocab_size
        return model


def read_target_vocabulary(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `generate()`, with the target's vocabulary where transformers would read the
    source's: in the tokenizer, for `stop_strings`, and in an assistant, to compare both."""
    target = getattr(kwargs.get("tokenizer"), "target_tokenizer", None)
    if target is not None:
        kwargs = {**kwargs, "tokenizer": PreTrainedTokenizerFast(tokenizer_object=target)}
    assistant = kwargs.get("assistant_model")
    if isinstance(assistant, VanillaTransformerGenerationMixin):
        kwargs = {**kwargs, "assistant_model": assistant._with_target_vocabulary()}
    return kwargs


def _shows_what_may_be_kept(options: GenerationOptions) -> bool:
    """Whether objects of the caller see, and may keep, tokens or scores."""
    if options["streamer"] is not None or options["prefix_allowed_tokens_fn"] is not None:
        return True
    lists = ("logits_processor", "stopping_criteria")
    given = (each for name in lists for each in options.kwargs.get(name) or [])
    return not all(
        isinstance(each, (SourceLengthCriteria, SourceLengthForcedEnd)) for each in given
    )


def _is_quantized(model: torch.nn.Module) -> bool:
    """Whether a library has replaced the matrices of all layers with a type of its own."""
    layers = getattr(model.get_decoder(), "layers", nn.Module())  # an engine has none
    first = next(layers.parameters(), None)
    return first is not None and type(first) is not nn.Parameter


def _is_sharded(model: torch.nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # not in every build of torch

    return isinstance(model, FSDPModule)
