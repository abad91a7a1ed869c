import os
from pathlib import Path

import pytest
import torch

# Set before transformers and datasets are imported: no test may reach a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization import train_tokenizer

REPOSITORY = Path(__file__).parents[1]

# Small, and with every size different, so that no two can be taken for each other.
SMALL = {
    "vocab_size": 50,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
}


def small_config(**overrides):
    return VanillaTransformerConfig(**{**SMALL, **overrides})


def random_ids(rows, length, vocab_size=SMALL["vocab_size"], seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (rows, length), generator=generator)


# Sentence pairs for a trainer: 6 batches of 2 make an epoch.
PAIRS = [{"input_ids": [5, 6, 7, 2], "labels": [8, 9, 2]}, {"input_ids": [9, 2], "labels": [2]}] * 6


def small_trainer(folder, tokenizer, *callbacks, config=None, **options):
    """A trainer of 8 quiet steps with a checkpoint after every other one, over `PAIRS`."""
    from datasets import Dataset

    from vanilla_transformer.arguments import TranslationTrainingArguments
    from vanilla_transformer.training import make_trainer

    torch.manual_seed(0)
    config = small_config(vocab_size=len(tokenizer), **(config or {}))
    defaults = {
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TranslationTrainingArguments(str(folder), **{**defaults, **options})
    data = Dataset.from_list(PAIRS)
    model = VanillaTransformerForConditionalGeneration(config)
    trainer = make_trainer(model, tokenizer, arguments, {"train": data, "validation": data})
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config()).eval()


@pytest.fixture(scope="session")
def tokenizer():
    texts = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"] * 3
    return train_tokenizer(texts, 300, show_progress=False)


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A folder as training leaves it: a small random model and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    config = small_config(vocab_size=len(tokenizer))
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """The trace that a payload leaves; a test in which there is one fails."""
    trace = tmp_path / "mark"
    yield trace
    assert not trace.exists(), "a payload was executed"
