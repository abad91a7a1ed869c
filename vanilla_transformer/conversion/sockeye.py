"""Sockeye 3: a folder with `params.best` (a PyTorch state dict), `config`, `version` and a
vocabulary of each side, `vocab.src.0.json` and `vocab.trg.0.json`.

Source: Hieber et al. (2022), "Sockeye 3: Fast Neural Machine Translation with PyTorch",
https://arxiv.org/abs/2207.05851, and https://github.com/awslabs/sockeye, versions 3.0 and 3.1.
"""

import re
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ..data.vocabularies import Specials
from ..data.vocabulary_files import read_json_vocab
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from . import core
from .core import SIDES, STACKS, TOKEN_FILES, Conversion, ConversionOptions, Tensors
from .positions import find_sinusoids, learned_positions
from .text import tokenizer_for
from .toolkit import Toolkit, subwords
from .unpickling import load_torch
from .weights import PROJECTION_BIAS, interleave_halves, tie

NAME = "sockeye"
READS: tuple[str, ...] = TOKEN_FILES
PARAMS, CONFIG, VERSION, ARGUMENTS = "params.best", "config", "version", "args.yaml"
VOCABULARIES = "vocab.src.0.json", "vocab.trg.0.json"
SPECIAL_IDS = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3}
# The first bytes of MXNet arrays, in which Sockeye 1 and 2 save their parameters.
MXNET_MAGIC = (0x112).to_bytes(8, "little")

# Turn our names into theirs: regular expressions and their replacements, applied in order. WHEN is
# "pre" or "post".
NAMES = {
    r"^model\.": "",
    r"^(\w+)\.layer_norm": r"\1.final_process.layer_norm",
    r"(\w+)_layer_norm": r"WHEN_\1.layer_norm",
    r"^(encoder.+)self_attn": r"\1self_attention",
    r"^(decoder.+)self_attn": r"\1autoregr_layer",
    r"encoder_attn": "enc_attention",
    r"ffn\.fc": "ff.ff",
    r"WHEN_ffn": "WHEN_ff",
    r"q_proj": "ff_q",
    r"([kv])_proj\.weight": r"ff_kv.weight[\1]",
    r"out_proj": "ff_out",
}
ACTIVATIONS = {"relu": "relu", "swish1": "silu", "gelu": "gelu"}
# The steps before and after a sub-layer, without dropout: n normalizes, r adds the input.
NORM_POSITIONS = {("", "rn"): "post", ("n", "r"): "pre"}
# Without effect on a translation's probability: the predictor of lengths, and word selection.
IGNORED = (r"length_ratio\..*", r"nvs\..*")
REQUIRED = "model_size", "num_layers", "attention_heads", "feed_forward_num_hidden"
# Options of a stack that change what it computes, and the only value that we support.
PLAIN = {
    "decoder_type": "transformer", "use_lhuc": False, "use_glu": False,
    "block_prepended_cross_attention": False,
}  # fmt: skip


class _ConfigLoader(yaml.SafeLoader):
    """YAML that keeps a Sockeye object as a mapping and a Python tuple as a list."""


def _mapping(loader: yaml.SafeLoader, tag: str, node: Any) -> dict[Any, Any]:
    return loader.construct_mapping(node, deep=True)


def _sequence(loader: yaml.SafeLoader, node: Any) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


_ConfigLoader.add_multi_constructor("!", _mapping)
_ConfigLoader.add_constructor("tag:yaml.org,2002:python/tuple", _sequence)


def recognizes(path: Path) -> bool:
    """Whether this is a model folder of Sockeye, or the parameters in one."""
    folder = path if path.is_dir() else path.parent
    if path != folder and not path.name.startswith("params."):
        return False
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in VOCABULARIES)


