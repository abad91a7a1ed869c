import pytest
from conversion.models import random_model

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.export import export


@pytest.fixture
def saved(tokenizer, tmp_path):
    """Saves a random model with these fields of its configuration, and the tokenizer of the tests:
    the model and its folder."""

    def save(tokenizer=tokenizer, **config):
        model = random_model(**{"vocab_size": len(tokenizer), **config})
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"

    return save


@pytest.fixture(scope="session")
def two_sided(tokenizer):
    """A tokenizer with a vocabulary for each side."""
    other = train_tokenizer(["a train by the sea", "ein Zug am Meer"] * 3, 280, show_progress=False)
    return VanillaTransformerTokenizer(
        tokenizer_object=other.backend_tokenizer,
        target_tokenizer_object=tokenizer.backend_tokenizer,
        **tokenizer.special_tokens_map,
    )


@pytest.fixture
def exported(saved, tmp_path):
    """The same, and the folder to which it is exported."""

    def make(to, quantization=None, **config):
        model, folder = saved(**config)
        return model, export(folder, tmp_path / "exported", to, quantization)

    return make
