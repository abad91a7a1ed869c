"""fairseq: `checkpoint*.pt` next to `dict.*.txt`.

Versions 0.1 to 0.12 (facebookresearch/fairseq at 3d262bb2): post- and pre-norm, learned and
sinusoidal positions, shared or separate embeddings.
"""

import logging
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..data import vocabularies, vocabulary_files
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import first_given
from . import core
from .core import STACKS, TOKEN_FILES, Conversion, ConversionOptions, Tensors
from .positions import sinusoids
from .saving import copy_original_files, read_record, restore
from .text import side_tokenizer
from .toolkit import Toolkit, subwords
from .unpickling import Inert, contents, load_torch
from .weights import PROJECTION, interleave_halves, matrix_of, split_fused, tie

logger = logging.getLogger(__name__)

NAME = "fairseq"
READS: tuple[str, ...] = TOKEN_FILES
PAD, EOS, UNK = 1, 2, 3
USUAL = "checkpoint_best.pt", "checkpoint_last.pt"  # the checkpoint of a folder

# Turn our names into theirs: regular expressions and their replacements, applied in order.
NAMES = {
    r"^model\.": "",
    r"\.ffn\.fc": ".fc",
    r"\.ffn_layer_norm": ".final_layer_norm",
    r"\.embed_layer_norm": ".layernorm_embedding",
}
# Turn older names into those of 0.9 and later.
OLD_NAMES = {
    r"^(encoder\.layers\.\d+)\.layer_norms\.0\.": r"\1.self_attn_layer_norm.",
    r"^(encoder\.layers\.\d+)\.layer_norms\.1\.": r"\1.final_layer_norm.",
    r"^(decoder\.layers\.\d+)\.layer_norms\.0\.": r"\1.self_attn_layer_norm.",
    r"^(decoder\.layers\.\d+)\.layer_norms\.1\.": r"\1.encoder_attn_layer_norm.",
    r"^(decoder\.layers\.\d+)\.layer_norms\.2\.": r"\1.final_layer_norm.",
    r"^decoder\.embed_out$": "decoder.output_projection.weight",
}
# Buffers that the model does not need.
BUFFERS = (r"(en|de)coder\.version", r"(en|de)coder\.embed_positions\.(_float_tensor|weights)")
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "relu_squared": "relu2",
    "tanh": "tanh",
    "linear": "linear",
}
# Options that change what a model computes and that our model does not have.
REFUSED = (
    "adaptive_softmax_cutoff", "adaptive_input", "char_inputs", "cross_self_attention",
    "no_cross_attention", "base_layers", "quant_noise_pq", "quant_noise_scalar", "scale_fc",
    "scale_attn", "scale_heads", "scale_resids", "moe_freq", "encoder_moe_freq", "decoder_moe_freq",
    "moe_expert_count", "encoder_langtok", "decoder_langtok", "decoder_xformers_att_config",
    "encoder_xformers_att_config", "alibi", "use_alibi", "rotary_embeddings",
    "max_relative_positions", "prepend_bos",
)  # fmt: skip
# Tasks whose texts begin with <s>: denoising, and the Levenshtein Transformer's. In mBART's task,
# texts end in their language.
OTHER_TASKS = (
    "denoising", "multilingual_denoising", "masked_lm", "multilingual_masked_lm", "translation_lev",
)  # fmt: skip
MBART = "translation_from_pretrained_bart"
# Ways to split into subwords that our tokenizer has, from their files.
BPES = ("subword_nmt", "fastbpe", "sentencepiece")
# In names of architectures that translate while they read: no tensor tells that a word of the
# source sees no later ones.
SIMULTANEOUS = ("unidirectional", "monotonic")
# Options of the search, and their values without effect.
NO_EQUIVALENT = {
    "match_source_len": False, "sampling": False, "temperature": 1.0, "diverse_beam_groups": -1,
    "diversity_rate": -1.0, "lm_path": None,
}  # fmt: skip
# Classes of saved options and states, none of whose code is executed.
INERT = (
    "fairseq.*", "omegaconf.*", "typing.*", "_operator.getitem", "collections.defaultdict",
    "builtins.dict", "builtins.list", "builtins.tuple", "builtins.int", "builtins.float",
    "builtins.str", "builtins.bool", "__builtin__.*",
)  # fmt: skip


