# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""The paper's encoder or decoder by itself, which the paper does not have: a text encoder, and a
language model."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation import VanillaTransformerGenerationMixin
from .modeling_vanilla_transformer import (
    DecoderOutput,
    Ids,
    Mask,
    States,
    VanillaTransformerDecoder,
    VanillaTransformerEmbeddedStacks,
    VanillaTransformerEncoder,
    VanillaTransformerWithProjection,
)
from .validation import expect_integers, select_positions, validate_inputs


class VanillaTransformerEncoderModel(VanillaTransformerEmbeddedStacks):
    """The encoder alone, every position seeing every other: `AutoModelForTextEncoding`."""

    _auto_class = "AutoModelForTextEncoding"
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.for_one_stack("encoder"), encoder=VanillaTransformerEncoder)

    @can_return_tuple
    @validate_inputs
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, position_ids: Ids = None,
        inputs_embeds: States = None, **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:  # fmt: skip
        """Encode (batch, length) token ids into `last_hidden_state`, (batch, length, d_model).

        Args:
            attention_mask: 1 for tokens, 0 for padding on either side, (batch, length).
            position_ids: (batch, length); counted from the mask by default.
            inputs_embeds: In place of `input_ids`, not yet scaled, (batch, length, d_model).
        """
        return self.encoder(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)


class VanillaTransformerDecoderModel(VanillaTransformerEmbeddedStacks):
    """The decoder alone, without attention to an encoder: the body of a language model."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.for_one_stack("decoder"), decoder=VanillaTransformerDecoder)

    @validate_inputs
    def forward(self, input_ids: Ids = None, **kwargs: Any) -> DecoderOutput:
        """See `VanillaTransformerDecoder.forward`."""
        return self.decoder(input_ids, **kwargs)


class VanillaTransformerForCausalLM(
    VanillaTransformerWithProjection, VanillaTransformerGenerationMixin
):
    """A language model, the decoder alone with the projection: `AutoModelForCausalLM`."""

    _auto_class = "AutoModelForCausalLM"
    _keys_to_ignore_on_load_unexpected = [r"encoder\.", r"encoder_attn"]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(VanillaTransformerDecoderModel(config))

    @can_return_tuple
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, position_ids: Ids = None,
        past_key_values: Cache | None = None, inputs_embeds: States = None, labels: Ids = None,
        shift_labels: Ids = None, use_cache: bool | None = None, logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None, skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Predict each next token.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, past_length + length), padding on either side.
            position_ids: (batch, length); counted from the mask by default.
            past_key_values: Keys and values of earlier positions.
            inputs_embeds: In place of `input_ids`, not yet scaled, (batch, length, d_model).
            labels: (batch, length), usually `input_ids` themselves: shifted here, as in every
                causal model of transformers; -100 takes no part in the loss.
            shift_labels: Labels that stand beside their logits already; they go before `labels`.
            use_cache: Return `past_key_values`.
            logits_to_keep: Predict only the last so many positions, or those of this index.
            num_items_in_batch, skip_logits: See `VanillaTransformerForConditionalGeneration`.
        """
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None:
                expect_integers(given, name)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache if shift_labels is None else False,
            **kwargs,
        )
        states = select_positions(outputs.last_hidden_state, logits_to_keep)
        logits, loss = self.logits_and_loss(states, shift_labels, num_items_in_batch, skip_logits)
        return CausalLMOutputWithPast(
            loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions
        )


__all__ = ["VanillaTransformerEncoderModel", "VanillaTransformerForCausalLM"]
