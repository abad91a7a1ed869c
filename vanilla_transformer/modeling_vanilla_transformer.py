"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the paper's order.

3.1 encoder and decoder stacks, 3.2 attention, 3.3 feed-forward networks, 3.4 embeddings,
3.5 positional encoding, 5.4 label smoothing; then the four models that transformers sees.
Source: https://arxiv.org/abs/1706.03762
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import VanillaTransformerGenerationMixin


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What the four models share: how weights start, and what transformers may do with them."""

    config: VanillaTransformerConfig
    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start a module's weights as tensor2tensor does; the paper does not say.

        | weights                                          | start                       |
        |--------------------------------------------------|-----------------------------|
        | embeddings, learned positions, untied projection | normal, std d_model^-0.5    |
        | matrices of attention and feed-forward networks  | uniform, Xavier             |
        | biases                                           | 0                           |
        | layer normalisation                              | gain 1, bias 0              |
        """
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


# ---------------------------------------------------------------- 3.1 Encoder and decoder stacks


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embedded tokens plus positions, N layers, a final norm.

    The final layer normalisation belongs to the pre-norm variant; the paper's stack has none.
    """

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layers: list[nn.Module]):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_positions = POSITION_ENCODINGS[config.position_encoding](config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(layers)
        pre_norm = config.norm_position == "pre"
        self.layer_norm = _layer_norm(config) if pre_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def embed(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.FloatTensor | None,
    ) -> torch.Tensor:
        """Rows of the embedding matrix, before scaling: (batch, length, d_model)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        return _look_up(self.embed_tokens, input_ids, self.embed_tokens.num_embeddings, "token id")

    def add_positions(
        self, embeddings: torch.Tensor, position_ids: torch.LongTensor
    ) -> torch.Tensor:
        """Dropout(sqrt(d_model) * embedding + position), sections 3.4, 3.5 and 5.4."""
        positions = self.embed_positions(position_ids, embeddings.dtype)
        return self.dropout(embeddings * self.embed_scale + positions)


