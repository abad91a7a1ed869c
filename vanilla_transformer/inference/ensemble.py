"""Several models as one: the mean of their probabilities for each next token."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..model.attention import is_our_sdpa
from ..model.cache import CACHE_NAME, generation_cache, new_cache, takes_either_name
from ..model.generation import NO_PLAIN_CACHE, VanillaTransformerGenerationMixin
from ..model.generation_options import GenerationOptions
from ..model.hooks import is_position_wise, is_watched
from ..model.loss import at_least_float32
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..model.pretrained import VanillaTransformerPreTrainedModel

# All members must have these in common: they define the meaning of token ids.
SHARED_FIELDS = (
    "vocab_size", "target_vocab_size", "pad_token_id", "bos_token_id", "eos_token_id",
    "decoder_start_token_id",
)  # fmt: skip


class VanillaTransformerEnsemble(
    VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin
):
    """Several models that decode together: p(token) is the mean of the members' probabilities.

    `generate()` has the same options as for a member. Members may differ in everything except the
    vocabulary. The generation config is the first member's. The output is never longer than the
    learned positions of any member.

    Args:
        members: At least one model.

    Raises:
        TypeError: A member is not a `VanillaTransformerForConditionalGeneration`.
        ValueError: There is no member, or their vocabularies or special tokens differ.

    Example:

        >>> ensemble = VanillaTransformerEnsemble([first, second])
        >>> ensemble.generate(**inputs, num_beams=5)
    """

    def __init__(self, members: Sequence[VanillaTransformerForConditionalGeneration]):
        expect_members(members)
        super().__init__(shared_config(members))
        self.members = nn.ModuleList(members)
        self.encoder = EnsembleEncoder(members)
        self.generation_config = copy.deepcopy(members[0].generation_config)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoders of all members as one module."""
        return self.encoder

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("an ensemble has no format of its own: save its members")

    @takes_either_name
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: "EnsembleCache | None" = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Predict the next tokens; for other arguments see a member's `forward`.

        Args:
            input_ids: (batch, source_length).
            decoder_input_ids: (batch, target_length).
            decoder_attention_mask: (batch, past_length + target_length).
            encoder_outputs: From `EnsembleEncoder`, in place of `input_ids`.

        Returns:
            `logits` (batch, target_length, vocabulary), whose softmax is the mean of the members'
            probabilities, and whose level is the mean of theirs, so that a repetition penalty works
            as for a member; and the cache.

        Raises:
            ValueError: An input or output that an ensemble does not have is given or asked for.
        """
        expect_supported(kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        if use_cache and cache is None:
            cache = EnsembleCache([new_cache(member.config) for member in self.members])
        caches = [None] * len(self.members) if cache is None else cache.members
        inputs = {
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
        }
        total: torch.Tensor | None = None
        level: torch.Tensor | float = 0.0
        for member, states, own_cache in zip(
            self.members, self.encoder.split(encoder_outputs[0]), caches, strict=True
        ):
            outputs = member(
                **inputs,
                **kwargs,
                encoder_outputs=BaseModelOutput(states),
                cache=own_cache,
                use_cache=use_cache,
            )
            logits = outputs.logits.to(at_least_float32(outputs.logits.dtype))
            normalizer = logits.logsumexp(-1, keepdim=True)
            log_probs, level = logits - normalizer, level + normalizer / len(self.members)
            total = log_probs if total is None else torch.logaddexp(total, log_probs)
        assert total is not None
        return Seq2SeqLMOutput(
            logits=total + (level - math.log(len(self.members))),
            **{CACHE_NAME: cache},
            encoder_last_hidden_state=encoder_outputs[0],
        )

    def _use_fast_cache(self, prompt_length: int, options: GenerationOptions) -> None:
        """Pass a cache of the members' caches, because transformers would make one for a single
        model.

        Raises:
            ValueError: An option asks for another kind of cache.
        """
        for name in NO_PLAIN_CACHE:
            if options[name]:
                raise ValueError(f"{name}={options[name]!r}: expected None for an ensemble")
        if CACHE_NAME in options.kwargs or options["use_cache"] is False:
            return
        configs = [member.config for member in self.members]
        are_fast = all(is_our_sdpa(config._attn_implementation) for config in configs)
        are_ours = all(is_position_wise(member.base_model) for member in self.members)
        # hooks and modules of a user get the rows of all beams
        if are_fast and are_ours and not is_watched(self):
            size = options.cache_size(prompt_length)
            caches = [generation_cache(config, *size) for config in configs]
        else:
            caches = [new_cache(config) for config in configs]
        options.kwargs[CACHE_NAME] = EnsembleCache(caches)


def expect_supported(options: dict[str, Any]) -> None:
    """Raise a ValueError if one of these options needs a single model."""
    names = ("labels", "inputs_embeds", "decoder_inputs_embeds", "output_attentions")
    for name in (*names, "output_hidden_states"):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{name} is given to an ensemble: expected a single model")


class EnsembleEncoder(nn.Module):
    """The encoders of all members. Their states, (batch, source_length, d_model) each, are
    concatenated along the last dimension, so that transformers can repeat them for beams."""

    main_input_name = "input_ids"

    def __init__(self, members: Sequence[VanillaTransformerForConditionalGeneration]):
        super().__init__()
        self.encoders = nn.ModuleList([member.get_encoder() for member in members])

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """(batch, source_length) token ids to (batch, source_length, sum of d_model) states."""
        expect_supported(kwargs)
        states = [encoder(input_ids, attention_mask)[0] for encoder in self.encoders]
        return BaseModelOutput(torch.cat(states, -1))

    def split(self, states: torch.Tensor) -> list[torch.Tensor]:
        """The states of each member."""
        parts = states.split([encoder.config.d_model for encoder in self.encoders], -1)
        return [part.to(encoder.dtype) for part, encoder in zip(parts, self.encoders, strict=True)]


class EnsembleCache(EncoderDecoderCache):
    """The caches of all members. Their layers are in one list, so that operations of transformers
    on layers, such as reordering beams, apply to each member's."""

    def __init__(self, members: Sequence[EncoderDecoderCache]):
        joined = []
        for kind in ("self_attention_cache", "cross_attention_cache"):
            cache = copy.copy(getattr(members[0], kind))
            cache.layers = [layer for member in members for layer in getattr(member, kind).layers]
            joined.append(cache)
        super().__init__(*joined)
        self.members = list(members)


