"""CTranslate2, a compiled inference engine, as a peer of `speed.py` and `gpu`.

It gets the weights of a MarianMTModel, an architecture that it supports.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from scripts.benchmarks.peers import EOS, PAD, PEERS, Size

COMPUTE_TYPES = {"ctranslate2": "float32", "ctranslate2, int8": "int8"}  # the peers of `speed.py`
INSTALLED = importlib.util.find_spec("ctranslate2") is not None


def make_translator(size: Size, compute_type: str, threads: int, device: str = "cpu") -> Any:
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    spec = MarianMTLoader().get_model_spec(PEERS["marian"](size))
    # The loader drops the last row, Marian's padding token.
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(4, size.vocab_size - 1))]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return ctranslate2.Translator(
            folder,
            device=device,
            compute_type=compute_type,
            intra_threads=threads,
            inter_threads=1,
        )


def generation(
    translator: Any, ids: torch.Tensor, beams: int, new_tokens: int
) -> Callable[[], None]:
    """A function that decodes `new_tokens` tokens for each row of padded ids."""
    sources = [[str(token) for token in row if token not in (PAD, EOS)] for row in ids.tolist()]

    def run() -> None:
        results = translator.translate_batch(
            sources,
            beam_size=beams,
            max_decoding_length=new_tokens,
            min_decoding_length=new_tokens,
        )
        assert {len(result.hypotheses[0]) for result in results} == {new_tokens}

    return run
