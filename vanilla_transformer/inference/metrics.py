"""BLEU, chrF and exact match, with the signatures that make scores comparable (Post, 2018, "A Call
for Clarity in Reporting BLEU Scores")."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from transformers import EvalPrediction, PreTrainedTokenizerBase

METRICS = ("bleu", "chrf", "exact_match")  # from 0 to 100


def score_translations(
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Score translations against one reference each.

    Args:
        predictions: The translations.
        references: The reference of each translation.
        tokenize: The tokenizer of sacreBLEU; `None` is its default, 13a.
        lowercase: Whether BLEU and chrF ignore case.

    Returns:
        `bleu`, `chrf` and `exact_match` from 0 to 100, and `bleu_signature`, `chrf_signature`.

    Raises:
        ValueError: The numbers of predictions and references differ, or there are none.
    """
    if len(predictions) != len(references) or not references:
        raise ValueError(
            f"{len(predictions)} translations for {len(references)} references: "
            "expected one for each, and at least one"
        )
    bleu, chrf = BLEU(tokenize=tokenize, lowercase=lowercase), CHRF(lowercase=lowercase)
    pairs = zip(predictions, references, strict=True)
    return {
        "bleu": bleu.corpus_score(predictions, [references]).score,
        "chrf": chrf.corpus_score(predictions, [references]).score,
        "exact_match": 100 * sum(a == b for a, b in pairs) / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A function for the argument `compute_metrics` of `Seq2SeqTrainer`, which decodes and scores
    the generated token ids."""

    def decode(token_ids: np.ndarray) -> list[str]:
        token_ids = np.where(token_ids == -100, tokenizer.pad_token_id, token_ids)
        return tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        scores = score_translations(decode(evaluation.predictions), decode(evaluation.label_ids))
        return {name: scores[name] for name in METRICS}

    return compute_metrics
