"""A model that is exported to ONNX once for all tests of a process: tracing takes seconds."""

import functools
import tempfile
from pathlib import Path

import pytest
from conversion.models import random_model

pytest.importorskip("onnxscript", reason="needs vanilla-transformer[export]")
pytest.importorskip("onnxruntime", reason="needs vanilla-transformer[export]")

from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.export import export

TEXTS = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"] * 3
# One layer is enough for a first look; other configurations are slow tests.
CONFIG = {"encoder_layers": 1, "decoder_layers": 2, "head_dim": 8, "value_head_dim": 5}


def saved_model(folder, **config):
    """A random model in a folder, with a tokenizer."""
    tokenizer = train_tokenizer(TEXTS, 300, show_progress=False)
    model = random_model(**{"vocab_size": len(tokenizer), **config})
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@functools.cache
def onnx_folder():
    """The model, its folder, and the folder to which it is exported."""
    # kept until the process ends
    folder = Path(onnx_folder.directory.name)  # type: ignore[attr-defined]
    model = saved_model(folder / "model", **CONFIG)
    return model, folder / "model", export(folder / "model", folder / "onnx", "onnx")


onnx_folder.directory = tempfile.TemporaryDirectory()
