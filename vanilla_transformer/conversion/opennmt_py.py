"""OpenNMT-py 1.x to 3.x: `NAME_step_N.pt`, with the weights in it or in `NAME_step_N.safetensors`.

Source: OpenNMT/OpenNMT-py, tags 1.0.0 to v3.5.1.
"""

import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.vocabularies import Specials
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .core import STACKS, Conversion, ConversionOptions, Tensors, read_weights, renamed, take_layers
from .positions import find_sinusoids
from .text import tokenizer_for
from .toolkit import Toolkit, subwords
from .unpickling import Inert, contents, load_torch
from .weights import PROJECTION_BIAS, interleave_halves, tie

NAME = "opennmt_py"
READS: tuple[str, ...] = ("source_codes", "target_codes")

# Turn our names into theirs: regular expressions and their replacements, applied in order.
NAMES = {
    r"^model\.": "",
    r"^encoder\.layers": "encoder.transformer",
    r"^decoder\.layers": "decoder.transformer_layers",
    r"^(encoder\..+)\.self_attn_layer_norm": r"\1.layer_norm",
    r"^(decoder\..+)\.self_attn_layer_norm": r"\1.layer_norm_1",
    r"encoder_attn_layer_norm": "layer_norm_2",
    r"encoder_attn": "context_attn",
    r"q_proj": "linear_query",
    r"k_proj": "linear_keys",
    r"v_proj": "linear_values",
    r"out_proj": "final_linear",
    r"ffn\.fc": "feed_forward.w_",
    r"ffn_layer_norm": "feed_forward.layer_norm",
}
# Turn older names into those of version 3.
OLD_NAMES = {r"^generator\.0\.": "generator.", r"\.a_2$": ".weight", r"\.b_2$": ".bias"}
LAYERS = {"encoder": "encoder.transformer", "decoder": "decoder.transformer_layers"}
EMBEDDING = "{}.embeddings.make_embedding.emb_luts.0.weight"
POSITIONS = "{}.embeddings.make_embedding.pe.pe"
SINUSOIDS = {
    "SinusoidalInterleaved": ("paper", "interleaved"),
    "SinusoidalConcat": ("tensor2tensor", "halves"),
}
MOST_POSITIONS = 5000
# Hides later words; up to version 0.7 in the file.
MASK = r"decoder\.transformer_layers\.\d+\.mask"
# Linear maps whose biases depend on version and options.
ATTENTION = r".*_attn\.(linear_\w+|final_linear)"
FEED_FORWARD = r".*\.feed_forward\.w_[12]"

# Options that change what a model computes, and the values that our model supports. The first is
# the value of versions without the option.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "model_task": ("seq2seq",),
    "model_type": ("text",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "max_relative_positions": (0,),
    "relative_positions_buckets": (0,),
    "sliding_window": (0,),
    "copy_attn": (False,),
    "generator_function": ("softmax",),
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "layer_norm": ("standard",),
    "parallel_residual": (False,),
    "multiquery": (False,),
    "num_experts": (0,),
    "n_src_feats": (0,),
    "lora_layers": ([],),
    "lora_embedding": (False,),
    "quant_layers": ([],),
}
# The defaults of `onmt_translate`, which don't depend on the checkpoint.
OLD_SEARCH = {"num_beams": 5, "length_penalty": 0.0, "max_new_tokens": 100}
GENERATION: dict[int, dict[str, Any]] = {
    1: OLD_SEARCH,
    2: OLD_SEARCH,
    3: {"num_beams": 5, "length_penalty": 1.0, "length_penalty_type": "avg", "max_new_tokens": 250},
}
PAD, BOS, EOS = "<blank>", "<s>", "</s>"
TEMPLATES = "$A", f"$A {EOS}"
# Transforms of a text that translation also needs but no tokenizer computes.
OUTSIDE = (
    "onmt_tokenize", "normalize", "prefix", "suffix", "docify", "inlinetags", "fuzzymatch",
    "terminology",
)  # fmt: skip
# OpenNMT-py splits subwords that these lack further; here they are unknown tokens.
RESTRICTIONS = ("src_subword_vocab", "tgt_subword_vocab")
# An option of version 3.5, which is the first to split a text at spaces alone.
SINCE_3_5 = "num_experts"
# Classes around the vocabularies of versions 1 and 2, none of whose code is executed.
INERT = ("torchtext.*", "onmt.*", "functools.partial", "collections.defaultdict")


def recognizes(path: Path) -> bool:
    """Whether this is a checkpoint, or a folder with one."""
    try:
        strings, _ = contents(_checkpoint(path))
    except FileNotFoundError:
        return False
    return {"vocab", "opt", "encoder_type"} <= strings


