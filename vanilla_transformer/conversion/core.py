"""What all converters share: their options, their result, and tensors that must all be read.

A format is a module with

    NAME: str
    READS: tuple[str, ...]  # the names of the options that it uses
    recognizes(path: Path) -> bool
    read(path: Path, options: ConversionOptions) -> Conversion
    load_toolkit(path: Path, options: ConversionOptions) -> Toolkit  # see toolkit.py

and, if models go back to it,

    write(model_folder: Path, output: Path) -> None
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .unpickling import load_torch
from .weights import PROJECTION_BIAS, SHARED, add_rows, matrix_of

STACKS, SIDES = ("encoder", "decoder"), ("source", "target")
# Options that name files for the tokenizer.
TOKEN_FILES = ("source_vocabulary", "target_vocabulary", "source_codes", "target_codes")


@dataclass
class ConversionOptions:
    """Information that is not in a checkpoint. Every option has a default.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: `like` is not known, or `moses` does not name two languages.
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
        default=None, help="The source's vocabulary. Default: next to the checkpoint."
    )
    target_vocabulary: str | None = HfArg(
        default=None, help="The target's vocabulary. Default: next to the checkpoint."
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
        """The codes of a side, "source" or "target". The source's are used for both if there are no
        others."""
        return getattr(self, f"{side}_codes") or self.source_codes

    def expect_no_codes(self, side: str, where: str) -> None:
        """Raise a ValueError if this side has codes of its own, but something else splits it."""
        if given := getattr(self, f"{side}_codes"):
            raise ValueError(f"{side}_codes={given!r} has no effect with {where}")

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def expect_none(self, where: str) -> None:
        """Raise a ValueError if any option is given."""
        for name, value in self.given().items():
            raise ValueError(f"{name}={value!r} has no effect with {where}")

    def expect_only(self, names: Sequence[str], format: str) -> None:
        """Raise a ValueError if an option is given that a format does not use."""
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
        weights: Tensors by our names, in the checkpoint's own precision. Tied matrices occur once
            (see `tie`).
        tokenizer: Tokenizes text as the toolkit's own pipeline does.
        generation: Fields of the generation config.
        origin: `toolkit`, `version`, `license`, `notes`: for the model card.
        record: JSON values that the format's `write` needs to convert back.
        sources: For each tensor of the checkpoint, in order, the parts that are stacked to make it:
            our tensors, perhaps only their first rows ("lm_head.weight[:1000]"), and leftovers
            ("original:" and the checkpoint's name).
        leftovers: Tensors, under the checkpoint's names, that only converting back needs.
        files: Small files, such as vocabularies, that are kept for converting back.
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
        """Extend a vocabulary to this number of rows, if it has fewer, with copies of `<unk>` that
        no translation contains: symbols that byte-pair encoding or a unigram model may produce but
        that the toolkit's vocabulary lacks.

        Args:
            side: "source" or "target".
            rows: The number of rows of the embedding.
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
            ValueError: A tensor is missing, unknown or has the wrong shape.
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
    """The tensors of a checkpoint. It keeps track of which were read.

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
        """A tensor of this shape, in which None matches any size. Without a shape, any tensor.

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
        """The number of layers: one more than the largest number that the group in `pattern`, a
        regular expression for the start of a name, matches."""
        matches = (re.match(pattern, name) for name in self)
        return max((int(match[1]) for match in matches if match), default=-1) + 1

    def expect_all_taken(self, ignored: Sequence[str] = ()) -> None:
        """Check that every tensor was read, so that nothing is lost silently.

        Args:
            ignored: Regular expressions for whole names of tensors that no model needs.

        Raises:
            ValueError: There are tensors that were neither read nor ignored; the message names
                them.
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
    """Whether a folder has a configuration of transformers with this model type."""
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
    """The content of a file written by safetensors or `torch.save`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is incomplete, or as for `load_torch`.
    """
    if path.suffix != ".safetensors":
        return load_torch(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a complete safetensors file ({error})") from error


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    """The name after all replacements of regular expressions, in order."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def take_layers(
    tensors: Tensors, config: VanillaTransformerConfig, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Every tensor except embeddings, positions and projection, with its shape checked.

    Args:
        names: Replacements that turn our names into the checkpoint's; see `renamed`.
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


def expect_size(place: str | Path, vocab: Mapping[str, int], size: int) -> None:
    """Check that vocabulary and embedding have the same size, except for rows that pad to a
    multiple of 8."""
    found = len(vocab)
    is_filled_up = size % 8 == 0 and 0 < size - found <= max(8, size // 10)
    if found != size and not is_filled_up:
        raise ValueError(f"{place}: {found} tokens: expected {size}, the rows of the embedding")


def empty_model(config: VanillaTransformerConfig) -> VanillaTransformerForConditionalGeneration:
    """A model whose weights take no memory."""
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config)
