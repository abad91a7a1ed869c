"""State dicts of `torch.nn.Transformer` and of The Annotated Transformer.

A state dict has names and tensors, but no configuration. Missing information comes from the
options, or from the table of `--names`, a YAML file with any of the keys of `Table`.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html, PyTorch's
tutorial "Language Translation with nn.Transformer and torchtext", and
https://nlp.seas.harvard.edu/annotated-transformer
"""

import ast
import copy
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, log_softmax
from transformers.activations import ACT2FN

from ..data.vocabularies import Specials
from ..data.vocabulary_files import read_json_vocab, read_plain_vocab
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .core import (
    SIDES,
    STACKS,
    TOKEN_FILES,
    Conversion,
    ConversionOptions,
    Tensors,
    expect_size,
    final_layer_norm,
    read_weights,
    renamed,
    take_layers,
)
from .positions import find_sinusoids, learned_positions, sinusoids
from .text import tokenizer_for
from .toolkit import Toolkit, subwords
from .weights import PROJECTION_BIAS, interleave_halves, matrix_of, tie

logger = logging.getLogger(__name__)

NAME = "torch_nn"
FOR_STATE_DICTS = ("heads", "norm_first", "activation", "layer_norm_eps")
READS: tuple[str, ...] = (*FOR_STATE_DICTS, "names", *TOKEN_FILES)
VOCABULARIES = "vocab.src.txt", "vocab.tgt.txt"
# Fields of `Table` that name tensors.
MATRICES = "source_embedding", "target_embedding", "projection", "projection_bias"
POSITIONS = "source_positions", "target_positions"
# In the configuration until the vocabularies are read.
NO_TOKENS: dict[str, Any] = dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
)
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# Keys under which training scripts save the state dict, and prefixes that wrappers add to names.
STATE_DICTS = ("model_state_dict", "state_dict", "model", "model_state", "net")
WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Table:
    """What the names within the layers don't tell. A user's YAML file can replace any of these.

    Attributes:
        heads: Attention heads of both stacks.
        norm_first: Pre-norm (true) or post-norm.
        activation: Name in transformers' `ACT2FN`.
        layer_norm_eps: Epsilon of all layer norms.
        scale_embedding: Whether embeddings are multiplied by sqrt(d_model).
        source_embedding, target_embedding: Names of the tensors (vocabulary, d_model).
        projection, projection_bias: Names of the tensors before the softmax. For no bias, a name
            that does not exist.
        source_positions, target_positions: Tables of positions, if they are in the file. Without
            them, positions are the paper's sinusoids.
        pad, unk, bos, eos: Special tokens in the vocabularies.
        bos_before_source, eos_after_source: Whether a source has these tokens.
        ignored: Regular expressions for names of tensors that a translation does not need.
    """

    heads: int | None = None
    norm_first: bool = False
    activation: str = "relu"
    layer_norm_eps: float = 1e-5
    scale_embedding: bool = True
    source_embedding: str = "src_tok_emb.embedding.weight"
    target_embedding: str = "tgt_tok_emb.embedding.weight"
    projection: str = "generator.weight"
    projection_bias: str | None = "generator.bias"
    source_positions: str | None = "positional_encoding.pos_embedding"
    target_positions: str | None = "positional_encoding.pos_embedding"
    pad: str = "<pad>"
    unk: str = "<unk>"
    bos: str = "<bos>"
    eos: str = "<eos>"
    bos_before_source: bool = True
    eos_after_source: bool = True
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Names within the stacks.

    Attributes:
        toolkit: Name for the model card.
        names: Turn our names into theirs: regular expressions and their replacements, applied in
            order.
        first: Names of the first tensors of self-attention and of attention to the source.
        table: The defaults for this layout.
    """

    toolkit: str
    names: Mapping[str, str]
    first: tuple[str, str]
    table: Table


TORCH = Layout(
    toolkit="torch.nn.Transformer",
    names={
        r"self_attn_layer_norm": "norm1",
        r"encoder_attn_layer_norm": "norm2",
        r"^(model\.encoder\..+)ffn_layer_norm": r"\1norm2",
        r"ffn_layer_norm": "norm3",
        r"\.layer_norm": ".norm",
        r"encoder_attn": "multihead_attn",
        r"([qkv])_proj\.(weight|bias)": r"in_proj_\2[\1]",
        r"ffn\.fc": "linear",
    },
    first=("layers.0.self_attn.in_proj_weight", "layers.0.multihead_attn.in_proj_weight"),
    table=Table(),
)
ANNOTATED = Layout(
    toolkit="The Annotated Transformer",
    names={
        r"self_attn_layer_norm": "sublayer.0.norm",
        r"encoder_attn_layer_norm": "sublayer.1.norm",
        r"^(model\.encoder\..+)ffn_layer_norm": r"\1sublayer.1.norm",
        r"ffn_layer_norm": "sublayer.2.norm",
        r"\.layer_norm": ".norm",
        r"norm\.weight": "norm.a_2",
        r"norm\.bias": "norm.b_2",
        r"encoder_attn": "src_attn",
        r"q_proj": "linears.0",
        r"k_proj": "linears.1",
        r"v_proj": "linears.2",
        r"out_proj": "linears.3",
        r"ffn\.fc": "feed_forward.w_",
    },
    first=("layers.0.self_attn.linears.0.weight", "layers.0.src_attn.linears.0.weight"),
    table=Table(
        norm_first=True,
        layer_norm_eps=1e-6,
        source_embedding="src_embed.0.lut.weight",
        target_embedding="tgt_embed.0.lut.weight",
        projection="generator.proj.weight",
        projection_bias="generator.proj.bias",
        source_positions="src_embed.1.pe",
        target_positions="tgt_embed.1.pe",
        pad="<blank>",
        bos="<s>",
        eos="</s>",
    ),
)


def recognizes(path: Path) -> bool:
    """Whether this is a state dict with the names of one of the two, or a folder with one."""
    try:
        return _layout(read_state_dict(find_file(path))) is not None
    except (ValueError, OSError):
        return False


def read(path: Path, options: ConversionOptions) -> Conversion:
    """Read a state dict; see `vanilla_transformer.conversion`."""
    file = find_file(path)
    tensors = read_state_dict(file)
    layout = _layout(tensors)
    if layout is None:
        raise ValueError(
            f"{file}: expected a state dict of torch.nn.Transformer or The Annotated Transformer, "
            f"with a tensor that ends in {TORCH.first[0]} or {ANNOTATED.first[0]}"
        )
    prefixes = _prefixes(tensors, layout)
    table = read_table(layout, options, prefixes["encoder"])
    bias = any(name.endswith("bias") for name in tensors if name.startswith(prefixes["encoder"]))
    bias |= layout is ANNOTATED
    tensors = _adapt_stacks(tensors, tuple(prefixes.values()), bias)
    weights, settings = _embeddings(tensors, table)
    names = {**layout.names, **{rf"^model\.{stack}\.": prefixes[stack] for stack in STACKS}}
    d_model = settings["d_model"]
    settings |= {"attention_bias": bias} | _layer_settings(tensors, table, names, d_model)
    positions, position_settings = _positions(tensors, table, d_model)
    order = position_settings.pop("layout", None)
    config = VanillaTransformerConfig(**settings, **position_settings, **NO_TOKENS)
    weights |= take_layers(tensors, config, names) | positions
    tensors.expect_all_taken(table.ignored)
    if layout is ANNOTATED:
        _rescale_gains(weights, d_model)
    if order == "halves":
        interleave_halves(weights)
    vocabularies = _vocabularies(file.parent, options, table)
    config.update(_token_ids(vocabularies, table))
    rows = [len(weights[matrix_of(weights, side)]) for side in SIDES]
    for side, vocabulary, size in zip(SIDES, vocabularies, rows, strict=True):
        _expect_size(side, vocabulary, size)
    tokenizer, wanted = tokenizer_for(vocabularies, _specials(table), options, rows)
    origin = {"toolkit": layout.toolkit, "notes": _notes(table, bool(position_settings))}
    # A user's loop is greedy; without a number, pipelines would search with 4 beams.
    conversion = Conversion(config, weights, tokenizer, {"num_beams": 1}, origin)
    conversion.fill_with_clones("source", wanted, vocabularies[0][table.unk])
    return conversion


def _notes(table: Table, has_positions: bool) -> str:
    said = ("heads", "norm_first", "activation", "layer_norm_eps", "scale_embedding")
    values = [f"{name} {getattr(table, name)}" for name in said]
    values += [] if has_positions else ["the paper's sinusoids"]
    return f"The state dict does not say, and the conversion assumed: {', '.join(values)}."


# ---------------------------------------------------------------- Files


def find_file(path: Path) -> Path:
    """The file itself, or the only one in a folder that may hold a state dict.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several.
    """
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise FileNotFoundError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds {names}: expected one state dict, so name the file")
    return files[0]


def read_state_dict(path: Path) -> Tensors:
    """The tensors, by the names of the saved model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It contains no state dict, or is damaged.
    """
    state = read_weights(path)
    for name in STATE_DICTS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path}: expected a state dict, names and tensors")
    for wrapper in WRAPPERS:
        if state and all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): tensor for name, tensor in state.items()}
    return Tensors(state, path)


def _layout(tensors: Tensors) -> Layout | None:
    for layout in (TORCH, ANNOTATED):
        if any(name.endswith(layout.first[0]) for name in tensors):
            return layout
    return None


def _prefixes(tensors: Tensors, layout: Layout) -> dict[str, str]:
    """The prefix of `layers.N` in each stack. The decoder is the one that attends to a source."""
    own, cross = layout.first
    decoders = [name.removesuffix(cross) for name in tensors if name.endswith(cross)]
    stacks = [name.removesuffix(own) for name in tensors if name.endswith(own)]
    encoders = [stack for stack in stacks if stack not in decoders]
    if len(encoders) != 1 or len(decoders) != 1:
        raise ValueError(
            f"{tensors.place}: found {len(encoders)} encoders and {len(decoders)} decoders that "
            f"attend to a source ({', '.join(sorted(stacks))}): expected one of each, as a "
            "language model is no translation model"
        )
    return {"encoder": encoders[0], "decoder": decoders[0]}


def read_table(layout: Layout, options: ConversionOptions, encoder: str) -> Table:
    """The layout's table, overridden by the file `options.names`, which the options override.

    Args:
        layout: Names within layers.
        options: The user's options.
        encoder: The prefix of the encoder's layers: "transformer.encoder.", "", or a longer one if
            the model is part of another.

    Raises:
        ValueError: The file is not YAML, or has an unknown key or a wrong type.
    """
    outer = encoder.removesuffix("encoder.").removesuffix("transformer.")
    names = {name: outer + getattr(layout.table, name) for name in (*MATRICES, *POSITIONS)}
    table = replace(layout.table, **names)
    given: dict[str, Any] = {}
    if options.names is not None:
        given = _read_names(Path(options.names))
    for name in FOR_STATE_DICTS:
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    return replace(table, **given)


def _read_names(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML ({error})") from error
    kinds = {each.name: each.type for each in fields(Table)}
    if not isinstance(given, dict) or not given.keys() <= kinds.keys():
        unknown = ", ".join(map(str, given)) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"{path}: {unknown}: expected keys among {', '.join(kinds)}")
    for name, value in given.items():
        if name == "ignored" and isinstance(value, list):
            given[name] = value = tuple(value)
        if name == "layer_norm_eps" and isinstance(value, str | int):
            given[name] = value = float(value)  # YAML reads 1e-5, without a point, as text
        kind: Any = tuple if name == "ignored" else kinds[name]
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {name}={value!r}: expected {kinds[name]}")
    return given


# ---------------------------------------------------------------- Vocabularies


def _vocabularies(folder: Path, options: ConversionOptions, table: Table) -> list[dict[str, int]]:
    """The lists of tokens, which neither toolkit saves in a readable form."""
    source, target = (folder / name for name in VOCABULARIES)
    source = Path(options.source_vocabulary or source)
    if options.target_vocabulary or not target.is_file():
        target = Path(options.target_vocabulary or options.source_vocabulary or target)
    vocabularies = []
    for side, path in zip(SIDES, (source, target), strict=True):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: a state dict holds no vocabulary, expected --{side}_vocabulary, a file "
                "with a token a line in the order of ids, or a JSON object of ids by token"
            )
        vocabulary = read_json_vocab(path) if path.suffix == ".json" else read_plain_vocab(path)
        for kind in ("pad", "unk", "bos", "eos"):
            token = getattr(table, kind)
            if token not in vocabulary:
                raise ValueError(
                    f"{path}: there is no {token!r}: expected the {kind} token, whose name can be "
                    "given in --names"
                )
        vocabularies.append(vocabulary)
    return vocabularies


def _expect_size(side: str, vocabulary: dict[str, int], rows: int) -> None:
    """Check that a vocabulary fits its embedding. It may lack a few tokens at the end."""
    if 0 < rows - len(vocabulary) <= max(8, rows // 10):
        logger.warning(
            "%s_vocabulary: %d tokens for %d rows of the embedding: the last rows have no text",
            side, len(vocabulary), rows,
        )  # fmt: skip
    else:
        expect_size(f"{side}_vocabulary", vocabulary, rows)


def _specials(table: Table) -> list[Specials]:
    before = f"{table.bos} " if table.bos_before_source else ""
    after = f" {table.eos}" if table.eos_after_source else ""
    return [
        Specials(table.pad, table.bos, table.eos, table.unk, template)
        for template in (f"{before}$A{after}", f"$A {table.eos}")
    ]


def _token_ids(vocabularies: list[dict[str, int]], table: Table) -> dict[str, int]:
    """The ids of the target's special tokens."""
    target = vocabularies[1]
    return {
        "pad_token_id": target[table.pad],
        "bos_token_id": target[table.bos],
        "eos_token_id": target[table.eos],
        "decoder_start_token_id": target[table.bos],
    }


