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
