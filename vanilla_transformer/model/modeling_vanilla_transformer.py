# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the paper's order.

Section by section, https://arxiv.org/abs/1706.03762, then figure 1 from tokens to the loss.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import (
    Dropout,
    by_length,
    cast_once,
    fastest,
    fold_beams,
    made_once,
    unfold_beams,
)
from .cache import causal_mask, new_cache, remember, remember_source
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation import VanillaTransformerGenerationMixin
from .logits import at_positions, project
from .loss import (
    at_least_float32,
    label_smoothed_cross_entropy,
    projected_cross_entropy,
)
from .packing import labelled, packed
from .pretrained import VanillaTransformerPreTrainedModel, count_positions
from .validation import expect_encoded, expect_inputs, expect_shiftable, look_up

# ---------------------------------------------------------------- 3.1 Encoder and decoder stacks


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embedded tokens plus positions, N layers, a final norm.

    The final layer normalisation belongs to the pre-norm variant; the paper's stack has none.
    """

    role: Literal["encoder", "decoder"]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        in_encoder = self.role == "encoder"
        vocab_size = config.vocab_size if in_encoder else config.target_vocab_size
        layers = range(config.encoder_layers if in_encoder else config.decoder_layers)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        learned = config.position_encoding == "learned"
        self.embed_positions = (LearnedPositions if learned else SinusoidalPositions)(config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            VanillaTransformerLayer(config, self.role, index) for index in layers
        )
        post_norm = config.norm_position == "post"
        self.layer_norm = nn.Identity() if post_norm else _layer_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def _can_record_outputs(self) -> dict[str, OutputRecorder]:
        attention = VanillaTransformerAttention
        recorders = {
            "hidden_states": OutputRecorder(VanillaTransformerLayer),
            "attentions": OutputRecorder(attention, 1, "self_attn"),
        }
        if self.role == "decoder":
            recorders["cross_attentions"] = OutputRecorder(attention, 1, "encoder_attn")
        recorders["hidden_states"].num_hidden_layers_key = f"{self.role}_layers"
        return recorders

    def embed(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.FloatTensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Dropout(sqrt(d_model) * embedding + position), (batch, length, d_model): sections 3.4,
        3.5 and 5.4. `inputs_embeds` are rows of the embedding matrix, not yet scaled."""
        heads = getattr(self.config, f"{self.role}_attention_heads")
        model = (self.config.d_model, heads, self.embed_tokens.weight.dtype)
        expect_inputs(input_ids, inputs_embeds, attention_mask, position_ids, cache, *model)
        if inputs_embeds is None:
            rows = len(self.embed_tokens.weight)
            inputs_embeds = look_up(self.embed_tokens, input_ids, rows, "token id")
        if position_ids is None:
            position_ids = count_positions(attention_mask, inputs_embeds, cache)
        positions = self.embed_positions(position_ids, inputs_embeds.dtype)
        return self.dropout(inputs_embeds * self.embed_scale + positions)

    def through_layers(
        self, hidden_states: torch.Tensor, *mask_and_source: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The N layers, over embedded tokens: (batch, length, d_model) in and out."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, *mask_and_source, **kwargs)
        return self.layer_norm(hidden_states)


class VanillaTransformerEncoder(VanillaTransformerStack):
    """Section 3.1: N layers of self-attention and feed-forward network, every position in sight."""

    role = "encoder"

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode (batch, source_length) token ids into (batch, source_length, d_model) states."""
        kwargs.pop("past_key_values", None)  # nothing comes before a source
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, position_ids)
        layers = partial(self.through_layers, **kwargs)
        states = packed(layers, self.config, kwargs, (hidden_states, attention_mask))
        if states is None:
            states = by_length(layers, self.config, kwargs, hidden_states, attention_mask)
        return BaseModelOutput(last_hidden_state=states)


class VanillaTransformerDecoder(VanillaTransformerStack):
    """Section 3.1: as the encoder, but no position sees a later one, and each layer attends to the
    encoder's output as well, where there is an encoder."""

    role = "decoder"

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode (batch, target_length) token ids into (batch, target_length, d_model) states,
        with a mask (batch, past_length + target_length) of their own, the encoder's output
        (batch, source_length, d_model) and its mask (batch, source_length)."""
        if use_cache and past_key_values is None:
            past_key_values = new_cache(self.config)
        past = kwargs.get("cache", past_key_values)  # "cache": that of continuous batching
        hidden_states = self.embed(input_ids, inputs_embeds, attention_mask, position_ids, past)
        target = (hidden_states, attention_mask)
        source = (encoder_hidden_states, encoder_attention_mask)
        layers: Callable = partial(self.through_layers, past_key_values=past_key_values, **kwargs)
        states = packed(layers, self.config, kwargs, target, source, past_key_values)
        if states is None:
            mask = causal_mask(self.config, *target, past_key_values, position_ids)
            if encoder_hidden_states is not None:
                source = remember_source(self.config, hidden_states, *source, past_key_values)
            states = layers(hidden_states, mask, *source)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=states,
            past_key_values=past_key_values if use_cache else None,
        )


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network. In the decoder the first is causal, and attention
    to the encoder's output comes between, where there is an encoder."""

    def __init__(self, config: VanillaTransformerConfig, role: str, layer_idx: int):
        super().__init__()
        in_decoder = role == "decoder"
        attention = (config, getattr(config, f"{role}_attention_heads"), layer_idx)
        self.self_attn = VanillaTransformerAttention(*attention, is_causal=in_decoder)
        self.self_attn_layer_norm = _layer_norm(config)
        if in_decoder and config.is_encoder_decoder:
            self.encoder_attn = VanillaTransformerAttention(*attention, is_causal=False)
            self.encoder_attn_layer_norm = _layer_norm(config)
        self.ffn = VanillaTransformerFeedForward(config, getattr(config, f"{role}_ffn_dim"))
        self.ffn_layer_norm = _layer_norm(config)
        self.pre_norm = config.norm_position == "pre"
        self.dropout = Dropout(config.dropout)

    def residual(
        self,
        hidden_states: torch.Tensor,
        layer_norm: nn.LayerNorm,
        sublayer: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), or pre-norm x + Dropout(Sublayer(LayerNorm(x)))."""
        states = sublayer(cast_once(layer_norm(hidden_states) if self.pre_norm else hidden_states))
        states = hidden_states + (self.dropout(states) if self.training else states)
        return states if self.pre_norm else layer_norm(states)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        source_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(batch, length, d_model) in and out; `source` is (batch, source_length, d_model)."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, mask, past_key_values, **kwargs)[0],
        )
        if source is not None:
            hidden_states = self.residual(
                hidden_states,
                self.encoder_attn_layer_norm,
                lambda x: self.encoder_attn(x, source_mask, past_key_values, source, **kwargs)[0],
            )
        return self.residual(hidden_states, self.ffn_layer_norm, self.ffn)


# ---------------------------------------------------------------- 3.2 Attention


def scaled_dot_product_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation (1), softmax(Q K^T / sqrt(d_k)) V: the "eager" entry among transformers' attentions.

    From queries (batch, heads, query_length, d_k), keys (batch, heads, key_length, d_k), values
    (batch, heads, key_length, d_v) and a mask that is added to the scores, the output
    (batch, query_length, heads, d_v) and the weights (batch, heads, query_length, key_length).
    """
    # Half precision can't hold the sum of many small exponentials, nor a masked score.
    wide = at_least_float32(query.dtype)
    scores = query * scaling @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores = scores + attention_mask.to(wide)
    weights = scores.softmax(dim=-1, dtype=wide).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class VanillaTransformerAttention(nn.Module):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(QW_i^Q, KW_i^K, VW_i^V).

    One class for the three uses of section 3.2.3: over the encoder's own positions, over the
    decoder's (causal), and from the decoder to the encoder's output (`source`).
    """

    def __init__(
        self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int, is_causal: bool
    ):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.dropout = config.attention_dropout
        self.d_k = config.head_dim or config.d_model // num_heads
        self.d_v = config.value_head_dim or self.d_k
        self.scaling = self.d_k**-0.5
        d_model, bias = config.d_model, config.attention_bias
        self.q_proj = nn.Linear(d_model, num_heads * self.d_k, bias=bias)
        self.k_proj = nn.Linear(d_model, num_heads * self.d_k, bias=bias)
        self.v_proj = nn.Linear(d_model, num_heads * self.d_v, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.d_v, d_model, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        source: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from (batch, query_length, d_model) states to themselves and those in the cache,
        or to `source`, (batch, source_length, d_model).

        Returns:
            The output (batch, query_length, d_model) and, from the eager attention only, the
            weights (batch, heads, query_length, key_length).
        """
        states = hidden_states if source is None else source

        def keys_and_values() -> tuple[torch.Tensor, torch.Tensor]:
            key = _split_heads(self.k_proj(states), self.d_k)
            return key, _split_heads(self.v_proj(states), self.d_v)

        key, value = remember(keys_and_values, past_key_values, self.layer_idx, source is not None)
        query = _split_heads(fold_beams(self.q_proj(hidden_states), key), self.d_k)
        name, eager = self.config._attn_implementation, scaled_dot_product_attention
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        attend = fastest(attend, eager, query, key, mask, kwargs)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        output, weights = unfold_beams(hidden_states.shape[0], output, weights)
        return self.out_proj(output.flatten(2)), weights


def _split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(batch, length, heads * head_dim) to (batch, heads, length, head_dim)."""
    return states.view(*states.shape[:2], states.shape[2] // head_dim, head_dim).transpose(1, 2)


# ---------------------------------------------------------------- 3.3 Feed-forward networks


class VanillaTransformerFeedForward(nn.Module):
    """Equation (2), FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, at each position alike."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, length, d_model) in and out."""
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))