# ---------------------------------------------------------------- Tensors


def _adapt_stacks(tensors: Tensors, prefixes: tuple[str, ...], bias: bool) -> Tensors:
    """The tensors, with those of the stacks as our layers have them: queries, keys and values
    apart, and zeros for biases that ours has but theirs, without `bias`, lacks."""
    state = dict(tensors.tensors)
    stack = "|".join(map(re.escape, prefixes))
    lacks_bias = rf"({stack})(layers\.\d+\.(linear|norm)\d|norm)\.weight"
    for name, tensor in tensors.tensors.items():
        if name.startswith(prefixes) and name.endswith((".in_proj_weight", ".in_proj_bias")):
            parts = zip("qkv", torch.atleast_1d(state.pop(name)).chunk(3), strict=False)
            state |= {f"{name}[{part}]": piece for part, piece in parts}
        elif not bias and re.fullmatch(lacks_bias, name):
            state.setdefault(f"{name.removesuffix('weight')}bias", tensor.new_zeros(len(tensor)))
    return Tensors(state, tensors.place)


def _rescale_gains(weights: dict[str, Tensor], d_model: int) -> None:
    """Include a factor in the gains of layer norms: those of The Annotated Transformer divide by
    the unbiased standard deviation, which is larger by sqrt(d / (d - 1))."""
    for name, tensor in weights.items():
        if name.endswith("layer_norm.weight"):
            weights[name] = tensor * math.sqrt((d_model - 1) / d_model)


