"""Measured speeds of training, in a JSON file, which `vanilla-transformer plan` extrapolates."""

import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from ..data.bpe_dropout import BPEDropoutDataset
from ..data.token_batches import count_tokens
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .distributed import uses_fsdp

# If no measurement has the same values of these, a plan uses the nearest one.
BRIDGED = ("vocabulary", "batch", "accumulation", "processes", "source_ratio", "target_length")


def measurement_key(model: PreTrainedModel, args: TrainingArguments, text: Any) -> dict[str, Any]:
    """What the speed depends on: device, model, precision, batches, options and text. `batch` is
    the batch of one device; an update has `accumulation` of them on each of `processes`.
    `source_ratio` is the number of source tokens per target token in `text`, the tokenized training
    data: speed is in target tokens, but sources take time too. `target_length` is the mean number
    of target tokens in a pair, as a power of two: a batch of short pairs has few tokens."""
    config = model.config
    source, target = (int(lengths.sum()) for lengths in count_tokens(text))
    shape = f"{config.model_type}, {model.num_parameters():,} parameters"
    if isinstance(config, VanillaTransformerConfig):
        layers = f"{config.encoder_layers}+{config.decoder_layers}"
        shape = f"d_model {config.d_model}, {layers} layers, d_ff {config.encoder_ffn_dim}"
        if config.decoder_ffn_dim != config.encoder_ffn_dim:
            shape += f"+{config.decoder_ffn_dim}"
    pairs = int(args.per_device_train_batch_size or 0)
    batch = getattr(args, "max_tokens", None) or -pairs  # in tokens, or in pairs
    strategy = args.train_sampling_strategy
    options = {
        "R-Drop": getattr(args, "r_drop_alpha", 0.0),
        "gradient checkpointing": args.gradient_checkpointing,
        "torch.compile": args.torch_compile,
        "BPE-dropout": isinstance(text, BPEDropoutDataset),
        "FSDP": uses_fsdp(),
        "DeepSpeed": args.deepspeed_plugin is not None,
        f"{strategy} batches": batch < 0 and strategy != "random",  # less padding by length
        args.optim.value: args.optim != TrainingArguments.optim,
    }
    return {
        "device": device_name(args.device),
        "shape": shape,
        "layer_weights": layer_weights(model),
        "heads": [
            getattr(config, name, None)
            for name in ("num_attention_heads", "decoder_attention_heads")
        ],
        "vocabulary": getattr(config, "target_vocab_size", config.vocab_size),
        "precision": precision(args),
        "batch": batch,
        "accumulation": args.gradient_accumulation_steps,
        "processes": args.world_size,
        "source_ratio": max(0.1, round(source / target, 1)),
        "target_length": 2 ** round(math.log2(target / len(text))),
        "attention": config._attn_implementation,
        "options": [name for name, used in options.items() if used],
    }


def layer_weights(model: PreTrainedModel) -> int:
    """The number of weights besides embeddings and the output projection."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = {weight for table in tables for weight in table.parameters()}
    if (projection := model.get_output_embeddings()) is not None:
        others |= {*projection.parameters()}
    return sum(weight.numel() for weight in model.parameters() if weight not in others)


def precision(args: TrainingArguments) -> str:
    """The precision of products; with float32, also what torch may round to."""
    if args.bf16:
        return "bf16"
    if args.fp16:
        return "fp16"
    # `get_float32_matmul_precision` raises an error after `--tf32`
    backend = torch.backends.cuda if args.device.type == "cuda" else torch.backends.mkldnn
    rounded = {"tf32": " (high)", "bf16": " (medium)"}  # as in torch.set_float32_matmul_precision
    return "fp32" + rounded.get(backend.matmul.fp32_precision, "")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with its vector instructions and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {processor} {instructions}, {torch.get_num_threads()} threads"


def read_speeds(path: str | Path | None) -> list[dict[str, Any]]:
    """The measurements of a file: none if it does not exist. Each has the fields of its key,
    `target_tokens_per_second` of a device and `gib`, the peak memory in GiB. Older files lack
    `layer_weights`, `heads`, `accumulation`, `processes`, `source_ratio` and `target_length`.
    Without `accumulation`, `batch` is that of an update.

    Raises:
        ValueError: The file does not hold a list of measurements.
    """
    if path is None or not Path(path).exists():
        return []
    wanted = f"speeds={str(path)!r}: expected a list of measurements in JSON"
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from error
    is_list = isinstance(rows, list)
    if not is_list or not all(isinstance(row, dict) and "device" in row for row in rows):
        raise ValueError(wanted)
    return rows


def find_speed(rows: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any] | None:
    """The measurement with this key, if there is one."""
    return next((row for row in rows if all(row.get(name) == key[name] for name in key)), None)


def nearest_speed(
    rows: list[dict[str, Any]], key: dict[str, Any], model: PreTrainedModel
) -> dict[str, Any] | None:
    """The measurement of this device, model, precision, attention and options, also with batches of
    tokens or of pairs, whose `BRIDGED` values are nearest; None if there is none. Its speed is
    scaled to the weights that `model` has with its own vocabulary."""
    rows = [row for row in rows if _is_comparable(row, key)]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: _distance(row, key))
    weights = model.num_parameters()
    more = (nearest["vocabulary"] - key["vocabulary"]) * model.get_output_embeddings().in_features
    speed = nearest["target_tokens_per_second"] * (weights + more) / weights
    return {**nearest, "target_tokens_per_second": speed}


def _is_comparable(row: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether all values outside `BRIDGED` are equal, or missing in the row of an older file."""
    same = [name for name in key if name not in BRIDGED]
    equal = all(row.get(name, key[name]) == key[name] for name in same)
    return equal and row["batch"] * key["batch"] > 0


def _distance(row: dict[str, Any], key: dict[str, Any]) -> tuple[float, int]:
    """How far away a measurement is: first by ratios of values, then by how many it lacks. In an
    older file, `batch` is that of an update, on one device."""
    whole = {**key, "processes": 1, **row}
    if "accumulation" not in row:
        whole["batch"] /= key["accumulation"]
    ratios = sum(abs(math.log(whole[name] / key[name])) for name in BRIDGED)
    return ratios, sum(name not in row for name in key)


def write_speeds(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write measurements to a file, creating the folder if necessary."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
