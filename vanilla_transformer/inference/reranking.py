"""Choose among the hypotheses of a line: minimum Bayes risk, and a reverse model.

Minimum Bayes risk (Eikema and Aziz, 2020, https://arxiv.org/abs/2005.10283) chooses the hypothesis
that is most similar to all others on average, as measured by a utility such as chrF. The noisy
channel (Yee et al., 2019, https://arxiv.org/abs/1908.05731) adds a model of the reverse direction.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import compress, tee
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.pipelines import is_blank
from .decoding import position_limits
from .scoring import add_token_scores, map_hypotheses, score_pairs
from .translation import Hypothesis, pair_up

# Takes hypotheses, references and their source; returns (hypotheses, references), from 0 to 100.
Utility = Callable[[Sequence[str], Sequence[str], str], np.ndarray]

COMET_MODEL = "Unbabel/wmt22-comet-da"


def rerank_by_utility(
    lines: Iterable[str], found: Iterable[list[Hypothesis]], utility: str | Utility = "chrf"
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each line, the highest expected utility first, without duplicates.
    All hypotheses, duplicates included, are the references. The expected utility becomes the score.

    Args:
        lines: The sources, read lazily.
        found: The hypotheses of each source, from sampling or beam search.
        utility: "chrf", "bleu", "exact_match" or "comet"; or a function of hypotheses, references
            and the source that returns an array (hypotheses, references).

    Raises:
        ValueError: No utility has this name.
        ModuleNotFoundError: The utility needs a package that is not installed.
    """
    measure = get_utility(utility) if isinstance(utility, str) else utility
    for line, hypotheses in pair_up(lines, found, "hypotheses"):
        if is_blank(line):  # so its translation is blank
            yield hypotheses
            continue
        counts = Counter(h.text for h in hypotheses)
        first = {h.text: h for h in reversed(hypotheses)}
        texts = list(counts)
        utilities = np.asarray(measure(texts, texts, line))
        expected = utilities @ np.array(list(counts.values())) / counts.total()
        order = np.argsort(-expected, kind="stable")
        yield [first[texts[i]]._replace(score=float(expected[i])) for i in order]


