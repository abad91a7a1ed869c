"""The same Transformer as this package and as other libraries define it, for the benchmarks.

Every peer is built from one `Size` with random weights. Activation, dropout, tied embeddings and
their scale follow the paper as far as the peer's configuration allows; T5 and FSMT differ where
their architecture requires it. Only public names of this package are used, so that another checkout
can be a peer too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

PAD, BOS, EOS = 0, 1, 2
SMOOTHING, DROPOUT, MAX_POSITIONS = 0.1, 0.1, 1024


@dataclass(frozen=True)
class Size:
    d_model: int
    ffn_dim: int
    heads: int
    layers: int
    vocab_size: int

    def options(self) -> dict[str, Any]:
        """The fields that most configurations in transformers share."""
        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (
                ("layers", self.layers),
                ("attention_heads", self.heads),
                ("ffn_dim", self.ffn_dim),
            )
        }
        regularization = {"dropout": DROPOUT, "attention_dropout": 0.0, "activation_dropout": 0.0}
        return {"d_model": self.d_model, **sides, **regularization, **SPECIAL}


SIZES = {"tiny": Size(128, 256, 4, 4, 8000), "base": Size(512, 2048, 8, 6, 37000)}
BIG = Size(1024, 4096, 16, 6, 37000)  # too slow for the benchmarks on CPUs
SPECIAL = {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
}
# For models with a table of positions. By default, they also force </s> at the end.
WITH_TABLE = {"max_position_embeddings": MAX_POSITIONS, "forced_eos_token_id": None}


def ours(size: Size) -> PreTrainedModel:
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=size.vocab_size, label_smoothing=SMOOTHING, **size.options()
        )
    )


def like_bart(
    config: type[PreTrainedConfig], model: type[PreTrainedModel], size: Size
) -> PreTrainedModel:
    return model(
        config(
            vocab_size=size.vocab_size,
            activation_function="relu",
            scale_embedding=True,
            **WITH_TABLE,
            **size.options(),
        )
    )


def as_marian(model: PreTrainedModel) -> PreTrainedModel:
    """A MarianMTModel with the weights and predictions of our model (with one vocabulary)."""
    config = model.config
    size = Size(
        config.d_model,
        config.encoder_ffn_dim,
        config.encoder_attention_heads,
        config.encoder_layers,
        config.vocab_size,
    )
    marian = like_bart(MarianConfig, MarianMTModel, size).eval()
    renamed = {
        name.replace(".ffn.fc", ".fc").replace(".ffn_layer_norm.", ".final_layer_norm."): weight
        for name, weight in model.state_dict().items()
    }
    marian.load_state_dict(renamed, strict=False)  # biases that ours lacks stay 0
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight.data = sinusoids(config.d_model)
    return marian


def sinusoids(d_model: int) -> torch.Tensor:
    """(MAX_POSITIONS, d_model) position encodings of section 3.5."""
    frequencies = 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
    angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def fsmt(size: Size) -> PreTrainedModel:
    return FSMTForConditionalGeneration(
        FSMTConfig(
            langs=["en", "de"],
            src_vocab_size=size.vocab_size,
            tgt_vocab_size=size.vocab_size,
            tie_word_embeddings=True,
            **WITH_TABLE,
            **size.options(),
        )
    )


def t5(size: Size) -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=size.vocab_size,
            d_model=size.d_model,
            d_kv=size.d_model // size.heads,
            d_ff=size.ffn_dim,
            num_layers=size.layers,
            num_heads=size.heads,
            dropout_rate=DROPOUT,
            **SPECIAL,
        )
    )


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` between an embedding and a projection with the same weights. It has no
    cache, so it is only trained."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
        self.scale = math.sqrt(size.d_model)
        self.register_buffer("positions", sinusoids(size.d_model))
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            size.d_model,
            size.heads,
            size.layers,
            size.layers,
            size.ffn_dim,
            DROPOUT,
            batch_first=True,
        )
        for module in self.transformer.modules():  # the other peers drop only residuals
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        length = decoder_input_ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        padding = attention_mask == 0
        states = self.transformer(
            self.embed(input_ids),
            self.embed(decoder_input_ids),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(states, self.embedding.weight)


PEERS: dict[str, Callable[[Size], nn.Module]] = {
    "vanilla_transformer": ours,
    "marian": partial(like_bart, MarianConfig, MarianMTModel),
    "bart": partial(like_bart, BartConfig, BartForConditionalGeneration),
    "fsmt": fsmt,
    "t5": t5,
    "torch": TorchTransformer,
}


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING
    )


def training_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Label-smoothed cross-entropy, as users of each library would write it."""
    unwrapped = getattr(model, "module", model)  # DistributedDataParallel wraps it
    if isinstance(unwrapped, VanillaTransformerForConditionalGeneration):
        return model(**batch).loss
    labels = batch["labels"]
    shifted = F.pad(labels[:, :-1], (1, 0), value=BOS).masked_fill(labels == -100, PAD)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if isinstance(unwrapped, PreTrainedModel):
        inputs["use_cache"] = False  # as these models do themselves if labels are given
    outputs = model(**inputs, decoder_input_ids=shifted)
    return smoothed_loss(getattr(outputs, "logits", outputs), labels)
