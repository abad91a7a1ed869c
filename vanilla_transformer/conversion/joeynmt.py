"""JoeyNMT 1.x to 2.3: `best.ckpt` with `config.yaml`, `src_vocab.txt` and `trg_vocab.txt`.

Source: joeynmt/joeynmt, tags 1.0 to v2.3.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers import pre_tokenizers as splits
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..data.vocabularies import (
    SPACE,
    Specials,
    bpe_codes,
    lower_case,
    pair,
    rows,
    sentencepiece,
    strip,
    with_moses,
    words,
)
from ..data.vocabulary_files import PRIVATE, read_bpe_codes, read_plain_vocab, read_sentencepiece
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import first_given
from .core import (
    STACKS,
    TOKEN_FILES,
    Conversion,
    ConversionOptions,
    Tensors,
    final_layer_norm,
    norm_positions,
    take_layers,
)
from .toolkit import Toolkit
from .unpickling import contents, load_torch
from .weights import SHARED, SOURCE, tie

logger = logging.getLogger(__name__)

NAME = "joeynmt"
READS: tuple[str, ...] = TOKEN_FILES

# Turn our names into theirs: regular expressions and their replacements, applied in order.
NAMES = {
    r"^model\.": "",
    r"^(encoder\..+)\.self_attn_layer_norm": r"\1.layer_norm",
    r"self_attn_layer_norm": "x_layer_norm",
    r"encoder_attn_layer_norm": "dec_layer_norm",
    r"ffn_layer_norm": "feed_forward.layer_norm",
    r"^(encoder\..+)\.self_attn": r"\1.src_src_att",
    r"self_attn": "trg_trg_att",
    r"encoder_attn": "src_trg_att",
    r"([qkv])_proj": r"\1_layer",
    r"out_proj": "output_layer",
    r"ffn\.fc1": "feed_forward.pwff_layer.0",
    r"ffn\.fc2": "feed_forward.pwff_layer.3",
}
SIDES = ("src", "trg")
# The paper's sinusoids, stored as a table.
BUFFERS = [r"(en|de)coder\.pe\.pe"]
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "tanh": "tanh", "swish": "silu"}
EPSILON = 1e-6
# Options of the search that transformers computes differently.
NO_EQUIVALENT = ("repetition_penalty", "no_repeat_ngram_size")
SPECIALS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>", "sep": None}


class Symbols(NamedTuple):
    """Special tokens (some vocabularies have no separator) and names of languages."""

    unk: str
    pad: str
    bos: str
    eos: str
    sep: str | None
    tags: Sequence[str]

    @property
    def special(self) -> list[str]:
        """The tokens at the beginning of every vocabulary."""
        return [token for token in self[:5] if token]


def _symbols(cfg: Mapping[str, Any]) -> Symbols:
    given = cfg["data"].get("special_symbols") or {}
    special: dict[str, Any] = {
        name: given.get(f"{name}_token", token) for name, token in SPECIALS.items()
    }
    return Symbols(**special, tags=given.get("lang_tags") or [])


def recognizes(path: Path) -> bool:
    """Whether this is a checkpoint, or a folder with one. Reading it also needs `config.yaml`."""
    try:
        strings, _ = contents(_checkpoint(path))
    except FileNotFoundError:
        return False
    return {"model_state", "src_embed.lut.weight"} <= strings


def read(path: Path, options: ConversionOptions) -> Conversion:
    """The model of a file, or of the best checkpoint in a folder.

    Raises:
        FileNotFoundError: A file is missing: the checkpoint, `config.yaml`, a vocabulary or codes.
        ValueError: The model is of a different kind, or has unknown tensors.
    """
    path = _checkpoint(path)
    cfg = _read_config(path.parent / "config.yaml")
    state = load_torch(path)
    if not isinstance(state, dict) or "model_state" not in state:
        raise ValueError(f"{path}: expected a JoeyNMT checkpoint, a dictionary with 'model_state'")
    tensors = Tensors(state["model_state"], path)
    symbols = _symbols(cfg)
    source, target = (_vocabulary(cfg, side, symbols, options, path.parent) for side in SIDES)
    weights, fields = _matrices(tensors, cfg, len(source), len(target))
    config = VanillaTransformerConfig(
        **fields,
        **_norms(cfg, tensors),
        **_options(cfg, tensors),
        pad_token_id=target[symbols.pad],
        bos_token_id=target[symbols.bos],
        eos_token_id=target[symbols.eos],
        decoder_start_token_id=target[symbols.bos],
    )
    weights |= take_layers(tensors, config, NAMES)
    tensors.expect_all_taken(BUFFERS)
    _fold_alpha(cfg, weights)
    sides = [
        _tokenizer(cfg, side, vocabulary, symbols, options, path.parent)
        for side, vocabulary in zip(SIDES, (source, target), strict=True)
    ]
    version = str(cfg.get("joeynmt_version") or "2")
    origin = {"toolkit": "JoeyNMT", "version": version, "notes": _notes(cfg, options)}
    generation = _generation(cfg, symbols, target)
    tokenizer = pair(*sides, size=len(target), unk_id=target[symbols.unk])
    conversion = Conversion(config, weights, tokenizer, generation, origin)
    conversion.languages = [cfg["data"][side].get("lang") for side in SIDES]
    moses = _moses_languages(cfg)
    if any(moses):
        conversion.tokenizer = with_moses(
            conversion.tokenizer, *moses, aggressive_dash_splits=False
        )
    sizes = [rows(side) for side in sides]
    for name, size in zip(("source", "target"), sizes, strict=True):
        number = max(sizes) if SHARED in weights else size
        conversion.fill_with_clones(name, number, target[symbols.unk])
    return conversion


# ---------------------------------------------------------------- Files


def _checkpoint(path: Path) -> Path:
    """The file, or the best checkpoint in a folder."""
    if not path.is_dir():
        return path
    for name in ("best.ckpt", "latest.ckpt"):
        if (path / name).is_file():
            return path / name
    steps = [file for file in path.glob("*.ckpt") if file.stem.isdigit()]
    if not steps:
        raise FileNotFoundError(f"{path}: expected a checkpoint best.ckpt")
    return max(steps, key=lambda file: int(file.stem))


def _read_config(path: Path) -> dict[str, Any]:
    """The configuration of the training in the format of version 2. Version 1 has one set of text
    options for both sides."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the configuration of the training")
    try:
        cfg = yaml.safe_load(path.read_text(encoding="utf-8"))
        cfg |= {name: cfg.get(name) or {} for name in ("testing", "training")}
        data = cfg["data"]
        if isinstance(data["src"], str):
            both = {name: data[name] for name in ("level", "lowercase") if name in data}
            for side in SIDES:
                data[side] = {**both, "lang": data[side], "voc_file": data.get(f"{side}_vocab")}
            cfg["joeynmt_version"] = "1"
        for stack, side in zip(STACKS, SIDES, strict=True):
            options = cfg["model"][stack]
            options["embeddings"] = options.get("embeddings") or {}
            _expect(path, f"model.{stack}.type", options.get("type", "transformer"), "transformer")
            if not _is_since_2_3(cfg):
                options["activation"] = "relu"  # earlier versions do not read it
            activation = options.setdefault("activation", "relu")
            _expect(path, f"model.{stack}.activation", activation, *ACTIVATIONS)
            norm = options.get("layer_norm")
            _expect(path, f"model.{stack}.layer_norm", norm, None, "pre", "post")
            _expect(path, f"data.{side}.has_prompt", data[side].get("has_prompt", False), False)
            level = data[side].setdefault("level", "word")
            _expect(path, f"data.{side}.level", level, "word", "char", "bpe")
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a configuration of JoeyNMT, but {error!r}") from error
    return cfg


