# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the paper's order.

Section by section, https://arxiv.org/abs/1706.03762, then figure 1, where a batch starts: in
`VanillaTransformerForConditionalGeneration.forward`. Faster versions are in other files: attention
(`attention.py`), batches (`packing.py`), the cache (`cache.py`) and the loss (`loss.py`). With
`attn_implementation="eager"`, this file computes everything."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import LongTensor, Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as DecoderOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import (
    FastAttention,
    as_scores,
    cast_once,
    is_tracing,
    one_row_for_all_queries,
    repeat_sources,
)
from .cache import CACHE_NAME, is_paged, new_cache, takes_either_name, update_kv_cache
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .generation import VanillaTransformerGenerationMixin
from .loss import at_least_float32, can_fuse, fused_linear_cross_entropy, not_suppressed
from .packing import mask_from_labels, without_padding
from .pretrained import (
    VanillaTransformerPreTrainedModel,
    as_model_output,
    count_positions,
    output_recorders,
    scale_sublayers,
)
from .validation import (
    expect_count,
    expect_labels,
    expect_shiftable,
    select_positions,
    validate_inputs,
    warn_of_unshifted,
)

Ids: TypeAlias = LongTensor | None
Mask: TypeAlias = Tensor | None
States: TypeAlias = Tensor | None

