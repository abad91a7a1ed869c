"""Options of commands that load a model for inference."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass
class LoadingArguments:
    """How to load a model for inference.

    Raises:
        ValueError: The device or the dtype does not exist.
    """

    device: str | None = field(
        default=None,
        metadata={"help": "cpu, cuda, cuda:1, ... Default: the accelerator, if there is one."},
    )
    dtype: str = field(
        default="auto",
        metadata={"help": f"One of {', '.join(DTYPES)}. Default: the dtype of the checkpoint."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention implementation: eager, sdpa, ..."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow code from the model repository to run."}
    )

    def __post_init__(self) -> None:
        devices = ["cpu"]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            numbers = range(torch.accelerator.device_count())
            kind = accelerator.type
            devices = [kind, *(f"{kind}:{number}" for number in numbers), "cpu"]
        if self.device is None:
            self.device = devices[0]
        if self.device not in devices:
            raise ValueError(f"device={self.device!r}: expected one of {', '.join(devices)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")

    def load(self, name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a sequence-to-sequence model and its tokenizer from a folder or the Hub."""
        remote = {"trust_remote_code": self.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(name, **remote)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            name, dtype=self.dtype, attn_implementation=self.attn_implementation, **remote
        )
        return model.to(self.device), tokenizer
