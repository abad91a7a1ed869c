"""transformers' `FSMTForConditionalGeneration`: fairseq's post-norm models, such as those of WMT19.

The names are fairseq's with "model." in front. Files: `config.json`, the weights,
`vocab-src.json`, `vocab-tgt.json` and `merges.txt`.
"""

from pathlib import Path
from typing import Any

from transformers import FSMTConfig, FSMTForConditionalGeneration, FSMTTokenizer
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ..data import vocabularies, vocabulary_files
from . import core, fairseq
from .core import Conversion, ConversionOptions
from .hf_marian import pipeline_fields, read_generation
from .saving import copy_original_files, restore, write_safetensors
from .toolkit import TransformersModel

NAME = "fsmt"
READS: tuple[str, ...] = ("source_vocabulary", "target_vocabulary", "source_codes")
VOCABULARIES = {"source": "vocab-src.json", "target": "vocab-tgt.json"}
MERGES = "merges.txt"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
# Fields that correspond to an option of fairseq.
OPTIONS = (
    "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "dropout", "attention_dropout", "activation_dropout",
)  # fmt: skip
# Options of the search that FSMTConfig has defaults for.
DEFAULTS = ("num_beams", "length_penalty", "early_stopping", "max_length", "forced_eos_token_id")


def recognizes(path: Path) -> bool:
    """Whether this is a folder with a configuration of this type."""
    return core.has_model_type(path, NAME)


def read(path: Path, options: ConversionOptions) -> Conversion:
    """The model with its tokenizer, which runs Moses; see `core`."""
    theirs = FSMTConfig.from_pretrained(path)
    tensors = dict(core.read_transformers_weights(path).tensors)
    state = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tables = {name: state.pop(name) for name in list(state) if "embed_positions" in name}
    if theirs.tie_word_embeddings and "decoder.embed_tokens.weight" in state:
        # One matrix for all, which the file contains once.
        state.setdefault("encoder.embed_tokens.weight", state["decoder.embed_tokens.weight"])

    def make_side(side: str, rows: int) -> fairseq.Side:
        return _side(path, side, options, rows)

    conversion = fairseq.build(path, _args(theirs), state, make_side)
    _set_fields(conversion.config, theirs)
    conversion.leftovers |= tables
    conversion.sources = {
        name: conversion.sources.get(name.removeprefix("model."), [])
        or [f"original:{name.removeprefix('model.')}"]
        for name in tensors
    }
    conversion.generation = _generation(path, theirs)
    lowercase = get_tokenizer_config(path).get("do_lower_case", False)
    conversion.tokenizer = vocabularies.with_moses(
        conversion.tokenizer, *theirs.langs, normalize=True, lowercase=lowercase
    )
    conversion.files += [path / name for name in FILES if (path / name).is_file()]
    conversion.languages = theirs.langs
    conversion.origin = {
        "toolkit": "transformers FSMT",
        "notes": f"{theirs.langs[0]} to {theirs.langs[1]}; the tokenizer runs Moses (sacremoses)",
    }
    return conversion


def write(model_folder: Path, output: Path) -> None:
    """Write a folder for `FSMTForConditionalGeneration` from a model that `read` has made."""
    tensors = restore(model_folder, halves=True)
    write_safetensors(tensors, output / "model.safetensors")
    copy_original_files(model_folder, output)


def _args(theirs: FSMTConfig) -> dict[str, Any]:
    return {
        **{name: getattr(theirs, name) for name in OPTIONS},
        "arch": "fsmt",
        "share_all_embeddings": theirs.tie_word_embeddings,
        # If the target embedding is the projection, files may contain it once.
        "share_decoder_input_output_embed": True,
        "no_scale_embedding": not theirs.scale_embedding,
        "max_source_positions": theirs.max_position_embeddings,
        "max_target_positions": theirs.max_position_embeddings,
    }


def _set_fields(config: Any, theirs: FSMTConfig) -> None:
    """Set the fields that are constants in fairseq."""
    for name in ("activation_function", "pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(theirs, name))
    config.decoder_start_token_id = theirs.decoder_start_token_id
    config.position_offset = theirs.pad_token_id + 1
    for name, value in pipeline_fields(theirs).items():
        setattr(config, name, value)


def _side(path: Path, side: str, options: ConversionOptions, rows: int) -> fairseq.Side:
    given = getattr(options, f"{side}_vocabulary")
    file = Path(given) if given else path / VOCABULARIES[side]
    codes = Path(options.source_codes) if options.source_codes else path / MERGES
    for each in (file, codes):
        if not each.is_file():
            raise FileNotFoundError(f"{each}: expected the vocabulary of an FSMT model")
    vocab = vocabulary_files.read_json_vocab(file)
    if len(vocab) != rows:
        raise ValueError(
            f"{file}: holds {len(vocab)} tokens, expected {rows}, the rows of the embedding"
        )
    merges = vocabulary_files.read_bpe_codes(codes)
    specials = vocabularies.Specials(prints_unk=False)
    tokenizer = vocabularies.bpe_codes(merges, vocab, specials, size=rows, separator=None)
    return fairseq.Side(tokenizer, [file, codes])


def _generation(path: Path, theirs: FSMTConfig) -> dict[str, Any]:
    """The generation config; without one, the configuration's, with its class's own defaults."""
    has_own = (path / "generation_config.json").is_file()
    defaults = {} if has_own else {name: getattr(theirs, name) for name in DEFAULTS}
    return defaults | read_generation(path)


def load_toolkit(path: Path, options: ConversionOptions) -> TransformersModel:
    """The checkpoint in transformers, for `check`."""
    tokenizer = FSMTTokenizer.from_pretrained(path)
    model = FSMTForConditionalGeneration.from_pretrained(path, dtype="float32")
    return TransformersModel(model, model.config.src_vocab_size, fairseq.UNK, tokenizer.encode)