def _layer_settings(
    tensors: Tensors, table: Table, names: Mapping[str, str], d_model: int
) -> dict[str, Any]:
    """The fields of the configuration about the layers."""
    if table.heads is None or table.heads < 1 or d_model % table.heads:
        raise ValueError(
            f"heads={table.heads}: a state dict does not say how many attention heads there are; "
            f"expected --heads, a divisor of d_model={d_model}"
        )
    if table.activation not in ACT2FN:
        expected = ", ".join(sorted(ACT2FN))
        raise ValueError(f"activation={table.activation!r}: expected one of {expected}")
    settings: dict[str, Any] = {
        "activation_function": table.activation,
        "norm_position": "pre" if table.norm_first else "post",
        "layer_norm_eps": table.layer_norm_eps,
        "scale_embedding": table.scale_embedding,
    }
    for stack in STACKS:
        layers = re.escape(renamed(f"model.{stack}.layers.", names))
        fc1 = renamed(f"model.{stack}.layers.0.ffn.fc1.weight", names)
        settings[f"{stack}_layers"] = tensors.count(rf"{layers}(\d+)\.")
        settings[f"{stack}_ffn_dim"] = len(tensors.take(fc1, None, d_model))
        settings[f"{stack}_attention_heads"] = table.heads
    ends = (renamed(f"model.{stack}.layer_norm.weight", names) in tensors for stack in STACKS)
    return {**settings, "final_layer_norm": final_layer_norm(*ends)}