class VanillaTransformerEncoder(VanillaTransformerStack):
    """Section 3.1: N layers of self-attention and feed-forward network, every position in sight."""

    def __init__(self, config: VanillaTransformerConfig):
        layers = [VanillaTransformerEncoderLayer(config) for _ in range(config.encoder_layers)]
        super().__init__(config, config.vocab_size, layers)

    @property
    def _can_record_outputs(self) -> dict:
        return {
            "hidden_states": VanillaTransformerEncoderLayer,
            "attentions": VanillaTransformerAttention,
        }

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
        embeddings = self.embed(input_ids, inputs_embeds)
        if position_ids is None:
            position_ids = _position_ids(attention_mask, embeddings)
        hidden_states = self.add_positions(embeddings, position_ids)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class VanillaTransformerDecoder(VanillaTransformerStack):
    """Section 3.1: as the encoder, but no position sees a later one, and each layer attends to the
    encoder's output as well, where there is an encoder."""

    def __init__(self, config: VanillaTransformerConfig):
        layers = [VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers)]
        super().__init__(config, config.target_vocab_size, layers)

    @property
    def _can_record_outputs(self) -> dict:
        attention = VanillaTransformerAttention
        return {
            "hidden_states": VanillaTransformerDecoderLayer,
            "attentions": OutputRecorder(attention, index=1, layer_name="self_attn"),
            "cross_attentions": OutputRecorder(attention, index=1, layer_name="encoder_attn"),
        }

    def new_cache(self) -> Cache:
        """An empty cache of keys and values, one for each kind of attention in a layer."""
        cache = DynamicCache(config=self.config)
        if not self.config.is_encoder_decoder:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=self.config))

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
        """Decode (batch, target_length) token ids into (batch, target_length, d_model) states.

        Args:
            attention_mask: (batch, past_length + target_length), 1 for tokens, 0 for padding.
            encoder_hidden_states: (batch, source_length, d_model).
            encoder_attention_mask: (batch, source_length).
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if position_ids is None:
            position_ids = _position_ids(attention_mask, embeddings, past_key_values)
        hidden_states = self.add_positions(embeddings, position_ids)
        if encoder_hidden_states is not None:
            if len(encoder_hidden_states) != len(hidden_states):
                raise ValueError(
                    f"{len(hidden_states)} targets for {len(encoder_hidden_states)} sources: "
                    "expected as many of each"
                )
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """The residual connection around each sub-layer (sections 3.1 and 5.4)."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.dropout = nn.Dropout(config.dropout)

    def residual(
        self,
        hidden_states: torch.Tensor,
        layer_norm: nn.LayerNorm,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), or pre-norm x + Dropout(Sublayer(LayerNorm(x)))."""
        if self.pre_norm:
            return hidden_states + self.dropout(sublayer(layer_norm(hidden_states)))
        return layer_norm(hidden_states + self.dropout(sublayer(hidden_states)))


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention, then the feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.self_attn = VanillaTransformerAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = _layer_norm(config)
        self.ffn = VanillaTransformerFeedForward(config, config.encoder_ffn_dim)
        self.ffn_layer_norm = _layer_norm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(batch, source_length, d_model) in and out."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask=attention_mask, **kwargs)[0],
        )
        return self.residual(hidden_states, self.ffn_layer_norm, self.ffn)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Causal self-attention, attention to the encoder's output, then the feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        heads = config.decoder_attention_heads
        self.self_attn = VanillaTransformerAttention(config, heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = _layer_norm(config)
        if config.is_encoder_decoder:
            self.encoder_attn = VanillaTransformerAttention(config, heads, layer_idx)
            self.encoder_attn_layer_norm = _layer_norm(config)
        self.ffn = VanillaTransformerFeedForward(config, config.decoder_ffn_dim)
        self.ffn_layer_norm = _layer_norm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(batch, target_length, d_model) in and out."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(
                x, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )[0],
        )
        if encoder_hidden_states is not None:
            hidden_states = self.residual(
                hidden_states,
                self.encoder_attn_layer_norm,
                lambda x: self.encoder_attn(
                    x,
                    key_value_states=encoder_hidden_states,
                    attention_mask=encoder_attention_mask,
                    past_key_values=past_key_values,
                    **kwargs,
                )[0],
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

    Args:
        query: (batch, heads, query_length, d_k).
        key: (batch, heads, key_length, d_k).
        value: (batch, heads, key_length, d_v).
        attention_mask: Added to the scores, (batch, 1, query_length, key_length).

    Returns:
        The output (batch, query_length, heads, d_v) and the weights
        (batch, heads, query_length, key_length).
    """
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    # Half precision can't hold the sum of many small exponentials.
    weights = F.softmax(scores, dim=-1, dtype=_at_least_float32(scores.dtype)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class VanillaTransformerAttention(nn.Module):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(QW_i^Q, KW_i^K, VW_i^V).

    One class for the three uses of section 3.2.3: over the encoder's own positions, over the
    decoder's (causal), and from the decoder to the encoder's output (`key_value_states`).
    """

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.dropout = config.attention_dropout
        self.head_dim = config.head_dim or config.d_model // num_heads
        self.value_head_dim = config.value_head_dim or self.head_dim
        self.scaling = self.head_dim**-0.5
        key_width, value_width = num_heads * self.head_dim, num_heads * self.value_head_dim
        self.q_proj = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, value_width, bias=config.attention_bias)
        self.out_proj = nn.Linear(value_width, config.d_model, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from (batch, query_length, d_model) to (batch, key_length, d_model) states.

        Returns:
            The output (batch, query_length, d_model) and, from the eager attention only, the
            weights (batch, heads, query_length, key_length).
        """
        query = _split_heads(self.q_proj(hidden_states), self.head_dim)
        if key_value_states is None:
            key, value = self._project(hidden_states)
            if past_key_values is not None:
                key, value = _self_attention_cache(past_key_values).update(
                    key, value, self.layer_idx
                )
        else:
            key, value = self._encoder_keys_and_values(key_value_states, past_key_values)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, scaled_dot_product_attention
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            **kwargs,
        )
        return self.out_proj(output.flatten(2)), weights

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = _split_heads(self.k_proj(hidden_states), self.head_dim)
        return key, _split_heads(self.v_proj(hidden_states), self.value_head_dim)

    def _encoder_keys_and_values(
        self, encoder_hidden_states: torch.Tensor, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the encoder's output, once for a whole generation where there is a cache."""
        if past_key_values is None:
            return self._project(encoder_hidden_states)
        cache = past_key_values.cross_attention_cache
        if not past_key_values.is_updated.get(self.layer_idx):
            past_key_values.is_updated[self.layer_idx] = True
            return cache.update(*self._project(encoder_hidden_states), self.layer_idx)
        return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values


def _split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(batch, length, heads * head_dim) to (batch, heads, length, head_dim)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _self_attention_cache(past_key_values: Cache) -> Cache:
    if isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values.self_attention_cache
    return past_key_values


# ---------------------------------------------------------------- 3.3 Feed-forward networks


class VanillaTransformerFeedForward(nn.Module):
    """Equation (2), FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, at each position alike."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, length, d_model) in and out."""
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))


