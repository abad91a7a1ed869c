"""The log-probability of given translations."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase

from ..data.token_batches import TokenBudgetSampler

PAIRS_PER_WINDOW = 10_000  # sorted by length together


class PairScore(NamedTuple):
    """The natural log-probability of a target given its source, and its number of tokens. Both
    include the final </s>."""

    log_probability: float
    tokens: int


def score_pairs(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = 2048,
    show_progress: bool = False,
) -> Iterator[PairScore]:
    """Yield the score of each pair, in the order of the pairs, without label smoothing.

    Args:
        pairs: Sources and targets, read lazily.
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch, including
            padding.
        show_progress: Whether to show a progress bar.
    """
    model.eval()
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    remaining = iter(pairs)
    with tqdm(desc="Scoring", unit="pair", disable=not show_progress) as progress:
        while window := list(islice(remaining, PAIRS_PER_WINDOW)):
            sources = tokenizer([source for source, _ in window])["input_ids"]
            targets = tokenizer(text_target=[target for _, target in window])["input_ids"]
            source_lengths, target_lengths = (list(map(len, side)) for side in (sources, targets))
            shortest = min(map(max, source_lengths, target_lengths))
            budget = max(max_tokens, shortest)  # a longer pair is scored alone
            scores = [0.0] * len(window)
            for batch in TokenBudgetSampler(source_lengths, target_lengths, budget, shuffle=False):
                rows = [{"input_ids": sources[row], "labels": targets[row]} for row in batch]
                for row, score in zip(batch, _score(collate(rows), model), strict=True):
                    scores[row] = score
                progress.update(len(batch))
            yield from map(PairScore, scores, target_lengths)


@torch.inference_mode()
def _score(inputs: dict[str, torch.Tensor], model: PreTrainedModel) -> list[float]:
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    labels = inputs.pop("labels")
    logits = model(**inputs, use_cache=False).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 for -100
    return (-losses.double().sum(1)).tolist()
