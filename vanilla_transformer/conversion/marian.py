"""Native Marian: `model.npz`, `decoder.yml` and vocabularies. https://github.com/marian-nmt/marian-dev

A model runs as it was trained. Marian's sinusoids have d_model - 2 in the exponent, its layer norms
an epsilon of 1e-6, and its decoder starts from a vector of zeros. transformers' own converter does
not keep the first two, and its padding is a word of logit 0; `like="transformers"` gives the same.
"""

import logging
import math
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..data import vocabularies, vocabulary_files
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from . import core
from .core import STACKS, TOKEN_FILES, Conversion, ConversionOptions, Tensors
from .toolkit import Toolkit, subwords
from .weights import PROJECTION_BIAS, SHARED, add_rows, interleave_halves, tie

logger = logging.getLogger(__name__)

NAME = "marian"
READS: tuple[str, ...] = ("like", *TOKEN_FILES)
OPTIONS = "special:model.yml"
# Our modules and Marian's names: {} is "W" or "b", in a layer norm "scale" or "bias".
STACK_NAMES = {"embed_layer_norm": "emb_ln_{}_pre", "layer_norm": "top_ln_{}"}
LAYER_NAMES = {
    "self_attn.q_proj": "self_{}q",
    "self_attn.k_proj": "self_{}k",
    "self_attn.v_proj": "self_{}v",
    "self_attn.out_proj": "self_{}o",
    "self_attn_layer_norm": "self_Wo_ln_{}",
    "encoder_attn.q_proj": "context_{}q",
    "encoder_attn.k_proj": "context_{}k",
    "encoder_attn.v_proj": "context_{}v",
    "encoder_attn.out_proj": "context_{}o",
    "encoder_attn_layer_norm": "context_Wo_ln_{}",
    "ffn.fc1": "ffn_{}1",
    "ffn.fc2": "ffn_{}2",
    "ffn_layer_norm": "ffn_ffn_ln_{}",
}
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "": "linear"}
EXACT_GELU = (1, 12, 3)  # in earlier versions x * sigmoid(1.702 x)
NORMALIZED_KEYS = (1, 11)  # in earlier versions, pre-norm did not normalize keys and values

# Options of which our model supports only these values; the first is the default.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-attention-mask": ("default",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-pool": (False,),
    "right-left": (False,),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("",),
    "factors-dim-emb": (0,),
    "factors-combine": ("sum",),
}
REQUIRED = {
    "dim-vocabs", "dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn",
}  # fmt: skip
# Other options that we read, and those that have no effect with the values above.
READ = {
    "version", "tied-embeddings", "tied-embeddings-src", "tied-embeddings-all", "output-omit-bias",
    "transformer-no-projection", "transformer-decoder-dim-ffn", "transformer-ffn-activation",
    "transformer-tied-layers", "transformer-preprocess", "transformer-postprocess",
    "transformer-postprocess-emb", "transformer-postprocess-top",
    "transformer-disable-position-embeddings",
}  # fmt: skip
IGNORED = re.compile(
    "(enc|dec)-(type|cell|cell-depth|cell-base-depth|cell-high-depth)|dim-rnn|skip|input-types"
    "|layer-normalization|special-vocab|separator-symbol|bert-.*|ulr-.*|transformer-alibi-.*"
    "|transformer-(dim-aan|aan-.*|rnn-projection|guided-alignment-layer|depth-scaling)"
    "|transformer-(train-position(s|-embeddings)|no-bias|no-affine)"
)


@dataclass
class Side:
    """The tokenizer of a side, and two of its ids."""

    tokenizer: PreTrainedTokenizerFast
    unk_id: int
    eos_id: int


def recognizes(path: Path) -> bool:
    """Whether this is a Marian model (`.npz`), its `decoder.yml`, or a folder that has either."""
    if path.is_dir():
        return any(map(_is_marian, [*path.glob("*.yml"), *path.glob("*.npz")]))
    return path.is_file() and _is_marian(path)


def _is_marian(file: Path) -> bool:
    return file.suffix == ".npz" or file.name.endswith("decoder.yml")