def read(path: Path, options: ConversionOptions) -> Conversion:
    """The model of a file, or of the last checkpoint in a folder.

    Raises:
        FileNotFoundError: There is no checkpoint, or no file with its weights.
        ValueError: The model is of a different kind, or has unknown tensors.
    """
    path = _checkpoint(path)
    checkpoint = load_torch(path, allowed=[Namespace], inert=INERT)
    opt, vocab = vars(checkpoint["opt"]), dict(checkpoint["vocab"])
    version = 3 if "data_task" in vocab else 2 if "transforms" in opt else 1
    _expect_understood(opt, path)
    options = _with_codes(opt, options, path)
    sides = [_tokens(vocab, side, path) for side in ("src", "tgt")]
    token_ids = _token_ids(vocab, sides, path)
    tensors = Tensors(_modern(_tensors(checkpoint, path)), path)
    weights, tying = _matrices(tensors, *map(len, sides))
    tokenizer, rows = tokenizer_for(
        [{token: number for number, token in enumerate(side)} for side in sides],
        [_specials(side, template) for side, template in zip(sides, TEMPLATES, strict=True)],
        options,
        list(map(len, sides)),
        splits_again=SINCE_3_5 not in opt,
    )
    config = VanillaTransformerConfig(
        **tying, **token_ids, **_options(opt, tensors), **_positions(opt, tensors)
    )
    weights |= take_layers(tensors, config, NAMES)
    tensors.expect_all_taken([MASK])
    if config.sinusoid_frequencies == "tensor2tensor":
        interleave_halves(weights)
    if config.position_encoding == "learned":
        absent = torch.zeros(MOST_POSITIONS, config.d_model, dtype=weights[PROJECTION_BIAS].dtype)
        for stack in STACKS:
            weights[f"model.{stack}.embed_positions.weight"] = absent.clone()
    origin = {"toolkit": "OpenNMT-py", "version": f"{version}.x", "notes": _notes(opt, options)}
    conversion = Conversion(config, weights, tokenizer, dict(GENERATION[version]), origin)
    conversion.fill_with_clones("source", rows, sides[0].index("<unk>"))
    return conversion


# ---------------------------------------------------------------- Files


def _checkpoint(path: Path) -> Path:
    """The file, or the last checkpoint in a folder."""
    if not path.is_dir():
        return path

    def step(file: Path) -> int:
        match = re.search(r"_step_(\d+)\.pt$", file.name)
        return int(match[1]) if match else -1

    checkpoints = list(path.glob("*.pt"))
    if not checkpoints:
        raise FileNotFoundError(f"{path}: expected a checkpoint NAME_step_N.pt")
    return max(checkpoints, key=step)


def _expect_understood(opt: Mapping[str, Any], path: Path) -> None:
    for name, expected in EXPECTED.items():
        value = opt.get(name, expected[0])
        if value not in expected:
            values = " or ".join(map(repr, expected))
            raise ValueError(f"{path}: {name}={value!r}, expected {values}")
    if opt.get("num_kv", 0) not in (0, opt["heads"]):
        raise ValueError(f"{path}: num_kv={opt['num_kv']}, expected heads={opt['heads']}")


