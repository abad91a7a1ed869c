"""Norms and neighbours of embeddings, and how much of their sum with positions is position."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from ..data.text_files import expect_several
from ..data.vocabularies import unknown_token
from ..model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .positions import position_encodings


class EmbeddingReport(NamedTuple):
    """The embeddings of a stack compared with its positions (sections 3.4 and 3.5).

    `norms`, (vocabulary,), are those of the rows of the matrix, which the stack multiplies by
    `scale`, and `position_norm` is the root mean square of the positions' norms.
    """

    norms: torch.Tensor
    scale: float
    position_norm: float
    d_model: int

    def norm(self, scale: float) -> float:
        """The root mean square of the norms, times `scale`."""
        return scale * self.norms.square().mean().sqrt().item()

    def position_share(self, scale: float) -> float:
        """The position's part, 0 to 1, of the squared length of scale * embedding + position, for
        a random token and position."""
        position, embedding = self.position_norm**2, self.norm(scale) ** 2
        return position / (position + embedding)

    @property
    def scales(self) -> dict[str, float]:
        """Factors to compare, by their labels: 1, and that of section 3.4."""
        return {"1": 1.0, "sqrt(d_model)": math.sqrt(self.d_model)}


def analyze_embeddings(stack: nn.Module, length: int = 100) -> EmbeddingReport:
    """Measure the embeddings of an encoder or decoder.

    Args:
        stack: A model's `encoder` or `decoder`.
        length: The number of positions.

    Raises:
        ValueError: As `position_encodings`.
    """
    matrix = stack.embed_tokens.weight.detach().float().cpu()
    positions = position_encodings(stack.embed_positions, length)
    return EmbeddingReport(
        matrix.norm(dim=-1),
        stack.embedding_scale,
        positions.square().sum(-1).mean().sqrt().item(),
        matrix.shape[1],
    )


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, stack: str) -> Tokenizer:
    """The tokenizer for the text that the "encoder" or "decoder" reads."""
    if stack == "decoder" and isinstance(tokenizer, VanillaTransformerTokenizer):
        return tokenizer.target_tokenizer
    return tokenizer.backend_tokenizer


def nearest_tokens(
    matrix: torch.Tensor, vocabulary: Tokenizer, words: Sequence[str], count: int = 5
) -> dict[str, list[tuple[str, float]]]:
    """The tokens whose embeddings have the highest cosine similarity to the words' embeddings.

    Args:
        matrix: (vocabulary, d_model).
        vocabulary: The tokenizer of these rows. Additional rows are ignored.
        words: Each is one token, at the start of a text or, as in Chinese, inside one. A word that
            is encoded as the unknown token must be that token itself.
        count: The number of neighbours.

    Returns:
        For each word its nearest tokens and their cosine similarity, nearest first.

    Raises:
        ValueError: A word is not one token, or not one that the matrix has.
        TypeError: `words` is a single string.
    """
    expect_several(tokens=words)
    vocabulary = deepcopy(vocabulary)  # it pads and truncates as in the tokenizer's last call
    vocabulary.no_padding()
    vocabulary.no_truncation()
    rows = matrix[: vocabulary.get_vocab_size(with_added_tokens=True)]
    directions = F.normalize(rows.detach().float().cpu(), dim=-1)
    unknown, nearest = unknown_token(vocabulary), {}
    for word in words:
        ids = vocabulary.encode(word, add_special_tokens=False).ids
        if len(ids) > 1 and (inside := vocabulary.token_to_id(word)) is not None:
            ids = [inside]
        pieces = [vocabulary.id_to_token(i) if i < len(rows) else unknown for i in ids]
        if len(pieces) != 1 or pieces[0] == unknown != word:
            raise ValueError(
                f"tokens={word!r}: expected one token of the vocabulary, but it consists of "
                f"{', '.join(map(repr, pieces))}"
            )
        similarities = directions @ directions[ids[0]]
        similarities[ids[0]] = -2.0  # a token is not its own neighbour
        best = similarities.topk(min(count, len(similarities) - 1))
        tokens = [str(vocabulary.id_to_token(row)) for row in best.indices.tolist()]
        nearest[word] = list(zip(tokens, best.values.tolist(), strict=True))
    return nearest