def read(path: Path, options: ConversionOptions) -> Conversion:
    """Read a model folder, or `params.NNNNN` in one; see `vanilla_transformer.conversion`."""
    folder, params = (path, path / PARAMS) if path.is_dir() else (path.parent, path)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder / CONFIG}: expected the configuration of the model")
    described = read_config(folder / CONFIG)
    expect_plain(described, folder / CONFIG)
    tensors = _separate(read_params(params), described)
    weights, fields = _embeddings(tensors, described)
    positions, position_fields = _positions(tensors, described)
    arguments = _load_yaml(folder / ARGUMENTS) if (folder / ARGUMENTS).is_file() else {}
    config = VanillaTransformerConfig(
        **_sizes(described), **fields, **position_fields,
        **_rates(described, arguments),
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
    )  # fmt: skip
    norms = {
        rf"^({stack}.+)WHEN": rf"\1{_norm_position(described[f'config_{stack}'])}"
        for stack in STACKS
    }
    weights |= core.take_layers(tensors, config, NAMES | norms) | positions
    tensors.expect_all_taken(IGNORED)
    if not positions:
        interleave_halves(weights)
    files = options.source_vocabulary, options.target_vocabulary
    vocabularies = []
    for given, name, side in zip(files, VOCABULARIES, SIDES, strict=True):
        file = Path(given or folder / name)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: expected the vocabulary, or --{side}_vocabulary")
        vocabularies.append(read_vocabulary(file, described[f"vocab_{side}_size"]))
    sizes = [described[f"vocab_{side}_size"] for side in SIDES]
    tokenizer, rows = tokenizer_for(vocabularies, [Specials()] * 2, options, sizes)
    version = folder / VERSION
    conversion = Conversion(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        generation=_generation(described),
        origin={
            "toolkit": "Sockeye",
            "version": version.read_text(encoding="utf-8").strip() if version.is_file() else "3",
            "notes": "Text is split at white space: apply the tokenization that the model was "
            "trained with before, and undo it afterwards.",
        },
    )
    conversion.fill_with_clones("source", rows, SPECIAL_IDS["<unk>"])
    return conversion


# ---------------------------------------------------------------- Configuration


def read_config(path: Path) -> dict[str, Any]:
    """Sockeye's `config`, whose objects are read as mappings.

    Raises:
        ValueError: It is not YAML, or not the configuration of a model.
    """
    config = _load_yaml(path)
    for name in ("vocab_source_size", "vocab_target_size"):
        if not isinstance(config.get(name), int):
            raise ValueError(f"{path}: {name}={config.get(name)!r}: expected a number")
    for stack in ("config_encoder", "config_decoder"):
        if not isinstance(config.get(stack), dict):
            raise ValueError(f"{path}: expected {stack}, of a Transformer of Sockeye 3")
        for name in REQUIRED:
            if not isinstance(config[stack].get(name), int):
                value = config[stack].get(name)
                raise ValueError(f"{path}: {name}={value!r} in {stack}: expected a number")
        width, heads = config[stack]["model_size"], config[stack]["attention_heads"]
        if heads < 1 or width % heads:
            raise ValueError(f"{path}: attention_heads={heads}: expected a divisor of {width}")
    return config


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _ConfigLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected the YAML of a Sockeye model ({error})") from error
    return content if isinstance(content, dict) else {}


def expect_plain(config: dict[str, Any], path: Path) -> None:
    """Reject options that our model does not support, by name.

    Raises:
        ValueError: An option has a value that changes what the model computes.
    """
    if config.get("lhuc"):
        raise ValueError(f"{path}: lhuc={config['lhuc']}: expected false")
    if config.get("dtype") == "int8":
        raise ValueError(f"{path}: dtype=int8: expected the parameters before quantization")
    for side in ("source", "target"):
        factors = config.get(f"config_embed_{side}", {}).get("num_factors", 1)
        if factors != 1:
            raise ValueError(f"{path}: num_factors={factors} of the {side}: expected 1")
    for stack in ("config_encoder", "config_decoder"):
        for name, plain in PLAIN.items():
            value = config[stack].get(name, plain)
            if value != plain:
                raise ValueError(f"{path}: {name}={value!r} in {stack}: expected {plain!r}")
        activation = config[stack].get("act_type")
        if activation not in ACTIVATIONS:
            expected = ", ".join(ACTIVATIONS)
            raise ValueError(f"{path}: act_type={activation!r}: expected one of {expected}")
        _norm_position(config[stack], path)
    for name in ("model_size", "act_type", "positional_embedding_type"):
        values = [config[stack].get(name) for stack in ("config_encoder", "config_decoder")]
        if values[0] != values[1]:
            raise ValueError(
                f"{path}: {name}={values[0]!r} in the encoder and {values[1]!r} in the decoder: "
                "expected the same"
            )


