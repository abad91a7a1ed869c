"""transformers' `MarianMTModel`, such as the models of OPUS-MT, and back.

These models were trained by Marian. transformers runs them with different sinusoids and epsilon
than Marian. So do we, to give the same results as transformers. `marian` reads Marian's own files
and runs them as they were trained.
"""

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ..data import vocabularies, vocabulary_files
from ..data.vocabularies import Specials
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import SHARES
from ..model.tokenization_vanilla_transformer import SOURCE_FILE, TARGET_FILE
from . import core
from .core import Conversion, ConversionOptions, Tensors
from .positions import find_sinusoids
from .saving import copy_original_files, restore, write_safetensors
from .toolkit import TransformersModel
from .weights import (
    PROJECTION,
    PROJECTION_BIAS,
    SHARED,
    SOURCE,
    TARGET,
    interleave_halves,
    matrix_of,
    tie,
)

NAME = "hf_marian"
READS: tuple[str, ...] = ()
BIAS = "final_logits_bias"
UNK, END = "<unk>", "</s>"
SPECIALS = Specials(bos=None, eos=END, unk=UNK, template=f"$A {END}", prints_unk=False)

# Every MarianMTModel, in fields of our configuration.
FIXED = {
    "norm_position": "post",
    "final_layer_norm": "none",
    "embedding_layer_norm": False,
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "lm_head_bias": True,
    "position_encoding": "sinusoidal",
    "position_offset": 0,
}
# Fields that have the same name and meaning in both configurations.
SAME = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function",
    "dropout", "attention_dropout", "activation_dropout", "scale_embedding",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
    "decoder_start_token_id", "use_cache",
)  # fmt: skip
# Turn our names into those of `MarianMTModel` and similar classes.
NAMES = {
    r"\.ffn\.fc": ".fc",
    r"\.ffn\.activation": ".activation_fn",  # the parameters of PReLU and xIELU
    r"\.ffn_layer_norm": ".final_layer_norm",
}
# Options of models before transformers 4: today's MarianMTModel ignores them.
OFF = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits")
SAMPLING = ("temperature", "top_k", "top_h", *SHARES)
# Files that are copied when converting back.
FILES = (
    "config.json", "generation_config.json", "source.spm", "target.spm", "vocab.json",
    "target_vocab.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.json", SOURCE_FILE, TARGET_FILE, "tokenization_vanilla_transformer.py", "moses.py",
)  # fmt: skip


def recognizes(path: Path) -> bool:
    """Whether this is the folder of a `MarianMTModel`."""
    return core.has_model_type(path, "marian")


def read(path: Path, options: ConversionOptions) -> Conversion:
    """Read a folder of a `MarianMTModel`.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged, or our model does not support
            it.
    """
    theirs = MarianConfig.from_pretrained(path)
    for name in OFF:
        if getattr(theirs, name, False):
            raise ValueError(f"{path}: {name}={getattr(theirs, name)!r}: expected false")
    tensors = core.read_transformers_weights(path)
    matrices = _matrices(tensors, theirs)
    weights, tying = tie(*matrices[:3])
    weights[PROJECTION_BIAS] = matrices[3]
    config = VanillaTransformerConfig(
        **{name: getattr(theirs, name) for name in SAME}, **FIXED, **tying,
        **_positions(tensors, theirs.d_model), **pipeline_fields(theirs), label_smoothing=0.0,
    )  # fmt: skip
    weights |= core.take_layers(tensors, config, NAMES)
    tensors.expect_all_taken()
    sides = {} if _was_exported(path) else _sides(path, config)
    unk = {side: each.backend_tokenizer.token_to_id(UNK) for side, each in sides.items()}
    if sides:
        size, unk_id = config.target_vocab_size, unk["target"]
        tokenizer = vocabularies.pair(*sides.values(), size=size, unk_id=unk_id)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
    conversion = Conversion(config, weights, tokenizer)
    conversion.sources, conversion.leftovers = _way_back(tensors, weights)
    interleave_halves(weights)
    for side, each in sides.items():
        conversion.fill_with_clones(side, vocabularies.rows(each), unk[side])
    conversion.generation = read_generation(path)
    version = str(theirs.transformers_version)
    conversion.origin = {"toolkit": "transformers (MarianMTModel)", "version": version}
    details = get_tokenizer_config(path)
    conversion.languages = [details.get("source_lang"), details.get("target_lang")]
    conversion.files = [file for name in FILES if (file := path / name).is_file()]
    return conversion


def pipeline_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that `pipeline("translation")` reads, of those that a configuration may lack."""
    names = ("prefix", "task_specific_params")
    return {name: value for name in names if (value := getattr(config, name, None))}


def _was_exported(folder: Path) -> bool:
    """Whether the folder has one of our tokenizers, written by `export`, and not Marian's."""
    has_ours = any((folder / name).is_file() for name in ("tokenizer.json", SOURCE_FILE))
    return has_ours and not (folder / "vocab.json").is_file()


