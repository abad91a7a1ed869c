"""What is wrong with an input, in one sentence that names the value and what was expected."""

from collections.abc import Callable

import torch


def look_up(
    embedding: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, rows: int, name: str
) -> torch.Tensor:
    """`embedding(ids)`, where an id may be none of the matrix's rows.

    Raises:
        IndexError: It is none, which shows on the CPU only.
    """
    try:
        return embedding(ids)
    except IndexError:
        raise out_of_range(ids, rows, name) from None


def out_of_range(ids: torch.Tensor, limit: int, name: str) -> IndexError:
    """An error about the first of the ids that is not in [0, limit)."""
    outside = ids[(ids < 0) | (ids >= limit)]
    return IndexError(f"{name} {int(outside[0])} is out of range: expected 0 <= {name} < {limit}")


def expect_tokens_or_embeddings(
    input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> None:
    """Raises ValueError unless exactly one is given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("expected exactly one of input_ids and inputs_embeds")


def expect_mask_for_tokens(attention_mask: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Raises ValueError unless a (batch, past_length + length) mask covers the tokens."""
    batch, length, _ = embeddings.shape
    if attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention mask of shape {tuple(attention_mask.shape)} for {batch} rows of "
            f"{length} tokens: expected a mask for each token"
        )


def expect_as_many(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError unless there are as many targets, or as many for each source."""
    targets, sources = target.shape[0], source.shape[0]  # len() would make an export's batch fixed
    if sources == 0 or targets % sources != 0:
        raise ValueError(
            f"{targets} targets for {sources} sources: expected as many, or as many for each source"
        )


def expect_labels(labels: torch.Tensor, predictions: torch.Tensor) -> None:
    """Raises ValueError unless there is a label for each prediction's last dimension."""
    if labels.shape != predictions.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for predictions of shape "
            f"{tuple(predictions.shape[:-1])}: expected one label for each prediction"
        )


def expect_special_tokens(**token_ids: int | None) -> None:
    """Raises ValueError unless the configuration has all of these."""
    for name, token_id in token_ids.items():
        if token_id is None:
            raise ValueError(
                f"{name}=None: expected a token id in the configuration, "
                "to make decoder_input_ids from labels"
            )
