"""transformers' `PegasusForConditionalGeneration`: pre-norm models with one vocabulary."""

import math
import re
from pathlib import Path

from torch import Tensor
from transformers import PegasusConfig, PegasusForConditionalGeneration

from ..conversion.weights import fold_embedding_scale
from .source import position_table, read_model
from .stock import EPSILON, copied_weights, expect_fields, save, shared_fields

QUANTIZATIONS: tuple[str, ...] = ()
FIXED = {
    "norm_position": "pre",
    "decoder_norm_position": None,
    "embedding_layer_norm": False,
    "tie_word_embeddings": True,
    "decoder_vocab_size": None,
}


def write(model_folder: Path, output: Path, quantization: str | None) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM` loads without this package.

    Raises:
        ValueError: `PegasusForConditionalGeneration` can't express the model; the message names
            the field.
    """
    model, tokenizer = read_model(model_folder)
    config = model.config
    expect_fields(config, "PegasusForConditionalGeneration", FIXED, ends_in_layer_norm=True)
    theirs = PegasusConfig(**shared_fields(config), vocab_size=config.vocab_size)
    weights = copied_weights(model)
    for stack in ("encoder", "decoder"):
        table = position_table(getattr(model.model, stack))
        weights[f"model.{stack}.embed_positions.weight"] = table
    _use_their_epsilon(weights, config.layer_norm_eps)
    save(model, tokenizer, PegasusForConditionalGeneration, theirs, weights, output)


def _use_their_epsilon(weights: dict[str, Tensor], epsilon: float) -> None:
    """Scale everything that is added to the residual stream, so that their epsilon has the same
    ratio to the variance as ours. In pre-norm models, only layer normalizations read the stream."""
    factor = math.sqrt(EPSILON / epsilon)
    fold_embedding_scale(weights, factor)
    for name in weights:
        if re.search(r"(embed_positions\.weight|(out_proj|fc2)\.(weight|bias))$", name):
            weights[name] = weights[name] * factor