def _norm_position(stack: dict[str, Any], path: Path | str = CONFIG) -> str:
    sequences = stack.get("preprocess_sequence", ""), stack.get("postprocess_sequence", "")
    position = NORM_POSITIONS.get(tuple(sequence.replace("d", "") for sequence in sequences))
    if position is None:
        raise ValueError(
            f"{path}: preprocess_sequence={sequences[0]!r}, postprocess_sequence={sequences[1]!r}: "
            "expected '' and 'drn', or 'n' and 'dr'"
        )
    return position


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    encoder, decoder = config["config_encoder"], config["config_decoder"]
    return {
        "d_model": encoder["model_size"],
        **core.norm_positions(_norm_position(encoder), _norm_position(decoder)),
        "activation_function": ACTIVATIONS[encoder["act_type"]],
        "encoder_layers": encoder["num_layers"],
        "decoder_layers": decoder["num_layers"],
        "encoder_attention_heads": encoder["attention_heads"],
        "decoder_attention_heads": decoder["attention_heads"],
        "encoder_ffn_dim": encoder["feed_forward_num_hidden"],
        "decoder_ffn_dim": decoder["feed_forward_num_hidden"],
        "layer_norm_eps": 1e-6,
    }


def _rates(config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, float]:
    encoder = config["config_encoder"]
    return {
        "dropout": encoder.get("dropout_prepost", 0.1),
        "attention_dropout": encoder.get("dropout_attention", 0.0),
        "activation_dropout": encoder.get("dropout_act", 0.0),
        "label_smoothing": arguments.get("label_smoothing", 0.1),
    }


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    """The search of `sockeye-translate`. Its limit of length is a multiple of the source's length,
    rounded up: the mean ratio in training, and two standard deviations. Ours is rounded down, so
    half a token for each of the source makes it no shorter."""
    fields: dict[str, Any] = {"num_beams": 5, "length_penalty": 1.0, "early_stopping": "never"}
    statistics = (config.get("config_data") or {}).get("data_statistics") or {}
    mean, deviation = (statistics.get(f"length_ratio_{name}") for name in ("mean", "std"))
    if isinstance(mean, (int, float)) and isinstance(deviation, (int, float)):
        fields["max_length_factor"] = mean + 2 * deviation + 0.5
    return fields


# ---------------------------------------------------------------- Parameters


def read_params(path: Path) -> Tensors:
    """The state dict.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is in MXNet's format, quantized or damaged.
    """
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MXNET_MAGIC)) == MXNET_MAGIC:
                raise ValueError(
                    f"{path} holds MXNet arrays, of Sockeye 1 or 2: expected a PyTorch state dict, "
                    "to which Sockeye 3.0 converts them"
                )
    state = load_torch(path)
    if not isinstance(state, dict) or not all(isinstance(each, Tensor) for each in state.values()):
        raise ValueError(f"{path}: expected a state dict of Sockeye 3")
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{path}: {name} is {tensor.dtype}: expected the parameters before quantization"
            )
    return Tensors(state, path)


