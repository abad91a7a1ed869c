"""CTranslate2: all models, except those with an activation function that it lacks.

Both CTranslate2's libraries for C++ and Python and `inference.engines` open the folder:
`config.json` has both configurations, and the generation config and the tokenizer are next to it.
"""

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from ctranslate2.specs import common_spec, transformer_spec
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES, visit_spec
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..inference.engines.ctranslate2_engine import MASKS, unsupported
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import GenerationOptions, first_given
from ..model.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerStack,
)
from .source import number_of_positions, padded_heads, portable_fields, position_table, read_model

logger = logging.getLogger(__name__)

QUANTIZATIONS = ACCEPTED_MODEL_TYPES
# CTranslate2's activation functions by transformers' names.
ACTIVATIONS = {
    "relu": "RELU", "gelu": "GELU", "gelu_new": "GELUTanh", "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh", "quick_gelu": "GELUSigmoid", "silu": "SWISH", "swish": "SWISH",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip
SEVEN_BITS = 64 / 127  # the range of 7 bits, relative to 8


def write(model_folder: Path, output: Path, quantization: str | None) -> None:
    """Write a folder for CTranslate2.

    Raises:
        ValueError: CTranslate2 can't express the model; the message names the field.
    """
    model, tokenizer = read_model(model_folder)
    generation_config = _generation_config(model)
    spec = make_spec(model, tokenizer)
    spec.config.add_attribute("quantization", quantization)
    spec.validate()
    spec.optimize(quantization)
    visit_spec(spec, _use_7_bits)
    spec.save(str(output))
    generation_config.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _generation_config(model: VanillaTransformerForConditionalGeneration) -> GenerationConfig:
    """The model's generation config, if the engine has all of its options."""
    generation_config = copy.deepcopy(model.generation_config)
    masks = [name for name in MASKS if getattr(generation_config, name, None)]
    if masks and not generation_config.renormalize_logits:
        generation_config.renormalize_logits = True
        logger.warning(
            "%s: CTranslate2 normalizes again after masking tokens, so scores of beam search are "
            "higher, and a translation may differ",
            ", ".join(masks),
        )
    lacking = unsupported(GenerationOptions(generation_config, None, {}), generation_config)
    if lacking:
        raise ValueError(f"generation_config.json: {'; '.join(lacking)}: CTranslate2 can't do this")
    return generation_config


def _use_7_bits(spec: Any, name: str, value: Any) -> None:
    """Round an 8-bit matrix to 7 bits. With 8, sums overflow on CPUs without VNNI."""
    if name.endswith("weight_scale") and getattr(spec.weight, "dtype", None) == "int8":
        matrix, scale = spec.weight.numpy(), value.numpy()
        matrix[:] = (matrix * SEVEN_BITS).round()
        scale *= SEVEN_BITS


def make_spec(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> transformer_spec.TransformerSpec:
    """A model as CTranslate2's specification, with copies of its tensors, as quantization works in
    place.

    Raises:
        ValueError: CTranslate2 can't express the model; the message names the field.
    """
    config = model.config
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(
            f"activation_function={config.activation_function!r}: expected one of "
            f"{', '.join(ACTIVATIONS)}, which CTranslate2 has"
        )
    start_id = _special_id(model, "decoder_start_token_id", "bos_token_id")
    end_id = _special_id(model, "eos_token_id")
    sources, targets = vocabularies(config, tokenizer)
    encoder, decoder = (
        _stack(getattr(model.model, stack), stack) for stack in ("encoder", "decoder")
    )
    _set(decoder.projection, model.lm_head.named_parameters())
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    spec.register_source_vocabulary(sources)
    spec.register_target_vocabulary(targets)
    start, end = targets[start_id], targets[end_id]
    unknown = tokenizer.unk_token if {tokenizer.unk_token} <= {*sources} & {*targets} else end
    tokens = {"decoder_start_token": start, "bos_token": start, "eos_token": end}
    for name, value in {**portable_fields(config), **tokens, "unk_token": unknown}.items():
        spec.config.add_attribute(name, value)
    spec.config.add_attribute("layer_norm_epsilon", config.layer_norm_eps)
    spec.config.add_attribute("max_position_embeddings", number_of_positions(config))
    return spec


def _special_id(model: VanillaTransformerForConditionalGeneration, *fields: str) -> int:
    """The id of a special token, as `generate()` finds it."""
    configs: tuple[Any, ...] = model.generation_config, model.config
    token = first_given(*(getattr(config, field) for field in fields for config in configs))
    if isinstance(token, list):  # the engine gets the others as an option
        token = next((id_ for id_ in token if id_ >= 0), None)
    if token is None:
        raise ValueError(f"{fields[0]}=None: expected a token, for CTranslate2")
    return token


def vocabularies(
    config: VanillaTransformerConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str]]:
    """The tokens of source and target in the order of their ids, one for each embedding. Ids that
    are unknown to the tokenizer, or have the token of another id, get a new name."""
    other, target = tokenizer, getattr(tokenizer, "target_tokenizer", None)
    if target is not None:
        other = PreTrainedTokenizerFast(tokenizer_object=target)
    sources = [_token(tokenizer, id_) for id_ in range(config.vocab_size)]
    return sources, [_token(other, id_) for id_ in range(config.target_vocab_size)]


def _token(tokenizer: PreTrainedTokenizerBase, id_: int) -> str:
    token: Any = tokenizer.convert_ids_to_tokens(id_)
    if token is None or tokenizer.convert_tokens_to_ids(token) != id_:
        return f"<no token {id_}>"
    return token


def _stack(stack: VanillaTransformerStack, name: str) -> Any:
    """`TransformerEncoderSpec` or `TransformerDecoderSpec`."""
    config = stack.config
    heads = getattr(config, f"{name}_attention_heads")
    attention = stack.layers[0].self_attn
    is_encoder = name == "encoder"
    make = getattr(transformer_spec, f"Transformer{name.capitalize()}Spec")
    spec = make(
        getattr(config, f"{name}_layers"),
        heads,
        no_final_norm=not config.ends_in_layer_norm(name),
        activation=getattr(common_spec.Activation, ACTIVATIONS[config.activation_function]),
        layernorm_embedding=config.embedding_layer_norm,
        num_heads_kv=heads,
        head_dim=max(attention.d_k, attention.d_v),
    )
    spec.pre_norm = config.has_pre_norm(name)
    spec.scale_embeddings = config.scale_embedding
    embeddings = spec.embeddings[0] if is_encoder else spec.embeddings
    embeddings.weight = stack.embed_tokens.weight.detach().clone()
    spec.position_encodings.encodings = position_table(stack)
    if config.embedding_layer_norm:
        _set_norm(spec.layernorm_embedding, stack.embed_layer_norm)
    if config.ends_in_layer_norm(name):
        _set_norm(spec.layer_norm, stack.layer_norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _set_attention(layer_spec.self_attention, layer.self_attn)
        _set_norm(layer_spec.self_attention.layer_norm, layer.self_attn_layer_norm)
        if not is_encoder:
            _set_attention(layer_spec.attention, layer.encoder_attn)
            _set_norm(layer_spec.attention.layer_norm, layer.encoder_attn_layer_norm)
        _set(layer_spec.ffn.linear_0, layer.ffn.fc1.named_parameters())
        _set(layer_spec.ffn.linear_1, layer.ffn.fc2.named_parameters())
        _set_norm(layer_spec.ffn.layer_norm, layer.ffn_layer_norm)
    return spec


def _set_attention(spec: Any, attention: VanillaTransformerAttention) -> None:
    """Merge projections that read the same states: queries, keys and values, or keys and values."""
    parts = padded_heads(attention)
    groups = [["q_proj", "k_proj", "v_proj"], ["out_proj"]]
    if attention.is_cross_attention:
        groups = [["q_proj"], ["k_proj", "v_proj"], ["out_proj"]]
    for linear, names in zip(spec.linear, groups, strict=True):
        fused = {part: torch.cat([parts[each][part] for each in names]) for part in parts[names[0]]}
        _set(linear, fused.items())
    spec.queries_scale = attention.scaling


def _set_norm(spec: common_spec.LayerNormSpec, norm: nn.Module) -> None:
    spec.gamma, spec.beta = (tensor.detach().clone() for tensor in (norm.weight, norm.bias))


def _set(spec: common_spec.LinearSpec, parts: Iterable[tuple[str, Tensor]]) -> None:
    for part, tensor in parts:
        setattr(spec, part, tensor.detach().clone())
