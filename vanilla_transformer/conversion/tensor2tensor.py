"""tensor2tensor, the toolkit of the paper: a TensorFlow checkpoint `model.ckpt-N.{index,data-*}`
with `hparams.json` and, from the data folder, `vocab.*.subwords`. It is read without TensorFlow.

Source: Vaswani et al. (2018), "Tensor2Tensor for Neural Machine Translation",
https://arxiv.org/abs/1803.07416, and https://github.com/tensorflow/tensor2tensor, 1.0 to 1.15.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.vocabularies import Specials, pair, subwords, words
from ..data.vocabulary_files import read_subwords
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .core import STACKS, Conversion, ConversionOptions, Tensors
from .positions import learned_positions
from .tensorflow_checkpoint import TensorFlowCheckpoint, is_index
from .toolkit import Toolkit
from .weights import SHARED, SOURCE, TARGET, add_rows, interleave_halves, matrix_of, tie

logger = logging.getLogger(__name__)

NAME = "tensor2tensor"
READS: tuple[str, ...] = ("heads", "target_space_id", "source_vocabulary", "target_vocabulary")
SIDES = "inputs", "targets"
SPECIALS = "<pad>", "<EOS>"  # ids 0 and 1; most files add an underscore
START = "<start>"  # ours: the decoder starts from a zero vector
# The unknown token of a vocabulary of whole tokens, such as that of translate_ende_wmt_bpe32k.
UNKNOWN = "UNK"
# Variables that a translation does not need: the optimizer's and counters.
IGNORED = (
    r"training/.*", r".*/(\w*Adam\w*|Adafactor|Momentum)(_\d+)?", r"(.*/)?beta[12]_power",
    r"(.*/)?global_step", r"losses_avg/.*", r"train_stats/.*",
)  # fmt: skip

# Their names, after any scopes, and the short names that the functions below use. The last
# alternatives are from 2017, up to 1.2: convolutions, fused projections, no scopes.
_LAYER = r"(?:.*/)?body/(encoder|decoder)/layer_(\d+)(?:_\d+)?/"
_PROJECTION = r"(qkv|kv|q|k|v|output|o)(?:_transform)?(?:_single)?(?:/(kernel|bias))?"
_SUBLAYER = r"(self_attention|encdec_attention|ffn)"
_NORM = r"layer_norm/layer_norm_(scale|bias)"
SUBLAYERS = {
    "encoder": ("self_attention", "ffn"),
    "decoder": ("self_attention", "encdec_attention", "ffn"),
}


def _name_of_norm(match: re.Match[str]) -> str:
    """The name of a layer norm of 2017, which has the number of its sub-layer, except for the
    first."""
    stack, layer, number, part = match.groups()
    return f"{stack}.{layer}.{SUBLAYERS[stack][int(number or 0)]}.postprocess.{part}"


NAMES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (
        rf"{_LAYER}(?:encoder_|decoder_)?(self_attention|encdec_attention)/(?:multihead_attention/)?"
        + _PROJECTION,
        lambda m: f"{m[1]}.{m[2]}.{m[3]}.{'output' if m[4] == 'o' else m[4]}.{m[5] or 'kernel'}",
    ),
    (
        rf"{_LAYER}(?:ffn/)?(?:conv_hidden_relu/)?(conv[12])(?:_single)?/(kernel|bias)",
        r"\1.\2.ffn.\3.\4",
    ),
    (rf"{_LAYER}{_SUBLAYER}/layer_(postprocess|prepostprocess)/{_NORM}", r"\1.\2.\3.\4.\5"),
    (rf"{_LAYER}layer_norm(?:_([12]))?/layer_norm_(scale|bias)", _name_of_norm),
    (rf"(?:.*/)?body/(encoder|decoder)/layer_prepostprocess/{_NORM}", r"\1.layer_norm.\2"),
    (r"(?:.*/)?target_space_embedding/kernel", "target_space"),
    (r"(?:.*/)?target_space_embedding/kernel/(\w+)", r"slot.target_space.\1"),
    (r"(?:.*/)?(inputs|targets)_positional_embedding", r"\1.positions"),
    (
        r"(?:.*/)?symbol_modality_(\d+)_\d+(?:_\d+)?/(shared|input_emb|target_emb|softmax)"
        r"/weights_(\d+)",
        r"symbols.\1.\2.\3",
    ),
]
ATTENTION = {"self_attention": "self_attn", "encdec_attention": "encoder_attn"}
NORMS = {**ATTENTION, "ffn": "ffn"}

# Hyper-parameters that change what the model computes, and the values that we support. Older files
# lack some.
KNOWN: dict[str, tuple[Any, ...]] = {
    "self_attention_type": ("dot_product",),
    "ffn_layer": ("dense_relu_dense", "conv_hidden_relu"),
    "norm_type": ("layer",),
    "pos": ("timing", "emb"),
    "multiply_embedding_mode": ("sqrt_depth", "none"),
    "prepend_mode": ("none",),
    "proximity_bias": (False,),
    "unidirectional_encoder": (False,),
    "causal_decoder_self_attention": (True,),
    "hard_attention_k": (0,),
    "num_area_layers": (0,),
    "weight_dtype": ("float32",),  # with "bfloat16", files hold (128 w)^8 in place of w
}
# The steps before and after a sub-layer, without dropout: n normalizes, a adds the input.
SEQUENCES = {("", "an"), ("n", "a")}


def recognizes(path: Path) -> bool:
    """Whether this is the folder, the index or the prefix of a TensorFlow checkpoint."""
    try:
        return is_index(find_index(path))
    except (OSError, ValueError):
        return False


def read(path: Path, options: ConversionOptions) -> Conversion:
    """Read a checkpoint; see `vanilla_transformer.conversion`."""
    index = find_index(path)
    hparams = read_hparams(index.parent)
    expect_known(hparams, index.parent)
    tensors = read_tensors(index.with_suffix(""))
    reader = _Reader(tensors, hparams, options)
    vocabularies = _vocabularies(index.parent, options)
    weights, tied = _embeddings(tensors, [_rows(v.ids, hparams) for v in vocabularies])
    for stack in STACKS:
        weights |= reader.stack(stack)
    _fold_target_space(tensors, weights, hparams, options)
    positions, position_fields = _positions(tensors, hparams)
    weights |= positions
    tensors.expect_all_taken((r"slot\..*",))
    if not positions:
        interleave_halves(weights)
    start = add_rows(weights, "target", 1)  # the decoder starts from a zero vector
    if SOURCE in weights and vocabularies[0] == vocabularies[1]:
        add_rows(weights, "source", 1)
    sizes = [len(weights[matrix_of(weights, side)]) for side in ("source", "target")]
    own = SHARED not in weights and (tied or sizes[0] != sizes[1])
    config = VanillaTransformerConfig(
        vocab_size=sizes[0], decoder_vocab_size=sizes[1] if own else None,
        tie_word_embeddings=tied, lm_head_bias=True, **position_fields, **reader.fields(),
        pad_token_id=0, bos_token_id=start, eos_token_id=1, decoder_start_token_id=start,
    )  # fmt: skip
    return Conversion(
        config=config,
        weights=weights,
        tokenizer=_tokenizer(vocabularies, sizes, start),
        generation={
            "num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt",
            "extra_output_tokens": 100, "early_stopping": "never",
        },
        origin={"toolkit": "tensor2tensor", "version": "1"},
    )  # fmt: skip


# ---------------------------------------------------------------- Files


def find_index(path: Path) -> Path:
    """The index of a checkpoint. `path` is the index, with or without `.index`, or a folder, in
    which the file `checkpoint` names the newest.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several in a folder without the file `checkpoint`.
    """
    if path.suffix == ".index" and path.is_file():
        return path
    if not path.is_dir():
        index = path.with_name(f"{path.name}.index")
        if not index.is_file():
            raise FileNotFoundError(f"{path}: expected a checkpoint of TensorFlow, with {index}")
        return index
    state = path / "checkpoint"
    if state.is_file():
        text = state.read_text(encoding="utf-8")
        named = re.search(r'^model_checkpoint_path: "(.*)"', text, re.MULTILINE)
        if named and (index := path / f"{Path(named[1]).name}.index").is_file():
            return index
    indices = sorted(path.glob("*.index"))
    if not indices:
        raise FileNotFoundError(f"{path}: expected a checkpoint of TensorFlow, such as *.index")
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise ValueError(f"{path} holds {names}: expected one, so name the file")
    return indices[0]


def read_hparams(folder: Path) -> dict[str, Any]:
    """`hparams.json`, if it exists; before 1.3 there is none.

    Raises:
        ValueError: It is not a JSON object, or `flags.txt` names another model.
    """
    for file in sorted(folder.glob("flags*.txt")):
        model = re.search(r"^--model=(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        if model and model[1] != "transformer":
            raise ValueError(f"{file}: model={model[1]}: expected transformer")
    path = folder / "hparams.json"
    if not path.is_file():
        return {}
    try:
        hparams = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON ({error})") from error
    if not isinstance(hparams, dict):
        raise ValueError(f"{path}: expected a JSON object of hyper-parameters")
    return hparams


def expect_known(hparams: Mapping[str, Any], place: Path) -> None:
    """Reject hyper-parameters that our model does not support, by name.

    Raises:
        ValueError: A hyper-parameter has a value that changes what the model computes.
    """
    for name, known in KNOWN.items():
        value = hparams.get(name, known[0])
        if value not in known:
            expected = " or ".join(map(repr, known))
            raise ValueError(f"{place}: {name}={value!r}: expected {expected}")
    before = hparams.get("layer_preprocess_sequence", "none")
    after = hparams.get("layer_postprocess_sequence", "dan")
    if (before.replace("none", "").replace("d", ""), after.replace("d", "")) not in SEQUENCES:
        raise ValueError(
            f"{place}: layer_preprocess_sequence={before!r}, layer_postprocess_sequence={after!r}: "
            "expected 'none' and 'dan', or 'n' and 'da'"
        )


def read_tensors(prefix: Path) -> Tensors:
    """The variables by the short names of `NAMES`; unknown ones keep their own.

    Raises:
        FileNotFoundError, ValueError: As `TensorFlowCheckpoint`, or two variables have one name.
    """
    checkpoint = TensorFlowCheckpoint(prefix)
    renamed: dict[str, Tensor] = {}
    for name in checkpoint:
        short = name
        for pattern, replacement in NAMES:
            if match := re.fullmatch(pattern, name):
                short = replacement(match) if callable(replacement) else match.expand(replacement)
                break
        if short == name and any(re.fullmatch(pattern, name) for pattern in IGNORED):
            continue
        if short in renamed:
            raise ValueError(f"{prefix}: {name} and another variable are both {short}")
        renamed[short] = checkpoint[name]
    return Tensors(renamed, prefix)


# ---------------------------------------------------------------- Tensors


class _Reader:
    """Reads the layers under our names.

    Args:
        tensors: The variables.
        hparams: The hyper-parameters; may be empty.
        options: Information that is not among these.

    Raises:
        ValueError: The number of heads is unknown or does not fit, or there is no encoder.
    """

    def __init__(self, tensors: Tensors, hparams: Mapping[str, Any], options: ConversionOptions):
        self.tensors, self.hparams = tensors, hparams
        self.layers = {stack: tensors.count(rf"{stack}\.(\d+)\.") for stack in STACKS}
        if not all(self.layers.values()):
            raise ValueError(
                f"{tensors.place}: found {self.layers['encoder']} layers of an encoder and "
                f"{self.layers['decoder']} of a decoder: expected both, as a language model is no "
                "translation model"
            )
        self.pre = "encoder.layer_norm.scale" in tensors
        known = hparams.get("num_heads")
        if known and options.heads not in (None, known):
            raise ValueError(f"heads={options.heads}: expected {known}, as hparams.json has it")
        self.heads = int(options.heads or known or 0)
        if not self.heads:
            raise ValueError(
                f"{tensors.place}: there is no hparams.json next to it, which says how many "
                "attention heads there are: expected --heads"
            )
        first = tensors.take("encoder.0.ffn.conv1.kernel")
        self.d_model = first.shape[-2]
        self.key_width = hparams.get("attention_key_channels") or self.d_model
        self.value_width = hparams.get("attention_value_channels") or self.d_model
        self.bias = any(".output.bias" in name for name in tensors)
        for width in (self.key_width, self.value_width):
            if width % self.heads:
                raise ValueError(f"num_heads={self.heads}: expected a divisor of {width}")

    def fields(self) -> dict[str, Any]:
        """The fields of the configuration about the layers."""
        hparams, same = self.hparams, self.key_width == self.value_width
        fields = {
            "d_model": self.d_model,
            "norm_position": "pre" if self.pre else "post",
            "layer_norm_eps": hparams.get("norm_epsilon", 1e-6),
            "attention_bias": self.bias,
            "head_dim": self.key_width // self.heads,
            "value_head_dim": None if same else self.value_width // self.heads,
            "scale_embedding": _scales_embedding(hparams),
            "dropout": hparams.get("layer_prepostprocess_dropout", 0.1),
            "attention_dropout": hparams.get("attention_dropout", 0.0),
            "activation_dropout": hparams.get("relu_dropout", 0.0),
            "label_smoothing": hparams.get("label_smoothing", 0.1),
        }
        for stack, layers in self.layers.items():
            fields[f"{stack}_layers"] = layers
            fields[f"{stack}_attention_heads"] = self.heads
            conv1 = self.tensors[f"{stack}.0.ffn.conv1.kernel"]
            fields[f"{stack}_ffn_dim"] = conv1.shape[-1]
        return fields

    def stack(self, stack: str) -> dict[str, Tensor]:
        """The layers of a stack, and the layer norm after them."""
        weights: dict[str, Tensor] = {}
        when = "prepostprocess" if self.pre else "postprocess"
        for layer in range(self.layers[stack]):
            theirs, ours = f"{stack}.{layer}.", f"model.{stack}.layers.{layer}."
            for name in SUBLAYERS[stack]:
                weights |= self.norm(f"{theirs}{name}.{when}", f"{ours}{NORMS[name]}_layer_norm")
                if name == "ffn":
                    weights |= self.feed_forward(f"{theirs}ffn", f"{ours}ffn")
                else:
                    weights |= self.attention(theirs + name, ours + ATTENTION[name])
        if self.pre:
            weights |= self.norm(f"{stack}.layer_norm", f"model.{stack}.layer_norm")
        return weights

    def norm(self, theirs: str, ours: str) -> dict[str, Tensor]:
        """A layer norm."""
        return {
            f"{ours}.weight": self.tensors.take(f"{theirs}.scale", self.d_model),
            f"{ours}.bias": self.tensors.take(f"{theirs}.bias", self.d_model),
        }

    def feed_forward(self, theirs: str, ours: str) -> dict[str, Tensor]:
        """The two linear layers."""
        d_ff = self.tensors[f"{theirs}.conv1.kernel"].shape[-1]
        shapes = {"1": (self.d_model, d_ff), "2": (d_ff, self.d_model)}
        weights = {}
        for number, shape in shapes.items():
            kernel = self.kernel(f"{theirs}.conv{number}", *shape)
            weights[f"{ours}.fc{number}.weight"] = kernel
            weights[f"{ours}.fc{number}.bias"] = self.tensors.take(
                f"{theirs}.conv{number}.bias", shape[1]
            )
        return weights

    def kernel(self, theirs: str, rows: int, columns: int) -> Tensor:
        """A matrix (rows, columns), transposed. A convolution of width 1 has leading ones, and
        `attention_variables_3d` an axis of heads."""
        name, heads = f"{theirs}.kernel", self.heads
        kernel, expected = self.tensors.take(name), (rows, columns)
        by_heads = (rows, heads, columns // heads), (heads, rows // heads, columns)
        if tuple(kernel.shape) not in (expected, (1, *expected), (1, 1, *expected), *by_heads):
            self.tensors.take(name, *expected)  # raises and names it
        return kernel.reshape(expected).T

    def has_3d_queries(self, theirs: str) -> bool:
        """Whether queries are of `attention_variables_3d`, with which tensor2tensor does not divide
        scores by sqrt(d_k)."""
        shape = (self.d_model, self.heads, self.key_width // self.heads)
        name = f"{theirs}.q.kernel"
        return name in self.tensors and tuple(self.tensors[name].shape) == shape

    def attention(self, theirs: str, ours: str) -> dict[str, Tensor]:
        """Queries, keys, values and output, each in its own matrix or, in 2017, in one."""
        widths = {"q": self.key_width, "k": self.key_width, "v": self.value_width}
        weights = {}
        for fused in ("qkv", "q", "kv", "k", "v"):
            if f"{theirs}.{fused}.kernel" not in self.tensors:
                continue
            sizes = [widths[part] for part in fused]
            kernels = self.kernel(f"{theirs}.{fused}", self.d_model, sum(sizes)).split(sizes)
            for part, kernel in zip(fused, kernels, strict=True):
                weights[f"{ours}.{part}_proj.weight"] = kernel.contiguous()
            if self.bias:
                biases = self.tensors.take(f"{theirs}.{fused}.bias", sum(sizes)).split(sizes)
                for part, bias in zip(fused, biases, strict=True):
                    weights[f"{ours}.{part}_proj.bias"] = bias
        for part in widths:
            if f"{ours}.{part}_proj.weight" not in weights:
                self.tensors.take(f"{theirs}.{part}.kernel")  # raises and names it
        if self.has_3d_queries(theirs):
            queries = weights[f"{ours}.q_proj.weight"]
            weights[f"{ours}.q_proj.weight"] = queries * (self.key_width / self.heads) ** 0.5
        output = self.kernel(f"{theirs}.output", self.value_width, self.d_model)
        weights[f"{ours}.out_proj.weight"] = output
        if self.bias:
            weights[f"{ours}.out_proj.bias"] = self.tensors.take(
                f"{theirs}.output.bias", self.d_model
            )
        return weights


def _rows(vocabulary: Mapping[str, int], hparams: Mapping[str, Any]) -> int:
    """Rows of an embedding: tokens, up to a multiple of `vocab_divisor`."""
    divisor = hparams.get("vocab_divisor", 1) or 1
    return -(-len(vocabulary) // divisor) * divisor


def _scales_embedding(hparams: Mapping[str, Any]) -> bool:
    return hparams.get("multiply_embedding_mode", "sqrt_depth") == "sqrt_depth"


def _embeddings(tensors: Tensors, sizes: list[int]) -> tuple[dict[str, Tensor], bool]:
    """The three matrices, each made of numbered shards, and whether target embedding and projection
    are one.

    Args:
        tensors: The variables.
        sizes: Sizes of the vocabularies of source and target, to distinguish two matrices named
            `shared`.
    """
    matrices: dict[tuple[str, int], Tensor] = {}
    names = [name.split(".") for name in tensors if name.startswith("symbols.")]
    for size, kind in sorted({(int(size), kind) for _, size, kind, _ in names}):
        prefix = f"symbols.{size}.{kind}"
        shards = [
            tensors.take(f"{prefix}.{n}", None, None)
            for n in range(tensors.count(rf"{prefix}\.(\d+)"))
        ]
        matrices[kind, size] = torch.cat(shards) if len(shards) > 1 else shards[0]
        if len(matrices[kind, size]) != size:
            raise ValueError(
                f"{tensors.place}: the shards of {prefix} have {len(matrices[kind, size])} rows: "
                f"expected {size}"
            )

    def find(side: str, own: str, rows: int) -> Tensor:
        for kind in (own, "shared"):
            if (kind, rows) in matrices:
                return matrices[kind, rows]
        have = ", ".join(f"{kind} of {size} rows" for kind, size in matrices) or "none"
        raise ValueError(
            f"{tensors.place}: the {side} vocabulary has {rows} tokens, which does not match the "
            f"embeddings ({have}): expected {own} or shared of {rows} rows"
        )

    source = find("source", "input_emb", sizes[0])
    target = find("target", "target_emb", sizes[1])
    weights, fields = tie(source, target, find("target", "softmax", sizes[1]))
    return weights, fields["tie_word_embeddings"]


def _fold_target_space(
    tensors: Tensors,
    weights: dict[str, Tensor],
    hparams: Mapping[str, Any],
    options: ConversionOptions,
) -> None:
    """Add the vector of the target space, which tensor2tensor adds to each source position, to each
    row of the source embedding."""
    if "target_space" not in tensors:
        return
    spaces = tensors.take("target_space", None, None)
    space = _target_space(tensors, options)
    if not 0 <= space < len(spaces):
        raise ValueError(f"target_space_id={space}: expected 0 to {len(spaces) - 1}")
    vector = spaces[space]
    if _scales_embedding(hparams):
        vector = vector / vector.shape[0] ** 0.5
    shared = weights.pop(SHARED, None)
    if shared is not None:
        weights |= {SOURCE: shared, TARGET: shared}
    weights[SOURCE] = weights[SOURCE] + vector


def _target_space(tensors: Tensors, options: ConversionOptions) -> int:
    """The given target space, or else the trained one; 0 if the model has none."""
    if options.target_space_id is not None:
        return options.target_space_id
    return _trained_space(tensors) if "target_space" in tensors else 0


def _trained_space(tensors: Tensors) -> int:
    """The target space of the problem. It is not in any file, but the optimizer's averages of
    gradients are zero for all other spaces. Without one it is 0, as for all problems since 1.5."""
    slots = [name for name in tensors if name.startswith("slot.target_space")]
    trained: set[int] = set()
    for slot in slots:
        if (averages := tensors.take(slot)).ndim == 2:
            trained |= set(averages.any(1).nonzero().flatten().tolist())
    if len(trained) > 1:
        numbers = ", ".join(map(str, sorted(trained)))
        raise ValueError(
            f"{tensors.place}: trained target spaces are {numbers}: expected one, so "
            "give --target_space_id"
        )
    if not trained:  # also with Adafactor's, which are sums over rows and columns
        logger.warning(
            "%s: target_space_id=0 is a guess, as Adam's variables are not there: up to "
            "tensor2tensor 1.5, each target language had its own",
            tensors.place,
        )
    return trained.pop() if trained else 0


def _positions(
    tensors: Tensors, hparams: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if hparams.get("pos", "timing") == "timing":
        return {}, {"sinusoid_frequencies": "tensor2tensor"}
    return learned_positions(*(tensors.take(f"{side}.positions", None, None) for side in SIDES))


# ---------------------------------------------------------------- Vocabularies


def _vocabulary_files(folder: Path, options: ConversionOptions) -> list[str]:
    """The source's and the target's; a single file is for both.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several in the folder.
    """
    source = options.source_vocabulary or options.target_vocabulary
    target = options.target_vocabulary or source
    if source is None:
        files = sorted(folder.glob("vocab.*"))
        if not files:
            raise FileNotFoundError(
                f"{folder}: expected vocab.*.subwords, of the data folder, here or as "
                "--source_vocabulary"
            )
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(
                f"{folder} holds {names}: expected --source_vocabulary and --target_vocabulary"
            )
        source = target = str(files[0])
    return [str(source), str(target)]


class Vocabulary(NamedTuple):
    """Ids by token. Whole tokens are split at white space, as `TokenTextEncoder` does."""

    ids: dict[str, int]
    of_whole_tokens: bool


def _vocabularies(folder: Path, options: ConversionOptions) -> list[Vocabulary]:
    """The source's and the target's.

    Raises:
        FileNotFoundError, ValueError: As `_vocabulary_files`, or one lacks the special tokens.
    """
    vocabularies = []
    for file in _vocabulary_files(folder, options):
        tokens = _read_tokens(file)
        vocabulary = Vocabulary(tokens or read_subwords(file), tokens is not None)
        specials = tuple(token.removesuffix("_") for token in _first_two(vocabulary.ids))
        if specials != SPECIALS:
            raise ValueError(f"{file} starts with {specials}: expected {SPECIALS}")
        vocabularies.append(vocabulary)
    return vocabularies


def _read_tokens(file: str) -> dict[str, int] | None:
    """The vocabulary of a `TokenTextEncoder`, which splits at white space; None for subwords."""
    lines = Path(file).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    tokens = [line.strip() for line in lines]
    if tuple(tokens[:2]) != SPECIALS or UNKNOWN not in tokens:
        return None
    return {token: number for number, token in enumerate(tokens)}


def _first_two(vocabulary: Mapping[str, int]) -> list[str]:
    """The tokens for padding and end, ids 0 and 1."""
    return sorted(vocabulary, key=vocabulary.__getitem__)[:2]


def _tokenizer(
    vocabularies: list[Vocabulary], sizes: list[int], start: int
) -> PreTrainedTokenizerBase:
    """Subwords or whole tokens of each side. The start token is the target's, and the source's if
    they share a vocabulary."""
    sides = []
    for (vocabulary, of_tokens), size in zip(vocabularies, sizes, strict=True):
        pad, eos = _first_two(vocabulary)
        known = {**vocabulary, START: start} if size == start + 1 else vocabulary
        bos = START if START in known else None
        specials = Specials(pad, bos, eos, UNKNOWN if of_tokens else None, f"$A {eos}")
        sides.append((words if of_tokens else subwords)(known, specials, size=size))
    return pair(*sides)


# ---------------------------------------------------------------- The toolkit itself


def python() -> str:
    """The Python that has tensor2tensor, usually a separate one: TensorFlow 2.15 needs NumPy 1."""
    return os.environ.get("TENSOR2TENSOR_PYTHON", sys.executable)


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The checkpoint in tensor2tensor, for `check`.

    Raises:
        ImportError: `python()` can't import tensor2tensor.
    """
    return Tensor2TensorToolkit(find_index(path), options)