def rerank_by_reverse_model(
    lines: Iterable[str],
    found: Iterable[list[Hypothesis]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reverse_model: PreTrainedModel,
    reverse_tokenizer: PreTrainedTokenizerBase,
    *,
    reverse_weight: float = 1.0,
    length_weight: float = 0.0,
    max_tokens: int = 2048,
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each line, the highest score first, without duplicates. The score is
    log p(target | source) + `reverse_weight` log p(source | target) + `length_weight` |target|,
    with natural logarithms and the number of target tokens.

    The score is -inf if the reverse model can't read the pair: a side has no token, or has more
    tokens than the model has positions. Hypotheses with the same score keep their order.

    Args:
        lines: The sources, read lazily.
        found: The hypotheses of each source.
        model: The model of the hypotheses.
        tokenizer: Its tokenizer.
        reverse_model: A model from the target's language to the source's.
        reverse_tokenizer: Its tokenizer, which may have a different vocabulary.
        reverse_weight: The weight of the reverse model.
        length_weight: The reward of each token.
        max_tokens: The maximum number of source tokens, and of target tokens, in a batch.
    """

    def score(sources: list[str], hypotheses: list[Hypothesis]) -> Iterator[Hypothesis]:
        pairs = [(h.text, source) for h, source in zip(hypotheses, sources, strict=True)]
        readable = are_readable(pairs, reverse_model, reverse_tokenizer)
        reverse = score_pairs(
            compress(pairs, readable), reverse_model, reverse_tokenizer, max_tokens=max_tokens
        )
        for hypothesis, is_readable in zip(hypotheses, readable, strict=True):
            total = -math.inf
            if is_readable:
                total = sum(hypothesis.token_scores) + length_weight * len(hypothesis.token_ids)
                total += reverse_weight * next(reverse).log_probability
            yield hypothesis._replace(score=total)

    rows, sources = tee(lines)
    scored = add_token_scores(rows, found, model, tokenizer, max_tokens=max_tokens)
    yield from map(_ranked, map_hypotheses(score, sources, scored))


def are_readable(
    pairs: Iterable[tuple[str, str]], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[bool]:
    """Whether a model can read each pair: both sides have at least one token, and no more than the
    model has positions."""
    sources, targets = zip(*pairs, strict=True)
    ids = tokenizer(list(sources))["input_ids"], tokenizer(text_target=list(targets))["input_ids"]
    of_source, of_target = position_limits(model)
    return [
        0 < len(source) <= of_source and 0 < len(target) <= of_target
        for source, target in zip(*ids, strict=True)
    ]


def rank_by_log_probability(found: Iterable[list[Hypothesis]]) -> Iterator[list[Hypothesis]]:
    """Yield hypotheses with `token_scores`, such as samples, the most probable first, without
    duplicates. Their log-probability becomes the score."""
    for hypotheses in found:
        yield _ranked([h._replace(score=float(sum(h.token_scores))) for h in hypotheses])


def _ranked(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Hypotheses by descending score, without duplicates. Those without tokens, and so without a
    new score, come last."""
    best: dict[str, Hypothesis] = {}
    for hypothesis in sorted(hypotheses, key=lambda h: (not h.token_ids, -h.score)):
        best.setdefault(hypothesis.text, hypothesis)
    return list(best.values())


# ---------------------------------------------------------------- Utilities


def chrf_utility(
    hypotheses: Sequence[str], references: Sequence[str], source: str = ""
) -> np.ndarray:
    """sacreBLEU's sentence-level chrF of each hypothesis against each reference."""
    from sacrebleu.metrics import CHRF
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    metric = CHRF()
    factor = metric.beta**2
    sides = [
        [extract_all_char_ngrams(text, metric.char_order) for text in texts]
        for texts in (hypotheses, references)
    ]
    precision, recall, orders = (np.zeros((len(hypotheses), len(references))) for _ in range(3))
    for n in range(metric.char_order):
        left, right = ([grams[n] for grams in side] for side in sides)
        matches, totals = overlaps(left, right), (_totals(left)[:, None], _totals(right)[None])
        precision += matches / np.maximum(totals[0], 1)
        recall += matches / np.maximum(totals[1], 1)
        orders += np.minimum(*totals) > 0
    precision, recall = (100 * side / np.maximum(orders, 1) for side in (precision, recall))
    both = factor * precision + recall
    return (1 + factor) * precision * recall / np.where(both > 0, both, 1)


def bleu_utility(
    hypotheses: Sequence[str], references: Sequence[str], source: str = ""
) -> np.ndarray:
    """sacreBLEU's sentence-level BLEU of each hypothesis against each reference."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.metrics.helpers import extract_word_ngrams

    metric = BLEU(effective_order=True)
    orders = range(1, metric.max_ngram_order + 1)
    sides = [
        [metric.tokenizer(text.rstrip()).split() for text in texts]
        for texts in (hypotheses, references)
    ]
    matches = []
    for n in orders:
        left, right = ([extract_word_ngrams(tokens, n) for tokens in side] for side in sides)
        matches.append(overlaps(left, right))
    scores = np.zeros((len(hypotheses), len(references)))
    for i, j in np.ndindex(scores.shape):
        lengths = len(sides[0][i]), len(sides[1][j])
        counts = [int(found[i, j]) for found in matches]
        totals = [max(lengths[0] - n + 1, 0) for n in orders]
        options = {"smooth_method": metric.smooth_method, "effective_order": True}
        scores[i, j] = BLEU.compute_bleu(counts, totals, *lengths, **options).score
    return scores


def exact_match_utility(
    hypotheses: Sequence[str], references: Sequence[str], source: str = ""
) -> np.ndarray:
    """100 for equal texts, otherwise 0, so that the most frequent hypothesis wins."""
    return 100.0 * (np.array(hypotheses)[:, None] == np.array(references)[None])


def comet_utility(hypotheses: Sequence[str], references: Sequence[str], source: str) -> np.ndarray:
    """COMET (Rei et al., 2022) of the package `unbabel-comet`, 0 to 100."""
    data = [{"src": source, "mt": h, "ref": r} for h in hypotheses for r in references]
    scores = _comet().predict(data, batch_size=64, progress_bar=False).scores
    return 100 * np.array(scores).reshape(len(hypotheses), len(references))


def load_comet(model: str = COMET_MODEL) -> Any:
    """COMET's model with this name on the Hub, or from this .ckpt file."""
    from comet import download_model, load_from_checkpoint

    return load_from_checkpoint(model if model.endswith(".ckpt") else download_model(model))


_comet = cache(load_comet)


UTILITIES: dict[str, Utility] = {
    "chrf": chrf_utility,
    "bleu": bleu_utility,
    "exact_match": exact_match_utility,
    "comet": comet_utility,
}


def get_utility(name: str) -> Utility:
    """A utility by its name. Its packages and models are loaded now, so that errors are raised
    before work starts.

    Raises:
        ValueError: No utility has this name.
        ModuleNotFoundError: It needs a package that is not installed.
    """
    if name not in UTILITIES:
        raise ValueError(f"mbr={name!r}: expected one of {', '.join(UTILITIES)}")
    load = _comet if name == "comet" else partial(UTILITIES[name], [], [], "")
    try:
        load()
    except ModuleNotFoundError as error:
        hint = "of unbabel-comet, which is not installed"
        if name != "comet":
            hint = "of the extra train: pip install 'vanilla-transformer[train]'"
        message = f"mbr={name!r}: needs the package {error.name} {hint}"
        raise ModuleNotFoundError(message, name=error.name) from error
    return UTILITIES[name]


def overlaps(left: Sequence[Counter], right: Sequence[Counter]) -> np.ndarray:
    """The number of n-grams that each pair of texts has in common, (left, right).

    min(a, b) is the number of thresholds from 1 that both reach, so that a sum of minima is a sum
    of matrix products."""
    columns = {gram: place for place, gram in enumerate(set().union(*left, *right))}
    sides = [np.zeros((len(side), len(columns)), np.float32) for side in (left, right)]
    for matrix, side in zip(sides, (left, right), strict=True):
        for row, counts in zip(matrix, side, strict=True):
            row[[columns[gram] for gram in counts]] = list(counts.values())
    common = np.zeros((len(left), len(right)))
    for threshold in range(1, int(min(matrix.max(initial=0) for matrix in sides)) + 1):
        reached = [(matrix >= threshold).astype(np.float32) for matrix in sides]
        common += reached[0] @ reached[1].T
    return common


def _totals(side: Sequence[Counter]) -> np.ndarray:
    return np.array([counts.total() for counts in side])
