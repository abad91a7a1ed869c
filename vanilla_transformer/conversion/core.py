"""What all converters share: tensors that must all be read, folds into weights, and saving.

A format is a module with

    NAME: str
    recognizes(path: Path) -> bool
    read(path: Path, options: ConversionOptions) -> Conversion

and, if models go back to it,

    write(model_folder: Path, output: Path) -> None
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..data.paths import expect_unused
from ..inference.derived_cards import language_codes
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.loss import SUPPRESSED
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .unpickling import load_torch

logger = logging.getLogger(__name__)

# A subfolder of the converted model for what only the way back needs.
ORIGINAL, RECORD_NAME, LEFTOVERS_NAME = "original", "conversion.json", "leftovers.safetensors"
SHARED, SOURCE, TARGET = (
    f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
STACKS, SIDES = ("encoder", "decoder"), ("source", "target")
# The options that name the files of a text's tokens.
TOKEN_FILES = ("source_vocabulary", "target_vocabulary", "source_codes", "target_codes")
# What only a search with several beams reads.
BEAM_OPTIONS = ("length_penalty", "length_penalty_type", "early_stopping")
PROJECTION, PROJECTION_BIAS = "lm_head.weight", "lm_head.bias"


@dataclass
class ConversionOptions:
    """What a checkpoint does not say. Every option has a default.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: `like` is not known.
    """

    format: str | None = HfArg(
        default=None,
        help="The toolkit, such as fairseq or opennmt_py (docs/conversion/README.md names all). "
        "Default: recognized from the files.",
    )
    like: str | None = HfArg(
        default=None,
        help="'transformers': compute what transformers computes from these files, if it differs "
        "from the toolkit.",
    )
    source_vocabulary: str | None = HfArg(
        default=None, help="The source's vocabulary. Default: beside the checkpoint."
    )
    target_vocabulary: str | None = HfArg(
        default=None, help="The target's vocabulary. Default: beside the checkpoint."
    )
    source_codes: str | None = HfArg(
        default=None, help="BPE codes or SentencePiece model of the source (or of both sides)."
    )
    target_codes: str | None = HfArg(
        default=None, help="BPE codes or SentencePiece model of the target."
    )
    moses: list[str] | None = HfArg(
        default=None,
        help="The languages of source and target, such as 'de en', if text went through Moses "
        "(sacremoses): the tokenizer then runs it, and its detokenizer.",
    )
    heads: int | None = HfArg(default=None, help="Attention heads, for a bare state dict.")
    norm_first: bool | None = HfArg(
        default=None, help="Pre-norm (true) or post-norm, for a bare state dict."
    )
    activation: str | None = HfArg(default=None, help="Activation function, for a bare state dict.")
    layer_norm_eps: float | None = HfArg(
        default=None, help="Epsilon of the layer norms, for a bare state dict."
    )
    names: str | None = HfArg(
        default=None, help="YAML file with names of tensors and tokens, for a bare state dict."
    )
    target_space_id: int | None = HfArg(
        default=None,
        help="tensor2tensor: the problem's target space. Default: inferred from the optimizer's "
        "variables, else 0.",
    )
    license: str | None = HfArg(
        default=None, help="The licence of the weights, for the model card."
    )

    def __post_init__(self) -> None:
        if self.like not in (None, "transformers"):
            raise ValueError(f"like={self.like!r}: expected 'transformers'")
        if self.moses is not None and len(self.moses) != 2:
            raise ValueError(f"moses={self.moses}: expected two languages, such as de en")
        for name in (*TOKEN_FILES, "names"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_file():
                raise FileNotFoundError(f"{name}={value!r}: expected a file")

    def codes(self, side: str) -> str | None:
        """The codes of a side, "source" or "target". The source's serve both if there are no
        others."""
        return getattr(self, f"{side}_codes") or self.source_codes

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def expect_none(self, where: str) -> None:
        """Raise a ValueError if any option is given."""
        for name, value in self.given().items():
            raise ValueError(f"{name}={value!r} has no effect with {where}")

    def expect_only(self, names: Sequence[str], format: str) -> None:
        """Raise a ValueError if an option is given that a format does not read."""
        for name, value in self.given().items():
            if name not in (*names, "format", "moses", "license"):
                raise ValueError(
                    f"{name}={value!r} has no effect on a checkpoint of {format}: expected "
                    f"{' or '.join(names) or 'no option'}"
                )


@dataclass
class Conversion:
    """A model of another toolkit, in our terms.

    Attributes:
        config: Its configuration.
        weights: Our names, and tensors in the checkpoint's own precision. Tied matrices are there
            once (see `tie`).
        tokenizer: Takes text as the toolkit's own pipeline does.
        generation: Fields of the generation config.
        origin: `toolkit`, `version`, `license`, `notes`: for the model card.
        record: JSON values that the format's `write` needs to go back.
        sources: For each tensor of the checkpoint, in order, what it consists of, one below the
            other: our tensors, perhaps only their first rows ("lm_head.weight[:1000]"), and
            leftovers ("original:" and the checkpoint's name).
        leftovers: Tensors, under the checkpoint's names, that no model needs and going back does.
        files: Small files, such as vocabularies, that are kept for the way back.
        languages: Of source and target, as the toolkit names them, for the model card.
    """

    config: VanillaTransformerConfig
    weights: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    generation: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    leftovers: dict[str, Tensor] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    languages: Sequence[str | None] = ()

    def fill_with_clones(self, side: str, rows: int, unk: int) -> None:
        """Let a vocabulary grow to this number of rows, if it has fewer, with rows that no
        translation contains and that are `<unk>` to the model: symbols that byte-pair encoding or a
        unigram model may produce, and that the toolkit's vocabulary lacks.

        Args:
            side: "source" or "target".
            rows: Of the embedding.
            unk: The id of `<unk>`.
        """
        matrix = matrix_of(self.weights, side)
        number = rows - len(self.weights[matrix])
        if number > 0:
            add_rows(self.weights, side, number, copy_of=unk)
            self.config.lm_head_bias = PROJECTION_BIAS in self.weights
            sizes = [len(self.weights[matrix_of(self.weights, each)]) for each in SIDES]
            self.config.vocab_size = sizes[0]
            if matrix != SHARED:
                self.config.decoder_vocab_size = sizes[1]

    def expect_fit(self) -> None:
        """Compare names and shapes of the weights with those of the model.

        Raises:
            ValueError: A tensor is missing, unknown or of another shape.
        """
        model = empty_model(self.config)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in model.all_tied_weights_keys:
            expected.pop(name, None)
        for name in sorted(expected.keys() - self.weights.keys()):
            raise ValueError(
                f"{name}: the checkpoint has no such tensor, expected {expected[name]}"
            )
        for name in sorted(self.weights.keys() - expected.keys()):
            raise ValueError(f"{name}: the configuration has no place for this tensor")
        for name, shape in expected.items():
            if tuple(self.weights[name].shape) != shape:
                found = tuple(self.weights[name].shape)
                raise ValueError(f"{name}: the shape is {found}, expected {shape}")


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint. It keeps track of those that were read.

    Args:
        tensors: Torch tensors or NumPy arrays by name; a lazy mapping reads them one by one.
        place: The file, for error messages.
    """

    def __init__(self, tensors: Mapping[str, Any], place: str | Path):
        self.tensors, self.place = tensors, place
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        return self.take(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None) -> Tensor:
        """A tensor of this shape, in which None stands for any size. Without a shape, any tensor.

        Raises:
            ValueError: There is no tensor of this name, or it has a different shape.
        """
        if name not in self.tensors:
            of = f" of shape {_show(shape)}" if shape else ""
            raise ValueError(f"{self.place}: expected a tensor {name!r}{of}, there is none")
        self.taken.add(name)
        tensor = torch.as_tensor(self.tensors[name])
        fits = len(shape) == tensor.ndim and all(
            expected in (None, size) for expected, size in zip(shape, tensor.shape, strict=True)
        )
        if shape and not fits:
            found = _show(tuple(tensor.shape))
            raise ValueError(
                f"{self.place}: tensor {name!r} has shape {found}, expected {_show(shape)}"
            )
        return tensor

    def count(self, pattern: str) -> int:
        """How many layers there are: one more than the largest number that the group of `pattern`,
        a regular expression for the start of a name, matches."""
        found = (re.match(pattern, name) for name in self)
        return max((int(match[1]) for match in found if match), default=-1) + 1

    def expect_all_taken(self, ignored: Sequence[str] = ()) -> None:
        """Nothing is lost silently.

        Args:
            ignored: Regular expressions for whole names of tensors that no model needs.

        Raises:
            ValueError: Tensors that were neither read nor ignored; the message names them.
        """
        left = [
            name
            for name in self
            if name not in self.taken and not any(re.fullmatch(each, name) for each in ignored)
        ]
        if left:
            raise ValueError(
                f"{self.place}: tensors that this converter does not know: {', '.join(left)}"
            )


def _show(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


# ---------------------------------------------------------------- Files


def has_model_type(folder: Path, model_type: str) -> bool:
    """Whether a folder holds a configuration of this type of transformers."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("model_type") == model_type


def read_transformers_weights(folder: Path) -> Tensors:
    """The weights that transformers has saved in a folder: safetensors or torch, sharded or not.

    Raises:
        FileNotFoundError: There are none.
        ValueError: A file is incomplete.
    """
    for index, whole in (
        (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),
        (WEIGHTS_INDEX_NAME, WEIGHTS_NAME),
    ):
        files = [whole]
        if (folder / index).is_file():
            weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
            files = sorted({Path(file).name for file in weight_map.values()})
        elif not (folder / whole).is_file():
            continue
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= read_weights(folder / file)
        return Tensors(tensors, folder)
    raise FileNotFoundError(f"{folder}: expected {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}")


def read_weights(path: Path) -> Any:
    """What a file of safetensors or of `torch.save` holds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is incomplete, or as `load_torch`.
    """
    if path.suffix != ".safetensors":
        return load_torch(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a complete safetensors file ({error})") from error


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    """The name after all replacements, in order: regular expressions, and what replaces them."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def take_layers(
    tensors: Tensors, config: VanillaTransformerConfig, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Every tensor except embeddings, positions and projection, with its shape checked.

    Args:
        names: From our names to the checkpoint's; see `renamed`.
    """
    apart = r".*(shared|embed_tokens|embed_positions|lm_head)\.(weight|bias)"
    shapes = {name: tensor.shape for name, tensor in empty_model(config).state_dict().items()}
    return {
        name: tensors.take(renamed(name, names), *shape)
        for name, shape in shapes.items()
        if not re.fullmatch(apart, name)
    }


def norm_positions(encoder: str, decoder: str) -> dict[str, Any]:
    """The fields for "pre" or "post" in each stack."""
    return {
        "norm_position": encoder,
        "decoder_norm_position": None if decoder == encoder else decoder,
    }


def final_layer_norm(encoder: bool, decoder: bool) -> str:
    """The field for stacks that end in a layer norm, or don't."""
    names = {(True, False): "encoder", (False, True): "decoder", (True, True): "both"}
    return names.get((encoder, decoder), "none")


# ---------------------------------------------------------------- Folds


def tie(source: Tensor, target: Tensor, projection: Tensor) -> tuple[dict, dict[str, Any]]:
    """Decide by comparison which of the three matrices are one.

    Args:
        source: Source embedding, (vocab_size, d_model).
        target: Target embedding, (target_vocab_size, d_model).
        projection: Before the softmax, (target_vocab_size, d_model).

    Returns:
        The weights under our names, and the fields of the configuration that say so.
    """
    sizes: dict[str, Any] = {"vocab_size": len(source), "decoder_vocab_size": None}
    if not _same(target, projection):
        if len(source) != len(target):
            sizes["decoder_vocab_size"] = len(target)
        # Ours are three matrices, also where two of theirs are one in memory.
        shared = source.data_ptr()
        target, projection = (
            each.clone() if each.data_ptr() == shared else each for each in (target, projection)
        )
        matrices = {SOURCE: source, TARGET: target, PROJECTION: projection}
        return matrices, {"tie_word_embeddings": False, **sizes}
    if _same(source, target):
        return {SHARED: source}, {"tie_word_embeddings": True, **sizes}
    sizes["decoder_vocab_size"] = len(target)
    return {SOURCE: source, TARGET: target}, {"tie_word_embeddings": True, **sizes}


def _same(one: Tensor, other: Tensor) -> bool:
    # Tensors that share memory need no comparison, which reads all of it.
    return one.shape == other.shape and (
        (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())
        or torch.equal(one, other)
    )


def interleave_halves(weights: dict[str, Tensor]) -> None:
    """Reorder the dimensions of a model whose positions are first all sines, then all cosines, so
    that they alternate, as ours do.

    A permutation of d_model commutes with layer norms, dropout and residual sums, and the matrices
    on either side absorb it. It happens in place: a large model is in memory only once.

    Args:
        weights: Under our names.
    """
    _permute(weights, interleaved)


def separate_halves(weights: dict[str, Tensor]) -> None:
    """The inverse of `interleave_halves`."""
    _permute(weights, separated)


def _permute(weights: dict[str, Tensor], order: Callable[[int], Tensor]) -> None:
    done = set()
    for name, tensor in tqdm(weights.items(), desc="Permuting d_model", leave=False, disable=None):
        if re.search(r"(out_proj|fc2|layer_norm)\.(weight|bias)$", name):
            axis = 0
        elif re.search(
            r"(shared|embed_tokens|embed_positions|lm_head|[qkv]_proj|fc1)\.weight$", name
        ):
            axis = 1
        else:
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in done:  # two names of one tensor
            done.add(place)
            tensor.copy_(tensor.index_select(axis, order(tensor.shape[axis])))


def interleaved(d_model: int) -> Tensor:
    """Our columns in a toolkit that has the sines first: 0, d/2, 1, d/2 + 1, ..."""
    return torch.arange(d_model).view(2, -1).T.flatten()


def separated(d_model: int) -> Tensor:
    """The inverse of `interleaved`: 0, 2, ..., 1, 3, ..."""
    return torch.arange(d_model).view(-1, 2).T.flatten()


def fold_embedding_scale(weights: dict[str, Tensor], factor: float) -> None:
    """Multiply the embeddings on input by `factor`, and the last layer norm by its inverse where
    the projection is one of them. The logits stay the same: they are linear in that layer norm's
    output, which nothing else reads.

    Args:
        weights: Under our names.
        factor: Their scale over ours, sqrt(d_model).
    """
    for name in (SHARED, SOURCE, TARGET):
        if name in weights:
            weights[name] = weights[name] * factor
    if PROJECTION not in weights:
        norm = "model.decoder.layer_norm"
        if f"{norm}.weight" not in weights:
            layers = (re.match(r"model\.decoder\.layers\.(\d+)", name) for name in weights)
            last = max(int(match[1]) for match in layers if match)
            norm = f"model.decoder.layers.{last}.ffn_layer_norm"
        for part in ("weight", "bias"):
            weights[f"{norm}.{part}"] = weights[f"{norm}.{part}"] / factor


def split_fused(name: str, fused: Tensor, prefix: str) -> dict[str, Tensor]:
    """The thirds of a projection that holds queries, keys and values, in this order.

    Args:
        name: "weight" or "bias".
        fused: (3 d_model, d_model) or (3 d_model).
        prefix: Our name of the attention, such as "model.encoder.layers.0.self_attn".
    """
    parts = zip("qkv", fused.chunk(3), strict=True)
    return {f"{prefix}.{part}_proj.{name}": tensor for part, tensor in parts}


def add_rows(weights: dict[str, Tensor], side: str, number: int, copy_of: int | None = None) -> int:
    """Append tokens to a vocabulary; no translation contains them.

    Args:
        weights: Under our names. With one matrix for all, `side` makes no difference.
        side: "source" or "target".
        number: How many.
        copy_of: The token whose embedding they get. None: their embeddings are zero.

    Returns:
        The id of the first.
    """
    matrix = matrix_of(weights, side)
    old = weights[matrix]
    row = torch.zeros_like(old[0]) if copy_of is None else old[copy_of]
    weights[matrix] = torch.cat([old, row.expand(number, -1)])
    if matrix != SOURCE:
        if PROJECTION in weights:
            projection = weights[PROJECTION]
            weights[PROJECTION] = torch.cat(
                [projection, projection.new_zeros(number, old.shape[1])]
            )
        bias = weights.get(PROJECTION_BIAS, old.new_zeros(len(old)))
        weights[PROJECTION_BIAS] = torch.cat([bias, bias.new_full((number,), SUPPRESSED)])
    return len(old)


def matrix_of(weights: Mapping[str, Tensor], side: str) -> str:
    """Our name of the embedding of "source" or "target"."""
    return SHARED if SHARED in weights else SOURCE if side == "source" else TARGET


def expect_size(place: str | Path, vocab: Mapping[str, int], size: int) -> None:
    """Check that vocabulary and embedding have the same size, except for rows that fill up a
    multiple of 8."""
    found = len(vocab)
    is_filled_up = size % 8 == 0 and 0 < size - found <= max(8, size // 10)
    if found != size and not is_filled_up:
        raise ValueError(f"{place}: {found} tokens: expected {size}, the rows of the embedding")


# ---------------------------------------------------------------- Saving


def empty_model(config: VanillaTransformerConfig) -> VanillaTransformerForConditionalGeneration:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config)


def save(conversion: Conversion, output_dir: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Write weights, configuration, code, generation config, tokenizer and model card.

    Raises:
        FileExistsError: The folder is in use.
        ValueError: The weights don't fit the configuration.
    """
    output = expect_unused(output_dir)
    conversion.expect_fit()
    model = empty_model(conversion.config).to(next(iter(conversion.weights.values())).dtype)
    model.generation_config = generation_config(conversion)
    conversion.tokenizer.save_pretrained(output)
    model.save_pretrained(output, state_dict=conversion.weights, max_shard_size=max_shard_size)
    _keep_original(conversion, output / ORIGINAL)
    model_card(conversion, output).save(output / "README.md")
    return output


def _keep_original(conversion: Conversion, folder: Path) -> None:
    folder.mkdir()
    values = {**conversion.origin, **conversion.record, "sources": conversion.sources}
    record = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    (folder / RECORD_NAME).write_text(record, encoding="utf-8")
    if conversion.leftovers:
        leftovers = {name: each.clone() for name, each in conversion.leftovers.items()}
        save_file(leftovers, folder / LEFTOVERS_NAME)
    for file in conversion.files:
        shutil.copyfile(file, folder / file.name)


def read_record(model_folder: Path) -> dict[str, Any]:
    """What `save` recorded of the checkpoint that a model comes from.

    Raises:
        FileNotFoundError: The model was not converted.
    """
    path = model_folder / ORIGINAL / RECORD_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the record of a conversion, there is none")
    return json.loads(path.read_text(encoding="utf-8"))


def restore(model_folder: Path, halves: bool) -> dict[str, Tensor]:
    """The tensors of the original checkpoint, in its order, from a converted model, which may have
    been trained since.

    Args:
        halves: Undo `interleave_halves`.

    Raises:
        ValueError: The conversion changed the tensors in a way that can't be undone.
    """
    record = read_record(model_folder)
    if not record["sources"]:
        raise ValueError(
            f"{model_folder}: a {record['format']} checkpoint of this kind can't be restored, "
            "because the conversion changed its tensors"
        )
    weights = dict(read_transformers_weights(model_folder).tensors)
    if halves:
        separate_halves(weights)
    leftovers = {}
    if (model_folder / ORIGINAL / LEFTOVERS_NAME).is_file():
        leftovers = load_file(model_folder / ORIGINAL / LEFTOVERS_NAME)
    weights |= {f"original:{name}": each for name, each in leftovers.items()}
    placed = {part.partition("[:")[0] for parts in record["sources"].values() for part in parts}
    for name in weights:
        if name.endswith("embed_positions.weight") and name not in placed:
            logger.warning(
                "%s: this %s checkpoint has no place for %s: if training has changed it, its "
                "scores will differ",
                model_folder, record["format"], name,
            )  # fmt: skip
    bias = weights.get(PROJECTION_BIAS)
    if bias is not None and PROJECTION_BIAS not in placed:
        largest = bias[bias > SUPPRESSED / 2].abs().max().item()
        if largest > 0:
            logger.warning(
                "%s: training has changed the biases of the output by up to %.2g, which this %s "
                "checkpoint has no place for: its scores will differ",
                model_folder, largest, record["format"],
            )  # fmt: skip

    def part(name: str) -> Tensor:
        name, _, rows = name.partition("[:")
        return weights[name][: int(rows[:-1])] if rows else weights[name]

    return {
        name: part(ours[0]) if len(ours) == 1 else torch.cat([part(each) for each in ours])
        for name, ours in record["sources"].items()
    }


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Save tensors of which several may be one in memory, as in a file of transformers."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        whole[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(whole, path, metadata={"format": "pt"})


def copy_original_files(model_folder: Path, output: Path) -> None:
    """Vocabularies and the like."""
    for file in (model_folder / ORIGINAL).iterdir():
        if file.name not in (RECORD_NAME, LEFTOVERS_NAME):
            shutil.copyfile(file, output / file.name)


def generation_config(conversion: Conversion) -> GenerationConfig:
    """The model's special tokens, and what the toolkit's own search does."""
    config = conversion.config
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    fields = {name: getattr(config, name) for name in tokens} | conversion.generation
    if fields.get("num_beams") == 1:  # transformers saves no options of beams with it
        beams = {name: fields.pop(name) for name in BEAM_OPTIONS if name in fields}
        options = ", ".join(f"{name}={value!r}" for name, value in beams.items())
        if options:
            logger.warning("searches with one beam; to search with more, also set %s", options)
    generation = GenerationConfig(**fields)
    generation._from_model_config = False  # or `length_penalty_type` is lost on loading
    return generation


# A code of ISO 639, perhaps with a script or region, and not the name of a side.
LANGUAGE = r"(?!src|trg|tgt)[a-z]{2,3}([-_]\w+)*"

CARD = """---
{{ card_data }}
---

# {{ name }}

Converted from {{ toolkit }} with vanilla_transformer. The weights are the original ones;
{{ licence }}.

```python
from transformers import pipeline

translate = pipeline("translation", model="{{ place }}", trust_remote_code=True)
```

After `import vanilla_transformer`, `trust_remote_code` is not needed.

{{ rows }}
"""


def model_card(conversion: Conversion, output: Path) -> ModelCard:
    """Where the weights come from, under which licence, and the languages if they have codes."""
    origin, languages = conversion.origin, conversion.languages
    known = [code for code in languages if code and re.fullmatch(LANGUAGE, code)]
    license = origin.get("license")
    rows = [f"- {name}: {value}" for name, value in origin.items() if value]
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="translation",
            tags=[conversion.config.model_type],
            license=license,
            **language_codes(known if len(known) == len(languages) else ()),
        ),
        template_str=CARD,
        name=output.resolve().name,
        place=output,
        toolkit=" ".join(filter(None, (origin.get("toolkit"), origin.get("version")))),
        licence=f"their licence is {license}"
        if license
        else "the checkpoint names no licence for them, so ask its owners",
        rows="\n".join(rows),
    )