def _matrices(tensors: Tensors, theirs: MarianConfig) -> list[Tensor]:
    """Source embedding, target embedding, projection and its bias. A matrix with several names may
    be saved under one of them or all."""
    shared = theirs.share_encoder_decoder_embeddings
    target_size = theirs.vocab_size if shared else theirs.decoder_vocab_size
    matrices, name = [], SHARED
    for ours, size in (
        (SOURCE, theirs.vocab_size),
        (TARGET, target_size),
        (PROJECTION, target_size),
    ):
        name = ours if ours in tensors else name
        matrices.append(tensors.take(name, size, theirs.d_model))
    tensors.taken.add(SHARED)
    if BIAS in tensors:
        return [*matrices, tensors.take(BIAS, 1, target_size)[0]]
    return [*matrices, matrices[2].new_zeros(target_size)]


def _positions(tensors: Tensors, d_model: int) -> dict[str, Any]:
    """The frequencies of the sinusoids. Old files contain them as a table, rounded to float16."""
    kinds = set()
    for stack in core.STACKS:
        name = f"model.{stack}.embed_positions.weight"
        if name not in tensors:
            continue
        kind = find_sinusoids(tensors.take(name, None, d_model).half())
        if kind is None or kind[1] != "halves":
            raise ValueError(
                f"{tensors.place}: {name}: expected sinusoids, these are other positions"
            )
        kinds.add(kind)
    if len(kinds) > 1:
        raise ValueError(f"{tensors.place}: expected the same positions in encoder and decoder")
    return {"sinusoid_frequencies": kinds.pop()[0]} if kinds else {}


def read_generation(folder: Path) -> dict[str, Any]:
    """The generation config. Before transformers 4.27, its fields were in the configuration.
    Sampling options are left out if the model does not sample: transformers would not save them."""
    file = folder / "generation_config.json"
    known = GenerationConfig().to_dict().keys() - {"transformers_version"}
    settings = json.loads(
        (file if file.is_file() else folder / "config.json").read_text(encoding="utf-8")
    )
    if not settings.get("do_sample"):
        known -= set(SAMPLING)
    return {name: value for name, value in settings.items() if name in known}


def _sides(folder: Path, config: VanillaTransformerConfig) -> dict[str, PreTrainedTokenizerFast]:
    """The tokenizers of "source" and "target", with one vocabulary or two."""
    separate = folder / "target_vocab.json"
    files = [folder / "vocab.json", separate if separate.is_file() else folder / "vocab.json"]
    sizes = [config.vocab_size, config.target_vocab_size]
    sides = {}
    for side, file, size in zip(core.SIDES, files, sizes, strict=True):
        vocab = vocabulary_files.read_json_vocab(file)
        core.expect_size(file, vocab, size)
        for token, number in (("<pad>", config.pad_token_id), (END, config.eos_token_id)):
            if vocab.get(token) != number:
                raise ValueError(f"{file}: {token} has id {vocab.get(token)}: expected {number}")
        model = vocabulary_files.read_sentencepiece(folder / f"{side}.spm")
        whole = [token for token in vocab if re.fullmatch(">>.+<<", token)]
        tokenizer = vocabularies.sentencepiece(model, SPECIALS, vocab=vocab, size=size, whole=whole)
        tokenizer.add_special_tokens({"unk_token": UNK})  # so that decoding leaves it out
        sides[side] = tokenizer
    return sides


# ---------------------------------------------------------------- Back


def _way_back(
    tensors: Tensors, weights: dict[str, Tensor]
) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """`Conversion.sources` and `Conversion.leftovers`."""
    ours = {core.renamed(name, NAMES): name for name in weights}
    source, target = (matrix_of(weights, side) for side in core.SIDES)
    ours |= {
        SHARED: source,
        SOURCE: source,
        TARGET: target,
        PROJECTION: PROJECTION if PROJECTION in weights else target,
        BIAS: PROJECTION_BIAS,
    }
    sources, leftovers = {}, {}
    for name, tensor in tensors.tensors.items():
        if name in ours:
            rows = f"[:{tensor.shape[name == BIAS]}]" if tensor.ndim else ""  # xIELU has scalars
            sources[name] = [ours[name] + rows]
        else:
            leftovers[name], sources[name] = tensor, [f"original:{name}"]
    return sources, leftovers


def write(model_folder: Path, output: Path) -> None:
    """Write the folder of a `MarianMTModel` from a model that `read` has made, with its current
    weights.

    Raises:
        FileNotFoundError: The model was not converted.
        ValueError: The model was not converted from a `MarianMTModel`.
    """
    tensors = restore(model_folder, halves=True)
    if BIAS in tensors:
        tensors[BIAS] = tensors[BIAS][None]
    write_safetensors(tensors, output / "model.safetensors")
    copy_original_files(model_folder, output)


def load_toolkit(path: Path, options: ConversionOptions) -> TransformersModel:
    """The checkpoint in transformers, for `check`."""
    kind = AutoTokenizer if _was_exported(path) else MarianTokenizer
    tokenizer = kind.from_pretrained(path)
    model = MarianMTModel.from_pretrained(path, dtype="float32")
    unk = tokenizer.convert_tokens_to_ids(UNK)
    return TransformersModel(
        model, model.config.vocab_size, unk, lambda line: tokenizer(line)["input_ids"]
    )