def _tensors(checkpoint: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """All tensors. Those of the projection are `generator.weight` and `generator.bias`."""
    if "model" in checkpoint:
        generator = {f"generator.{name}": each for name, each in checkpoint["generator"].items()}
        return {**checkpoint["model"], **generator}
    files = [file for file in path.parent.iterdir() if file.name.startswith(f"{path.stem}.")]
    files = sorted(file for file in files if file.suffix == ".safetensors")
    if not files:
        raise FileNotFoundError(f"{path}: expected its weights in {path.stem}.safetensors")
    return {name: each for file in files for name, each in read_weights(file).items()}


def _modern(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in version 3, and zeros for biases that a model may lack but ours has.

    Before version 1, the layer norm divides by the standard deviation with d_model - 1 degrees of
    freedom. The factor is included in its gain.
    """
    modern = {}
    for name, tensor in tensors.items():
        if name.endswith(".a_2"):
            tensor = tensor * math.sqrt((len(tensor) - 1) / len(tensor))
        modern[renamed(name, OLD_NAMES)] = tensor
    for linear in (FEED_FORWARD, *([ATTENTION] if _has_bias(modern) else [])):
        for name in [each for each in modern if re.fullmatch(rf"{linear}\.weight", each)]:
            zeros = modern[name].new_zeros(len(modern[name]))
            modern.setdefault(name.replace(".weight", ".bias"), zeros)
    return modern


def _has_bias(tensors: Iterable[str]) -> bool:
    return any(re.fullmatch(rf"{ATTENTION}\.bias", name) for name in tensors)


def _tokens(vocab: Mapping[str, Any], side: str, path: Path) -> list[str]:
    """The vocabulary of a side. Since version 3 it is a list. Before, it is inside the objects that
    read text."""
    held = vocab.get(side)
    while isinstance(held, Inert) or (
        isinstance(held, list) and held and isinstance(held[0], tuple)
    ):
        if isinstance(held, Inert):
            inner = [held.state[name] for name in ("fields", "vocab", "itos") if name in held.state]
            held = inner[0] if inner else None
        elif len(held) > 1:
            names = ", ".join(name for name, _ in held)
            raise ValueError(f"{path}: vocabularies {names}, expected words without features")
        else:
            held = held[0][1]
    if not isinstance(held, list) or not held or not all(isinstance(each, str) for each in held):
        raise ValueError(f"{path}: vocab[{side!r}]: expected a list of tokens")
    return held


# ---------------------------------------------------------------- Model


def _matrices(
    tensors: Tensors, source: int, target: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Embeddings and projection, which have a row for each token."""
    embedding = tensors.take(EMBEDDING.format("encoder"), source, None)
    d_model = embedding.shape[1]
    weights, tying = tie(
        embedding,
        tensors.take(EMBEDDING.format("decoder"), target, d_model),
        tensors.take("generator.weight", target, d_model),
    )
    weights[PROJECTION_BIAS] = tensors.take("generator.bias", target)
    return weights, {**tying, "d_model": d_model, "lm_head_bias": True}


def _options(opt: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    dropout, attention_dropout = (
        value[-1] if isinstance(value, list) else value  # one for each phase of training
        for value in (opt["dropout"], opt.get("attention_dropout", opt["dropout"]))
    )
    fields = {
        "norm_position": "pre",
        "layer_norm_eps": opt.get("norm_eps", 1e-6),
        "attention_bias": _has_bias(tensors),
        "activation_function": opt.get("pos_ffn_activation_fn", "relu"),
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "activation_dropout": dropout,
        "label_smoothing": opt.get("label_smoothing", 0.0),
    }
    for stack, layers in LAYERS.items():
        fields[f"{stack}_layers"] = tensors.count(rf"{layers}\.(\d+)\.")
        fields[f"{stack}_attention_heads"] = opt["heads"]
        fields[f"{stack}_ffn_dim"] = len(tensors.take(f"{layers}.0.feed_forward.w_1.weight"))
    return fields


def _positions(opt: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The kind of the stored sinusoids. Models without positions don't scale embeddings."""
    tables = [name for name in map(POSITIONS.format, STACKS) if name in tensors]
    if not tables and not opt.get("position_encoding"):
        return {
            "position_encoding": "learned",
            "max_position_embeddings": MOST_POSITIONS,
            "scale_embedding": False,
        }
    frequencies, _ = SINUSOIDS[opt.get("position_encoding_type", "SinusoidalInterleaved")]
    for name in tables:
        kind = find_sinusoids(tensors.take(name, None, 1, None)[:64, 0])
        if kind is None or kind not in SINUSOIDS.values():
            raise ValueError(f"{tensors.place}: tensor {name!r} is no table of sinusoids")
        frequencies, _ = kind
    return {"sinusoid_frequencies": frequencies}


# ---------------------------------------------------------------- Text


def _specials(tokens: Sequence[str], template: str) -> Specials:
    """The special tokens. In versions 1 and 2 a source has neither `<s>` nor `</s>`."""
    bos, eos = (token if token in tokens else None for token in (BOS, EOS))
    return Specials(pad=PAD, bos=bos, eos=eos, template=template)


def _token_ids(
    vocab: Mapping[str, Any], sides: Sequence[list[str]], path: Path
) -> dict[str, int | None]:
    source, target = sides
    start = vocab.get("decoder_start_token", BOS)
    for token, tokens in ((PAD, source), (PAD, target), (EOS, target), (start, target)):
        if token not in tokens:
            raise ValueError(f"{path}: expected a token {token!r} in the vocabulary")
    if source.index(PAD) != target.index(PAD):
        ids = f"{source.index(PAD)} in the source and {target.index(PAD)} in the target"
        raise ValueError(f"{path}: {PAD!r} has id {ids}, expected the same")
    return {
        "pad_token_id": target.index(PAD),
        "bos_token_id": target.index(BOS) if BOS in target else None,
        "eos_token_id": target.index(EOS),
        "decoder_start_token_id": target.index(start),
    }


def _transforms(opt: Mapping[str, Any]) -> set[str]:
    """The transforms of all corpora; before version 2 there are none."""
    corpora = opt["data"].values() if isinstance(opt.get("data"), dict) else []
    return {name for where in (opt, *corpora) for name in where.get("transforms") or []}


def _codes(opt: Mapping[str, Any], path: Path) -> list[Path]:
    """The files of the transforms `bpe` and `sentencepiece`, source first."""
    if not _transforms(opt) & {"bpe", "sentencepiece"}:
        return []
    source = opt.get("src_subword_model") or ""
    names = source, opt.get("tgt_subword_model") or source
    return [path.parent / Path(name).name for name in names]


def _with_codes(
    opt: Mapping[str, Any], options: ConversionOptions, path: Path
) -> ConversionOptions:
    """The options, with codes that were moved along with the checkpoint for a side without any."""
    given = options.source_codes, options.target_codes
    codes = [own or str(file) for own, file in zip(given, _codes(opt, path), strict=False)]
    if not codes or not all(Path(file).is_file() for file in codes):
        return options
    return replace(options, source_codes=codes[0], target_codes=codes[1])


def _notes(opt: Mapping[str, Any], options: ConversionOptions) -> str:
    """The preprocessing of a text before the tokenizer, and what the tokenizer lacks."""
    outside = sorted(_transforms(opt) & {*OUTSIDE})
    if not options.source_codes:
        outside += sorted(_transforms(opt) & {"bpe", "sentencepiece"})
    notes = [f"text goes through OpenNMT-py's {', '.join(outside)} first"] if outside else []
    if restricted := [name for name in RESTRICTIONS if opt.get(name)]:
        notes.append(f"subwords are not restricted by OpenNMT-py's {', '.join(restricted)}")
    return "; ".join(notes)


# ---------------------------------------------------------------- The toolkit itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The checkpoint in OpenNMT-py 3, for `check`.

    Raises:
        ImportError: OpenNMT-py can't be imported, or its version does not open this checkpoint.
    """
    return OpenNMTModel(path, options)


class OpenNMTModel(Toolkit):
    """A model in OpenNMT-py, which gets options and weights that we have read, not a pickle."""

    def __init__(self, path: Path, options: ConversionOptions):
        from onmt.inputters.inputter import dict_to_vocabs
        from onmt.model_builder import build_base_model
        from onmt.transforms import get_transforms_cls, make_transforms
        from onmt.utils.parse import ArgumentParser

        path = _checkpoint(path)
        checkpoint = load_torch(path, allowed=[Namespace], inert=INERT)
        if "data_task" not in checkpoint["vocab"]:
            raise ImportError(f"OpenNMT-py 3 does not open {path}, of an older version")
        opt = ArgumentParser.ckpt_model_opts(checkpoint["opt"])
        ArgumentParser.update_model_opts(opt)
        self.vocabs = dict_to_vocabs(checkpoint["vocab"])
        self.module = build_base_model(opt, self.vocabs).eval()
        nn.Module.load_state_dict(self.module, _tensors(checkpoint, path))
        source, target = self.vocabs["src"], self.vocabs["tgt"]
        self.pad, self.start = target[PAD], target[self.vocabs["decoder_start_token"]]
        self.eos = target[EOS]
        self.unk, self.source_size = source["<unk>"], len(source)
        self.criterion = nn.CrossEntropyLoss(ignore_index=self.pad)
        options = _with_codes(vars(opt), options, path)
        names = [name for name in ("bpe", "sentencepiece") if name in _transforms(vars(opt))]
        names = names if options.source_codes else []  # the converted model has no codes either
        for side, name in (("src", "source"), ("tgt", "target")):
            setattr(opt, f"{side}_subword_model", options.codes(name))
        self.transforms = make_transforms(opt, get_transforms_cls(names), self.vocabs)
        outside = None if names else options.source_codes
        self.split = subwords(outside) if outside else None

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        whole = torch.cat([inputs, inputs[:, :1]], dim=1)  # the model leaves the last one out
        out, _ = self.module(sources[..., None], whole[..., None], sources.ne(self.pad).sum(1))
        return self.module.generator(out)

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        from onmt.translate.beam_search import GNMTGlobalScorer
        from onmt.translate.translator import Translator

        penalty = GENERATION[3]["length_penalty"], 0.0, GENERATION[3]["length_penalty_type"], "none"
        translator = Translator(
            self.module, self.vocabs, beam_size=num_beams, max_length=longest, max_length_ratio=0,
            global_scorer=GNMTGlobalScorer(*penalty), report_score=False,
        )  # fmt: skip
        ids = self.padded(self.known(sources))
        batch = {"src": ids[..., None], "srclen": ids.ne(self.pad).sum(1)}
        of_lines = translator.translate_batch(batch, attn_debug=False)["predictions"]
        return [[*hypotheses[0].tolist(), self.eos] for hypotheses in of_lines]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        tokens = line.strip().split(" ")
        for transform in self.transforms.values():
            tokens = transform.apply({"src": tokens, "tgt": None})["src"]
        if self.split is not None:
            tokens = self.split(line)
        return [self.vocabs["src"][token] for token in tokens]

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        logits = self.logits(sources, self.inputs(targets))
        return self.criterion(logits.flatten(0, 1), targets.flatten())
