"""transformers' `MarianMTModel`: post-norm models with the paper's sinusoids."""

from pathlib import Path

from transformers import MarianConfig, MarianMTModel

from ..conversion.weights import separate_halves
from .source import read_model
from .stock import copied_weights, expect_fields, save, shared_fields

QUANTIZATIONS: tuple[str, ...] = ()
FIXED = {
    "norm_position": "post",
    "decoder_norm_position": None,
    "embedding_layer_norm": False,
    "position_encoding": "sinusoidal",
    "sinusoid_frequencies": "paper",
    "position_offset": 0,
}


def write(model_folder: Path, output: Path, quantization: str | None) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM` loads without this package.

    Raises:
        ValueError: `MarianMTModel` can't express the model; the message names the field.
    """
    model, tokenizer = read_model(model_folder)
    config = model.config
    expect_fields(config, "MarianMTModel", FIXED, ends_in_layer_norm=False)
    theirs = MarianConfig(
        **shared_fields(config),
        vocab_size=config.vocab_size,
        decoder_vocab_size=config.target_vocab_size,
        share_encoder_decoder_embeddings=config.shares_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    weights = copied_weights(model)
    separate_halves(weights)  # as in their positions: all sines, then all cosines
    save(model, tokenizer, MarianMTModel, theirs, weights, output)