# ---------------------------------------------------------------- 3.1 Encoder and decoder stacks


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embedded tokens plus positions, and N layers. The layer
    normalization after them belongs to the pre-norm variant; the paper's stack has none."""

    def __init__(self, config: VanillaTransformerConfig, stack: str, layer: type[nn.Module]):
        super().__init__(config)
        vocab_size = config.vocab_size if stack == "encoder" else config.target_vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        learned = config.position_encoding == "learned"
        self.embed_positions = (LearnedPositions if learned else SinusoidalPositions)(config)
        # not `embed_scale`, by which inseq would multiply the `inputs_embeds` that it passes
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_layer_norm = _layer_norm(config, config.embedding_layer_norm)
        number = getattr(config, f"{stack}_layers")
        self.layers = nn.ModuleList(layer(config, layer_idx) for layer_idx in range(number))
        scale_sublayers(self.layers, config.initializer)
        self.layer_norm = _layer_norm(config, config.ends_in_layer_norm(stack))
        self.dropout, self.gradient_checkpointing = Dropout(config.dropout), False
        self.post_init()

    def embed(
        self, input_ids: Ids, inputs_embeds: States, position_ids: Ids, attention_mask: Mask,
        cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Dropout(sqrt(d_model) * embedding + position), (batch, length, d_model): sections 3.4,
        3.5 and 5.4. `inputs_embeds` are rows of the embedding matrix, unscaled."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = count_positions(inputs_embeds, attention_mask, cache)
        positions = self.embed_positions(position_ids, inputs_embeds.dtype)
        states = self.embed_layer_norm(inputs_embeds * self.embedding_scale + positions)
        return self.dropout(states)


class VanillaTransformerEncoder(VanillaTransformerStack):
    """N layers of self-attention and feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, "encoder", VanillaTransformerEncoderLayer)

    @property
    def _can_record_outputs(self) -> dict[str, Any]:
        return output_recorders(VanillaTransformerEncoderLayer, VanillaTransformerAttention)

    @takes_either_name
    @merge_with_config_defaults
    @capture_outputs
    @without_padding
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, position_ids: Ids = None,
        inputs_embeds: States = None, **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:  # fmt: skip
        """Encode (batch, source_length) token ids into (batch, source_length, d_model) states."""
        kwargs.pop("cache", None)  # nothing comes before a source
        hidden_states = self.embed(input_ids, inputs_embeds, position_ids, attention_mask)
        mask = padding_mask(self.config, hidden_states, attention_mask, hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class VanillaTransformerDecoder(VanillaTransformerStack):
    """Like the encoder, but no position sees a later one, and each layer attends to the source."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, "decoder", VanillaTransformerDecoderLayer)

    @property
    def _can_record_outputs(self) -> dict[str, Any]:
        return output_recorders(VanillaTransformerDecoderLayer, VanillaTransformerAttention)

    @takes_either_name
    @merge_with_config_defaults
    @capture_outputs
    @without_padding
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, position_ids: Ids = None,
        encoder_hidden_states: States = None, encoder_attention_mask: Mask = None,
        cache: Cache | None = None, inputs_embeds: States = None,
        use_cache: bool | None = None, **kwargs: Unpack[TransformersKwargs],
    ) -> DecoderOutput:  # fmt: skip
        """Decode (batch, target_length) token ids into (batch, target_length, d_model) states, with
        their mask (batch, past_length + target_length), the encoder's output (batch, source_length,
        d_model) and its mask (batch, source_length)."""
        past = None if is_paged(cache) else cache  # continuous batching has its own mask
        if use_cache and cache is None:
            cache = new_cache(self.config)
        hidden_states = self.embed(input_ids, inputs_embeds, position_ids, attention_mask, cache)
        source, source_mask = encoder_hidden_states, encoder_attention_mask
        if source is not None:
            source = cast_once(source)
            source_mask = padding_mask(self.config, hidden_states, source_mask, source)
        # Position i sees the positions up to i ("masking out", section 3.2.3), but no padding.
        # Without source and cache, a row may hold several sequences, each with positions from 0:
        # none sees another.
        apart = position_ids if source is None else None
        mask = create_causal_mask(
            self.config, hidden_states, attention_mask, past, position_ids=apart
        )
        kwargs[CACHE_NAME] = cache  # gradient checkpointing knows it by this name
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, source, source_mask, **kwargs)
        return DecoderOutput(self.layer_norm(hidden_states), cache if use_cache else None)


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """The residual rule around each sub-layer of encoder and decoder."""

    def __init__(self, config: VanillaTransformerConfig, stack: str):
        super().__init__()
        self.pre_norm = config.has_pre_norm(stack)
        self.dropout = Dropout(config.dropout)

    def residual(
        self, x: Tensor, layer_norm: nn.Module, sublayer: nn.Module, *args: Any, **kwargs: Any
    ) -> Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), or pre-norm x + Dropout(Sublayer(LayerNorm(x)))."""
        states = sublayer(layer_norm(x) if self.pre_norm else x, *args, **kwargs)
        states = states[0] if isinstance(states, tuple) else states  # without the attention weights
        states = x + self.dropout(states)
        return states if self.pre_norm else layer_norm(states)


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention and a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, "encoder")
        heads = config.encoder_attention_heads
        self.self_attn = VanillaTransformerAttention(config, heads, layer_idx)
        self.self_attn_layer_norm = _layer_norm(config)
        self.ffn = VanillaTransformerFeedForward(config, config.encoder_ffn_dim)
        self.ffn_layer_norm = _layer_norm(config)

    def forward(self, hidden_states: Tensor, mask: Mask = None, **kwargs: Any) -> Tensor:
        """(batch, source_length, d_model) in and out."""
        hidden_states = self.residual(
            hidden_states, self.self_attn_layer_norm, self.self_attn, mask, **kwargs
        )
        return self.residual(hidden_states, self.ffn_layer_norm, self.ffn)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Causal self-attention, attention to the encoder's output, and a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, "decoder")
        attention = (config, config.decoder_attention_heads, layer_idx)
        self.self_attn = VanillaTransformerAttention(*attention, is_causal=True)
        self.self_attn_layer_norm = _layer_norm(config)
        if config.is_encoder_decoder:
            self.encoder_attn = VanillaTransformerAttention(*attention, is_cross_attention=True)
            self.encoder_attn_layer_norm = _layer_norm(config)
        self.ffn = VanillaTransformerFeedForward(config, config.decoder_ffn_dim)
        self.ffn_layer_norm = _layer_norm(config)

    def forward(
        self, hidden_states: Tensor, mask: Mask, source: States, source_mask: Mask, **kwargs: Any
    ) -> Tensor:
        """(batch, length, d_model) in and out; `source` is (batch, source_length, d_model)."""
        hidden_states = self.residual(
            hidden_states, self.self_attn_layer_norm, self.self_attn, mask, **kwargs
        )
        if source is not None:
            hidden_states = self.residual(
                hidden_states, self.encoder_attn_layer_norm, self.encoder_attn, source_mask,
                source, **kwargs,
            )  # fmt: skip
        return self.residual(hidden_states, self.ffn_layer_norm, self.ffn)


def _layer_norm(config: VanillaTransformerConfig, is_there: bool = True) -> nn.Module:
    return nn.LayerNorm(config.d_model, config.layer_norm_eps) if is_there else nn.Identity()


# ---------------------------------------------------------------- 3.2 Attention


def scaled_dot_product_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask,
    scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Equation (1), softmax(Q K^T / sqrt(d_k)) V: the "eager" entry among transformers' attentions.

    Takes queries (batch, heads, query_length, d_k), keys (batch, heads, key_length, d_k), values
    (batch, heads, key_length, d_v) and a mask, which is True where a key is visible or is added to
    the scores. Returns the output (batch, query_length, heads, d_v) and the weights (batch, heads,
    query_length, key_length).
    """
    # Half precision can't represent the sum of many small exponentials, or a masked score.
    wide = at_least_float32(query.dtype)
    scores = query * scaling @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores = scores + as_scores(attention_mask).to(wide)
    weights = scores.softmax(dim=-1, dtype=wide).to(query.dtype)
    weights = F.dropout(weights, p=dropout)
    return (weights @ value).transpose(1, 2), weights


