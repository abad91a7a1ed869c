"""Minimum Bayes risk and reverse models choose among hypotheses."""

import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import seq2seq
from sacrebleu.metrics import BLEU, CHRF

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.vocabularies import Specials, words
from vanilla_transformer.inference import reranking
from vanilla_transformer.inference.reranking import (
    bleu_utility,
    chrf_utility,
    rank_by_log_probability,
    rerank_by_reverse_model,
    rerank_by_utility,
)
from vanilla_transformer.inference.scoring import add_token_scores, score_pairs
from vanilla_transformer.inference.translation import Hypothesis, translate_n_best

LINES = ["a house", "", "the lake is deep"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    ("utility", "metric"), [(chrf_utility, CHRF()), (bleu_utility, BLEU(effective_order=True))]
)
def test_utilities_are_those_of_sacrebleu(utility, metric):
    draw = random.Random(0)
    words = ["a", "man", "in", "the", "the", "red", "shirt", ",", "Häuser", "it", "'s", "."]
    texts = ["", "a", "aaaaaa aaaa"]
    texts += [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(12)]
    references = texts[8::-1]
    expected = [[metric.sentence_score(h, [r]).score for r in references] for h in texts]
    np.testing.assert_allclose(utility(texts, references), expected, atol=1e-9)


def hypotheses(*texts):
    return [Hypothesis(text, token_ids=(5, 2)) for text in texts]


def test_the_hypothesis_most_similar_to_all_others_wins():
    found = hypotheses("ein Haus", "kein Haus", "ein Haus am See", "ein Hund", "ein Haus am See")
    (ranked,) = rerank_by_utility(["a house"], [found])
    utilities = chrf_utility([h.text for h in found], [h.text for h in found])
    expected = dict(zip((h.text for h in found), utilities.mean(1), strict=True))
    assert [h.text for h in ranked] == sorted(expected, key=lambda text: -expected[text])
    assert [h.score for h in ranked] == pytest.approx([expected[h.text] for h in ranked])


def test_with_exact_match_the_most_frequent_wins():
    found = [hypotheses("b", "a", "c", "a"), [Hypothesis("", 0.0)]]
    found[0][1] = found[0][1]._replace(token_ids=(6, 2))
    ranked, blank = rerank_by_utility(["x", ""], found, "exact_match")
    assert [(h.text, h.score) for h in ranked] == [("a", 50), ("b", 25), ("c", 25)]
    assert ranked[0].token_ids == (6, 2)  # the first of equal texts
    assert blank == found[1]


def test_a_single_hypothesis_has_its_utility_as_its_score():
    one, two = rerank_by_utility(["x", "y"], [hypotheses("ab cd"), hypotheses("ab cd", "ab cd")])
    assert one[0].score == two[0].score == pytest.approx(100)


def test_a_utility_can_be_a_function_of_the_source():
    def shortest(hypotheses, references, source):
        lengths = [abs(len(h) - len(source)) for h in hypotheses]
        return -np.array(lengths)[:, None] * np.ones(len(references))

    (ranked,) = rerank_by_utility(["abc"], [hypotheses("a", "abcd", "abcdefg")], shortest)
    assert [h.text for h in ranked] == ["abcd", "a", "abcdefg"]


def test_comet_compares_each_hypothesis_with_each_reference(monkeypatch):
    """With the package's interface; it needs an older transformers than this package."""

    def predict(data, batch_size, progress_bar):
        return SimpleNamespace(scores=[len(d["mt"]) / len(d["src"] + d["ref"]) for d in data])

    comet = SimpleNamespace(
        download_model=lambda name: f"path of {name}",
        load_from_checkpoint=lambda path: SimpleNamespace(path=path, predict=predict),
    )
    monkeypatch.setitem(sys.modules, "comet", comet)
    reranking._comet.cache_clear()
    (ranked,) = rerank_by_utility(["xy"], [hypotheses("a", "bcd")], "comet")
    reranking._comet.cache_clear()
    assert [h.text for h in ranked] == ["bcd", "a"]
    assert ranked[1].score == pytest.approx(100 * (1 / 3 + 1 / 5) / 2)