def _layer_norm(config: VanillaTransformerConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)


# ---------------------------------------------------------------- 3.4 Embeddings


def _look_up(
    embedding: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, rows: int, name: str
) -> torch.Tensor:
    """Rows of an embedding matrix. An id that it lacks is named, on the CPU: a GPU can't tell."""
    try:
        return embedding(ids)
    except IndexError:
        raise _out_of_range(ids, rows, name) from None


def _out_of_range(ids: torch.Tensor, limit: int, name: str) -> IndexError:
    outside = ids[(ids < 0) | (ids >= limit)]
    return IndexError(f"{name} {int(outside[0])} is out of range: expected 0 <= {name} < {limit}")


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
        wide = _at_least_float32(dtype)
        even = torch.arange(0, self.d_model, 2, dtype=wide, device=position_ids.device)
        angles = position_ids[..., None] * 10000.0 ** (-even / self.d_model)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


class LearnedPositions(nn.Embedding):
    """Row (E) of Table 3: one learned vector for each of `max_position_embeddings` positions."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(batch, length) positions to (batch, length, d_model) encodings."""
        return _look_up(super().forward, position_ids, self.num_embeddings, "position").to(dtype)


POSITION_ENCODINGS: dict[str, type[nn.Module]] = {
    "sinusoidal": SinusoidalPositions,
    "learned": LearnedPositions,
}


def _position_ids(
    attention_mask: torch.Tensor | None,
    embeddings: torch.Tensor,
    past_key_values: Cache | None = None,
) -> torch.Tensor:
    """Positions counted from 0 at each row's first token, so that left padding shifts nothing.

    Args:
        attention_mask: (batch, past_length + length), or `None` for no padding.
        embeddings: (batch, length, d_model).

    Returns:
        (batch, length), or (1, length) where all rows agree.
    """
    batch, length = embeddings.shape[:2]
    if attention_mask is not None and attention_mask.ndim == 2:
        if attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
            raise ValueError(
                f"attention mask of shape {tuple(attention_mask.shape)} for {batch} rows of "
                f"{length} tokens: expected a mask for each token"
            )
        positions = attention_mask.long().cumsum(-1) - 1
        return positions.clamp(min=0)[:, -length:].to(embeddings.device)
    past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
    return torch.arange(length, device=embeddings.device)[None] + past_length


# ---------------------------------------------------------------- 5.4 Label smoothing


