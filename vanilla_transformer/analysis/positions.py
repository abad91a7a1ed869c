"""The encodings of positions, their similarities, and how far attention looks."""

from collections.abc import Iterable
from contextlib import closing

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plotting import Kind
from .attention import query_masks, read_batches

REACH = ("distance", "previous", "same", "next")
SELF_ATTENTION: tuple[Kind, ...] = ("encoder", "decoder")  # where queries and keys share positions


def position_encodings(positions: nn.Module, length: int) -> torch.Tensor:
    """The first encodings, (length, d_model), of a stack's `embed_positions`: sinusoids or learned
    vectors.

    Raises:
        ValueError: `length` is not positive, or exceeds the number of learned positions.
    """
    limit = getattr(positions, "num_embeddings", None)
    if length < 1 or (limit is not None and length > limit):
        expected = "a positive number" if limit is None else f"1 to {limit}"
        raise ValueError(f"length={length}: expected {expected}")
    device = next((weight.device for weight in positions.parameters()), "cpu")
    places = torch.arange(length, device=device)[None]
    with torch.no_grad():
        return positions(places, torch.float32)[0].cpu()


def position_similarities(encodings: torch.Tensor) -> torch.Tensor:
    """The cosine similarity of each pair of (length, d_model) encodings, (length, length)."""
    directions = F.normalize(encodings.float(), dim=-1)
    return directions @ directions.T


def attention_reach(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
) -> dict[str, dict[Kind, torch.Tensor]]:
    """Measure how far the heads of self-attention look on parallel text.

    Args:
        pairs, model, tokenizer, max_tokens: As for `read_batches`.

    Returns:
        Numbers (layers, heads) of encoder and decoder. `distance` is the mean of
        |key position - query position|, weighted by attention, in tokens. `previous`, `same` and
        `next` are the shares of queries with the largest weight on the token before, on the same
        one and on the one after. Voita et al. (2019, https://aclanthology.org/P19-1580) call a head
        positional if one of them is 0.9.

    Raises:
        ValueError: As `read_batches`.
    """
    reach: dict[str, dict[Kind, torch.Tensor]] = {name: {} for name in REACH}
    queries = dict.fromkeys(SELF_ATTENTION, 0)
    batches = read_batches(pairs, model, tokenizer, max_tokens)
    with closing(batches), torch.inference_mode():
        for inputs in batches:
            outputs = model(**inputs, use_cache=False, output_attentions=True)
            masks = query_masks(inputs)
            for kind in SELF_ATTENTION:
                weights = torch.stack(outputs[f"{kind}_attentions"]).float()
                places = torch.arange(weights.shape[-1], device=weights.device)
                distance = (weights * (places - places[:, None]).abs()).sum(-1)
                offset = weights.argmax(-1) - places
                measured = (distance, offset == -1, offset == 0, offset == 1)
                for name, values in zip(REACH, measured, strict=True):
                    of_batch = (values * masks[kind][:, None]).sum((1, 3)).cpu()  # (layers, heads)
                    reach[name][kind] = reach[name].get(kind, 0) + of_batch
                queries[kind] += int(masks[kind].sum())
    return {
        name: {kind: values / queries[kind] for kind, values in by_kind.items()}
        for name, by_kind in reach.items()
    }