def test_hypotheses_that_have_been_read_before_are_reported(model, tokenizer):
    """As when a cell of a notebook runs again."""
    found = [[Hypothesis("see", token_ids=(5, 2))] for _ in LINES]

    def all_of(hypotheses, lines=LINES):
        yield lambda: list(rerank_by_utility(lines, hypotheses))
        yield lambda: list(add_token_scores(lines, hypotheses, model, tokenizer))

    once = iter(found)
    for use in all_of(once):
        list(once)
        with pytest.raises(ValueError, match=r"^there are only 0 hypotheses, and more lines: "):
            use()
    for use in all_of(found, LINES[:2]):
        with pytest.raises(ValueError, match=r"^there are only 2 lines, and more hypotheses: "):
            use()


def test_an_unknown_utility_is_reported():
    with pytest.raises(ValueError, match="mbr='ter': expected one of chrf, bleu, exact_match"):
        reranking.get_utility("ter")


@pytest.mark.parametrize(
    ("name", "package", "origin"),
    [
        ("comet", "comet", "unbabel-comet"),
        ("chrf", "sacrebleu.metrics", "the extra train"),
        ("bleu", "sacrebleu.metrics", "the extra train"),
    ],
)
def test_a_missing_package_is_reported(name, package, origin, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    reranking._comet.cache_clear()
    message = f"mbr='{name}': needs the package {package} of {origin}"
    with pytest.raises(ModuleNotFoundError, match=message):
        reranking.get_utility(name)


def test_scores_of_a_reverse_model_and_the_length_are_added(model, tokenizer):
    options = {"num_beams": 4, "max_new_tokens": 6}
    found = list(translate_n_best(LINES, model, tokenizer, 4, **options))
    weights = {"reverse_weight": 0.7, "length_weight": 0.3}
    models = (model, tokenizer, model, tokenizer)
    ranked = list(rerank_by_reverse_model(LINES, found, *models, **weights))
    assert [len(row) for row in ranked] == [len({h.text for h in row}) for row in found]
    for line, row in zip(LINES, ranked, strict=True):
        scores = [h.score for h in row]
        assert scores == sorted(scores, reverse=True)
        if not line:
            assert row == [Hypothesis("", 0.0)]
            continue
        reverse = score_pairs([(h.text, line) for h in row], model, tokenizer)
        expected = [
            sum(h.token_scores) + 0.7 * score.log_probability + 0.3 * len(h.token_ids)
            for h, score in zip(row, reverse, strict=True)
        ]
        assert scores == pytest.approx(expected, rel=1e-5)


def test_hypotheses_that_a_reverse_model_cannot_read_come_last(model, tokenizer):
    """It reads words, without </s>, and has 3 positions."""
    texts = ["", "Haus Haus Haus Haus", "Haus", "See"]
    ids = tokenizer(text_target=texts)["input_ids"]
    found = [Hypothesis(*each) for each in zip(texts, [-1.0] * 4, map(tuple, ids), strict=True)]
    names = ["<pad>", "<s>", "</s>", "<unk>", "Haus", "See", "lake"]
    reader = words({name: i for i, name in enumerate(names)}, Specials(template="$A"))
    reverse = seq2seq(position_encoding="learned", max_position_embeddings=3)

    def rank(line, found, **weights):
        models = (model, tokenizer, reverse, reader)
        (ranked,) = rerank_by_reverse_model([line], [found], *models, **weights)
        return [h.text for h in ranked], [h.score for h in ranked]

    for weight in (1, 0, -1):
        order, scores = rank("lake", found, reverse_weight=weight)
        assert set(order[:2]) == {"Haus", "See"}
        assert order[2:] == texts[:2]
        assert scores[0] > scores[1] > scores[2] == scores[3] == -math.inf
    assert rank("lake", found[:2])[0] == texts[:2]
    assert rank("lake lake lake", found[2:3])[1] > [-math.inf]
    assert rank("the lake is deep", found)[0] == texts  # the source is too long for all


def test_samples_are_ranked_by_their_probability(model, tokenizer):
    sampled = translate_n_best(LINES, model, tokenizer, 5, do_sample=True, max_new_tokens=3)
    found = list(sampled)
    assert [len(row) for row in found] == [5, 1, 5]
    for row in rank_by_log_probability(add_token_scores(LINES, found, model, tokenizer)):
        scores = [h.score for h in row]
        assert scores == sorted(scores, reverse=True)
        assert all(h.score == pytest.approx(sum(h.token_scores)) for h in row)


def test_a_hypothesis_of_only_padding_is_not_the_most_probable():
    padding, token = Hypothesis("", 0.0), Hypothesis("See", token_ids=(5, 2), token_scores=(-2, -1))
    ((best, last),) = rank_by_log_probability([[padding, token]])
    assert (best.text, best.score, last.text) == ("See", -3.0, "")