def _expect(path: Path, name: str, value: Any, *expected: Any) -> None:
    if value not in expected:
        values = " or ".join(map(repr, expected))
        raise ValueError(f"{path}: {name}={value!r}, expected {values}")


def _vocabulary(
    cfg: Mapping[str, Any], side: str, symbols: Symbols, options: ConversionOptions, folder: Path
) -> dict[str, int]:
    """Ids by token. Training writes the vocabularies next to the checkpoint."""
    given = options.source_vocabulary if side == "src" else options.target_vocabulary
    file = _find(given, folder / f"{side}_vocab.txt", cfg["data"][side].get("voc_file"))
    tokens = dict.fromkeys([*symbols.special, *symbols.tags, *read_plain_vocab(file)])
    return {token: number for number, token in enumerate(tokens)}


def _find(given: str | None, beside: Path, named: str | None = None) -> Path:
    """The file that an option gives, or one next to the checkpoint."""
    files = [Path(given)] if given else [beside]
    if named and not given:
        files.append(beside.parent / Path(named).name)
    for file in files:
        if file.is_file():
            return file
    raise FileNotFoundError(f"{beside}: expected a file")


# ---------------------------------------------------------------- Model


def _matrices(
    tensors: Tensors, cfg: Mapping[str, Any], source: int, target: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Embeddings and projection, which have a row for each token."""
    embedding = tensors.take("src_embed.lut.weight", source, None)
    d_model = embedding.shape[1]
    weights, fields = tie(
        embedding,
        tensors.take("trg_embed.lut.weight", target, d_model),
        tensors.take("decoder.output_layer.weight", target, d_model),
    )
    scales = [cfg["model"][stack]["embeddings"].get("scale", False) for stack in STACKS]
    if cfg["model"].get("tied_embeddings", False):
        scales[1] = scales[0]  # one module for both
    if scales[0] != scales[1]:
        weights[SOURCE] = weights[SOURCE] * math.sqrt(d_model) ** (scales[0] - scales[1])
    return weights, {**fields, "d_model": d_model, "scale_embedding": scales[1]}


def _norms(cfg: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The places of layer norms, and their epsilon, adapted to the weight `alpha` of residuals."""
    norms = [_norm(cfg, stack, tensors) for stack in STACKS]
    (encoder, encoder_ends), (decoder, decoder_ends) = norms
    alphas = [_alpha(cfg, stack) for stack in STACKS]
    has_pre = "pre" in (encoder, decoder)
    if min(alphas) <= 0 or (has_pre and alphas != [1.0, 1.0]):
        expected = "1 with layer_norm='pre'" if has_pre else "numbers above 0"
        raise ValueError(f"{tensors.place}: alpha={alphas[0]} and {alphas[1]}, expected {expected}")
    return {
        **norm_positions(encoder, decoder),
        "final_layer_norm": final_layer_norm(encoder_ends, decoder_ends),
        "layer_norm_eps": EPSILON / alphas[1] ** 2,
    }


def _norm(cfg: Mapping[str, Any], stack: str, tensors: Tensors) -> tuple[str, bool]:
    """ "pre" or "post", and whether the stack ends in a layer norm, which only pre-norm does."""
    given, version = cfg["model"][stack].get("layer_norm"), cfg.get("joeynmt_version")
    if f"{stack}.layer_norm.weight" in tensors:
        return "pre", True
    if given is not None:
        return given, given == "pre"
    if version is None:
        raise ValueError(
            f"{tensors.place}: config.yaml has neither model.{stack}.layer_norm nor "
            "joeynmt_version, expected one of them: what is the default depends on the version"
        )
    return ("pre" if _is_since_2_3(cfg) and stack == "encoder" else "post"), False


def _is_since_2_3(cfg: Mapping[str, Any]) -> bool:
    version = re.findall(r"\d+", str(cfg.get("joeynmt_version", "2.3")))
    return tuple(map(int, version[:2])) >= (2, 3)


def _alpha(cfg: Mapping[str, Any], stack: str) -> float:
    return float(cfg["model"][stack].get("alpha", 1.0))


def _fold_alpha(cfg: Mapping[str, Any], weights: dict[str, Tensor]) -> None:
    """LayerNorm(alpha x + f) is LayerNorm(x + f / alpha) with epsilon / alpha^2."""
    for name, tensor in weights.items():
        sublayer = re.match(r"model\.(encoder|decoder)\..+\.(out_proj|fc2)\.", name)
        if sublayer and _alpha(cfg, sublayer[1]) != 1:
            weights[name] = tensor / _alpha(cfg, sublayer[1])


def _options(cfg: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    encoder, decoder = (cfg["model"][stack] for stack in STACKS)
    if encoder["activation"] != decoder["activation"]:
        raise ValueError(
            f"{tensors.place}: activation is {encoder['activation']!r} in the encoder and "
            f"{decoder['activation']!r} in the decoder, expected the same in both"
        )
    dropout = decoder.get("dropout", 0.1)
    fields = {
        "attention_bias": True,
        "activation_function": ACTIVATIONS[decoder["activation"]],
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "label_smoothing": cfg["training"].get("label_smoothing", 0.0),
        "encoder_attention_heads": encoder.get("num_heads", 4),
        "decoder_attention_heads": decoder.get("num_heads", 8),
    }
    for stack in STACKS:
        fields[f"{stack}_layers"] = tensors.count(rf"{stack}\.layers\.(\d+)\.")
        first = f"{stack}.layers.0.feed_forward.pwff_layer.0.weight"
        fields[f"{stack}_ffn_dim"] = len(tensors.take(first))
    return fields


def _generation(
    cfg: Mapping[str, Any], symbols: Symbols, target: Mapping[str, int]
) -> dict[str, Any]:
    """The search that `testing` describes."""
    testing = cfg["testing"]
    alpha = first_given(testing.get("alpha"), testing.get("beam_alpha"), -1)
    beams = max(1, first_given(testing.get("beam_size"), 1))  # 0 means greedy
    for name in NO_EQUIVALENT:
        if (testing.get(name) or -1) > 0:
            logger.warning(
                "testing.%s=%s has no equivalent here: translations may repeat more than JoeyNMT's",
                name, testing[name],
            )  # fmt: skip
    fields: dict[str, Any] = {"num_beams": beams, "length_penalty": 0.0}
    if alpha > 0:
        fields |= {"length_penalty": float(alpha), "length_penalty_type": "gnmt"}
    most = testing.get("max_output_length", cfg["training"].get("max_output_length"))
    if most is not None and most > 0:
        fields["max_new_tokens"] = most
    else:
        fields["max_length_factor"] = 1.5  # times the longest source in a batch
    if cfg.get("joeynmt_version") == "1":
        return fields
    forbidden = [] if testing.get("generate_unk", True) else [symbols.unk]
    if _is_since_2_3(cfg):
        forbidden += [symbols.bos, symbols.pad, *symbols.special[4:], *symbols.tags]
    if forbidden:
        fields["suppress_tokens"] = sorted(target[token] for token in forbidden)
    return {**fields, "min_new_tokens": testing.get("min_output_length", 1)}


# ---------------------------------------------------------------- Text


def _tokenizer(
    cfg: Mapping[str, Any],
    side: str,
    vocabulary: Mapping[str, int],
    symbols: Symbols,
    options: ConversionOptions,
    folder: Path,
) -> PreTrainedTokenizerFast:
    """The tokenizer of a side, "src" or "trg"."""
    text = cfg["data"][side]
    details = text.get("tokenizer_cfg") or {}
    specials = Specials(symbols.pad, symbols.bos, symbols.eos, symbols.unk, f"$A {symbols.eos}")
    codes = _codes(cfg, side, options, folder)
    is_old = cfg.get("joeynmt_version") == "1"
    if text["level"] == "char":
        tokenizer = _characters(vocabulary, specials, is_old)
    elif codes is None and is_old:
        tokenizer = words(vocabulary, specials)
    elif codes is None:
        tokenizer = words(vocabulary, specials, spaces_only=True, empty_words=True)
    elif codes.suffix in (".model", ".spm"):
        model = read_sentencepiece(codes)
        tokenizer = sentencepiece(model, specials, vocab=vocabulary, restrict=not is_old)
    else:
        separator = details.get("separator", "@@")
        tokenizer = bpe_codes(
            read_bpe_codes(codes), vocabulary, specials, separator=separator, restrict=not is_old
        )
    _prepare(tokenizer.backend_tokenizer, text)
    return tokenizer


def _codes(
    cfg: Mapping[str, Any], side: str, options: ConversionOptions, folder: Path
) -> Path | None:
    """Codes or a SentencePiece model. In version 1, users apply these themselves."""
    name = "source" if side == "src" else "target"
    given = options.codes(name)
    text = cfg["data"][side]
    if text["level"] != "bpe":
        where = f"data.{side}.level={text['level']!r}: JoeyNMT applies codes only with 'bpe'"
        options.expect_no_codes(name, where)
        return None
    if not given and cfg.get("joeynmt_version") == "1":
        return None
    details = text.get("tokenizer_cfg") or {}
    named = details.get("model_file") or details.get("codes")
    if not given and not named:
        raise ValueError(
            f"{folder}/config.yaml: data.{side}.tokenizer_cfg has neither model_file nor codes, "
            "expected one of them"
        )
    return _find(given, folder / Path(named or "").name)


def _characters(
    vocabulary: Mapping[str, int], specials: Specials, is_old: bool
) -> PreTrainedTokenizerFast:
    """Characters. Version 1 strips a text and has a token for a space, later ones write it "▁"."""
    tokenizer = words(vocabulary, specials)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = splits.Split(Regex(r"[\s\S]"), "isolated")
    if is_old:
        backend.decoder = decoders.Fuse()
        return strip(tokenizer)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return tokenizer


def _prepare(backend: Tokenizer, text: Mapping[str, Any]) -> None:
    """Add the preprocessing of texts and, with `normalize`, the postprocessing of translations."""
    first: list[normalizers.Normalizer] = []
    if text.get("normalize"):
        tidy: list[tuple[str | Regex, str]] = [("\u200b", ""), (Regex("[ \u3000]+"), " ")]
        tidy += [(f" {sign}", sign) for sign in "?!,.:"]
        quotes = [("’", "'"), ("“", '"'), ("”", '"')]
        first = [
            normalizers.NFKC(),
            *(normalizers.Replace(*pair) for pair in (*quotes, *tidy)),
            normalizers.Strip(),
        ]
        # Without its own decoder, a tokenizer joins words with spaces.
        joined = backend.decoder or decoders.WordPiece(prefix=PRIVATE, cleanup=False)
        last = [decoders.Replace(*pair) for pair in tidy]
        backend.decoder = decoders.Sequence([joined, decoders.Fuse(), *last])
    if text.get("lowercase"):
        first.append(lower_case())
    if first:
        own = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([*first, *own])


def _moses_languages(cfg: Mapping[str, Any]) -> list[str | None]:
    """The language of each side that runs Moses. None with `normalize`: JoeyNMT normalizes before
    Moses, the converted tokenizer would do so after it."""
    return [
        text["lang"] if _runs_moses(text) and not text.get("normalize") else None
        for text in (cfg["data"][side] for side in SIDES)
    ]


def _runs_moses(text: Mapping[str, Any]) -> bool:
    return (text.get("tokenizer_cfg") or {}).get("pretokenizer") == "moses"


def _notes(cfg: Mapping[str, Any], options: ConversionOptions) -> str:
    """The processing that the tokenizer does not do."""
    texts = [cfg["data"][side] for side in SIDES]
    if any(_runs_moses(text) and text.get("normalize") for text in texts):
        return "text goes through sacremoses first, and translations through its detokenizer"
    is_split = cfg.get("joeynmt_version") == "1" and cfg["data"]["src"]["level"] == "bpe"
    if is_split and not options.source_codes:
        return "text is split into subwords first, and translations consist of subwords"
    return ""


# ---------------------------------------------------------------- The toolkit itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The checkpoint in JoeyNMT, for `check`.

    Raises:
        ImportError: JoeyNMT can't be imported.
    """
    return JoeyModel(path, options)


class JoeyModel(Toolkit):
    """A model in JoeyNMT, which gets weights that we have read: it opens no pickle."""

    def __init__(self, path: Path, options: ConversionOptions):
        from joeynmt.model import build_model
        from joeynmt.tokenizers import build_tokenizer
        from joeynmt.vocabulary import build_vocab

        path = _checkpoint(path)
        cfg = _read_config(path.parent / "config.yaml")
        symbols, data = _symbols(cfg), cfg["data"]
        for side in SIDES:
            data[side]["voc_file"] = str(path.parent / f"{side}_vocab.txt")
            codes = _codes(cfg, side, options, path.parent)
            details = data[side].get("tokenizer_cfg") or {}
            details |= {name: str(codes) for name in ("codes", "model_file") if name in details}
        tokens = {f"{name}_token": getattr(symbols, name) for name in SPECIALS}
        numbers = {f"{name}_id": number for number, name in enumerate(SPECIALS)}
        data["special_symbols"] = SimpleNamespace(**tokens, **numbers, lang_tags=symbols.tags)
        self.source, target = build_vocab(data, model_dir=path.parent)
        self.tokenizer = build_tokenizer(data)[data["src"]["lang"]]
        self.tokenizer.set_vocab(self.source)
        self.module = build_model(cfg["model"], self.source, target).eval()
        self.module.load_state_dict(load_torch(path)["model_state"])
        self.module.loss_function = ("crossentropy", 0.0)
        self.pad, self.start, self.eos = target.pad_index, target.bos_index, target.eos_index
        self.unk, self.source_size = self.source.unk_index, len(self.source)
        testing = cfg["testing"]
        self.alpha = testing.get("alpha", testing.get("beam_alpha", -1))

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        batch = vars(self._batch(sources)) | {
            "trg_input": inputs,
            "trg_mask": inputs.ne(self.pad)[:, None],
        }
        return self.module._encode_decode(**batch)[0]

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        from joeynmt.search import search

        batch = self._batch(self.padded(self.known(sources)))
        outputs, _, _ = search(
            self.module,
            batch,
            longest,
            num_beams,
            self.alpha,
            generate_unk=True,
            min_output_length=1,
        )
        rows = outputs.tolist()
        return [row[: row.index(self.eos) + 1] if self.eos in row else row for row in rows]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        tokens = self.tokenizer(self.tokenizer.pre_process(line, allow_empty=True))
        return self.source.sentences_to_ids([tokens], bos=False, eos=True)[0][0]

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        whole = torch.cat([torch.full_like(targets[:, :1], self.start), targets], dim=1)
        batch = vars(self._batch(sources, whole))
        return self.module(return_type="loss", **batch)[0] / targets.ne(self.pad).sum()

    def _batch(self, sources: Tensor, targets: Tensor | None = None) -> Any:
        from joeynmt.batch import Batch

        return Batch(
            sources, sources.ne(self.pad).sum(1), None, targets, None, torch.arange(len(sources)),
            torch.device("cpu"), self.pad, self.eos, is_train=False,
        )  # fmt: skip
