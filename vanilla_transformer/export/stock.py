"""Shared code of exports to classes of transformers: folders that load without this package."""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..conversion.core import renamed
from ..conversion.hf_marian import BIAS, NAMES, SAME, pipeline_fields
from ..conversion.weights import PROJECTION_BIAS
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import OWN_OPTIONS, first_given
from ..model.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerForConditionalGeneration,
)
from ..model.tokenization_vanilla_transformer import SOURCE_FILE, VanillaTransformerTokenizer
from .source import number_of_positions, padded_heads

logger = logging.getLogger(__name__)
EPSILON = 1e-5  # of all layer normalizations in these classes
MAX_LENGTH = 512  # in place of a limit that grows with the source
PROBE = (4, 16)  # sources and tokens to measure a difference with


def expect_fields(
    config: VanillaTransformerConfig, name: str, fixed: dict[str, Any], ends_in_layer_norm: bool
) -> None:
    """Check the fields for which a class of transformers has only one value.

    Args:
        config: Our configuration.
        name: The name of the class.
        fixed: The values of our fields that the class supports.
        ends_in_layer_norm: Whether its stacks end in a layer norm.

    Raises:
        ValueError: A field has another value, or heads are wider than d_model.
    """
    for field, expected in fixed.items():
        if (value := getattr(config, field)) != expected:
            raise ValueError(f"{field}={value!r}: expected {expected!r} for {name}")
    for stack in ("encoder", "decoder"):
        if config.ends_in_layer_norm(stack) != ends_in_layer_norm:
            expected = "both" if ends_in_layer_norm else "none"
            raise ValueError(
                f"final_layer_norm={config.final_layer_norm!r}: expected {expected!r} for {name}"
            )
        heads = getattr(config, f"{stack}_attention_heads")
        d_k = config.head_dim or config.d_model // heads
        widest = max(d_k, config.value_head_dim or d_k)
        if config.d_model % heads or widest * heads > config.d_model:
            raise ValueError(
                f"{stack}_attention_heads={heads}, head_dim={d_k}, "
                f"value_head_dim={config.value_head_dim}: expected heads that divide "
                f"d_model={config.d_model} and are no wider together, for {name}"
            )


def shared_fields(config: VanillaTransformerConfig) -> dict[str, Any]:
    """The fields of our configuration that have the same name and meaning there."""
    fields = {name: getattr(config, name) for name in SAME}
    fields |= pipeline_fields(config)
    fields["max_position_embeddings"] = number_of_positions(config)
    # MarianConfig needs the start token that `generate()` finds.
    fields["decoder_start_token_id"] = first_given(
        config.decoder_start_token_id, config.bos_token_id
    )
    return {**fields, "forced_eos_token_id": None}


def copied_weights(model: VanillaTransformerForConditionalGeneration) -> dict[str, Tensor]:
    """Copies of all tensors under our names, with heads as wide as d_model / h and with biases."""
    weights = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    for name, module in model.named_modules():
        if not isinstance(module, VanillaTransformerAttention):
            continue
        heads = module.q_proj.out_features // module.d_k
        width = model.config.d_model // heads
        for linear, parts in padded_heads(module, width).items():
            parts.setdefault("bias", torch.zeros(len(parts["weight"])))
            # Their scale is width^-0.5.
            factor = math.sqrt(width / module.d_k) if linear == "q_proj" else 1.0
            for part, tensor in parts.items():
                weights[f"{name}.{linear}.{part}"] = tensor * factor
    return weights


def save(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    their_class: type[PreTrainedModel],
    their_config: PreTrainedConfig,
    weights: dict[str, Tensor],
    output: Path,
) -> None:
    """Write a folder for `AutoModelForSeq2SeqLM`, and log how much its logits differ from ours.

    Args:
        model: Our model.
        tokenizer: Its tokenizer.
        their_class: The other class.
        their_config: Its configuration.
        weights: Its weights under our names, or under its own if our model lacks them.
        output: The folder.
    """
    bias = weights.pop(PROJECTION_BIAS, torch.zeros(model.config.target_vocab_size))
    named = {renamed(name, NAMES): tensor for name, tensor in weights.items()} | {BIAS: bias[None]}
    limit = min(MAX_LENGTH, number_of_positions(model.config))
    with torch.device("meta"):
        theirs = their_class(their_config)
    theirs.generation_config = _generation_config(model.generation_config, limit)
    theirs.save_pretrained(output, state_dict=named)
    tokenizer.padding_side = "right"  # their positions count left padding, ours don't
    tokenizer.save_pretrained(output)
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        (output / "tokenizer.json").rename(output / SOURCE_FILE)
        logger.warning("%s: load the tokenizer with trust_remote_code=True", output.name)
    written, report = AutoModelForSeq2SeqLM.from_pretrained(output, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"{output.name}: transformers reads back other tensors: {report}")
    logger.warning(
        "%s: logits differ by at most %.1e on %d tokens; layer_norm_eps is %g there and %g here",
        their_class.__name__,
        _difference(model, written),
        math.prod(PROBE),
        EPSILON,
        model.config.layer_norm_eps,
    )


def _generation_config(ours: GenerationConfig, limit: int) -> GenerationConfig:
    """The generation config without options that only our `generate()` has, and with this limit of
    length if it has none."""
    fields = ours.to_diff_dict()
    lost = {name: fields.pop(name) for name in OWN_OPTIONS if name in fields}
    if fields.get("max_length") is None and fields.get("max_new_tokens") is None:
        fields["max_length"] = limit
        logger.warning("translations end after %d tokens, whatever the length of the source", limit)
    if lost:
        said = ", ".join(f"{name}={value!r}" for name, value in lost.items())
        logger.warning("%s: left out, because transformers' own generate() lacks it", said)
    return GenerationConfig(**fields)


@torch.no_grad()
def _difference(
    model: VanillaTransformerForConditionalGeneration, written: PreTrainedModel
) -> float:
    """The largest difference of logits, for random sources and targets."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    sources, length = PROBE
    probe = (sources, min(length, number_of_positions(config)))
    ids, targets = (
        torch.randint(size, probe, generator=generator)
        for size in (config.vocab_size, config.target_vocab_size)
    )
    ours, theirs = (
        each.eval()(input_ids=ids, decoder_input_ids=targets).logits for each in (model, written)
    )
    return (ours - theirs).abs().max().item()