def recognizes(path: Path) -> bool:
    """Whether this is a checkpoint, or a folder with one: with its dictionaries, or under the names
    that fairseq gives in `--save-dir`, where it writes no dictionaries."""
    if path.is_dir():
        has_dictionary = any(path.glob("dict*.txt")) and any(path.glob("*.pt"))
        return has_dictionary or any(recognizes(path / name) for name in USUAL)
    strings, _ = contents(path)
    return {"model", "decoder.embed_tokens.weight"} <= strings and bool({"args", "cfg"} & strings)


def read(path: Path, options: ConversionOptions) -> Conversion:
    """The model with its dictionaries; see `core`."""
    path = _checkpoint(path)
    checkpoint = load_torch(path, allowed=[Namespace], inert=INERT)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ValueError(f"{path}: expected a fairseq checkpoint, a dictionary with 'model'")
    args = _with_languages(path, _model_options(path, checkpoint))

    def make_side(side: str, rows: int) -> Side:
        return _side(path, args, side, options, rows)

    conversion = build(path, args, checkpoint["model"], make_side)
    conversion.generation = _generation(checkpoint, args, conversion.config)
    conversion.origin = {"toolkit": "fairseq", "notes": _notes(args)}
    conversion.languages = [args.get("source_lang"), args.get("target_lang")]
    conversion.record = {"checkpoint": path.name, "args": _plain_values(args)}
    return conversion


def build(
    path: Path,
    args: dict[str, Any],
    state: dict[str, Tensor],
    make_side: Callable[[str, int], "Side"],
) -> Conversion:
    """The model, without what each format adds to it.

    Args:
        path: The checkpoint, for error messages.
        args: fairseq's options.
        state: fairseq's names and tensors.
        make_side: Makes the tokenizer of "source" or "target" for the rows of its embedding.
    """
    _expect_translation_model(path, args, state)
    tensors, parts = _with_new_names(state, path)
    source, target, projection = _embeddings(tensors, args)
    weights, tying = tie(source, target, projection)
    sides = {
        side: make_side(side, len(matrix))
        for side, matrix in zip(core.SIDES, (source, target), strict=True)
    }
    config = _config(path, args, tensors, tying)
    config.eos_token_id = config.decoder_start_token_id = sides["target"].end
    weights |= core.take_layers(tensors, config, NAMES)
    weights |= _positions(tensors, args, config)
    tensors.expect_all_taken(BUFFERS)
    tokenizers = [side.tokenizer for side in sides.values()]
    tokenizer = vocabularies.pair(*tokenizers, size=len(target), unk_id=UNK)
    conversion = Conversion(config, weights, tokenizer)
    conversion.sources, conversion.leftovers = _way_back(state, parts, weights)
    conversion.files = [file for side in sides.values() for file in side.files]
    if config.position_encoding == "sinusoidal":
        interleave_halves(weights)
    # Targets get <unk> in place of a clone.
    conversion.fill_with_clones("source", vocabularies.rows(tokenizers[0]), UNK)
    return conversion


def _checkpoint(path: Path) -> Path:
    if path.is_file():
        return path
    for name in USUAL:
        if (path / name).is_file():
            return path / name
    checkpoints = sorted(path.glob("*.pt"))
    if len(checkpoints) != 1:
        names = ", ".join(file.name for file in checkpoints) or "none"
        raise FileNotFoundError(f"{path}: holds the checkpoints {names}, expected the path of one")
    return checkpoints[0]


