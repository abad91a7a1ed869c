"""Scores of translations, with signatures that make them comparable (Post, 2018, "A Call for
Clarity in Reporting BLEU Scores"), and tests of the difference between systems."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from operator import ne
from typing import Any
from unicodedata import is_normalized
from unittest.mock import patch

import numpy as np
import torch
from sacrebleu import significance
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric, Score
from transformers import EvalPrediction, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.text_files import expect_several
from ..data.vocabularies import unknown_id
from .reranking import COMET_MODEL, load_comet

logger = logging.get_logger(__name__)

METRICS = ("bleu", "chrf", "exact_match")  # the default
LABELS = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "ter": "TER",
    "exact_match": "exact match, %",
    "ser": "sentence error rate, %",
    "wer": "word error rate, %",
    "per": "phone error rate, %",
    "cer": "character error rate, %",
    "comet": "COMET",
}
METRICS_WITHOUT_SOURCE = tuple(name for name in LABELS if name != "comet")
LOWER_IS_BETTER = frozenset({"ter", "ser", "wer", "per", "cer"})
SIGNED = frozenset({"bleu", "chrf", "ter"})  # by sacreBLEU
# Tokenizers of BLEU that need other packages, or a model from the network.
NEEDS_MORE = ("ja-mecab", "ko-mecab", "spm", "flores101", "flores200", "spBLEU-1K")
# Advice if BLEU is 0 because targets are short.
OTHER_METRICS = "Use chrf, exact_match or BLEU's tokenizer char, which splits text into characters"
# Letters of Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese, which have no spaces between
# words.
UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
TESTS = {"bootstrap": "bs", "ar": "ar"}  # paired tests, and sacreBLEU's names for them

# ---------------------------------------------------------------- Metrics

LineStatistics = Callable[[str, Sequence[str]], Sequence[float]]


class LineMetric(Metric):
    """A metric that sacreBLEU lacks, as a class of sacreBLEU, so that its paired tests apply. The
    score is a percentage: the sum of a count over all lines, divided by the sum of another count.

    Args:
        name: Key of `LABELS`.
        statistics: Both counts of a line, from its translation and its references.
    """

    def __init__(self, name: str, statistics: LineStatistics):
        super().__init__()
        self.name, self.statistics = name, statistics

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": refs}

    def _compute_segment_statistics(
        self, hypothesis: str, ref_kwargs: dict[str, Any]
    ) -> list[float]:
        return list(self.statistics(hypothesis, ref_kwargs["references"]))

    def _aggregate_and_compute(self, stats: Sequence[Sequence[float]]) -> Score:
        return self._compute_score_from_stats(np.sum(stats, axis=0))

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score(self.name, 100 * float(stats[0]) / max(float(stats[1]), 1.0))


class Comet(LineMetric):
    """COMET (Rei et al., 2020, https://aclanthology.org/2020.emnlp-main.213), times 100, averaged
    over several references.

    Args:
        sources: The source of each translation.
        model: A name on the Hub, or the path of a checkpoint.
    """

    def __init__(self, sources: Sequence[str], model: str = COMET_MODEL):
        super().__init__("comet", lambda hypothesis, references: ())
        self.sources, self.model = sources, load_comet(model)

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        assert references is not None
        self.num_refs = len(references)
        triples = [
            {"src": source, "mt": hypothesis, "ref": reference}
            for lines in references
            for source, hypothesis, reference in zip(self.sources, hypotheses, lines, strict=True)
        ]
        gpus = min(1, torch.cuda.device_count())
        scores = self.model.predict(triples, batch_size=16, gpus=gpus, progress_bar=False).scores
        means = np.reshape(scores, (len(references), -1)).mean(0)
        return [[mean, 1] for mean in means.tolist()]


def is_one_of(translation: str, references: Sequence[str]) -> bool:
    """Whether a translation equals a reference, except for the amount of white space."""
    return translation.split() in map(str.split, references)


def edits(split: Callable[[str], Sequence[str]]) -> LineStatistics:
    """Counts the edits from a translation to the nearest reference, and the units of that
    reference."""
    from rapidfuzz.distance import Levenshtein

    def statistics(hypothesis: str, references: Sequence[str]) -> Sequence[float]:
        units = split(hypothesis)
        of_references = map(split, references)
        return min((Levenshtein.distance(units, other), len(other)) for other in of_references)

    return statistics


def expect_bleu_tokenizer(name: str | None, option: str = "tokenize") -> None:
    """Raise a ValueError unless sacreBLEU has a tokenizer of this name, or it is None."""
    if name not in (None, *BLEU.TOKENIZERS):
        raise ValueError(f"{option}={name!r}: expected one of {', '.join(BLEU.TOKENIZERS)}")
    if name in NEEDS_MORE:
        try:
            BLEU(tokenize=name)
        except (RuntimeError, ImportError) as error:  # sacreBLEU says which packages are missing
            raise ImportError(f"{option}={name!r}: {' '.join(str(error).split())}") from error
        except OSError as error:
            raise OSError(f"{option}={name!r}: its model can't be downloaded: {error}") from error


def make_metrics(
    names: Iterable[str] = METRICS,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    sources: Sequence[str] | None = None,
    comet_model: str = COMET_MODEL,
) -> dict[str, Metric]:
    """The metrics of these names.

    Args:
        names: Any of "bleu", "chrf", "ter", "exact_match", "comet", and the error rates "ser",
            "wer", "per" and "cer".
        tokenize: BLEU's tokenizer in sacreBLEU; `None` is its default, 13a.
        lowercase: Whether BLEU and chrF ignore case. TER always does, the others never.
        sources: The source of each line, for COMET.
        comet_model: A name on the Hub, or the path of a checkpoint.

    Raises:
        ValueError: A name or the tokenizer is unknown, or COMET has no sources.
        TypeError: `names` is a single string.
        ModuleNotFoundError: COMET is not installed.
    """
    expect_bleu_tokenizer(tokenize)
    expect_several(metrics=names)
    makers: dict[str, Callable[[], Metric]] = {
        "bleu": lambda: BLEU(tokenize=tokenize, lowercase=lowercase),
        "chrf": lambda: CHRF(lowercase=lowercase),
        "ter": TER,
        "exact_match": lambda: LineMetric(
            "exact_match", lambda line, right: (is_one_of(line, right), 1)
        ),
        "ser": lambda: LineMetric("ser", lambda line, right: (not is_one_of(line, right), 1)),
        "wer": lambda: LineMetric("wer", edits(str.split)),
        "per": lambda: LineMetric("per", edits(str.split)),
        "cer": lambda: LineMetric("cer", edits(str.strip)),
        "comet": lambda: Comet(sources or (), comet_model),
    }
    names = list(dict.fromkeys(names))
    expect_metrics(names, has_sources=sources is not None)
    return {name: makers[name]() for name in names}


def expect_metrics(names: Iterable[str], *, has_sources: bool) -> None:
    """Check the names of metrics.

    Raises:
        ValueError: A name is unknown, or COMET has no sources.
        ModuleNotFoundError: COMET is not installed.
    """
    for name in names:
        if name not in LABELS:
            raise ValueError(f"metrics={name}: expected one of {', '.join(LABELS)}")
        if name == "comet" and not has_sources:
            raise ValueError("metrics=comet: expected the sources too, which COMET reads")
        if name == "comet" and find_spec("comet") is None:
            raise ModuleNotFoundError(
                "metrics=comet: needs the package unbabel-comet, which is not installed"
            )


# ---------------------------------------------------------------- Scores


def score_translations(
    predictions: Sequence[str],
    *references: Sequence[str],
    metrics: Mapping[str, Metric] | Iterable[str] = METRICS,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Score translations against one or several references each.

    Args:
        predictions: The translations.
        references: One or several lists with the reference of each translation.
        metrics: Names as for `make_metrics`, or its result.
        tokenize, lowercase: As for `make_metrics`.

    Returns:
        The score of each metric by its name, from 0 to 100 (error rates may exceed 100), and the
        signatures of sacreBLEU's metrics, such as `bleu_signature`.

    Raises:
        ValueError: The numbers of predictions and references differ, or there are none; a metric is
            unknown.
        TypeError: Predictions or references are a single string.
    """
    expect_references(predictions, references)
    if not isinstance(metrics, Mapping):
        metrics = make_metrics(metrics, tokenize=tokenize, lowercase=lowercase)
    scores = {
        name: metric.corpus_score(predictions, references).score for name, metric in metrics.items()
    }
    _warn_of_tokens(references, metrics)
    _warn_of_form(predictions, references)
    signatures = {
        f"{name}_signature": str(metric.get_signature())
        for name, metric in metrics.items()
        if name in SIGNED
    }
    return scores | signatures


def _warn_of_tokens(references: Sequence[Sequence[str]], metrics: Mapping[str, Metric]) -> None:
    """Warn if a metric says little because it finds few tokens in the references."""
    unsplit = [name for name in ("ter", "wer") if name in metrics]
    if unsplit and any(lacks_spaces(lines, str.split) for lines in references):
        logger.warning_once(
            f"The references have no spaces between words, where {' and '.join(unsplit)} split "
            "text: edits of phrases are counted, or of whole lines. Use cer or chrf"
        )
    bleu = metrics.get("bleu")
    if bleu is None:
        return
    assert isinstance(bleu, BLEU)
    tokenizer = bleu.tokenizer
    if not any(has_4_tokens(lines, bleu) for lines in references):
        logger.warning_once(
            f"None of {len(references[0])} references has 4 tokens: BLEU is 0 for perfect "
            f"translations, and higher for longer ones. {OTHER_METRICS}"
        )
    elif any(lacks_spaces(lines, lambda text: tokenizer(text).split()) for lines in references):
        logger.warning_once(
            "The references have no spaces between words, where BLEU's tokenizer "
            f"{tokenizer.signature()} splits text: BLEU counts phrases instead of words. Use "
            "zh for Chinese, ja-mecab for Japanese, char or flores200 for any language, or chrf"
        )


def _warn_of_form(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Warn if translations are in Unicode's form NFC, as with a new tokenizer, and references are
    not, or if most are the reverse. Then the same letters differ, in all Vietnamese texts or for a
    few letters of Hindi. Some texts may be in another form by a model's mistake."""
    is_nfc = partial(is_normalized, "NFC")
    of_lines = [all(map(is_nfc, line)) for line in zip(*references, strict=True)]
    of_predictions = list(map(is_nfc, predictions))
    differ = sum(map(ne, of_predictions, of_lines))
    if differ and (all(of_predictions) or 2 * differ > len(predictions)):
        logger.warning_once(
            f"{differ} of {len(predictions)} lines have a translation in Unicode's form NFC and a "
            "reference in another, or the reverse: letters that look the same are errors. "
            "Normalize both, for example with uconv -x nfc"
        )


def lacks_spaces(references: Iterable[str], split: Callable[[str], Iterable[str]]) -> bool:
    """Whether a third of the letters are in scripts without spaces between words, and `split` makes
    tokens that are longer than words of these languages: 6 letters or more on average."""
    tokens = [token for reference in references for token in split(reference)]
    length = sum(map(len, tokens))
    unspaced = sum(len(UNSPACED.findall(token)) for token in tokens)
    return unspaced > length / 3 and length >= 6 * len(tokens)


def has_4_tokens(references: Iterable[str], bleu: Metric) -> bool:
    """Whether BLEU's tokenizer finds 4 tokens in one of the references. Otherwise BLEU, which
    counts sequences of 1 to 4 tokens, is 0 for the references themselves."""
    assert isinstance(bleu, BLEU)
    return any(len(bleu.tokenizer(reference).split()) >= 4 for reference in references)


def expect_references(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raise a ValueError unless each translation has its references, and there is one; a TypeError
    if a string is given in place of several."""
    for lines in references or ((),):
        expect_several(predictions=predictions, references=lines)
        if len(predictions) != len(lines) or not lines:
            raise ValueError(
                f"{len(predictions)} translations for {len(lines)} references: "
                "expected one for each, and at least one"
            )


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    *references: Sequence[str],
    metrics: Mapping[str, Metric] | Iterable[str] = METRICS,
    test: str = "bootstrap",
) -> dict[str, dict[str, Any]]:
    """Score several systems, and test how each differs from the first: by sacreBLEU's paired
    bootstrap (Koehn, 2004, https://aclanthology.org/W04-3250) with 1,000 samples, or approximate
    randomization (Riezler and Maxwell, 2005, https://aclanthology.org/W05-0908) with 10,000 trials.

    Args:
        systems: The translations of each system by its name.
        references, metrics: As for `score_translations`.
        test: "bootstrap", or "ar" for approximate randomization.

    Returns:
        For each system, what `score_translations` returns, with more numbers for each metric. For
        BLEU these are `bleu_p`, except for the first system, the probability of a difference at
        least as large if both systems are equally good, or with the bootstrap less than half; and
        from the bootstrap, `bleu_mean` and `bleu_ci`, the mean of the samples and half the width of
        their 95% confidence interval.

    Raises:
        ValueError, TypeError: As `score_translations`; there is no system, or no such test.
    """
    if test not in TESTS:
        raise ValueError(f"test={test!r}: expected one of {', '.join(TESTS)}")
    if not systems:
        raise ValueError("systems={}: expected at least one")
    if not isinstance(metrics, Mapping):
        metrics = make_metrics(metrics)
    for predictions in systems.values():
        expect_references(predictions, references)
        _warn_of_form(predictions, references)
    _warn_of_tokens(references, metrics)
    # It keeps the order of the metrics, but renames them.
    paired = significance.PairedTest(list(systems.items()), dict(metrics), references, TESTS[test])
    with patch.object(significance, "_compute_p_value", _p_value):
        signatures, results = paired()
    results.pop("System")
    scores: dict[str, dict[str, Any]] = {system: {} for system in systems}
    first = next(iter(systems.values()))
    # The chance that one system is better in all lines that differ. The bootstrap of a few lines
    # gives less, as all its samples are alike.
    differ = {system: sum(map(ne, lines, first)) for system, lines in systems.items()}
    for name, of_metric in zip(metrics, results.values(), strict=True):
        for system, result in zip(systems, of_metric, strict=True):
            if result.p_value is not None and result.score == of_metric[0].score:
                result.p_value = 1.0  # the bootstrap's differences are centred: some are negative
            elif result.p_value is not None:
                result.p_value = max(result.p_value, min(1.0, 2.0 ** (1 - differ[system])))
            found = {"": result.score, "_mean": result.mean, "_ci": result.ci, "_p": result.p_value}
            scores[system] |= {
                name + suffix: float(value) for suffix, value in found.items() if value is not None
            }
    named = zip(metrics, signatures.values(), strict=True)
    signed = {f"{name}_signature": str(signature) for name, signature in named if name in SIGNED}
    return {system: found | signed for system, found in scores.items()}


def _p_value(differences: np.ndarray, difference: float) -> float:
    """The share of samples with a difference at least as large, up to rounding. sacreBLEU's own
    function, in version 2.6, leaves out those that are equally large, which are many if few lines
    differ or if a metric counts lines."""
    as_large = np.count_nonzero(differences > difference - 1e-6)
    return (as_large + 1) / (len(differences) + 1)


def scores_by_length(
    systems: Mapping[str, Sequence[str]],
    *references: Sequence[str],
    metrics: Mapping[str, Metric],
    sources: Sequence[str],
    groups: int = 6,
) -> tuple[list[tuple[int, int, int]], dict[str, dict[str, list[float]]]]:
    """Score groups of lines with sources of similar length. The groups have similar sizes.

    Lengths are in words, or in characters if words are not separated by white space.

    Args:
        systems, references, metrics: As for `compare_systems`.
        sources: The source of each line.
        groups: The largest number of groups.

    Returns:
        The shortest length, the longest length and the number of lines of each group; and the
        scores of the groups, by metric and system.
    """
    has_words = any(len(source.split()) > 1 for source in sources)
    in_words = has_words and not lacks_spaces(sources, str.split)
    lengths = np.array([len(source.split() if in_words else source.strip()) for source in sources])
    shares = np.linspace(0, 1, groups + 1)[1:]
    limits = np.unique(np.quantile(lengths, shares, method="inverted_cdf"))
    group_of = np.searchsorted(limits, lengths)
    members = [np.flatnonzero(group_of == group) for group in range(len(limits))]
    ranges = [
        (int(lengths[lines].min()), int(lengths[lines].max()), len(lines)) for lines in members
    ]
    scores: dict[str, dict[str, list[float]]] = {}
    for name, metric in metrics.items():
        scores[name] = {}
        for system, predictions in systems.items():
            statistics = metric._extract_corpus_statistics(predictions, references)
            parts = ([statistics[line] for line in lines] for lines in members)
            scores[name][system] = [metric._aggregate_and_compute(part).score for part in parts]
    return ranges, scores


def line_scores(
    predictions: Sequence[str], *references: Sequence[str], metrics: Mapping[str, Metric]
) -> dict[str, list[float]]:
    """Score each line by itself, to find those that a system translates badly. The arguments are
    those of `score_translations`. BLEU counts only sequences as long as the line, as sacreBLEU's
    `sentence_score` does."""
    scores = {}
    for name, metric in metrics.items():
        if isinstance(metric, BLEU):
            metric = copy.copy(metric)
            metric.effective_order = True
        statistics = metric._extract_corpus_statistics(predictions, references)
        scores[name] = [metric._aggregate_and_compute([line]).score for line in statistics]
    return scores


# ---------------------------------------------------------------- Training


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase,
    metrics: Iterable[str] = METRICS,
    tokenize: str | None = None,
    log_translations: int = 0,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A function for `compute_metrics` of `Seq2SeqTrainer`, which decodes the generated token ids
    and scores them. An unknown token of a reference counts as an error.

    Args:
        tokenizer: The model's tokenizer.
        metrics: Some of `METRICS_WITHOUT_SOURCE`.
        tokenize: As for `make_metrics`.
        log_translations: The number of translations to log, the first ones, with their references.
    """
    scorers = make_metrics(metrics, tokenize=tokenize)
    unknown = unknown_id(tokenizer)

    def decode(token_ids: Iterable[np.ndarray]) -> list[str]:
        return tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    def decode_reference(token_ids: np.ndarray) -> str:
        """The text, with a word that matches no prediction in place of each unknown token: BLEU's
        tokenizer would split "<unk>" into three words."""
        parts = np.split(token_ids, np.flatnonzero(token_ids == unknown))
        return " \N{REPLACEMENT CHARACTER} ".join(decode(part[part != unknown] for part in parts))

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        outputs, labels = (
            [row[row != -100] for row in ids]
            for ids in (evaluation.predictions, evaluation.label_ids)
        )
        translations, references = decode(outputs), list(map(decode_reference, labels))
        for pair in list(zip(translations, references, strict=True))[:log_translations]:
            logger.info("Translation: %s\n  reference: %s", *pair)
        scores = score_translations(translations, references, metrics=scorers)
        return {name: scores[name] for name in scorers}

    return compute_metrics