def _embeddings(tensors: Tensors, table: Table) -> tuple[dict[str, Tensor], dict[str, Any]]:
    projection = tensors.take(table.projection, None, None)
    size, d_model = projection.shape
    source = tensors.take(table.source_embedding, None, d_model)
    weights, sizes = tie(source, tensors.take(table.target_embedding, size, d_model), projection)
    has_bias = table.projection_bias in tensors
    if has_bias:
        weights[PROJECTION_BIAS] = tensors.take(str(table.projection_bias), size)
    sizes |= {"d_model": d_model, "lm_head_bias": has_bias}
    return weights, sizes


def _positions(
    tensors: Tensors, table: Table, d_model: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Learned positions, or the kind of sinusoids."""
    names = table.source_positions, table.target_positions
    tables: dict[str | None, Tensor] = {
        name: _position_table(tensors, name, d_model)
        for name in names
        if name is not None and name in tensors
    }
    if not tables:
        return {}, {}
    known = next(iter(tables.values()))
    # For a stack without a table if the other one has a table.
    paper = sinusoids(len(known), d_model, "paper", "interleaved").to(known.dtype)
    source, target = (tables.get(name, paper) for name in names)
    kind = find_sinusoids(source)
    if kind is None or kind != find_sinusoids(target):
        return learned_positions(source, target.clone())
    frequencies, layout = kind
    return {}, {"sinusoid_frequencies": frequencies, "layout": layout}


def _position_table(tensors: Tensors, name: str, d_model: int) -> Tensor:
    positions = tensors.take(name)
    shape = tuple(positions.shape)
    if shape[-1:] != (d_model,) or positions.numel() != max(1, *shape[:-1]) * d_model:
        raise ValueError(f"{name}: the shape is {shape}, expected (positions, {d_model})")
    return positions.reshape(-1, d_model)


# ---------------------------------------------------------------- The toolkit itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The state dict in `torch.nn.Transformer` or The Annotated Transformer, for `check`.

    Raises:
        ImportError: As `annotated_transformer`.
    """
    file = find_file(path)
    tensors = read_state_dict(file)
    if _layout(tensors) is ANNOTATED:
        return AnnotatedModel(tensors, file.parent, options)
    return TorchModel(tensors, file.parent, options)


class TorchModel(Toolkit):
    """The stacks of `torch.nn.Transformer` between the embeddings and the projection that the table
    names. They have no search; greedy search is a loop here."""

    layout = TORCH

    def __init__(self, tensors: Tensors, folder: Path, options: ConversionOptions):
        prefixes = _prefixes(tensors, self.layout)
        self.table = table = read_table(self.layout, options, prefixes["encoder"])
        self.vocabularies = _vocabularies(folder, options, table)
        source, target = self.vocabularies
        self.pad, self.start, self.eos = target[table.pad], target[table.bos], target[table.eos]
        self.unk, self.source_size = source[table.unk], len(source)
        self.split = subwords(options.source_codes)
        self.module = self._module(tensors, prefixes)

    def _module(self, tensors: Tensors, prefixes: Mapping[str, str]) -> nn.Module:
        module, table = nn.Module(), self.table
        for stack in STACKS:
            module.add_module(stack, self._stack(tensors, prefixes[stack], stack))
        for name in MATRICES:
            theirs = getattr(table, name)
            parameter = nn.Parameter(tensors.take(theirs)) if theirs in tensors else None
            module.register_parameter(name, parameter)
        d_model = module.projection.shape[1]
        for stack, name in zip(STACKS, POSITIONS, strict=True):
            if (theirs := getattr(table, name)) in tensors:
                positions = tensors.take(theirs).reshape(-1, d_model).clone()
            else:
                positions = sinusoids(5000, d_model, "paper", "interleaved").float()
            module.register_buffer(f"{stack}_positions", positions)
        return module

    def _stack(self, tensors: Tensors, prefix: str, stack: str) -> nn.Module:
        table = self.table
        d_ff, d_model = tensors.take(f"{prefix}layers.0.linear1.weight").shape
        bias = f"{prefix}layers.0.linear1.bias" in tensors
        options = {
            "d_model": d_model, "nhead": table.heads, "dim_feedforward": d_ff, "dropout": 0.0,
            # A function, because copies of a decoder layer lose a module and use ReLU.
            "activation": ACT2FN[table.activation].forward, "layer_norm_eps": table.layer_norm_eps,
            "norm_first": table.norm_first, "batch_first": True, "bias": bias,
        }  # fmt: skip
        norm = None
        if f"{prefix}norm.weight" in tensors:
            norm = nn.LayerNorm(d_model, eps=table.layer_norm_eps, bias=bias)
        number = tensors.count(rf"{prefix.replace('.', '[.]')}layers[.](\d+)[.]")
        if stack == "encoder":
            layer = nn.TransformerEncoderLayer(**options)
            module: nn.Module = nn.TransformerEncoder(
                layer, number, norm, enable_nested_tensor=False
            )
        else:
            module = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), number, norm)
        names = [name for name in tensors if name.startswith(prefix)]
        module.load_state_dict({name.removeprefix(prefix): tensors.take(name) for name in names})
        return module.eval()

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        return self._decode(self._encode(sources), sources, inputs)

    def _encode(self, sources: Tensor) -> Tensor:
        embedded = self._embed("encoder", self.module.source_embedding, sources)
        return self.module.encoder(embedded, src_key_padding_mask=sources.eq(self.pad))

    def _decode(self, memory: Tensor, sources: Tensor, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        hidden = self.module.decoder(
            self._embed("decoder", self.module.target_embedding, inputs),
            memory,
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            memory_key_padding_mask=sources.eq(self.pad),
        )
        return linear(hidden, self.module.projection, self.module.projection_bias)

    def _embed(self, stack: str, matrix: Tensor, ids: Tensor) -> Tensor:
        positions = getattr(self.module, f"{stack}_positions")[: ids.shape[1]]
        scale = math.sqrt(matrix.shape[1]) if self.table.scale_embedding else 1.0
        return matrix[ids] * scale + positions

    @torch.no_grad()
    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        if num_beams > 1:
            raise NotImplementedError("torch.nn.Transformer has no beam search")
        ids = self.padded(self.known(sources))
        memory = self._encode(ids)
        targets = torch.full((len(ids), 1), self.start)
        ended = torch.zeros(len(ids), dtype=torch.bool)
        while targets.shape[1] <= longest and not ended.all():
            best = self._decode(memory, ids, targets)[:, -1].argmax(-1)
            targets = torch.cat([targets, best.masked_fill(ended, self.pad)[:, None]], dim=1)
            ended |= best.eq(self.eos)
        return [[i for i in row if i != self.pad] for row in targets[:, 1:].tolist()]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        source, table = self.vocabularies[0], self.table
        ids = [source.get(token, self.unk) for token in self.split(line)]
        before = [source[table.bos]] if table.bos_before_source else []
        return [*before, *ids, *([source[table.eos]] if table.eos_after_source else [])]

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        logits = self.logits(sources, self.inputs(targets))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.pad)