class SmoothedCrossEntropy(torch.autograd.Function):
    """The sum behind `label_smoothed_cross_entropy`, over rows of logits.

    torch's own keeps the log-probabilities and writes several gradients of their size. Here the
    gradient, softmax(logits) - target, is written once, and what lies between fits in a cache.
    """

    ROWS = 256

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """(rows, vocabulary) logits and (rows,) labels to a sum of -log p, at least in float32."""
        total = logits.new_zeros((), dtype=_at_least_float32(logits.dtype))
        log_normalizers = []
        for scores, gold in _split_rows(logits, labels):
            scores = scores.to(total.dtype)
            log_normalizer = scores.logsumexp(-1)
            label_score = scores.gather(-1, gold.clamp(min=0)[:, None])[:, 0]
            loss = log_normalizer - torch.lerp(label_score, scores.mean(-1), label_smoothing)
            total += loss.masked_fill(gold == -100, 0).sum()
            log_normalizers.append(log_normalizer)
        ctx.save_for_backward(logits, labels, torch.cat(log_normalizers))
        ctx.label_smoothing = label_smoothing
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Softmax less the smoothed target, 0 where there is no label."""
        logits, labels, log_normalizer = ctx.saved_tensors
        grad_logits, eps = torch.empty_like(logits), ctx.label_smoothing
        for grad, scores, gold, log_z in _split_rows(grad_logits, logits, labels, log_normalizer):
            error = (scores - log_z[:, None]).exp_().sub_(eps / logits.shape[-1])
            on_label = error.new_full((len(gold), 1), eps - 1)
            error.scatter_add_(-1, gold.clamp(min=0)[:, None], on_label)
            torch.mul(error, (grad_total * (gold != -100))[:, None], out=grad)
        return grad_logits, None, None


def _split_rows(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(SmoothedCrossEntropy.ROWS) for tensor in tensors), strict=True)


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy against (1 - eps) on the label plus eps / vocabulary on every token.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length); -100 takes no part.
        label_smoothing: eps.
        num_items_in_batch: What the sum is divided by, where other batches share one gradient
            step; by default this batch's own labels.

    Raises:
        ValueError: `labels` and `logits` differ in batch or length.
        IndexError: A label is neither -100 nor in the vocabulary (on the CPU).
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for predictions of shape "
            f"{tuple(logits.shape[:-1])}: expected one label for each prediction"
        )
    rows, flat = logits.flatten(0, -2), labels.to(logits.device).flatten()
    try:
        total = SmoothedCrossEntropy.apply(rows, flat, label_smoothing)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise _out_of_range(flat[flat != -100], logits.shape[-1], "label") from None
    if num_items_in_batch is None:
        return total / (labels != -100).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------- What transformers sees


class VanillaTransformerStacks(VanillaTransformerPreTrainedModel):
    """One or both stacks, and the embedding matrix that they share (section 3.4)."""

    def __init__(self, config: VanillaTransformerConfig, **stacks: Callable[..., nn.Module]):
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

    def _embedding_owner(self) -> tuple[nn.Module, str]:
        if hasattr(self, "shared"):
            return self, "shared"
        return getattr(self, "encoder", None) or self.decoder, "embed_tokens"

    def get_input_embeddings(self) -> nn.Embedding:
        """The shared matrix; the source's where source and target have matrices of their own."""
        return getattr(*self._embedding_owner())

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put another matrix in the place of `get_input_embeddings`'s."""
        setattr(*self._embedding_owner(), value)