def _model_options(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The options of the model and its task: a Namespace up to 0.10, then a configuration."""
    args = plain(checkpoint.get("args"))
    if args:
        return args
    cfg = plain(checkpoint.get("cfg"))
    if not isinstance(cfg, dict) or not isinstance(cfg.get("model"), dict):
        raise ValueError(f"{path}: expected the options of training, 'args' or 'cfg.model'")
    model = dict(cfg["model"])
    for name in ("encoder", "decoder", "quant_noise"):  # groups in hydra's configurations
        for key, value in (model.pop(name, None) or {}).items():
            model[f"{name}_{key}"] = value
    task = cfg.get("task") or {}
    names = {"arch": model.get("arch") or model.get("_name")}
    names["task"] = model.get("task") or task.get("_name")
    smoothing = (cfg.get("criterion") or {}).get("label_smoothing")
    return {**task, "label_smoothing": smoothing, **model, **names}


def plain(value: Any) -> Any:
    """Options as plain values, without the classes in which they were saved."""
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        for key in ("_content", "_val"):  # omegaconf's containers and values
            if key in state:
                return plain(state[key])
        return plain(state) if state else list(value.arguments)
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def _plain_values(args: dict[str, Any]) -> dict[str, Any]:
    """Options that JSON can represent."""
    simple = (str, int, float, bool, list, type(None))
    return {name: value for name, value in args.items() if isinstance(value, simple)}


def _expect_translation_model(path: Path, args: dict[str, Any], state: dict[str, Any]) -> None:
    arch = args.get("arch")
    if not any(name.startswith("encoder.") for name in state):
        raise ValueError(
            f"{path}: arch={arch!r} has no encoder, as language models have none: expected an "
            "encoder-decoder Transformer"
        )
    for stack in STACKS:
        if not any(name.startswith(f"{stack}.layers.0.self_attn.") for name in state):
            raise ValueError(
                f"{path}: arch={arch!r} has no {stack}.layers.0.self_attn: expected an "
                "encoder-decoder Transformer"
            )
    if any(word in str(arch) for word in SIMULTANEOUS):
        raise ValueError(
            f"{path}: arch={arch!r} reads a source from left to right: expected an encoder-decoder "
            "that reads it whole"
        )
    for name in REFUSED:
        if args.get(name):
            raise ValueError(f"{path}: {name}={args[name]!r}: expected a model without it")
    if args.get("task") in OTHER_TASKS:
        raise ValueError(
            f"{path}: task={args['task']!r}: expected a task of translation without <s> before text"
        )
    langtoks = args.get("langtoks") or {}
    if not isinstance(langtoks, dict) or any(any(pair) for pair in langtoks.values()):
        raise ValueError(f"{path}: langtoks={langtoks!r}: expected a model without it")
    widths = [args.get(f"{stack}_embed_dim") for stack in STACKS]
    if None not in widths and widths[0] != widths[1]:
        raise ValueError(
            f"{path}: encoder_embed_dim={widths[0]!r} and decoder_embed_dim={widths[1]!r}: "
            "expected the same"
        )


# ---------------------------------------------------------------- tensors


def _with_new_names(state: dict[str, Tensor], path: Path) -> tuple[Tensors, dict[str, list[str]]]:
    """The tensors under the names of fairseq 0.9 and later, and for each tensor of the file, its
    new names."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[str]] = {}
    for name, tensor in state.items():
        new_name = core.renamed(name, OLD_NAMES)
        module, _, kind = new_name.rpartition(".")
        renamed = {new_name: tensor}
        if kind in ("in_proj_weight", "in_proj_bias"):
            renamed = split_fused(kind.removeprefix("in_proj_"), tensor, module)
        tensors |= renamed
        parts[name] = list(renamed)
    return Tensors(tensors, path), parts


def _embeddings(tensors: Tensors, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Source and target embedding and the projection, each (vocabulary, d_model)."""
    source = tensors.take("encoder.embed_tokens.weight", None, None)
    width = source.shape[1]
    target = tensors.take("decoder.embed_tokens.weight", None, None)
    projection = target
    if "decoder.output_projection.weight" in tensors:
        projection = tensors.take("decoder.output_projection.weight", len(target), None)
    elif not (args.get("share_decoder_input_output_embed") or args.get("share_all_embeddings")):
        tensors.take("decoder.output_projection.weight", *target.shape)
    # A linear map without a bias can be multiplied into the matrix next to it.
    if "decoder.project_in_dim.weight" in tensors:
        into = tensors.take("decoder.project_in_dim.weight", width, target.shape[1])
        target = (target.double() @ into.double().T).to(target.dtype)
    if "decoder.project_out_dim.weight" in tensors:
        out = tensors.take("decoder.project_out_dim.weight", projection.shape[1], width)
        projection = (projection.double() @ out.double()).to(projection.dtype)
    for name, matrix in (("embed_tokens", target), ("output_projection", projection)):
        if matrix.shape[1] != width:
            raise ValueError(
                f"{tensors.place}: decoder.{name}.weight has {matrix.shape[1]} columns, expected "
                f"{width}, the width of the encoder"
            )
    return source, target, projection


def _config(
    path: Path, args: dict[str, Any], tensors: Tensors, tying: dict[str, Any]
) -> VanillaTransformerConfig:
    activation = args.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise ValueError(f"{path}: activation_fn={activation!r}: expected one of {expected}")
    pre_norm = [bool(args.get(f"{stack}_normalize_before")) for stack in STACKS]
    ends = [
        pre and _ends_in_norm(tensors, args, stack)
        for pre, stack in zip(pre_norm, STACKS, strict=True)
    ]
    fields: dict[str, Any] = {}
    for stack in STACKS:
        fields[f"{stack}_layers"] = _count_layers(path, args, tensors, stack)
        fields[f"{stack}_attention_heads"] = args.get(f"{stack}_attention_heads") or 8
        fc1 = tensors.take(f"{stack}.layers.0.fc1.weight", None, None)
        fields[f"{stack}_ffn_dim"] = len(fc1)
    fixed = all(_position_kind(tensors, args, stack) == "sinusoids" for stack in STACKS)
    return VanillaTransformerConfig(
        d_model=tensors.take("encoder.embed_tokens.weight").shape[1],
        attention_bias=True,
        activation_function=ACTIVATIONS[activation],
        dropout=_rate(args, "dropout", 0.1),
        attention_dropout=_rate(args, "attention_dropout", 0.0),
        activation_dropout=_rate(args, "activation_dropout", 0) or _rate(args, "relu_dropout", 0),
        label_smoothing=_rate(args, "label_smoothing", 0.0),
        **core.norm_positions(*("pre" if pre else "post" for pre in pre_norm)),
        final_layer_norm=core.final_layer_norm(*ends),
        embedding_layer_norm="encoder.layernorm_embedding.weight" in tensors,
        layer_norm_eps=1e-5,
        position_encoding="sinusoidal" if fixed else "learned",
        sinusoid_frequencies="tensor2tensor",
        position_offset=2 if fixed else 0,
        max_position_embeddings=max(_position_count(tensors, args, stack) for stack in STACKS),
        scale_embedding=not args.get("no_scale_embedding"),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        **fields,
        **tying,
    )


def _rate(args: dict[str, Any], name: str, default: float) -> float:
    value = args.get(name)
    return default if value is None else float(value)


def _ends_in_norm(tensors: Tensors, args: dict[str, Any], stack: str) -> bool:
    """Whether a pre-norm stack ends in a layer norm. In the first versions, it does not."""
    name = f"{stack}.layer_norm.weight"
    if stack == "decoder" and args.get("no_decoder_final_norm"):
        return False
    version = tensors.take(f"{stack}.version") if f"{stack}.version" in tensors else None
    last_without = 1 if stack == "encoder" else 2
    return name in tensors or (version is not None and version.item() > last_without)


def _count_layers(path: Path, args: dict[str, Any], tensors: Tensors, stack: str) -> int:
    """The number of layers in the file, which pruning may have reduced."""
    found, kept = tensors.count(rf"{stack}\.layers\.(\d+)\."), args.get(f"{stack}_layers_to_keep")
    expected = args.get(f"{stack}_layers") or found
    if kept:
        kept = kept.split(",") if isinstance(kept, str) else kept
        expected = len(kept)
    if found != expected:
        raise ValueError(
            f"{path}: {stack}.layers has {found} layers, expected {stack}_layers={expected}"
        )
    return found


def _position_kind(tensors: Tensors, args: dict[str, Any], stack: str) -> str:
    if args.get("no_token_positional_embeddings"):
        return "none"
    return "learned" if f"{stack}.embed_positions.weight" in tensors else "sinusoids"


def _position_count(tensors: Tensors, args: dict[str, Any], stack: str) -> int:
    if _position_kind(tensors, args, stack) == "learned":
        return len(tensors.take(f"{stack}.embed_positions.weight", None, None)) - 2
    side = "source" if stack == "encoder" else "target"
    return args.get(f"max_{side}_positions") or args.get("max_positions") or 1024


def _positions(
    tensors: Tensors, args: dict[str, Any], config: VanillaTransformerConfig
) -> dict[str, Tensor]:
    """Learned positions of both stacks, (max_position_embeddings, d_model); none if both have
    sinusoids. The first two rows are not positions of tokens."""
    if config.position_encoding == "sinusoidal":
        return {}
    tables = {}
    count, width = config.max_position_embeddings, config.d_model
    for stack in STACKS:
        kind = _position_kind(tensors, args, stack)
        like = tensors.take("encoder.embed_tokens.weight")
        table = like.new_zeros(count, width)
        if kind == "learned":
            learned = tensors.take(f"{stack}.embed_positions.weight", None, width)[2:]
            table[: len(learned)] = learned
        elif kind == "sinusoids":
            table = sinusoids(count + 2, width, "tensor2tensor", "halves")[2:].to(like.dtype)
        tables[f"model.{stack}.embed_positions.weight"] = table
    return tables


def _way_back(
    state: dict[str, Tensor],
    parts: dict[str, list[str]],
    weights: dict[str, Tensor],
) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """`Conversion.sources` and `Conversion.leftovers`; empty if matrices were multiplied."""
    if any(name.startswith("decoder.project_") for name in state):
        return {}, {}
    ours = {core.renamed(name, NAMES): name for name in weights}
    source, target = (matrix_of(weights, side) for side in core.SIDES)
    ours["encoder.embed_tokens.weight"], ours["decoder.embed_tokens.weight"] = source, target
    projection = PROJECTION if PROJECTION in weights else target
    ours["decoder.output_projection.weight"] = projection
    sources, leftovers = {}, {}
    for name, tensor in state.items():
        if parts[name][0] not in ours:
            leftovers[name], sources[name] = tensor, [f"original:{name}"]
        elif name.endswith("embed_positions.weight"):
            leftovers[name] = tensor[:2]
            sources[name] = [f"original:{name}", f"{ours[name]}[:{len(tensor) - 2}]"]
        elif (len(parts[name]) == 1 and "embed_" in name) or "output_projection" in name:
            sources[name] = [f"{ours[parts[name][0]]}[:{len(tensor)}]"]
        else:
            sources[name] = [ours[part] for part in parts[name]]
    return sources, leftovers


def write(model_folder: Path, output: Path) -> None:
    """Write the checkpoint that a model was converted from, with the model's current weights, and
    its dictionaries."""
    config = VanillaTransformerConfig.from_pretrained(model_folder)
    state = restore(model_folder, halves=config.position_encoding == "sinusoidal")
    record = read_record(model_folder)
    names = ("criterion_name", "optimizer_name", "lr_scheduler_state")
    checkpoint = {
        "args": Namespace(**record["args"]),
        "model": state,
        "optimizer_history": [{**dict.fromkeys(names), "num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }
    # An untrusted model's record may name any path.
    torch.save(checkpoint, output / Path(record["checkpoint"]).name)
    copy_original_files(model_folder, output)


# ---------------------------------------------------------------- text


@dataclass
class Side:
    """Source or target: its tokenizer, the files that it was made from, and its end's id."""

    tokenizer: PreTrainedTokenizerFast
    files: list[Path]
    end: int = EOS


def _side(
    path: Path, args: dict[str, Any], side: str, options: ConversionOptions, rows: int
) -> Side:
    language = args.get(f"{side}_lang")
    given = getattr(options, f"{side}_vocabulary")
    dictionary = Path(given) if given else _find_dictionary(path, args, side, language)
    vocab = vocabulary_files.read_fairseq_dict(dictionary)
    for token in _added_tokens(args, rows - len(vocab)):
        vocab[token] = len(vocab)
    if len(vocab) != rows:
        raise ValueError(
            f"{dictionary}: holds {len(vocab)} tokens, expected {rows}, the rows of the embedding "
            f"in {path}"
        )
    specials = _specials(dictionary, vocab, args, language)
    given = options.codes(side)
    codes = Path(given) if given else _find_codes({path.parent, dictionary.parent}, args, language)
    tokenizer = side_tokenizer(vocab, specials, codes, rows)
    files = [dictionary] if codes is None else [dictionary, codes]
    return Side(tokenizer, files, vocab[specials.eos or ""])


def _specials(
    file: Path, vocab: dict[str, int], args: dict[str, Any], language: str | None
) -> vocabularies.Specials:
    """mBART's texts end in `</s>` and their language, and its decoder starts from the language."""
    if args.get("task") != MBART:
        return vocabularies.Specials()
    token = f"[{language}]"
    if token not in vocab:
        raise ValueError(f"{file}: task={MBART!r}: expected the token {token!r}, added by langs")
    return vocabularies.Specials(bos="</s>", eos=token, template=f"$A </s> {token}")


def _with_languages(path: Path, args: dict[str, Any]) -> dict[str, Any]:
    """The options with the languages. If no option names them, fairseq takes them from file names
    of its data. Without the data, the names of two equal dictionaries are used."""
    if args.get("source_lang") or args.get("target_lang"):
        return args
    data = Path(str(args.get("data") or "").split(":")[0] or path.parent)
    files = [*path.parent.glob("*"), *data.glob("*")]
    matches = (re.match(r"(?:train|valid)\.([^.-]+)-([^.-]+)\.", file.name) for file in files)
    names = next((match.groups() for match in matches if match), None)
    dictionaries = sorted(path.parent.glob("dict.*.txt"))
    if names is None and len(dictionaries) == 2:
        source, target = dictionaries
        if source.read_bytes() == target.read_bytes():
            names = source.name.split(".")[1], target.name.split(".")[1]
    return args if names is None else {**args, "source_lang": names[0], "target_lang": names[1]}


def _find_dictionary(path: Path, args: dict[str, Any], side: str, language: str | None) -> Path:
    """The dictionary next to the checkpoint, or in the folder that training read."""
    data = str(args.get("data") or "").split(":")[0]
    folders = [path.parent, *([path.parent / data, Path(data)] if data else [])]
    names = [f"dict.{language}.txt", "dict.txt"] if language else ["dict.txt"]
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(
        f"{path.parent}: expected the dictionary {names[0]} beside the checkpoint, from the folder "
        f"that fairseq-preprocess wrote, or the option {side}_vocabulary"
    )


def _added_tokens(args: dict[str, Any], number: int) -> list[str]:
    """Tokens that a task appends to a dictionary when it loads it, if as many are missing."""
    languages = args.get("langs") or []
    languages = languages.split(",") if isinstance(languages, str) else languages
    added = [[f"__{language}__" for language in languages]]
    if "bart" in str(args.get("arch")) or args.get("task") == MBART:
        added.append([*(f"[{language}]" for language in languages), "<mask>"])
    return next((tokens for tokens in added if len(tokens) == number), [])


def _find_codes(folders: set[Path], args: dict[str, Any], language: str | None) -> Path | None:
    """BPE codes, or a SentencePiece model: one for this language is preferred to one for all."""
    saved = [args.get(name) for name in ("bpe_codes", "sentencepiece_model")]
    names = [Path(name).name for name in saved if isinstance(name, str) and name]
    for stem in ("bpecodes", "codes", "code", "bpe.codes", "codes.bpe"):
        names += [f"{stem}.{language}", f"{language}.{stem}", stem]
    names += [f"spm.{language}.model", f"{language}.spm.model", f"{language}.model", "*.model"]
    for folder in sorted(folders):
        for name in names:
            files = sorted(folder.glob(name))
            if len(files) == 1 and files[0].is_file():
                return files[0]
    return None


def _generation(
    checkpoint: dict[str, Any], args: dict[str, Any], config: VanillaTransformerConfig
) -> dict[str, Any]:
    """The search of `fairseq-generate` with its own defaults, or with the saved options."""
    search = (plain(checkpoint.get("cfg")) or {}).get("generation") or {}
    for name, default in NO_EQUIVALENT.items():
        if (value := first_given(search.get(name), default)) != default:
            logger.warning(
                "generation.%s=%r has no equivalent here: translations may differ from fairseq's",
                name, value,
            )  # fmt: skip
    saved = {**args, **search}
    fields = {
        "num_beams": saved.get("beam") or 5,
        "length_penalty": 0.0 if saved.get("unnormalized") else float(saved.get("lenpen", 1)),
        "early_stopping": not saved.get("no_early_stop"),
        **_limit(saved, args.get("max_target_positions") or args.get("max_positions") or 1024),
        "min_new_tokens": saved.get("min_len", 1),
        "suppress_tokens": [config.pad_token_id],  # fairseq's search never selects it
    }
    if saved.get("no_repeat_ngram_size"):
        fields["no_repeat_ngram_size"] = saved["no_repeat_ngram_size"]
    if saved.get("unkpen"):
        fields["sequence_bias"] = [[[UNK], -float(saved["unkpen"])]]
    return fields


def _limit(saved: dict[str, Any], positions: int) -> dict[str, Any]:
    """The longest output: max_len_a * source length + max_len_b."""
    factor, more = saved.get("max_len_a") or 0, first_given(saved.get("max_len_b"), 200)
    if factor == 1:
        return {"extra_output_tokens": more}
    if factor and not more:
        return {"max_length_factor": factor}
    if factor:
        logger.warning(
            "max_len_a=%s with max_len_b=%s has no equivalent here: translations may be longer "
            "than fairseq's", factor, more,
        )  # fmt: skip
    return {"max_new_tokens": min(int(factor * positions) + more, positions - 1)}


def _notes(args: dict[str, Any]) -> str:
    """The preprocessing that the tokenizer does not do."""
    steps = (args.get("tokenizer"), args.get("bpe"))
    outside = [name for name in steps if isinstance(name, str) and name and name not in BPES]
    if not outside:
        return ""
    return f"texts are tokenized ({', '.join(outside)}) before they reach this model's tokenizer"


# ---------------------------------------------------------------- the toolkit itself


def load_toolkit(path: Path, options: ConversionOptions) -> Toolkit:
    """The checkpoint in fairseq, for `check`.

    Raises:
        ImportError: fairseq can't be imported.
    """
    try:
        return FairseqModel(path, options)
    except ValueError as error:
        if "mutable default" in str(error):  # fairseq 0.12 on Python 3.11
            raise ImportError(str(error)) from error
        raise


class FairseqModel(Toolkit):
    """A model in fairseq, which gets options and weights that we have read: it opens no pickle."""

    pad, start, unk = PAD, EOS, UNK

    def __init__(self, path: Path, options: ConversionOptions):
        from fairseq import tasks
        from fairseq.criterions.cross_entropy import CrossEntropyCriterion
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        path = _checkpoint(path)
        checkpoint = load_torch(path, allowed=[Namespace], inert=INERT)
        args = _with_languages(path, _model_options(path, checkpoint))
        language = args.get("source_lang")
        dictionary = _find_dictionary(path, args, "source", language)
        known = Namespace(**{**args, "data": str(dictionary.parent)})
        cfg = convert_namespace_to_omegaconf(known)
        self.task = tasks.setup_task(cfg.task)
        self.module = self.task.build_model(cfg.model)
        self.module.load_state_dict(checkpoint["model"], strict=True, model_cfg=cfg.model)
        self.module.float().eval()
        self.criterion = CrossEntropyCriterion(self.task, sentence_avg=False)
        self.ends: list[int] = []  # tokens after a source's </s>
        if args.get("task") == MBART:
            dictionaries = self.task.source_dictionary, self.task.target_dictionary
            tokens = (f"[{args[f'{side}_lang']}]" for side in core.SIDES)
            end, self.start = (d.index(t) for d, t in zip(dictionaries, tokens, strict=True))
            self.ends = [end]
        self.source_size = len(self.task.source_dictionary)
        folders = {path.parent, dictionary.parent}
        self.split = subwords(options.source_codes or _find_codes(folders, args, language))

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        return self.module(**self._inputs(sources), prev_output_tokens=inputs)[0]

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        from fairseq.sequence_generator import SequenceGenerator

        search = SequenceGenerator(
            [self.module], self.task.target_dictionary, beam_size=num_beams, max_len_b=longest,
            eos=self.start,
        )  # fmt: skip
        inputs = self._inputs(self.padded(self.known(sources)))
        hypotheses = search.generate([self.module], {"net_input": inputs})
        return [best[0]["tokens"].tolist() for best in hypotheses]

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        words = " ".join(self.split(line))
        ids = self.task.source_dictionary.encode_line(words, add_if_not_exist=False).tolist()
        return ids + self.ends

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        inputs = {**self._inputs(sources), "prev_output_tokens": self.inputs(targets)}
        tokens = int(targets.ne(PAD).sum())
        sample = {"net_input": inputs, "target": targets, "ntokens": tokens}
        return self.criterion(self.module, sample)[0] / tokens

    def _inputs(self, sources: Tensor) -> dict[str, Tensor]:
        return {"src_tokens": sources, "src_lengths": sources.ne(PAD).sum(1)}