def annotated_transformer() -> SimpleNamespace:
    """The definitions of The Annotated Transformer, from the file that the environment variable
    ANNOTATED_TRANSFORMER names. The code that the notebook runs between them is left out.

    Raises:
        ImportError: It names no file.
    """
    file = os.environ.get("ANNOTATED_TRANSFORMER", "")
    if not Path(file).is_file():
        raise ImportError(
            f"ANNOTATED_TRANSFORMER={file!r}: expected the file the_annotated_transformer.py"
        )
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    tree.body = [each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "math": math, "copy": copy, "time": time,
        "log_softmax": log_softmax,
    }  # fmt: skip
    exec(compile(tree, file, "exec"), names)
    return SimpleNamespace(**names)


class AnnotatedModel(TorchModel):
    """The classes and functions of The Annotated Transformer. Its greedy search takes one line at
    a time."""

    layout = ANNOTATED

    def _module(self, tensors: Tensors, prefixes: Mapping[str, str]) -> nn.Module:
        self.code, table = annotated_transformer(), self.table
        source = tensors.take(table.source_embedding)
        target = tensors.take(table.target_embedding)
        module = self.code.make_model(
            len(source), len(target), N=tensors.count(r"encoder\.layers\.(\d+)\."),
            d_model=target.shape[1], h=table.heads,
            d_ff=len(tensors.take("encoder.layers.0.feed_forward.w_1.weight")),
        )  # fmt: skip
        module.load_state_dict({name: tensors.take(name) for name in tensors})
        return module.eval()

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        return self.module.generator(self._hidden(sources, inputs))

    def _hidden(self, sources: Tensor, inputs: Tensor) -> Tensor:
        batch = self.code.Batch(sources, pad=self.pad)
        mask = batch.make_std_mask(inputs, self.pad)
        return self.module(sources, inputs, batch.src_mask, mask)

    @torch.no_grad()
    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        if num_beams > 1:
            raise NotImplementedError("The Annotated Transformer has no beam search")
        targets = []
        for source in self.known(sources):
            batch = self.code.Batch(torch.tensor([source]), pad=self.pad)
            for limit in (min(longest, 2 * len(source)), longest):  # it goes on after an end
                ids = self.code.greedy_decode(
                    self.module, batch.src, batch.src_mask, limit + 1, self.start
                )
                row = ids[0, 1:].tolist()
                if self.eos in row:
                    row = row[: row.index(self.eos) + 1]
                    break
            targets.append(row)
        return targets

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        size = self.module.generator.proj.out_features
        criterion = self.code.LabelSmoothing(size, self.pad, 0.0)
        compute = self.code.SimpleLossCompute(self.module.generator, criterion)
        hidden = self._hidden(sources, self.inputs(targets))
        return compute(hidden, targets, targets.ne(self.pad).sum())[1]