def read(path: Path, options: ConversionOptions) -> Conversion:
    """Read a model and its vocabularies.

    Args:
        path: `model.npz`, its `decoder.yml`, or a folder with one model.
        options: `source_vocabulary` and `target_vocabulary` replace those named in `decoder.yml`;
            `like="transformers"` uses the sinusoids, the epsilon and the logit of padding of
            `MarianMTModel`.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged, or our model does not support
            it.
    """
    files = MarianFiles.find(path, options)
    with NumpyFile(files.model) as arrays:
        marian = _model_options(arrays)
        tensors = Tensors(arrays, files.model)
        weights, tying = _matrices(marian, tensors)
        fields = _config_fields(marian, files, options) | tying | _position_fields(marian, tensors)
        source, target = _sides(files, marian, options)
        config = VanillaTransformerConfig(**fields, eos_token_id=target.eos_id)
        weights |= _stacks(marian, tensors, config) | _positions(tensors, config)
        tensors.expect_all_taken(ignored=[re.escape(OPTIONS)])
    if config.position_encoding == "sinusoidal":
        interleave_halves(weights)
    pair = vocabularies.pair(
        source.tokenizer, target.tokenizer, size=config.target_vocab_size, unk_id=target.unk_id
    )
    conversion = Conversion(config, weights, pair)
    for name, side in zip(core.SIDES, (source, target), strict=True):
        conversion.fill_with_clones(name, vocabularies.rows(side.tokenizer), side.unk_id)
    conversion.generation = _generation(files, target)
    if options.like is not None:
        _show_padding(conversion)
    conversion.origin = {"toolkit": "Marian", "version": str(marian.get("version", ""))}
    return conversion


def _show_padding(conversion: Conversion) -> None:
    """Give padding the logit 0, as transformers does: it takes probability from other tokens, and
    only a search hides it."""
    pad = conversion.config.pad_token_id
    conversion.weights[PROJECTION_BIAS][pad] = 0.0
    hidden = conversion.generation.get("suppress_tokens", [])
    conversion.generation["suppress_tokens"] = [*hidden, pad]


# ---------------------------------------------------------------- Files


@dataclass
class MarianFiles:
    """The files of a model.

    Attributes:
        model: Weights and options of the model.
        vocabularies: One for each side.
        options: Options of decoding and training; those for decoding win.
    """

    model: Path
    vocabularies: list[Path]
    options: dict[str, Any]

    @classmethod
    def find(cls, path: Path, options: ConversionOptions) -> "MarianFiles":
        """The files of the model at `path`, as `decoder.yml` names them."""
        named = _find_in(path) if path.is_dir() else path
        if named.suffix == ".npz":
            model = named
            beside = [named.with_name(f"{named.name}.decoder.yml"), named.with_name("decoder.yml")]
            decoding = next((_read_yaml(file) for file in beside if file.is_file()), {})
        else:
            decoding = _read_yaml(named)
            models = decoding.get("models") or []
            if len(models) != 1 or not str(models[0]).endswith(".npz"):
                raise ValueError(
                    f"{named}: models={models}: expected one .npz file; ensembles and quantized or "
                    "packed models (.bin) are not converted"
                )
            model = _beside(named, models[0])
        training = model.with_name(model.name + ".yml")
        both = {**(_read_yaml(training) if training.is_file() else {}), **decoding}
        given = [options.source_vocabulary, options.target_vocabulary]
        if any(given):
            files = [Path(file or given[0] or given[1] or "") for file in given]
        else:
            files = [_beside(model, name) for name in both.get("vocabs") or []]
        if len(files) != 2:
            raise ValueError(
                f"{model}: expected two vocabularies, in decoder.yml or as source_vocabulary and "
                f"target_vocabulary, not {len(files)}"
            )
        return cls(model, files, both)


def _find_in(folder: Path) -> Path:
    """The file with the options of decoding in a folder, or else its model. `decoder.yml` is
    preferred to those of single models, and an optimizer's state is not a model."""
    if (folder / "decoder.yml").is_file():
        return folder / "decoder.yml"
    patterns = "*decoder.yml", "*.npz"
    for pattern in patterns:
        files = [file for file in sorted(folder.glob(pattern)) if "optimizer" not in file.name]
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{folder}: holds {names}: expected one, or the path of one of them")
        if files:
            return files[0]
    raise FileNotFoundError(f"{folder}: expected one of {', '.join(patterns)}")


