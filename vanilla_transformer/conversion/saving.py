"""Saves converted models, and restores the tensors of the original checkpoint from them."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from ..data.paths import expect_unused, staged
from ..inference.derived_cards import language_codes
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.loss import SUPPRESSED
from .core import Conversion, empty_model, read_transformers_weights
from .weights import PROJECTION_BIAS, matrix_of, separate_halves

logger = logging.getLogger(__name__)

# A subfolder of the converted model with files that only converting back needs.
ORIGINAL, RECORD_NAME, LEFTOVERS_NAME = "original", "conversion.json", "leftovers.safetensors"
# Fields that a checkpoint's own options tell, which are written back as they were.
ARCHITECTURE = (
    "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "head_dim", "value_head_dim", "activation_function", "norm_position", "decoder_norm_position",
    "final_layer_norm", "embedding_layer_norm", "layer_norm_eps", "scale_embedding",
    "position_encoding", "position_offset", "sinusoid_frequencies",
)  # fmt: skip
# Options that have an effect only with several beams.
BEAM_OPTIONS = ("length_penalty", "length_penalty_type", "early_stopping")


def save(conversion: Conversion, output_dir: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Write weights, configuration, code, generation config, tokenizer and model card. A failure
    leaves nothing behind.

    Raises:
        FileExistsError: The folder is in use.
        ValueError: The weights don't fit the configuration, or two kept files have one name.
    """
    output = expect_unused(output_dir)
    conversion.expect_fit()
    _expect_distinct_names(conversion.files)
    model = empty_model(conversion.config).to(next(iter(conversion.weights.values())).dtype)
    model.generation_config = generation_config(conversion)
    with staged(output) as written:
        conversion.tokenizer.save_pretrained(written)
        model.save_pretrained(written, state_dict=conversion.weights, max_shard_size=max_shard_size)
        _keep_original(conversion, written / ORIGINAL)
        model_card(conversion, output).save(written / "README.md")
    return output


def _expect_distinct_names(files: list[Path]) -> None:
    """Check that no file would replace another one in the folder that keeps them."""
    first: dict[str, Path] = {}
    for file in files:
        other = first.setdefault(file.name, file)
        if file.read_bytes() != other.read_bytes():
            raise ValueError(
                f"{other} and {file}: expected files with different names, as one folder keeps "
                "both to convert back"
            )


def _keep_original(conversion: Conversion, folder: Path) -> None:
    folder.mkdir()
    config = {name: getattr(conversion.config, name) for name in ARCHITECTURE}
    values = {**conversion.origin, **conversion.record}
    values |= {"config": config, "sources": conversion.sources}
    record = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    (folder / RECORD_NAME).write_text(record, encoding="utf-8")
    if conversion.leftovers:
        leftovers = {name: each.clone() for name, each in conversion.leftovers.items()}
        save_file(leftovers, folder / LEFTOVERS_NAME)
    for file in conversion.files:
        shutil.copyfile(file, folder / file.name)


def read_record(model_folder: Path) -> dict[str, Any]:
    """The record that `save` wrote about the checkpoint that a model comes from.

    Raises:
        FileNotFoundError: The model was not converted.
    """
    path = model_folder / ORIGINAL / RECORD_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the record of a conversion, there is none")
    return json.loads(path.read_text(encoding="utf-8"))


def restore(model_folder: Path, halves: bool) -> dict[str, Tensor]:
    """The tensors of the original checkpoint, in its order, from a converted model, which may have
    been trained meanwhile.

    Args:
        halves: Undo `interleave_halves`.

    Raises:
        ValueError: The conversion changed the tensors in a way that can't be undone, or the
            configuration has changed since.
    """
    record = read_record(model_folder)
    if not record["sources"]:
        raise ValueError(
            f"{model_folder}: a {record['format']} checkpoint of this kind can't be restored, "
            "because the conversion changed its tensors"
        )
    _expect_same_architecture(model_folder, record)
    weights = dict(read_transformers_weights(model_folder).tensors)
    if halves:
        separate_halves(weights)
    leftovers = {}
    if (model_folder / ORIGINAL / LEFTOVERS_NAME).is_file():
        leftovers = load_file(model_folder / ORIGINAL / LEFTOVERS_NAME)
    weights |= {f"original:{name}": each for name, each in leftovers.items()}
    _report_changes(model_folder, record, weights)

    def part(name: str) -> Tensor:
        name, _, rows = name.partition("[:")
        return weights[name][: int(rows[:-1])] if rows else weights[name]

    return {
        name: part(ours[0]) if len(ours) == 1 else torch.cat([part(each) for each in ours])
        for name, ours in record["sources"].items()
    }


def _expect_same_architecture(model_folder: Path, record: dict[str, Any]) -> None:
    """Raise a ValueError if heads were pruned, or `config_overrides` changed a field."""
    config = VanillaTransformerConfig.from_pretrained(model_folder)
    for name, before in record.get("config", {}).items():
        if (now := getattr(config, name)) != before:
            raise ValueError(
                f"{model_folder}: {name}={now!r}: expected {before!r}, as when it was converted, "
                f"for a {record['format']} checkpoint with the original options"
            )


def _report_changes(model_folder: Path, record: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Log what training may have changed and the checkpoint has no place for."""
    parts = [part.partition("[:") for each in record["sources"].values() for part in each]
    placed = {name for name, _, _ in parts}
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
    source = matrix_of(weights, "source")
    rows = {int(rest[:-1]) for name, _, rest in parts if name == source and rest}
    clones = weights[source][max(rows, default=len(weights[source])) :]
    if len(clones) and not _are_copies(clones, weights[source][: -len(clones)]):
        logger.warning(
            "%s: training has changed the embeddings of <unk> or of pieces that are <unk> in this "
            "%s checkpoint: scores of texts with such pieces will differ",
            model_folder, record["format"],
        )  # fmt: skip


def _are_copies(rows: Tensor, others: Tensor) -> bool:
    """Whether these rows all equal one of the others."""
    first = rows[0]
    return bool((rows == first).all() and (others == first).all(1).any())


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Save tensors, of which several may share memory, in the format of transformers."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        whole[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(whole, path, metadata={"format": "pt"})


def copy_original_files(model_folder: Path, output: Path) -> None:
    """Copy vocabularies and the like."""
    for file in (model_folder / ORIGINAL).iterdir():
        if file.name not in (RECORD_NAME, LEFTOVERS_NAME):
            shutil.copyfile(file, output / file.name)


def generation_config(conversion: Conversion) -> GenerationConfig:
    """The model's special tokens, and the options of the toolkit's own search."""
    config = conversion.config
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    fields = {name: getattr(config, name) for name in tokens} | conversion.generation
    if fields.get("num_beams") == 1:  # with which transformers saves no options of beams
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
    """The card: the origin of the weights, their licence, and the languages if they have codes."""
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