def _separate(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """The tensors, with queries, keys and values apart. Keys and values alternate, head by head."""
    d, state = config["config_encoder"]["model_size"], dict(tensors.tensors)
    for name in tensors:
        module, _, kind = name.rpartition(".ff_")
        if kind == "in.weight":
            state[f"{module}.ff_q.weight"], kv = tensors.take(name, 3 * d, d).split([d, 2 * d])
        elif kind == "kv.weight":
            kv = tensors.take(name, 2 * d, d)
        else:
            continue
        del state[name]
        heads = config[f"config_{name.partition('.')[0]}"]["attention_heads"]
        for part, rows in zip("kv", kv.reshape(heads, 2, d // heads, d).unbind(1), strict=True):
            state[f"{module}.ff_kv.weight[{part}]"] = rows.reshape(d, d)
    return Tensors(state, tensors.place)


def _embeddings(
    tensors: Tensors, config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    d_model = config["config_encoder"]["model_size"]
    source, target = config["vocab_source_size"], config["vocab_target_size"]
    weights, fields = tie(
        tensors.take("embedding_source.embedding.weight", source, d_model),
        tensors.take("embedding_target.embedding.weight", target, d_model),
        tensors.take("output_layer.weight", target, d_model),
    )
    weights[PROJECTION_BIAS] = tensors.take("output_layer.bias", target)
    return weights, {**fields, "lm_head_bias": True}


def _positions(
    tensors: Tensors, config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Learned positions, or none if they are sinusoids. After the end of a learned table, Sockeye
    repeats its last row."""
    d = config["config_encoder"]["model_size"]
    kind = config["config_encoder"].get("positional_embedding_type")
    tables = [tensors.take(f"{stack}.pos_embedding.weight", None, d) for stack in STACKS]
    if kind == "learned":
        return learned_positions(*tables)
    if kind != "fixed":
        raise ValueError(f"positional_embedding_type={kind!r}: expected 'fixed' or 'learned'")
    for stack, table in zip(STACKS, tables, strict=True):
        if find_sinusoids(table) != ("paper", "halves"):
            raise ValueError(f"{stack}.pos_embedding.weight: expected the sinusoids of Sockeye")
    return {}, {}


# ---------------------------------------------------------------- Vocabularies


def read_vocabulary(path: Path, size: int) -> dict[str, int]:
    """Tokens and their ids.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It does not fit the model, or lacks a special token.
    """
    vocabulary = read_json_vocab(path)
    if sorted(vocabulary.values()) != list(range(size)):
        raise ValueError(
            f"{path} has {len(vocabulary)} tokens: expected the ids 0 to {size - 1} of the model"
        )
    for token, token_id in SPECIAL_IDS.items():
        if vocabulary.get(token) != token_id:
            raise ValueError(f"{path}: {token} is {vocabulary.get(token)}: expected {token_id}")
    return vocabulary


# ---------------------------------------------------------------- The toolkit itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The checkpoint in Sockeye, for `check`.

    Raises:
        ImportError: Sockeye can't be imported.
    """
    return SockeyeToolkit(path, options)


class SockeyeToolkit(Toolkit):
    """A model folder in Sockeye 3, which opens its `params.best`, or `params.NNNNN` in one."""

    pad, start, unk, eos = 0, SPECIAL_IDS["<s>"], SPECIAL_IDS["<unk>"], SPECIAL_IDS["</s>"]

    def __init__(self, path: Path, options: ConversionOptions):
        from sockeye.loss import CrossEntropyLoss
        from sockeye.model import load_model

        number = re.fullmatch(r"params\.(\d+)", path.name)
        self.module, self.sources, self.targets = load_model(
            str(path if path.is_dir() else path.parent),
            checkpoint=int(number[1]) if number else None,
        )
        self.module.eval()
        self.source_size = len(self.sources[0])
        self.criterion = CrossEntropyLoss()
        self.split = subwords(options.source_codes)

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        lengths = [self._lengths(ids) for ids in (sources, inputs)]
        return self.module(sources[..., None], lengths[0], inputs[..., None], lengths[1])["logits"]

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        from sockeye.beam_search import CandidateScorer
        from sockeye.inference import Translator, make_input_from_plain_string

        translator = Translator(
            torch.device("cpu"), "linear", CandidateScorer(), len(sources), "all", [self.module],
            self.sources, self.targets, beam_size=num_beams, max_output_length=longest,
        )  # fmt: skip
        tokens = {number: token for token, number in self.sources[0].items()}
        lines = [" ".join(tokens[i] for i in ids[:-1]) for ids in self.known(sources)]
        inputs = [make_input_from_plain_string(i, line) for i, line in enumerate(lines)]
        target = self.targets[0]
        return [
            [*(target[token] for token in output.tokens), self.eos]
            for output in translator.translate(inputs)
        ]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        from sockeye.data_io import tokens2ids

        return [*tokens2ids(self.split(line), self.sources[0]), self.eos]

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        return self.criterion.forward(self.logits(sources, self.inputs(targets)), targets)[0]

    def _lengths(self, ids: Tensor) -> Tensor:
        lengths = ids.ne(self.pad).sum(1)
        return torch.stack([lengths, lengths], dim=1)
