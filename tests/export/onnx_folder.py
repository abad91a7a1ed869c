"""A model that is exported to ONNX once for all tests, because tracing takes half a minute."""

import pytest
from conversion.models import random_model
from filelock import FileLock
from transformers import AutoModelForSeq2SeqLM

pytest.importorskip("onnxscript", reason="needs vanilla-transformer[export]")
pytest.importorskip("onnxruntime", reason="needs vanilla-transformer[export]")

from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.export import export

TEXTS = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"] * 3
# One layer is enough here; slow tests have other configurations.
CONFIG = {"encoder_layers": 1, "decoder_layers": 2, "head_dim": 8, "value_head_dim": 5}


def saved_model(folder, **config):
    """A random model in a folder, with a tokenizer."""
    tokenizer = train_tokenizer(TEXTS, 300, show_progress=False)
    model = random_model(**{"vocab_size": len(tokenizer), **config})
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def exported_model(root):
    """The model, its folder, and the folder of its export, which the first process creates."""
    root.mkdir(exist_ok=True)
    with FileLock(root / "lock"):
        if not (root / "exported").exists():
            saved_model(root / "model", **CONFIG)
            export(root / "model", root / "onnx", "onnx").rename(root / "exported")
    model = AutoModelForSeq2SeqLM.from_pretrained(root / "model").eval()
    return model, root / "model", root / "exported"
