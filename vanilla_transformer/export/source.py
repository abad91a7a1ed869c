"""The model that an export reads."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ..inference.decoding import set_output_limit
from ..inference.loading import expect_model_folder, load_intact, load_tokenizer
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerStack,
)

FILES = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer_config.json",),
)
# Sinusoids have no limit, but engines read them from a table, of at least this length.
LEAST_POSITIONS = 2048


def expect_model(folder: Path) -> None:
    """Check that a folder holds a finished encoder-decoder of this package and its tokenizer.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It contains a different architecture, quantized weights, or a damaged generation
            config.
    """
    for names in FILES:
        if not any((folder / name).is_file() for name in names):
            raise FileNotFoundError(
                f"{folder}: expected a finished model and its tokenizer, "
                f"there is no {' or '.join(names)}"
            )
    expect_model_folder(folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type, ours = content.get("model_type"), VanillaTransformerConfig.model_type
    if model_type != ours:
        raise ValueError(f"{folder}: model_type={model_type!r}: expected {ours!r}")
    if "quantization_config" in content:
        raise ValueError(f"{folder} is quantized: expected a model before it is quantized")
    if not content.get("is_encoder_decoder", True):
        raise ValueError(f"{folder}: is_encoder_decoder=False: expected encoder and decoder")


def read_model(
    folder: Path,
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """The model in single precision, in evaluation mode, and its tokenizer.

    Raises:
        ValueError: The weights are not those of the configuration.
    """
    model = load_intact(VanillaTransformerForConditionalGeneration, folder, dtype=torch.float32)
    set_output_limit(model)
    return model.eval(), load_tokenizer(folder)


def portable_fields(config: VanillaTransformerConfig) -> dict[str, Any]:
    """The configuration, without fields that name code that an exported folder lacks, or the path
    of the model on this machine."""
    left_out = ("auto_map", "custom_pipelines", "_name_or_path")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def number_of_positions(config: VanillaTransformerConfig) -> int:
    """The length of a table of positions: for sinusoids, `max_position_embeddings` if that is more
    than `LEAST_POSITIONS`."""
    if config.position_encoding == "learned":
        return config.max_position_embeddings
    return max(config.max_position_embeddings, LEAST_POSITIONS)


def position_table(stack: VanillaTransformerStack) -> Tensor:
    """The encodings of all positions, (positions, d_model)."""
    with torch.no_grad():
        positions = torch.arange(number_of_positions(stack.config))
        return stack.embed_positions(positions, torch.float32).clone()


def padded_heads(
    attention: VanillaTransformerAttention, width: int | None = None
) -> dict[str, dict[str, Tensor]]:
    """Copies of an attention's projections in which queries, keys and values have the same width,
    for engines with one `head_dim`. The added columns are zero and do not change the result, if
    the engine keeps the scale d_k^-0.5.

    Args:
        attention: An attention with heads of widths d_k and d_v.
        width: The new width, at least both. Default: the larger one.

    Returns:
        For "q_proj", "k_proj", "v_proj" and "out_proj", a "weight" with heads * width rows (columns
        for "out_proj") and a "bias" if there is one.
    """
    d_k, d_v = attention.d_k, attention.d_v
    width = width or max(d_k, d_v)
    linears: dict[str, dict[str, Tensor]] = {}
    for name, dim in {"q_proj": d_k, "k_proj": d_k, "v_proj": d_v, "out_proj": d_v}.items():
        axis = 1 if name == "out_proj" else 0  # where the heads are
        linears[name] = {}
        for part, tensor in getattr(attention, name).named_parameters():
            if axis < tensor.ndim:
                heads = tensor.unflatten(axis, (-1, dim)).transpose(axis + 1, -1)
                padded = F.pad(heads, (0, width - dim)).transpose(axis + 1, -1)
                tensor = padded.flatten(axis, axis + 1)
            linears[name][part] = tensor.detach().clone()
    return linears
