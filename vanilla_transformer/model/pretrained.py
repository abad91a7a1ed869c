# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""What every model is to transformers, and the paper does not speak of: how weights start, what
runs in parallel, and matrices that grow and shrink."""

import re
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .validation import expect_weights


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What all models share."""

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
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        if self.can_generate():
            # One that counts as made from a configuration loses `length_penalty_type` on loading.
            self.generation_config._from_model_config = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start a module's weights. The paper does not say how; this is tensor2tensor's start, but
        for the last matrix of each sub-layer, which `initializer="depth_scaled"` makes smaller.

        | weights                                          | start                         |
        |--------------------------------------------------|-------------------------------|
        | embeddings, learned positions, untied projection | normal, std d_model^-0.5      |
        | matrices of attention and feed-forward networks  | uniform, Xavier               |
        | the last one of each of a stack's n sub-layers   | the same times n^-0.5         |
        | biases                                           | 0                             |
        | layer normalization                              | gain 1, bias 0                |

        A post-norm stack then starts near the identity, and learns sooner and at higher rates
        (Zhang et al., 2019, https://arxiv.org/abs/1908.11365; the factor is that of GPT-2).
        """
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        """As transformers', which takes memory for all that a checkpoint lacks before it says so
        (5.17 to 5.24)."""
        if load_config.pretrained_model_name_or_path is not None:
            expect_weights(model, loading_info.missing_and_mismatched())
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers', but the configuration says whether matrices that were built as one
        still are. PEFT trains one of them apart from the others, and calls those of two
        vocabularies untied: the checkpoint would lack matrices, or tie what is not the same."""
        matrices = self._matrices_built_as_one()
        if len(matrices) > 1:
            is_tied, first = self.config.tie_word_embeddings, matrices[0]
            self.config.tie_word_embeddings = all(
                one is first or (is_tied and torch.equal(one.cpu(), first.cpu()))
                for one in matrices
            )
        if not self.config.tie_word_embeddings and hasattr(self.base_model, "shared"):
            weights = self.state_dict() if state_dict is None else state_dict
            state_dict = _without_shared(weights)
        return super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def _matrices_built_as_one(self) -> list[nn.Parameter]:
        """The embeddings and the projection for which the model was built with one matrix; none if
        there was none, or where one is adapted, quantized, sharded or offloaded."""
        stacks = self._stacks() if hasattr(self.base_model, "shared") else []
        if self.config.decoder_vocab_size is not None:
            stacks = [self.get_decoder()]
        modules = [*(stack.embed_tokens for stack in stacks), self.get_output_embeddings()]
        found = [module for module in modules if module is not None] if stacks else []
        if any(type(module) not in (nn.Embedding, nn.Linear) for module in found):
            return []
        matrices = [module.weight for module in found]
        is_plain = all(type(one) is nn.Parameter and not one.is_meta for one in matrices)
        return matrices if is_plain else []

    def init_parallel_plans(self) -> None:
        """Keep of the plans, which serve every class and each stack, what names a part of this."""
        super().init_parallel_plans()
        parts = chain(self.named_modules(), self.named_parameters())
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in parts}
        for plan in (self._tp_plan, self._fsdp_plan):
            for name in plan.keys() - names:
                del plan[name]

    def get_input_embeddings(self) -> nn.Embedding:
        """The shared matrix; the source's where source and target have matrices of their own."""
        return getattr(*self._embedding_owner())

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put another matrix in the place of `get_input_embeddings`'s, in every stack."""
        owner, name = self._embedding_owner()
        setattr(owner, name, value)
        if name == "shared":
            for stack in self._stacks():
                stack.embed_tokens = value

    def _embedding_owner(self) -> tuple[nn.Module, str]:
        model = self.base_model
        if hasattr(model, "shared"):
            return model, "shared"
        stack = getattr(model, "encoder", None) or getattr(model, "decoder", model)
        return stack, "embed_tokens"

    def _resize_token_embeddings(
        self,
        new_num_tokens: int | None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """The source's matrix; the target's and the projection follow if the vocabulary is one."""
        sizes = (new_num_tokens, pad_to_multiple_of, mean_resizing)
        if self.config.is_encoder_decoder and not self.config.shares_embeddings:
            # the base class resizes the source's and the projection, never the target's
            one_vocabulary = self.config.decoder_vocab_size is None
            stack = self.get_decoder() if one_vocabulary else self.get_encoder()
            stack.embed_tokens = self._get_resized_embeddings(stack.embed_tokens, *sizes)
            if not one_vocabulary:
                return stack.embed_tokens
        return super()._resize_token_embeddings(*sizes)

    def resize_decoder_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the target's embedding and the projection, where the target has a vocabulary of
        its own; `resize_token_embeddings` resizes the source's.

        Raises:
            ValueError: Source and target share a vocabulary.
        """
        if self.config.decoder_vocab_size is None:
            raise ValueError(
                "decoder_vocab_size=None: source and target share a vocabulary, "
                "expected a call of resize_token_embeddings"
            )
        decoder, projection = self.get_decoder(), self.get_output_embeddings()
        decoder.embed_tokens = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        rows = decoder.embed_tokens.num_embeddings
        if projection is not None:
            self.set_output_embeddings(
                self._get_resized_lm_head(projection, rows, mean_resizing=mean_resizing)
            )
        self.config.decoder_vocab_size = rows
        self.tie_weights()
        return decoder.embed_tokens

    def get_position_embeddings(self) -> nn.Embedding | tuple[nn.Embedding, ...]:
        """The learned positions, those of encoder and decoder where there are both.

        Raises:
            ValueError: The positions are sinusoids: nothing is learned, and there is no limit.
        """
        if self.config.position_encoding != "learned":
            raise ValueError(
                f"position_encoding={self.config.position_encoding!r}: expected 'learned'; "
                "sinusoids have no table and know no limit"
            )
        positions = tuple(stack.embed_positions for stack in self._stacks())
        return positions if self.config.is_encoder_decoder else positions[0]

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Give every stack so many learned positions, the old ones kept as far as they go.

        Raises:
            ValueError: The positions are sinusoids, or the number is not positive.
        """
        self.get_position_embeddings()
        if new_num_position_embeddings < 1:
            raise ValueError(
                f"new_num_position_embeddings={new_num_position_embeddings}: "
                "expected a positive integer"
            )
        self.config.max_position_embeddings = new_num_position_embeddings
        for stack in self._stacks():
            old = stack.embed_positions
            new = type(old)(self.config).to(old.weight.device, old.weight.dtype)
            self._init_weights(new)
            kept = min(len(old.weight), len(new.weight))
            new.weight.data[:kept] = old.weight.data[:kept]
            stack.embed_positions = new.requires_grad_(old.weight.requires_grad)

    def _stacks(self) -> list[nn.Module]:
        """Encoder and decoder, as far as they are there."""
        return [module for module in self.modules() if hasattr(module, "embed_positions")]


def _without_shared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a model that was built tied, for one that is not: each stack has its own."""
    return {
        name: weight.clone() if name.endswith("embed_tokens.weight") else weight
        for name, weight in weights.items()
        if name not in ("shared.weight", "model.shared.weight")
    }


def own_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model was made of. FSDP2 replaces it by a subclass, which no other process
    can find, and which no saved model may name."""
    kinds = type(model).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed"))


def scale_sublayers(layers: nn.ModuleList, initializer: str) -> None:
    """Note on the last matrix of each sub-layer by what its start is multiplied."""
    if initializer == "tensor2tensor":
        return
    modules = layers.named_modules()
    last = [module for name, module in modules if name.endswith(("out_proj", "fc2"))]
    for module in last:
        module.init_gain = len(last) ** -0.5


def output_recorders(layer: type[nn.Module], attention: type[nn.Module]) -> dict[str, Any]:
    """What transformers may record of a stack: each layer's output, and the attentions' weights."""
    states = OutputRecorder(layer)
    recorders = {"hidden_states": states, "attentions": OutputRecorder(attention, 1, "self_attn")}
    states.num_hidden_layers_key = "encoder_layers"  # a field since transformers 5.18
    if "Decoder" in layer.__name__:
        states.num_hidden_layers_key = "decoder_layers"
        recorders["cross_attentions"] = OutputRecorder(attention, 1, "encoder_attn")
    return recorders


def count_positions(
    embeddings: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None = None
) -> torch.Tensor:
    """Positions from 0 at each row's first token, so that left padding shifts nothing: (batch,
    length) of a mask (batch, past_length + length), or (1, length) without one."""
    length = embeddings.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        past_length = 0 if cache is None else cache.get_seq_length()
        return torch.arange(length, device=embeddings.device)[None] + past_length
    positions = attention_mask.bool().cumsum(-1) - 1
    return positions.clamp(min=0)[:, -length:].to(embeddings.device)
