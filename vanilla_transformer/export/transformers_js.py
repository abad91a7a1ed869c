"""transformers.js: a folder that `@huggingface/transformers` opens, with a web page that translates
in the browser."""

import json
import logging
import os
import shutil
from importlib.resources import as_file, files
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..conversion.saving import BEAM_OPTIONS
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import LIMITS
from ..model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from . import onnx_graphs
from .source import read_model

QUANTIZATIONS = onnx_graphs.QUANTIZATIONS
# For each quantization, transformers.js's name of the type and its suffix of file names.
TYPES = {None: ("fp32", ""), "int8": ("q8", "_quantized"), "float16": ("fp16", "_fp16")}
# Files from npm packages for the page: the library, and ONNX Runtime for browsers.
SCRIPTS = (
    "@huggingface/transformers/dist/transformers.min.js",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
)
# Options that version 4.3 does not implement, those for sampling last.
IGNORED = (
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty", "max_time", "sequence_bias", "stop_strings",
    "watermarking_config", "epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_p", "typical_p",
)  # fmt: skip
INSTALL = "npm install --ignore-scripts @huggingface/transformers@4"

logger = logging.getLogger(__name__)


def write(model_folder: Path, output: Path, quantization: str | None) -> None:
    """Write graphs, configurations, tokenizer and page into an empty folder.

    Args:
        quantization: One of `QUANTIZATIONS`. "int8" suits browsers.

    Raises:
        ValueError: Source and target have different tokenizers, or the tokenizer is a slow one,
            which transformers.js can't open.
    """
    model, tokenizer = read_model(model_folder)
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        raise ValueError(
            f"{model_folder}: tokenizer {type(tokenizer).__name__}: expected one vocabulary for "
            "source and target, transformers.js has one tokenizer for both"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{model_folder}: tokenizer {type(tokenizer).__name__}: expected a fast tokenizer, "
            "transformers.js reads tokenizer.json"
        )
    dtype, suffix = TYPES[quantization]
    graphs = output / "onnx"
    graphs.mkdir()
    names = (f"encoder_model{suffix}.onnx", f"decoder_model_merged{suffix}.onnx")
    encoder, decoder = (graphs / name for name in names)
    onnx_graphs.write_graphs(model, encoder, decoder, quantization)
    _write_json(output / "config.json", config_of(model.config, model_folder.name, dtype))
    generation = generation_config_of(model.generation_config)
    _write_json(output / "generation_config.json", generation)
    save_tokenizer(tokenizer, output)
    with as_file(files(__package__) / "page") as page:
        shutil.copytree(page, output, dirs_exist_ok=True)
    copy_scripts(output)


def config_of(config: VanillaTransformerConfig, name: str, dtype: str) -> dict[str, object]:
    """The fields that transformers.js reads. It chooses its class by `model_type`; the one for
    "marian" runs any encoder and decoder graph."""
    fields = [
        f"{s}_{size}" for s in ("encoder", "decoder") for size in ("layers", "attention_heads")
    ]
    fields += ["d_model", "vocab_size", "is_encoder_decoder"]
    fields += ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"]
    if config.position_encoding == "learned":
        fields.append("max_position_embeddings")  # the page's limit, so not for sinusoids
    # Of both prefixes, our pipeline takes the task's; its pipeline would take both.
    of_task = (getattr(config, "task_specific_params", None) or {}).get("translation") or {}
    prefix = of_task.get("prefix", getattr(config, "prefix", None))
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "_name_or_path": name,
        **{field: getattr(config, field) for field in fields},
        **({"prefix": prefix} if prefix else {}),
        "transformers.js_config": {"dtype": dtype},
    }


def generation_config_of(config: GenerationConfig) -> dict[str, object]:
    """The model's generation config, without beam search and `IGNORED`, which transformers.js
    silently ignores. Its pipelines also ignore limits of length, which the page reads."""
    beams = {"num_return_sequences", *BEAM_OPTIONS}
    fields = config.to_diff_dict()
    if ignored := [name for name in IGNORED if name in fields]:
        logger.warning("left out, because transformers.js lacks it: %s", ", ".join(ignored))
    if limits := [name for name in LIMITS if name in fields]:
        logger.warning(
            "the page reads %s, but transformers.js does not: elsewhere, pass max_new_tokens",
            ", ".join(limits),
        )
    kept = {name: value for name, value in fields.items() if name not in beams.union(ignored)}
    return {**kept, "num_beams": 1}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Save a fast tokenizer. For a vocabulary of words, transformers.js reads the unknown token
    from the configuration, which a converted tokenizer lacks. `model_max_length` is dropped, as its
    pipelines would cut a source there, with its `</s>`."""
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] == "WordLevel":
        tokenizer.unk_token = model["unk_token"]
    if model["type"] == "Unigram" and model["byte_fallback"]:
        logger.warning(
            "transformers.js reads characters outside the vocabulary as %s: with a unigram "
            "tokenizer, it can't spell them in bytes",
            model["vocab"][model["unk_id"]][0],
        )
    tokenizer.save_pretrained(output)


def copy_scripts(output: Path) -> None:
    """Copy the page's scripts from npm packages: in a folder of `NODE_PATH`, or in `node_modules`
    in the working directory. If there are none, warn and say what to install."""
    entries = [*os.environ.get("NODE_PATH", "").split(os.pathsep), "node_modules"]
    folders = [Path(entry) for entry in entries if entry]
    nested = [folder / "@huggingface/transformers/node_modules" for folder in folders]
    paths = []
    for script in SCRIPTS:
        paths += [path for folder in nested + folders if (path := folder / script).is_file()][:1]
    if len(paths) < len(SCRIPTS):
        logger.warning(
            "%s: works in Node, but the page lacks scripts of npm's packages: run `%s` and export "
            "again in this directory",
            output.name, INSTALL,
        )  # fmt: skip
        return
    for path in paths:
        shutil.copy(path, output)


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
