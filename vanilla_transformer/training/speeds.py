"""Measured speeds of training, in a JSON file: what `vanilla-transformer plan` extrapolates."""

import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from ..model.configuration_vanilla_transformer import VanillaTransformerConfig


def measurement_key(model: PreTrainedModel, args: TrainingArguments) -> dict[str, Any]:
    """What the speed depends on: device, model, precision, batch and options."""
    config = model.config
    shape = f"{config.model_type}, {model.num_parameters():,} parameters"
    if isinstance(config, VanillaTransformerConfig):
        layers = f"{config.encoder_layers}+{config.decoder_layers}"
        shape = f"d_model {config.d_model}, {layers} layers, d_ff {config.encoder_ffn_dim}"
    pairs = int(args.per_device_train_batch_size or 0)
    batch = getattr(args, "max_tokens", None) or -pairs  # in tokens, or in pairs
    options = {
        "R-Drop": getattr(args, "r_drop_alpha", 0.0),
        "gradient checkpointing": args.gradient_checkpointing,
        "torch.compile": args.torch_compile,
    }
    return {
        "device": device_name(args.device),
        "shape": shape,
        "vocabulary": getattr(config, "target_vocab_size", config.vocab_size),
        "precision": precision(args),
        "batch": batch * args.gradient_accumulation_steps,
        "attention": config._attn_implementation,
        "options": [name for name, used in options.items() if used],
    }


def precision(args: TrainingArguments) -> str:
    """The precision of products; for float32, also what torch is allowed to round."""
    if args.bf16:
        return "bf16"
    if args.fp16:
        return "fp16"
    products = torch.get_float32_matmul_precision()
    return "fp32" if products == "highest" else f"fp32 ({products})"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with its vector instructions and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {processor} {instructions}, {torch.get_num_threads()} threads"


def read_speeds(path: str | Path | None) -> list[dict[str, Any]]:
    """The measurements of a file: none if it does not exist. Each is its key, with
    `target_tokens_per_second` of a device and `gib`, the peak memory in GiB."""
    if path is None or not Path(path).exists():
        return []
    return json.loads(Path(path).read_text(encoding="utf-8"))


def find_speed(rows: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any] | None:
    """The measurement with this key, if there is one."""
    return next((row for row in rows if all(row.get(name) == key[name] for name in key)), None)


def nearest_speed(
    rows: list[dict[str, Any]], key: dict[str, Any], model: PreTrainedModel
) -> dict[str, Any] | None:
    """The measurement of this device, shape, precision, attention and options, with batches of
    tokens or of pairs as here, whose batch and vocabulary are nearest; None if there is none. Its
    speed is scaled to the weights that `model` has with its own vocabulary."""
    same = [name for name in key if name not in ("batch", "vocabulary")]
    rows = [
        row
        for row in rows
        if all(row.get(name) == key[name] for name in same) and row["batch"] * key["batch"] > 0
    ]
    if not rows:
        return None
    nearest = min(
        rows,
        key=lambda row: sum(
            abs(math.log(row[name] / key[name])) for name in ("batch", "vocabulary")
        ),
    )
    weights = model.num_parameters()
    more = (nearest["vocabulary"] - key["vocabulary"]) * model.get_output_embeddings().in_features
    speed = nearest["target_tokens_per_second"] * (weights + more) / weights
    return {**nearest, "target_tokens_per_second": speed}


def write_speeds(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write measurements to a file, in a folder that need not exist."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