class VanillaTransformerModel(VanillaTransformerStacks):
    """Encoder and decoder (figure 1) without the final projection: `AutoModel`."""

    _auto_class = "AutoModel"

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(
            _two_stacks(config),
            encoder=VanillaTransformerEncoder,
            decoder=VanillaTransformerDecoder,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` are given, and decode the target.

        Args:
            input_ids: Source, (batch, source_length).
            attention_mask: 1 for source tokens, 0 for padding on either side,
                (batch, source_length).
            decoder_input_ids: Target shifted right by one, (batch, target_length).
            decoder_attention_mask: (batch, past_length + target_length).
            position_ids: (batch, source_length); counted from the mask by default.
            decoder_position_ids: (batch, target_length); likewise.
            encoder_outputs: An earlier call's, to encode a source only once.
            past_key_values: Keys and values of earlier target positions and of the source.
            inputs_embeds: Rows of the embedding matrix in place of `input_ids`,
                (batch, source_length, d_model), not yet scaled by sqrt(d_model).
            decoder_inputs_embeds: Likewise in place of `decoder_input_ids`.
            use_cache: Return `past_key_values`.
        """
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
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
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin
):
    """The whole of figure 1, with the pre-softmax projection: `AutoModelForSeq2SeqLM`."""

    _auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, config: VanillaTransformerConfig):
        config = _two_stacks(config)
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        self._tied_weights_keys = _tied_projection(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict the target: everything of `VanillaTransformerModel.forward`, and

        Args:
            labels: Target, (batch, target_length); -100 takes no part in the loss. Gives
                `decoder_input_ids` where they are missing, and the loss, label-smoothed while
                training.
            logits_to_keep: Predict only the last so many positions, or those of this index.
            num_items_in_batch: Labels over all batches of a gradient step, which the loss is
                divided by; `Trainer` gives it.

        Returns:
            Among others `loss` and `logits`, (batch, target_length, vocabulary).

        Raises:
            ValueError: Inputs are missing, doubled, or at odds in batch or length.
            IndexError: A token id is outside the vocabulary (on the CPU).
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss = label_smoothed_cross_entropy(logits, labels, smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """The target shifted right by one, as "outputs (shifted right)" in figure 1.

        Args:
            labels: (batch, target_length), -100 at padding.

        Returns:
            (batch, target_length), `decoder_start_token_id` first, `pad_token_id` for -100.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={pad}: "
                "expected both in the configuration, to make decoder_input_ids from labels"
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == -100, pad)


class VanillaTransformerEncoderModel(VanillaTransformerStacks):
    """The encoder alone, every position seeing every other: `AutoModelForTextEncoding`."""

    _auto_class = "AutoModelForTextEncoding"
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(_one_stack(config, "encoder"), encoder=VanillaTransformerEncoder)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode (batch, length) token ids into `last_hidden_state`, (batch, length, d_model)."""
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class VanillaTransformerDecoderModel(VanillaTransformerStacks):
    """The decoder alone, without attention to an encoder: the body of a language model."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, decoder=VanillaTransformerDecoder)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """See `VanillaTransformerDecoder.forward`."""
        return self.decoder(*args, **kwargs)


class VanillaTransformerForCausalLM(
    VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin
):
    """A language model: the decoder alone with the projection, `AutoModelForCausalLM`."""

    _auto_class = "AutoModelForCausalLM"
    _keys_to_ignore_on_load_unexpected = [r"encoder\.", r"encoder_attn"]

    def __init__(self, config: VanillaTransformerConfig):
        config = _one_stack(config, "decoder")
        super().__init__(config)
        self.model = VanillaTransformerDecoderModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        self._tied_weights_keys = _tied_projection(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predict each next token.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, past_length + length), padding on either side.
            position_ids: (batch, length); counted from the mask by default.
            past_key_values: Keys and values of earlier positions.
            inputs_embeds: In place of `input_ids`, not yet scaled, (batch, length, d_model).
            labels: (batch, length), usually `input_ids` themselves: shifted here, as in every
                causal model of transformers; -100 takes no part in the loss.
            use_cache: Return `past_key_values`.
            logits_to_keep: Predict only the last so many positions, or those of this index.
            num_items_in_batch: See `VanillaTransformerForConditionalGeneration.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        logits = self.lm_head(_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            next_tokens = F.pad(labels, (0, 1), value=-100)[:, 1:]
            loss = label_smoothed_cross_entropy(logits, next_tokens, smoothing, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _two_stacks(config: VanillaTransformerConfig) -> VanillaTransformerConfig:
    """The configuration for encoder and decoder, also where it was saved from one of them."""
    return _with(config, is_encoder_decoder=True)


def _one_stack(config: VanillaTransformerConfig, stack: str) -> VanillaTransformerConfig:
    """The configuration for a stack alone. The other's sizes follow it, because transformers reads
    `num_hidden_layers`, `num_attention_heads` and `vocab_size` from the encoder's."""
    layers, heads, ffn = (
        getattr(config, f"{stack}_{size}") for size in ("layers", "attention_heads", "ffn_dim")
    )
    return _with(
        config,
        is_encoder_decoder=False,
        vocab_size=config.vocab_size if stack == "encoder" else config.target_vocab_size,
        decoder_vocab_size=None,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
    )


def _with(config: VanillaTransformerConfig, **fields: Any) -> VanillaTransformerConfig:
    """The configuration itself if it has these values, or else a copy that has."""
    if all(getattr(config, name) == value for name, value in fields.items()):
        return config
    config = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _tied_projection(config: VanillaTransformerConfig) -> dict[str, str]:
    """The pre-softmax projection is the target embedding's matrix (section 3.4)."""
    shared = "model.shared.weight"
    return {
        "lm_head.weight": shared
        if config.shares_embeddings
        else "model.decoder.embed_tokens.weight"
    }


def _keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions whose logits are wanted, all of them for 0."""
    keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return hidden_states[:, keep]


__all__ = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
