"""Changes weights under our names: ties, permutes, scales and splits them, and adds tokens."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..model.loss import SUPPRESSED

SHARED, SOURCE, TARGET = (
    f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
PROJECTION, PROJECTION_BIAS = "lm_head.weight", "lm_head.bias"


def tie(source: Tensor, target: Tensor, projection: Tensor) -> tuple[dict, dict[str, Any]]:
    """Compare the three matrices to find out which are the same.

    Args:
        source: Source embedding, (vocab_size, d_model).
        target: Target embedding, (target_vocab_size, d_model).
        projection: The matrix before the softmax, (target_vocab_size, d_model).

    Returns:
        The weights under our names, and the fields of the configuration about tying.
    """
    sizes: dict[str, Any] = {"vocab_size": len(source), "decoder_vocab_size": None}
    if not _same(target, projection):
        if len(source) != len(target):
            sizes["decoder_vocab_size"] = len(target)
        # Ours are three matrices, even if two of theirs share memory.
        shared = source.data_ptr()
        target, projection = (
            each.clone() if each.data_ptr() == shared else each for each in (target, projection)
        )
        matrices = {SOURCE: source, TARGET: target, PROJECTION: projection}
        return matrices, {"tie_word_embeddings": False, **sizes}
    if _same(source, target):
        return {SHARED: source}, {"tie_word_embeddings": True, **sizes}
    sizes["decoder_vocab_size"] = len(target)
    return {SOURCE: source, TARGET: target}, {"tie_word_embeddings": True, **sizes}


def _same(a: Tensor, b: Tensor) -> bool:
    # Tensors that share memory need no comparison, which would read all of it.
    share_memory = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (share_memory or torch.equal(a, b))


def interleave_halves(weights: dict[str, Tensor]) -> None:
    """Reorder the dimensions of a model whose positions are first all sines, then all cosines, so
    that they alternate like ours.

    A permutation of d_model commutes with layer norms, dropout and residual sums, and the matrices
    on either side absorb it. The weights are changed in place, so that a large model is in memory
    only once.

    Args:
        weights: Under our names.
    """
    _permute(weights, interleaved)


def separate_halves(weights: dict[str, Tensor]) -> None:
    """The inverse of `interleave_halves`."""
    _permute(weights, separated)


def _permute(weights: dict[str, Tensor], order: Callable[[int], Tensor]) -> None:
    done = set()
    for name, tensor in tqdm(weights.items(), desc="Permuting d_model", leave=False, disable=None):
        if re.search(r"(out_proj|fc2|layer_norm)\.(weight|bias)$", name):
            axis = 0
        elif re.search(
            r"(shared|embed_tokens|embed_positions|lm_head|[qkv]_proj|fc1)\.weight$", name
        ):
            axis = 1
        else:
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in done:  # two names of one tensor
            done.add(place)
            tensor.copy_(tensor.index_select(axis, order(tensor.shape[axis])))


def interleaved(d_model: int) -> Tensor:
    """Columns that put sines and cosines of a toolkit into our order: 0, d/2, 1, d/2 + 1, ..."""
    return torch.arange(d_model).view(2, -1).T.flatten()


def separated(d_model: int) -> Tensor:
    """The inverse of `interleaved`: 0, 2, ..., 1, 3, ..."""
    return torch.arange(d_model).view(-1, 2).T.flatten()


def fold_embedding_scale(weights: dict[str, Tensor], factor: float) -> None:
    """Multiply the embeddings on input by `factor`, and the last layer norm by its inverse if the
    projection is one of them. The logits stay the same: they are linear in that layer norm's
    output, which nothing else reads.

    Args:
        weights: Under our names.
        factor: Their scale divided by ours, sqrt(d_model).
    """
    for name in (SHARED, SOURCE, TARGET):
        if name in weights:
            weights[name] = weights[name] * factor
    if PROJECTION not in weights:
        norm = "model.decoder.layer_norm"
        if f"{norm}.weight" not in weights:
            layers = (re.match(r"model\.decoder\.layers\.(\d+)", name) for name in weights)
            last = max(int(match[1]) for match in layers if match)
            norm = f"model.decoder.layers.{last}.ffn_layer_norm"
        for part in ("weight", "bias"):
            weights[f"{norm}.{part}"] = weights[f"{norm}.{part}"] / factor


def split_fused(name: str, fused: Tensor, prefix: str) -> dict[str, Tensor]:
    """The three parts of a fused projection of queries, keys and values, in this order.

    Args:
        name: "weight" or "bias".
        fused: (3 d_model, d_model) or (3 d_model).
        prefix: Our name of the attention, such as "model.encoder.layers.0.self_attn".
    """
    parts = zip("qkv", fused.chunk(3), strict=True)
    return {f"{prefix}.{part}_proj.{name}": tensor for part, tensor in parts}


def add_rows(weights: dict[str, Tensor], side: str, number: int, copy_of: int | None = None) -> int:
    """Append tokens to a vocabulary; no translation contains them.

    Args:
        weights: Under our names. With one matrix for all, `side` makes no difference.
        side: "source" or "target".
        number: How many tokens to append.
        copy_of: The token whose embedding they get. With None, their embeddings are zero.

    Returns:
        The id of the first new token.
    """
    matrix = matrix_of(weights, side)
    old = weights[matrix]
    row = torch.zeros_like(old[0]) if copy_of is None else old[copy_of]
    weights[matrix] = torch.cat([old, row.expand(number, -1)])
    if matrix != SOURCE:
        if PROJECTION in weights:
            projection = weights[PROJECTION]
            weights[PROJECTION] = torch.cat(
                [projection, projection.new_zeros(number, old.shape[1])]
            )
        bias = weights.get(PROJECTION_BIAS, old.new_zeros(len(old)))
        weights[PROJECTION_BIAS] = torch.cat([bias, bias.new_full((number,), SUPPRESSED)])
    return len(old)


def matrix_of(weights: Mapping[str, Tensor], side: str) -> str:
    """Our name for the embedding of "source" or "target"."""
    if SHARED in weights:
        return SHARED
    return SOURCE if side == "source" else TARGET