def shared_config(members: Sequence[VanillaTransformerForConditionalGeneration]) -> Any:
    """The first member's configuration, with the positions that all members can read."""
    config = copy.deepcopy(members[0].config)
    learned = [m.config for m in members if m.config.position_encoding == "learned"]
    if learned:
        config.position_encoding = "learned"
        config.max_position_embeddings = min(c.max_position_embeddings for c in learned)
    return config


def expect_members(members: Sequence[Any]) -> None:
    """Raise an error unless these are models of this package with the same vocabulary."""
    if not members:
        raise ValueError("members=[]: expected at least one model")
    for index, member in enumerate(members):
        if not isinstance(member, VanillaTransformerForConditionalGeneration):
            raise TypeError(
                f"member {index} of the ensemble is a {type(member).__name__}: expected "
                "VanillaTransformerForConditionalGeneration; `vanilla-transformer convert` makes "
                "one of other toolkits' checkpoints"
            )
        for name in SHARED_FIELDS:
            value, first = (getattr(m.config, name) for m in (member, members[0]))
            if value != first:
                raise ValueError(
                    f"{name}={value} in member {index} of the ensemble: expected {first}, as in "
                    "member 0; members share their vocabulary"
                )


def expect_same_vocabulary(
    tokenizers: Sequence[PreTrainedTokenizerBase], names: Sequence[str | Path]
) -> None:
    """Raise a ValueError unless each token has the same id in all tokenizers, on both sides, and
    all split text into the same tokens."""

    def vocabularies(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, int]]:
        target = getattr(tokenizer, "target_tokenizer", None)
        return [tokenizer.get_vocab(), *([] if target is None else [target.get_vocab()])]

    first, parts = vocabularies(tokenizers[0]), text_preparation(tokenizers[0])
    for name, tokenizer in zip(names, tokenizers, strict=True):
        if vocabularies(tokenizer) != first:
            raise ValueError(
                f"{name} has a different vocabulary than {names[0]}: expected the same tokens "
                "with the same ids in all models"
            )
        for part, value in text_preparation(tokenizer).items():
            if value != parts.get(part):
                raise ValueError(
                    f"{name} prepares text in another way than {names[0]} ({part}): expected "
                    "the same tokens of a text in all models"
                )


def text_preparation(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The parts of a tokenizer that determine how it splits and marks a text."""
    languages = {name: getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")}
    parts = {"moses": tokenizer.init_kwargs.get("moses"), **languages}
    sides = {"": "backend_tokenizer", "target ": "target_tokenizer"}
    for side, name in sides.items():
        if (backend := getattr(tokenizer, name, None)) is not None:
            saved = json.loads(backend.to_str())
            for part in ("normalizer", "pre_tokenizer", "model", "post_processor"):
                parts[side + part] = saved[part]
    return parts