def _beside(file: Path, name: str) -> Path:
    """The file that `file` names, or the one of that name next to it, as models are moved with
    their files."""
    places = [file.parent / name, file.parent / Path(name).name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{file}: expected the file {name!r} that it names next to it")


def _read_yaml(file: Path) -> dict[str, Any]:
    return _parse_yaml(file.read_bytes(), file)


def _parse_yaml(text: str | bytes, file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected options in YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected options in YAML, not {content!r:.80}")
    return content


class NumpyFile(Mapping[str, Tensor]):
    """The arrays of an `.npz` file, each read when it is needed. Nothing is unpickled.

    Raises:
        ValueError: The file is damaged, or an array has a type that does not occur in Marian's
            float models.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path}: expected a complete .npz file: {error}") from error
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __enter__(self) -> "NumpyFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._zip.close()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __getitem__(self, name: str) -> Tensor:
        info = self._members[name]
        try:
            shape, dtype = self._header(info)
            is_whole = math.prod(shape) * dtype.itemsize < info.file_size
            is_held = dtype.kind == "f" or name == OPTIONS
            if is_whole and is_held:
                with self._zip.open(info) as file:
                    return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            raise ValueError(f"{self.path}: {name} is damaged: {error}") from error
        if is_whole:
            raise ValueError(
                f"{self.path}: {name} is of type {dtype}: expected floats, as quantized models are "
                "not converted"
            )
        raise ValueError(f"{self.path}: {name} is shorter than its shape {shape}")

    def _header(self, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type of an array, which tell how much memory it takes."""
        with self._zip.open(info) as file:
            is_old = np.lib.format.read_magic(file) == (1, 0)
            header = "read_array_header_1_0" if is_old else "read_array_header_2_0"
            shape, _, dtype = getattr(np.lib.format, header)(file)
        return shape, dtype


# ---------------------------------------------------------------- Configuration


def _model_options(arrays: NumpyFile) -> dict[str, Any]:
    """The options in the model. All must be known."""
    if OPTIONS not in arrays:
        raise ValueError(f"{arrays.path}: expected {OPTIONS!r} in it, the options of the model")
    text = bytes(arrays[OPTIONS].numpy()).decode().rstrip("\0")
    marian = _parse_yaml(text, arrays.path)
    for name, supported in SUPPORTED.items():
        if name in marian and marian[name] not in supported:
            expected = " or ".join(map(repr, supported))
            raise ValueError(f"{arrays.path}: {name}={marian[name]!r}: expected {expected}")
    for name in sorted(marian.keys() - READ - SUPPORTED.keys() - REQUIRED):
        if not IGNORED.fullmatch(name):
            raise ValueError(f"{arrays.path}: {name}={marian[name]!r}: expected no such option")
    if missing := sorted(REQUIRED - marian.keys()):
        raise ValueError(f"{arrays.path}: expected the option {missing[0]} in {OPTIONS!r}")
    types = marian.get("input-types") or []
    if "class" in types:  # without </s>
        raise ValueError(f"{arrays.path}: input-types={types}: expected 'sequence' for both")
    for name, number in (
        ("dim-vocabs", 2),
        ("transformer-tied-layers", marian["dec-depth"]),
    ):
        value = marian.get(name) or [None] * number
        if len(value) != number:
            raise ValueError(f"{arrays.path}: {name}={value}: expected {number} numbers")
    return marian


def _config_fields(
    marian: dict[str, Any], files: MarianFiles, options: ConversionOptions
) -> dict[str, Any]:
    """Our configuration, except for the vocabularies."""
    as_transformers = options.like == "transformers"
    d_ff = marian["transformer-dim-ffn"]
    heads = marian["transformer-heads"]
    final = "both" if _has_norm(marian, "transformer-postprocess-top") else "none"
    return {
        "d_model": marian["dim-emb"],
        "encoder_layers": marian["enc-depth"],
        "decoder_layers": marian["dec-depth"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": d_ff,
        "decoder_ffn_dim": marian.get("transformer-decoder-dim-ffn") or d_ff,
        "attention_bias": True,
        "lm_head_bias": True,
        "activation_function": _activation(marian, as_transformers),
        "norm_position": _norm_position(marian),
        "final_layer_norm": final,
        "embedding_layer_norm": _has_norm(marian, "transformer-postprocess-emb"),
        "layer_norm_eps": 1e-5 if as_transformers else 1e-6,
        "sinusoid_frequencies": "paper" if as_transformers else "tensor2tensor",
        "dropout": files.options.get("transformer-dropout", 0.0),
        "attention_dropout": files.options.get("transformer-dropout-attention", 0.0),
        "activation_dropout": files.options.get("transformer-dropout-ffn", 0.0),
        "label_smoothing": files.options.get("label-smoothing", 0.0),
    }


def _position_fields(marian: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Sinusoids, unless there are learned positions or none; only sinusoids scale embeddings."""
    if "Wpos" in tensors:
        number = len(tensors["Wpos"])
    elif marian.get("transformer-disable-position-embeddings"):
        number = 1024
    else:
        return {}
    return {
        "position_encoding": "learned",
        "scale_embedding": False,
        "max_position_embeddings": number,
    }


def _version(marian: dict[str, Any]) -> tuple[int, ...]:
    """The numbers of "v1.12.42 b7be0e964 2025-05-24": (1, 12, 42)."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(marian.get("version")))
    return tuple(map(int, match.groups())) if match else ()


def _activation(marian: dict[str, Any], as_transformers: bool) -> str:
    name = marian.get("transformer-ffn-activation", "swish")
    if name not in ACTIVATIONS:
        expected = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"transformer-ffn-activation={name!r}: expected one of {expected}")
    if name == "gelu" and _version(marian) < EXACT_GELU and not as_transformers:
        return "quick_gelu"
    return ACTIVATIONS[name]


def _norm_position(marian: dict[str, Any]) -> str:
    before = marian.get("transformer-preprocess", "")
    after = marian.get("transformer-postprocess", "dan")
    without_dropout = before.replace("d", ""), after.replace("d", "")
    if without_dropout == ("", "an"):
        return "post"
    if without_dropout != ("n", "a"):
        raise ValueError(
            f"transformer-preprocess={before!r} and transformer-postprocess={after!r}: expected "
            "'' and 'dan' (post-norm), or 'n' and 'da' (pre-norm)"
        )
    if _version(marian) < NORMALIZED_KEYS:
        raise ValueError(
            f"version={marian.get('version')!r} with transformer-preprocess={before!r}: expected "
            "1.11 or later, as earlier ones do not normalize keys and values"
        )
    return "pre"


def _has_norm(marian: dict[str, Any], option: str) -> bool:
    operations = marian.get(option, "")
    if operations.replace("d", "") not in ("", "n"):
        raise ValueError(
            f"{option}={operations!r}: expected 'n' (a layer norm), 'd' (dropout), both or ''"
        )
    return "n" in operations


# ---------------------------------------------------------------- Weights


def _matrices(marian: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Embeddings, projection and its bias, and the fields of our configuration about them.

    Both vocabularies are extended to a common size, with one more token for padding. Its embedding
    is the vector of zeros from which the decoder starts.
    """
    (source_size, target_size), d_model = marian["dim-vocabs"], marian["dim-emb"]
    if "Wemb" in tensors:
        source = target = tensors.take("Wemb", source_size, d_model)
    else:
        source = tensors.take("encoder_Wemb", source_size, d_model)
        target = tensors.take("decoder_Wemb", target_size, d_model)
    if marian.get("tied-embeddings") or marian.get("tied-embeddings-all"):
        projection = target
    elif "decoder_ff_logit_out_W" in tensors:  # in the first versions
        projection = tensors.take("decoder_ff_logit_out_W", d_model, target_size).T.contiguous()
    else:
        projection = tensors.take("decoder_ff_logit_out_Wt", target_size, d_model)
    weights, tying = tie(source, target, projection)
    if not marian.get("output-omit-bias"):
        weights[PROJECTION_BIAS] = tensors.take("decoder_ff_logit_out_b", 1, target_size)[0]
    start = max(marian["dim-vocabs"])
    add_rows(weights, "target", start + 1 - target_size)
    if SHARED not in weights:
        add_rows(weights, "source", start + 1 - source_size)
    tokens = {"pad_token_id": start, "decoder_start_token_id": start, "bos_token_id": None}
    tying["vocab_size"] = start + 1
    if tying["decoder_vocab_size"]:
        tying["decoder_vocab_size"] = start + 1
    return weights, tying | tokens


def _stacks(
    marian: dict[str, Any], tensors: Tensors, config: VanillaTransformerConfig
) -> dict[str, Tensor]:
    """All weights in the layers and after them. Marian's matrices are (in, out)."""
    weights: dict[str, Tensor] = {}
    for ours, tensor in core.empty_model(config).state_dict().items():
        theirs, shape = _their_name(ours, marian, config), tensor.shape
        if theirs is None:
            continue
        if marian.get("transformer-no-projection") and ".out_proj." in ours:
            identity = torch.zeros(shape) if len(shape) == 1 else torch.eye(*shape)
            weights[ours] = identity.to(next(iter(weights.values())).dtype)
        elif len(shape) == 1:
            weights[ours] = tensors.take(theirs, 1, *shape)[0]
        else:
            weights[ours] = tensors.take(theirs, *reversed(shape)).T.contiguous()
    return weights


def _their_name(ours: str, marian: dict[str, Any], config: VanillaTransformerConfig) -> str | None:
    """Marian's name for a tensor in a layer, or for a layer norm around the layers."""
    stack, *path, part = ours.removeprefix("model.").split(".")
    module = ".".join(path)
    if module.startswith("layers."):
        number = int(path[1])
        numbers = stack == "decoder" and marian.get("transformer-tied-layers")
        layer = numbers[number] if numbers else number + 1
        name = f"l{layer}_{LAYER_NAMES['.'.join(path[2:])]}"
        if config.norm_position == "pre" and "_ln_" in name:
            name += "_pre"
    elif module in STACK_NAMES:
        name = STACK_NAMES[module]
    else:
        return None
    kinds = ("scale", "bias") if "_ln_" in name else ("W", "b")
    return f"{stack}_{name}".format(kinds[part == "bias"])


def _positions(tensors: Tensors, config: VanillaTransformerConfig) -> dict[str, Tensor]:
    """Learned positions, which both stacks share; zeros if a model has no positions."""
    if config.position_encoding == "sinusoidal":
        return {}
    shape = config.max_position_embeddings, config.d_model
    table = tensors.take("Wpos", *shape) if "Wpos" in tensors else torch.zeros(shape)
    return {f"model.{stack}.embed_positions.weight": table.clone() for stack in STACKS}


# ---------------------------------------------------------------- Decoding


def _generation(files: MarianFiles, target: Side) -> dict[str, Any]:
    """The search of `marian-decoder` with these options, and its own defaults for missing ones."""
    options = files.options
    generation: dict[str, Any] = {
        "num_beams": options.get("beam-size", 12),
        "length_penalty": float(options.get("normalize", 0)),
        "max_length_factor": options.get("max-length-factor", 3),
    }
    if suppressed := _suppressed(options, target):
        generation["suppress_tokens"] = suppressed
    if options.get("word-penalty"):
        logger.warning(
            "word-penalty=%s has no equivalent here: translations may be shorter or longer than "
            "Marian's; length_penalty changes that",
            options["word-penalty"],
        )
    for name in ("shortlist", "output-sampling"):
        if options.get(name):
            logger.warning(
                "%s=%s has no equivalent here: translations may differ from Marian's; compare with "
                "those of marian-decoder without it",
                name, options[name],
            )  # fmt: skip
    return generation


def _suppressed(options: dict[str, Any], target: Side) -> list[int]:
    """Ids that Marian never produces: the unknown token, and control characters as bytes."""
    ids = [] if options.get("allow-unk") else [target.unk_id]
    if not options.get("allow-special"):
        vocab = target.tokenizer.get_vocab()
        ids += [vocab[byte] for code in range(32) if (byte := f"<0x{code:02X}>") in vocab]
    return ids


# ---------------------------------------------------------------- Vocabularies


def _sides(files: MarianFiles, marian: dict[str, Any], options: ConversionOptions) -> list[Side]:
    """Source and target, which split text like the toolkit, with a token added for padding."""
    sizes = marian["dim-vocabs"]
    return [
        _side(file, size, max(sizes), _splitter(side, file, options))
        for side, file, size in zip(core.SIDES, files.vocabularies, sizes, strict=True)
    ]


def _splitter(side: str, vocabulary: Path, options: ConversionOptions) -> str | Path | None:
    """The codes or the model that split a side's text, unless its vocabulary does."""
    if vocabulary.suffix == ".spm":
        options.expect_no_codes(side, f"{vocabulary}, which splits text")
        return None
    beside = (vocabulary.with_name(f"{side}.{suffix}") for suffix in ("spm", "bpe"))
    return options.codes(side) or next(filter(Path.is_file, beside), None)


def _side(file: Path, size: int, pad: int, splitter: str | Path | None) -> Side:
    if file.suffix == ".fsv":
        raise ValueError(f"{file}: expected a vocabulary without factors")
    model = vocabulary_files.read_sentencepiece(file) if file.suffix == ".spm" else None
    vocab = model.vocab() if model else _tokens_with_rows(file, size)
    core.expect_size(file, vocab, size)
    eos = _required(file, vocab, "</s>", "eos", 0)
    unk = _required(file, vocab, "<unk>", "UNK", 1)
    ids = vocab[unk], vocab[eos]
    specials = vocabularies.Specials(
        pad=add_pad(vocab, pad), bos=None, eos=eos, unk=unk, template=f"$A {eos}"
    )
    if model:
        return Side(vocabularies.sentencepiece(model, specials, vocab=vocab), *ids)
    return Side(split_and_look_up(splitter, vocab, specials), *ids)


def _tokens_with_rows(file: Path, size: int) -> dict[str, int]:
    """The tokens of a vocabulary that have a row in a matrix. Marian ignores the others."""
    vocab = vocabulary_files.read_marian_vocab(file)
    first = {token: number for token, number in vocab.items() if number < size}
    if len(first) < len(vocab):
        logger.warning(
            "%s: %d of %d tokens are unknown to the model, which has %d rows for them",
            file, len(vocab) - len(first), len(vocab), size,
        )  # fmt: skip
    return first


def split_and_look_up(
    splitter: str | Path | None, vocab: dict[str, int], specials: vocabularies.Specials
) -> PreTrainedTokenizerFast:
    """A tokenizer that splits text with a SentencePiece model, with BPE codes or at spaces, and
    looks up the pieces in another vocabulary."""
    if splitter is None:
        return vocabularies.words(vocab, specials, spaces_only=True)
    if Path(splitter).suffix in (".spm", ".model"):
        model = vocabulary_files.read_sentencepiece(splitter)
        whole = [token for token in vocab if re.fullmatch(">>.+<<", token)]
        return vocabularies.sentencepiece(model, specials, vocab=vocab, whole=whole)
    return vocabularies.bpe_codes(vocabulary_files.read_bpe_codes(splitter), vocab, specials)


def add_pad(vocab: dict[str, int], number: int) -> str:
    """Add a token for padding to a vocabulary, under an unused name."""
    pad = "<pad>"
    while pad in vocab:
        pad = f"<{pad}>"
    vocab[pad] = number
    return pad


def _required(file: Path, vocab: dict[str, int], name: str, old: str, number: int) -> str:
    """The token that Marian uses as `name`; in files of Nematus it is called `old`."""
    is_yaml = file.suffix in (".yml", ".yaml", ".json")
    if is_yaml and vocab.get(old) == number:
        return old
    if name not in vocab:
        raise ValueError(f"{file}: expected an entry {name!r}")
    return name


# ---------------------------------------------------------------- Marian itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The model in Marian, for `check`.

    Raises:
        ImportError: pymarian can't be imported.
    """
    return MarianToolkit(MarianFiles.find(path, options), options)


class MarianToolkit(Toolkit):
    """A model in pymarian, Marian's own program. It only reports log-probabilities of the target's
    own tokens, with five decimals. Ids are passed as words, with vocabularies of numbers, because
    Marian might split the text of a translation differently."""

    pad = -1

    def __init__(self, files: MarianFiles, options: ConversionOptions):
        from _pymarian import Translator

        self.files, self.load = files, Translator
        self.loaded: dict[int, Any] = {}  # by number of beams
        with NumpyFile(files.model) as arrays:
            marian = _model_options(arrays)
        sizes, sides = marian["dim-vocabs"], _sides(files, marian, options)
        self.source_size, self.unk = sizes[0], sides[0].unk_id
        self.ends = [side.eos_id for side in sides]
        self.words = [
            [{side.eos_id: "</s>", side.unk_id: "<unk>"}.get(i, str(i)) for i in range(size)]
            for side, size in zip(sides, sizes, strict=True)
        ]
        self.folder = tempfile.TemporaryDirectory()
        for name, words in zip(core.SIDES, self.words, strict=True):
            lines = (f'"{word}": {number}\n' for number, word in enumerate(words))
            Path(self.folder.name, f"{name}.yml").write_text("".join(lines), encoding="utf-8")
        file = files.vocabularies[0]
        if file.suffix == ".spm":
            self.split = subwords(file)
            self.vocab = vocabulary_files.read_sentencepiece(file).vocab()
        else:
            codes = _splitter("source", file, options)
            self.split = subwords(codes) if codes else re.compile("[^ ]+").findall
            self.vocab = _tokens_with_rows(file, sizes[0])

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """Marian does not report them."""
        raise NotImplementedError("Marian reports log-probabilities of the target's tokens alone")

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
        """See `Toolkit`."""
        lines = self._score(sources, targets, "--word-scores").splitlines()
        scores = [list(map(float, line.partition("WordScores=")[2].split())) for line in lines]
        pairs = zip(scores, targets, strict=True)  # Marian adds an end to each target
        return [torch.tensor(row[: len(target)])[:, None] for row, target in pairs]

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        options = self.files.options
        if num_beams not in self.loaded:
            names = ("normalize", "word-penalty", "allow-unk")
            search = [f"--{name}={str(options[name]).lower()}" for name in names if name in options]
            arguments = [*self._options(), f"--beam-size={num_beams}", *search]
            self.loaded[num_beams] = self.load(" ".join(arguments))
        # Marian's only limit is relative to the longest source of a batch.
        limit = {"max-length-factor": (longest - 0.5) / max(map(len, sources))}
        lines = self.loaded[num_beams].translate(self._lines(sources, 0), **limit)
        ids = {word: number for number, word in enumerate(self.words[1])}
        targets = [[ids[word] for word in line.split()] for line in lines]
        return [row if len(row) == longest else [*row, self.ends[1]] for row in targets]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        return [*(self.vocab.get(piece, self.unk) for piece in self.split(line)), self.ends[0]]

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`. The loss has no gradient, and six digits."""
        rows, goals = ([row[row != self.pad].tolist() for row in ids] for ids in (sources, targets))
        return torch.tensor(float(self._score(rows, goals, "--summary=ce-mean-words")))

    def _score(self, sources: list[list[int]], targets: list[list[int]], option: str) -> str:
        files = [Path(self.folder.name, name) for name in core.SIDES]
        for side, (file, rows) in enumerate(zip(files, (sources, targets), strict=True)):
            lines = "".join(f"{line}\n" for line in self._lines(rows, side))
            file.write_text(lines, encoding="utf-8")
        program = "import sys, _pymarian; sys.exit(_pymarian.main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "score", *self._options(), option, "--train-sets"]
        done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"marian score: {done.stderr[-2000:]}")
        return done.stdout

    def _options(self) -> list[str]:
        vocabularies = [f"{self.folder.name}/{name}.yml" for name in core.SIDES]
        return ["-m", str(self.files.model), "--vocabs", *vocabularies,
                "--cpu-threads=1", "--mini-batch=1024", "--quiet"]  # fmt: skip

    def _lines(self, rows: list[list[int]], side: int) -> list[str]:
        """Ids as words, without the end token, which Marian adds."""
        rows = rows if side else self.known(rows)
        return [" ".join(self.words[side][i] for i in row if i != self.ends[side]) for row in rows]