def _layer_norm(config: VanillaTransformerConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)


# ---------------------------------------------------------------- 3.4 Embeddings


class VanillaTransformerEmbeddedStacks(VanillaTransformerPreTrainedModel):
    """Encoder, decoder or both, and the embedding matrix that they share (section 3.4)."""

    def __init__(self, config: VanillaTransformerConfig, **stacks: type[VanillaTransformerStack]):
        super().__init__(config)
        self._tied_weights_keys = {}
        if config.shares_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self._tied_weights_keys = {
                f"{name}.embed_tokens.weight": "shared.weight" for name in stacks
            }
        for name, stack in stacks.items():
            setattr(self, name, stack(config))
        self.post_init()


# ---------------------------------------------------------------- 3.5 Positional encoding


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same.

    Computed where needed, for any length: there is no table, and nothing of it in a checkpoint.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.d_model = config.d_model

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(batch, length) positions to (batch, length, d_model) encodings."""
        wide, device = at_least_float32(dtype), position_ids.device
        frequencies = made_once(_frequencies, position_ids, self.d_model, wide, device)
        angles = position_ids[..., None] * frequencies
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def _frequencies(d_model: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1 / 10000^(2i / d_model) for each i, (d_model / 2)."""
    return 10000.0 ** (-torch.arange(0, d_model, 2, dtype=dtype, device=device) / d_model)