class Tensor2TensorToolkit(Toolkit):
    """A model in another process, which runs `tensor2tensor_program.py`. It computes in float32.
    It has no start token, because it shifts targets itself, and no unknown token.

    Args:
        index: The index of the checkpoint.
        options: The options of the conversion.

    Raises:
        FileNotFoundError, ImportError, RuntimeError: The hyper-parameters, the vocabularies or
            tensor2tensor are missing, or it ended early.
    """

    pad, start, unk = 0, 0, 0

    def __init__(self, index: Path, options: ConversionOptions):
        if not index.with_name("hparams.json").is_file():
            raise FileNotFoundError(
                f"{index.parent}: tensor2tensor runs no model without hparams.json"
            )
        files = _vocabulary_files(index.parent, options)
        vocabularies = _vocabularies(index.parent, options)
        self.source_size = len(vocabularies[0].ids)
        prefix = index.with_suffix("")
        model = {
            "prefix": str(prefix.absolute()),
            "vocabularies": [str(Path(file).absolute()) for file in files],
            "unknown": [UNKNOWN if each.of_whole_tokens else None for each in vocabularies],
            "target_space_id": _target_space(read_tensors(prefix), options),
            "threads": torch.get_num_threads(),
        }
        self.folder = tempfile.TemporaryDirectory()
        program = Path(__file__).with_name("tensor2tensor_program.py")
        with Path(self.folder.name, "messages").open("w", encoding="utf-8") as messages:
            self.process = subprocess.Popen(
                [python(), str(program), json.dumps(model)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True,
            )  # fmt: skip
        weakref.finalize(self, self.process.communicate)  # the program ends when its input does
        if (answer := self._answer()) != "ready":
            raise ImportError(
                f"{answer} in {python()}: set TENSOR2TENSOR_PYTHON to one that has it"
            )

    def _ask(self, method: str, *arguments: Any) -> Any:
        print(json.dumps([method, arguments]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            file = Path(self.folder.name, "messages")
            messages = file.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"tensor2tensor: {messages[-2000:]}")
        return json.loads(line)

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        targets = torch.cat([inputs[:, 1:], inputs.new_zeros(len(inputs), 1)], dim=1)
        file = Path(self.folder.name, "logits.npy")
        self._ask("logits", sources.tolist(), targets.tolist(), str(file))
        return torch.from_numpy(np.load(file))

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        return self._ask("translate", sources, num_beams, longest)

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        return self._ask("encode", line)

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`. It has no gradient."""
        return torch.tensor(self.losses(sources, targets, 1, 0.0)[0])

    def losses(
        self, sources: Tensor, targets: Tensor, steps: int, learning_rate: float
    ) -> list[float]:
        """The losses of a batch before each step of SGD on it, without dropout."""
        return self._ask("losses", sources.tolist(), targets.tolist(), steps, learning_rate)
