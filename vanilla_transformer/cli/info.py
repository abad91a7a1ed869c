"""Print versions, devices and optional packages, for a bug report.

vanilla-transformer info
"""

import platform
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.metadata import PackageNotFoundError, version

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
)

from .. import VanillaTransformerConfig, __version__

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors")
OPTIONAL = (
    "accelerate", "argcomplete", "ctranslate2", "datasets", "deepspeed", "fastapi", "flash-attn",
    "gradio", "matplotlib", "onnx", "onnxruntime", "peft", "rapidfuzz", "ray", "sacrebleu",
    "sacremoses", "sentencepiece", "tensorboard",
)  # fmt: skip
MAPPINGS = {
    "AutoModel": MODEL_MAPPING,
    "AutoModelForSeq2SeqLM": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForTextEncoding": MODEL_FOR_TEXT_ENCODING_MAPPING,
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"vanilla_transformer: {__version__}")
    print(f"Platform: {platform.platform()}")
    print(f"Python: {platform.python_version()}")
    for package in (*REQUIRED, *OPTIONAL):
        print(f"{package}: {installed_version(package)}")
    print(f"Devices: {', '.join(devices())}")
    for name, models in MAPPINGS.items():
        print(f"{name}: {models[VanillaTransformerConfig].__name__}")


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def devices() -> list[str]:
    """The accelerators that torch finds, and the CPU."""
    cpu = f"cpu ({torch.get_num_threads()} threads)"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [cpu]
    count = range(torch.accelerator.device_count())
    names = getattr(torch, accelerator.type)
    name_of = getattr(names, "get_device_name", lambda _: accelerator.type)
    return [*(f"{accelerator.type}:{number} ({name_of(number)})" for number in count), cpu]