class LearnedPositions(nn.Embedding):
    """Row (E) of Table 3: one learned vector for each of `max_position_embeddings` positions."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(batch, length) positions to (batch, length, d_model) encodings."""
        return look_up(super().forward, position_ids, len(self.weight), "position").to(dtype)


# ---------------------------------------------------------------- Figure 1


class VanillaTransformerModel(VanillaTransformerEmbeddedStacks):
    """Encoder and decoder without the final projection: `AutoModel`."""

    _auto_class = "AutoModel"

    def __init__(self, config: VanillaTransformerConfig):
        stacks = {"encoder": VanillaTransformerEncoder, "decoder": VanillaTransformerDecoder}
        super().__init__(config.for_both_stacks(), **stacks)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` are given, and decode the target; for the
        arguments see `VanillaTransformerForConditionalGeneration`."""
        positions = kwargs.pop("position_ids", None)
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, positions, inputs_embeds, **kwargs)
        else:
            is_tuple = isinstance(encoder_outputs, tuple)
            encoded = BaseModelOutput(*encoder_outputs[:3]) if is_tuple else encoder_outputs
            expect_encoded(encoded, self.config.d_model, self.dtype)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class VanillaTransformerWithProjection(VanillaTransformerPreTrainedModel):
    """A model's states, projected onto the vocabulary and scored: logits and loss."""

    output_class: type[ModelOutput]

    def __init__(self, model: VanillaTransformerEmbeddedStacks):
        config = model.config
        super().__init__(config)
        self.model = model
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        matrix = "shared" if config.shares_embeddings else "decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"model.{matrix}.weight"}
        self.post_init()

    def predict(
        self,
        outputs: ModelOutput,
        labels: torch.LongTensor | None,
        logits_to_keep: int | torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None,
        skip_logits: bool | None,
    ) -> ModelOutput:
        """The outputs, with logits and loss (label-smoothed while training) for states."""
        states = at_positions(outputs.last_hidden_state, logits_to_keep)
        known = self.output_class.__dataclass_fields__
        fields = {name: value for name, value in outputs.items() if name in known}
        if labels is None:
            return self.output_class(logits=project(states, self.lm_head, logits_to_keep), **fields)
        eps = self.config.label_smoothing if self.training else 0.0
        target = (labels, eps, num_items_in_batch)
        if self.training if skip_logits is None else skip_logits:
            loss = projected_cross_entropy(states, self.lm_head, *target)
            return self.output_class(loss, **fields)
        logits = project(states, self.lm_head)
        loss = label_smoothed_cross_entropy(logits, *target)
        return self.output_class(loss, logits, **fields)


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerWithProjection, VanillaTransformerGenerationMixin
):
    """The whole of figure 1: `AutoModelForSeq2SeqLM`.

    Args of `forward`:
        input_ids: Source, (batch, source_length).
        attention_mask: 1 for source tokens, 0 for padding on either side, (batch, source_length).
        decoder_input_ids: Target shifted right by one, (batch, target_length).
        decoder_attention_mask: (batch, past_length + target_length).
        encoder_outputs: An earlier call's, to encode a source only once.
        past_key_values: Keys and values of earlier target positions and of the source.
        inputs_embeds: Rows of the embedding matrix in place of `input_ids`, not yet scaled by
            sqrt(d_model), (batch, source_length, d_model).
        decoder_inputs_embeds: Likewise in place of `decoder_input_ids`.
        decoder_position_ids, position_ids: (batch, length); counted from the mask by default.
        labels: Target, (batch, target_length), -100 outside the loss. Gives the loss, and
            `decoder_input_ids` where they are missing.
        use_cache: Return `past_key_values`.
        logits_to_keep: Predict only the last so many positions, or those of this index.
        num_items_in_batch: Labels over all batches of a gradient step, which the loss is divided
            by; `Trainer` gives it.
        skip_logits: Compute the loss without ever holding all logits, and return None for them.
            By default where `labels` are given while training, as with Liger's kernels; False
            returns logits there as well.

    Returns, among others, `loss` and `logits`, (batch, target_length, vocabulary).

    Raises:
        ValueError: Inputs are missing, doubled, or at odds in batch or length.
        IndexError: A token id is outside the vocabulary (on the CPU).
    """

    _auto_class = "AutoModelForSeq2SeqLM"
    output_class = Seq2SeqLMOutput

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(VanillaTransformerModel(config))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict the target from the source and what comes before in the target."""
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            if decoder_attention_mask is None and self.training:
                decoder_attention_mask = labelled(self.config, kwargs, labels, decoder_input_ids)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        return self.predict(outputs, labels, logits_to_keep, num_items_in_batch, skip_logits)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Outputs, shifted right: (batch, target_length), `decoder_start_token_id` first, and
        `pad_token_id` for -100."""
        config = self.config
        start, pad = config.decoder_start_token_id, config.pad_token_id
        expect_shiftable(labels, decoder_start_token_id=start, pad_token_id=pad)
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, pad)


__all__ = ["VanillaTransformerForConditionalGeneration", "VanillaTransformerModel"]