ALL_ATTENTION_FUNCTIONS = FastAttention()


class VanillaTransformerAttention(nn.Module):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(QW_i^Q, KW_i^K, VW_i^V).
    It has the three uses of section 3.2.3: over the encoder's own positions, over the decoder's
    (`is_causal`), and from the decoder to the encoder's output (`is_cross_attention`)."""

    def __init__(
        self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int,
        is_causal: bool = False, is_cross_attention: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_causal, self.is_cross_attention = is_causal, is_cross_attention
        self.d_k = config.head_dim or config.d_model // num_heads
        self.d_v = config.value_head_dim or self.d_k
        self.scaling = self.d_k**-0.5
        self.dropout = nn.Dropout(config.attention_dropout)  # applied to the weights by `attend`
        d_model, bias = config.d_model, config.attention_bias
        self.q_proj = nn.Linear(d_model, num_heads * self.d_k, bias=bias)
        self.k_proj = nn.Linear(d_model, num_heads * self.d_k, bias=bias)
        self.v_proj = nn.Linear(d_model, num_heads * self.d_v, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.d_v, d_model, bias=bias)

    @takes_either_name
    def forward(
        self, hidden_states: Tensor, mask: Mask = None, source: States = None,
        cache: Cache | None = None, **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend from (batch, query_length, d_model) states to themselves and those in the cache,
        or to `source`, (batch, source_length, d_model). Returns the output (batch, query_length,
        d_model) and, with eager attention, the weights (batch, heads, query_length, key_length)."""
        hidden_states = cast_once(hidden_states)
        query = _split_heads(self.q_proj(hidden_states), self.d_k)
        states = hidden_states if source is None else source
        key, value = update_kv_cache(
            cache, self.layer_idx, self.is_cross_attention, self._keys_and_values, states, kwargs
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, scaled_dot_product_attention
        )
        rate = self.dropout.p if self.dropout.training else 0.0
        kwargs |= {"scaling": self.scaling, "dropout": rate}
        output, weights = attend(self, query, key, value, mask, **kwargs)
        return self.out_proj(output.flatten(2)), weights

    def _keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        key = _split_heads(self.k_proj(states), self.d_k)
        return key, _split_heads(self.v_proj(states), self.d_v)


def _split_heads(states: Tensor, head_dim: int) -> Tensor:
    """(batch, length, heads * head_dim) to (batch, heads, length, head_dim)."""
    return states.view(*states.shape[:2], states.shape[2] // head_dim, head_dim).transpose(1, 2)


def padding_mask(
    config: VanillaTransformerConfig, queries: Tensor, attention_mask: Mask, keys: Tensor
) -> Mask:
    """Hides padding: the keys for which `attention_mask`, (batch, key_length), is 0."""
    if attention_mask is None:
        return None
    broadcasts = config._attn_implementation == "sdpa" and attention_mask.ndim == 2
    if is_tracing() or not broadcasts:
        return create_bidirectional_mask(config, queries, attention_mask, keys)
    is_token = attention_mask.to(queries.device, torch.bool)
    return None if is_token.all() else one_row_for_all_queries(is_token, queries)


# ---------------------------------------------------------------- 3.3 Feed-forward networks


class VanillaTransformerFeedForward(nn.Module):
    """Equation (2), FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, the same at each position."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, d_model) in and out."""
        hidden_states = self.activation(self.fc1(hidden_states))
        return self.fc2(self.dropout(hidden_states))


# ---------------------------------------------------------------- 3.4 Embeddings and softmax


class VanillaTransformerEmbeddedStacks(VanillaTransformerPreTrainedModel):
    """Encoder, decoder or both, and the embedding matrix that they share: `post_init` ties what
    `_tied_weights_keys` names."""

    def __init__(self, config: VanillaTransformerConfig, **stacks: Callable[..., nn.Module]):
        super().__init__(config)
        self._tied_weights_keys = {}
        if config.shares_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            tied = {f"{name}.embed_tokens.weight": "shared.weight" for name in stacks}
            self._tied_weights_keys = tied
        for name, stack in stacks.items():
            setattr(self, name, stack(config))
        self.post_init()


class VanillaTransformerWithProjection(VanillaTransformerPreTrainedModel):
    """A model and the linear transformation before the softmax, with the same matrix."""

    def __init__(self, model: VanillaTransformerEmbeddedStacks):
        config = model.config
        super().__init__(config)
        self.model = model
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, config.lm_head_bias)
        matrix = "shared" if config.shares_embeddings else "decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"model.{matrix}.weight"}
        self.post_init()

    def logits_and_loss(
        self, hidden_states: Tensor, labels: Ids, logits_to_keep: int | Tensor,
        num_items: Tensor | int | None, skip_logits: bool | None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Logits (batch, length, vocabulary) of (batch, length, d_model) states, and the loss of
        labels (batch, length), label-smoothed while training."""
        hidden_states = select_positions(hidden_states, logits_to_keep)
        if labels is None:
            return self.lm_head(hidden_states), None
        expect_labels(labels, hidden_states, self.config.target_vocab_size)
        expect_count(num_items, "num_items_in_batch")
        eps = self.config.label_smoothing if self.training else 0.0
        skip_logits = self.training if skip_logits is None else skip_logits
        if skip_logits and can_fuse(self.config, self.lm_head):
            matrix = self.lm_head.weight
            return None, fused_linear_cross_entropy(hidden_states, matrix, labels, eps, num_items)
        logits = self.lm_head(hidden_states)
        loss = label_smoothed_cross_entropy(logits, labels, eps, num_items)
        return None if skip_logits else logits, loss


# ---------------------------------------------------------------- 3.5 Positional encoding


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same, computed
    for any length when needed: a checkpoint has no table."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.d_model, self.offset = config.d_model, config.position_offset
        self.divisor = config.d_model - 2 * (config.sinusoid_frequencies == "tensor2tensor")

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(batch, length) positions to (batch, length, d_model) encodings."""
        wide, device = at_least_float32(dtype), position_ids.device
        exponents = torch.arange(0, self.d_model, 2, dtype=wide, device=device) / self.divisor
        angles = (position_ids + self.offset)[..., None] * 10000.0**-exponents
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


class LearnedPositions(nn.Embedding):
    """Row (E) of Table 3: one learned vector for each of `max_position_embeddings` positions."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(batch, length) positions to (batch, length, d_model) encodings."""
        return super().forward(position_ids).to(dtype)


# ---------------------------------------------------------------- 5.4 Label smoothing


def label_smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits (batch, length, vocabulary) against (1 - eps) on the label plus
    eps/vocabulary on every token, without those that a conversion has suppressed. Labels are
    (batch, length), and -100 is ignored. The sum is divided by `num_items_in_batch`, by default the
    number of labels."""
    labels = labels.to(logits.device, torch.long)
    has_label = labels != -100
    # The gradient of a row without a label is 0, but 0 times NaN is NaN.
    logits = logits.to(at_least_float32(logits.dtype)).masked_fill(~has_label[..., None], 0)
    log_probs = logits.log_softmax(dim=-1)
    loss = F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), reduction="sum")
    if label_smoothing:
        is_token = not_suppressed(logits, has_label)
        mean = torch.where(is_token, log_probs, 0).sum(dim=-1) / is_token.sum().clamp(min=1)
        loss = (1 - label_smoothing) * loss - label_smoothing * (mean * has_label).sum()
    if num_items_in_batch is None:
        num_items_in_batch = has_label.sum().clamp(min=1)
    return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


# ---------------------------------------------------------------- Figure 1


class VanillaTransformerModel(VanillaTransformerEmbeddedStacks):
    """Encoder and decoder without the final projection: `AutoModel`."""

    _auto_class = "AutoModel"

    def __init__(self, config: VanillaTransformerConfig):
        stacks = {"encoder": VanillaTransformerEncoder, "decoder": VanillaTransformerDecoder}
        super().__init__(config.for_both_stacks(), **stacks)

    @takes_either_name
    @can_return_tuple
    @validate_inputs
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, decoder_input_ids: Ids = None,
        decoder_attention_mask: Mask = None, encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None, inputs_embeds: States = None,
        decoder_inputs_embeds: States = None, decoder_position_ids: Ids = None,
        use_cache: bool | None = None, **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:  # fmt: skip
        """Encode the source, unless `encoder_outputs` are given, and decode the target; for the
        arguments see `VanillaTransformerForConditionalGeneration`."""
        positions = kwargs.pop("position_ids", None)
        kwargs["return_dict"] = True  # whatever the model's configuration says
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, positions, inputs_embeds, **kwargs)
        else:
            encoded = as_model_output(encoder_outputs)
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        source = repeat_sources(target, encoded.last_hidden_state, attention_mask)
        outputs = self.decoder(
            decoder_input_ids, decoder_attention_mask, decoder_position_ids, *source,
            cache, decoder_inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        return Seq2SeqModelOutput(
            outputs.last_hidden_state, getattr(outputs, CACHE_NAME), outputs.hidden_states,
            outputs.attentions, outputs.cross_attentions,
            encoded.last_hidden_state, encoded.hidden_states, encoded.attentions,
        )  # fmt: skip


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerWithProjection, VanillaTransformerGenerationMixin
):
    """All of figure 1: `AutoModelForSeq2SeqLM`.

    Args of `forward`:
        input_ids: Source, (batch, source_length).
        attention_mask: 1 for source tokens, 0 for padding on either side, (batch, source_length).
        decoder_input_ids: Target shifted right by one, (batch, target_length).
        decoder_attention_mask: (batch, past_length + target_length).
        encoder_outputs, cache: From an earlier call, to compute them only once.
        inputs_embeds, decoder_inputs_embeds: In place of ids, unscaled, (batch, length, d_model).
        position_ids, decoder_position_ids: (batch, length); counted from the mask by default.
        labels: Target, (batch, target_length), -100 to ignore; gives `decoder_input_ids`.
        use_cache: Return keys and values as `cache`; by default as the configuration says.
        logits_to_keep: Number of last positions to predict (0 for all), or an index of positions.
        num_items_in_batch: Labels in all batches of a gradient step, by which the loss is divided.
        skip_logits: Never hold all logits, and return None for them; by default in training.

    Returns `loss` and `logits` (batch, target_length, vocabulary). Raises a TypeError or ValueError
    for inputs that are missing or don't fit together, and, on the CPU, an IndexError for a token id
    or position without an embedding.
    """

    _auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(VanillaTransformerModel(config))

    @takes_either_name
    @can_return_tuple
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, decoder_input_ids: Ids = None,
        decoder_attention_mask: Mask = None, encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None, inputs_embeds: States = None,
        decoder_inputs_embeds: States = None, decoder_position_ids: Ids = None, labels: Ids = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None, skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:  # fmt: skip
        """Predict each target token from the source and the target tokens before it."""
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            else:
                warn_of_unshifted(labels, decoder_input_ids)
            if decoder_attention_mask is None and self.training:
                target = (labels, decoder_input_ids)
                decoder_attention_mask = mask_from_labels(self.config, *target, kwargs)
        kwargs["return_dict"] = True
        outputs = self.model(
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs,
            cache, inputs_embeds, decoder_inputs_embeds, decoder_position_ids, use_cache, **kwargs,
        )  # fmt: skip
        scored = (labels, logits_to_keep, num_items_in_batch, skip_logits)
        logits, loss = self.logits_and_loss(outputs.last_hidden_state, *scored)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss, logits, **rest)

    def prepare_decoder_input_ids_from_labels(self, labels: LongTensor) -> LongTensor:
        """Outputs, shifted right: (batch, target_length), `decoder_start_token_id` first, and
        `pad_token_id` for -100."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        expect_shiftable(labels, decoder_start_token_id=start, pad_token_id=pad)
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, pad)


# ---------------------------------------------------------------- Beyond the paper: one stack


class VanillaTransformerEncoderModel(VanillaTransformerEmbeddedStacks):
    """The encoder alone, in which every position sees all: `AutoModelForTextEncoding`."""

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
        """Encode (batch, length) token ids or (batch, length, d_model) embeddings, unscaled, into
        (batch, length, d_model) states; the mask, (batch, length), is 1 for tokens."""
        return self.encoder(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)


class VanillaTransformerDecoderModel(VanillaTransformerEmbeddedStacks):
    """The decoder alone, without attention to an encoder: the body of a language model."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.for_one_stack("decoder"), decoder=VanillaTransformerDecoder)

    @takes_either_name
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
        self.loss_type = "ForCausalLM"  # how `Trainer` counts labels, whatever a subclass's name

    @takes_either_name
    @can_return_tuple
    def forward(
        self, input_ids: Ids = None, attention_mask: Mask = None, position_ids: Ids = None,
        cache: Cache | None = None, inputs_embeds: States = None, labels: Ids = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None, skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Predict each next token; for arguments see `VanillaTransformerForConditionalGeneration`.
        `labels`, (batch, length), are usually `input_ids` and are shifted here, as in every causal
        model of transformers; `shift_labels` are not shifted."""
        # Not a parameter, which `Trainer` would require as a column of each data set with labels.
        shift_labels = kwargs.pop("shift_labels", None)
        if shift_labels is None and labels is not None:
            expect_shiftable(labels)
            shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if shift_labels is not None and use_cache is None:
            use_cache = False
        kwargs["return_dict"] = True
        outputs = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids,
            cache=cache, inputs_embeds=inputs_embeds,
            use_cache=use_cache, **kwargs,
        )  # fmt: skip
        scored = (shift_labels, logits_to_keep, num_items_in_batch, skip_logits)
        logits, loss = self.logits_and_loss(outputs.last_hidden_state, *scored)
        return CausalLMOutputWithPast(
            loss, logits, getattr(outputs, CACHE_NAME), outputs.hidden_states, outputs.attentions
        )


__all__ = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
]
