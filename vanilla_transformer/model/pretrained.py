# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""The base class of all models, with what the paper leaves open: how weights are initialized,
saved, run in parallel and resized."""

import re
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
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
        config.expect_valid()  # it may have been changed since it was made
        super().__init__(config)
        if self.can_generate():
            # If it counts as made from a configuration, it loses `length_penalty_type` on loading.
            self.generation_config._from_model_config = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module. The paper does not say how. This is tensor2tensor's method, except
        that `initializer="depth_scaled"` makes the last matrix of each sub-layer smaller.

        | weights                                          | start                         |
        |--------------------------------------------------|-------------------------------|
        | embeddings, learned positions, untied projection | normal, std d_model^-0.5      |
        | matrices of attention and feed-forward networks  | uniform, Xavier               |
        | the last one of each of a stack's n sub-layers   | the same times n^-0.5         |
        | biases                                           | 0                             |
        | layer normalization                              | gain 1, bias 0                |

        Post-norm stacks then start close to the identity, and learn sooner and at higher rates
        (Zhang et al., 2019, https://arxiv.org/abs/1908.11365). The factor is GPT-2's.
        """
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
        else:  # normalization, and what a user's class adds: loading leaves it without values
            super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        """Same as transformers' method, but rejects a checkpoint that lacks far more weights than
        it has. transformers (5.17 to 5.24) allocates them before it reports them."""
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
        """Same as transformers' method, but sets `tie_word_embeddings` by comparing the matrices.
        PEFT trains one of the tied matrices separately, and marks those of two vocabularies as
        untied: the checkpoint would lack matrices, or tie different ones. The generation config is
        without the defaults of a trainer."""
        if hasattr(self, "forget_defaults_of_trainer"):
            self.forget_defaults_of_trainer()
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
        """The embeddings and the projection that shared one matrix when the model was built; none
        if they did not, or if one is adapted, quantized, sharded or offloaded."""
        model = self.base_model
        if model.config.decoder_vocab_size is not None and hasattr(model, "decoder"):
            stacks = [model.decoder]
        elif hasattr(model, "shared"):
            stacks = self._stacks()
        else:
            return []
        modules = [stack.embed_tokens for stack in stacks]
        if (projection := self.get_output_embeddings()) is not None:
            modules.append(projection)
        is_plain = all(
            type(module) in (nn.Embedding, nn.Linear)
            and type(module.weight) is nn.Parameter
            and not module.weight.is_meta
            for module in modules
        )
        return [module.weight for module in modules] if is_plain else []

    def init_parallel_plans(self) -> None:
        """Drop the plans' entries for modules that this model lacks: all classes share a plan."""
        super().init_parallel_plans()
        parts = chain(self.named_modules(), self.named_parameters())
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in parts}
        for plan in (self._tp_plan, self._fsdp_plan):
            for name in plan.keys() - names:
                del plan[name]

    def get_input_embeddings(self) -> nn.Embedding:
        """The shared matrix, or the source's if source and target have separate ones."""
        return getattr(*self._embedding_owner())

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the matrix of `get_input_embeddings`, in every stack that uses it."""
        owner, name = self._embedding_owner()
        setattr(owner, name, value)
        if name == "shared":
            for stack in self._stacks():
                stack.embed_tokens = value

    def _embedding_owner(self) -> tuple[nn.Module, str]:
        model = self.base_model
        if model.base_model is not model:  # a user's class holds a model with a projection
            return model._embedding_owner()
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
        """Resize the source's matrix, and, with one vocabulary, the target's and the projection."""
        sizes = (new_num_tokens, pad_to_multiple_of, mean_resizing)
        config = self.base_model.config  # of one stack alone if a user's class holds no other
        if config.is_encoder_decoder and not config.shares_embeddings:
            # the base class resizes the source's and the projection, never the target's
            one_vocabulary = config.decoder_vocab_size is None
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
        """Resize the target's embedding and the projection, if the target has a vocabulary of its
        own; `resize_token_embeddings` resizes the source's.

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
        """The learned positions: a pair for an encoder and a decoder.

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
        """Change the number of learned positions of every stack. Remaining positions keep their
        vectors.

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
        """The encoder, the decoder or both."""
        return [module for module in self.modules() if hasattr(module, "embed_positions")]


def _without_shared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a model that was built tied, under the names of an untied one, in which each
    stack has its own."""
    return {
        name: weight.clone() if name.endswith("embed_tokens.weight") else weight
        for name, weight in weights.items()
        if name not in ("shared.weight", "model.shared.weight")
    }


def own_class(model: nn.Module) -> type[nn.Module]:
    """The original class of a model. FSDP2 replaces it with a subclass that only this process has,
    so a saved model must not name it."""
    kinds = type(model).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed"))


def scale_sublayers(layers: nn.ModuleList, initializer: str) -> None:
    """Set `init_gain`, the factor of `_init_weights`, on the last matrix of each sub-layer."""
    if initializer == "tensor2tensor":
        return
    modules = layers.named_modules()
    last = [module for name, module in modules if name.endswith(("out_proj", "fc2"))]
    for module in last:
        module.init_gain = len(last) ** -0.5


def output_recorders(layer: type[nn.Module], attention: type[nn.Module]) -> dict[str, Any]:
    """What transformers records in a stack: the outputs of layers, and attention weights."""
    states = OutputRecorder(layer)
    recorders = {"hidden_states": states, "attentions": OutputRecorder(attention, 1, "self_attn")}
    states.num_hidden_layers_key = "encoder_layers"  # a field since transformers 5.18
    if "Decoder" in layer.__name__:
        states.num_hidden_layers_key = "decoder_layers"
        recorders["cross_attentions"] = OutputRecorder(attention, 1, "encoder_attn")
    return recorders


def as_model_output(encoder_outputs: Any) -> Any:
    """Encoder outputs with names, even if they are given as a tuple."""
    is_plain = isinstance(encoder_outputs, (tuple, list))
    return BaseModelOutput(*encoder_outputs[:3]) if is_plain else encoder_outputs


def count_positions(
    embeddings: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None = None
) -> torch.Tensor:
    """Positions, with 0 at each row's first token, so that left padding shifts nothing: (batch,
    length) from a mask (batch, past_length + length), or (1, length) without one."""
    length = embeddings.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        past_length = 0 if cache is None else cache.get_seq_length()
        return torch.arange(length, device=embeddings.device)[None] + past_length
    # torch's older ONNX exporter would write a sum of booleans
    positions = attention_mask.bool().cumsum(-1, dtype=torch.long) - 1
    return positions.clamp(min=0)[:, -length:].to(embeddings.device)
