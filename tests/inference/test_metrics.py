"""Scores: sacreBLEU's own, with signatures, and exact match."""

import numpy as np
import pytest
import sacrebleu
from transformers import EvalPrediction

from vanilla_transformer.inference.metrics import make_compute_metrics, score_translations

REFERENCES = ["Ein Haus am See, sagt er.", "Der See ist sehr tief und kalt."]
PREDICTIONS = ["Ein Haus am See, sagt er.", "Das Meer ist sehr tief und kalt."]


def test_scores_are_sacrebleus():
    scores = score_translations(PREDICTIONS, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    assert scores["exact_match"] == 50
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:mixed" in scores["bleu_signature"]
    assert "nc:6" in scores["chrf_signature"]


def test_tokenisation_and_case_are_options():
    upper = [line.upper() for line in REFERENCES]
    assert score_translations(upper, REFERENCES)["bleu"] < 50
    scores = score_translations(upper, REFERENCES, lowercase=True, tokenize="none")
    assert scores["bleu"] == pytest.approx(100)
    assert "tok:none" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_signature"]


@pytest.mark.parametrize(("predictions", "references"), [(["a"], ["a", "b"]), ([], [])])
def test_numbers_that_differ_are_named(predictions, references):
    message = f"{len(predictions)} translations for {len(references)} references"
    with pytest.raises(ValueError, match=message):
        score_translations(predictions, references)


def test_trainers_ids_are_decoded_and_scored(tokenizer):
    rows = [tokenizer(text)["input_ids"] for text in ("ein Haus", "der See ist tief")]
    labels = np.full((2, 20), -100)
    for row, ids in enumerate(rows):
        labels[row, : len(ids)] = ids
    predictions = labels.copy()
    predictions[1, 0] = -100
    metrics = make_compute_metrics(tokenizer)(EvalPrediction(predictions, labels))
    assert metrics["exact_match"] == 50
    assert set(metrics) == {"bleu", "chrf", "exact_match"}
