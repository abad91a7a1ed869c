"""Scores: sacreBLEU's own, with signatures, and others in the same form; tests of significance."""

import math
import sys
from importlib.machinery import ModuleSpec
from math import comb
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import sacrebleu
from datasets import Dataset
from sacrebleu.significance import PairedTest
from transformers import EvalPrediction
from transformers import logging as transformers_logging

from vanilla_transformer.data import vocabularies
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.data.tokenizer_options import log_coverage
from vanilla_transformer.inference import metrics
from vanilla_transformer.inference.metrics import (
    compare_systems,
    line_scores,
    make_compute_metrics,
    make_metrics,
    score_translations,
    scores_by_length,
)

REFERENCES = ["Ein Haus am See, sagt er.", "Der See ist sehr tief und kalt."]
PREDICTIONS = ["Ein Haus am See, sagt er.", "Das Meer ist sehr tief und kalt."]


def test_scores_equal_those_of_sacrebleu():
    scores = score_translations(PREDICTIONS, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    assert scores["exact_match"] == 50
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:mixed" in scores["bleu_signature"]
    assert "nc:6" in scores["chrf_signature"]


def test_tokenization_and_case_are_options():
    upper = [line.upper() for line in REFERENCES]
    assert score_translations(upper, REFERENCES)["bleu"] < 50
    scores = score_translations(upper, REFERENCES, lowercase=True, tokenize="none")
    assert [scores["bleu"], scores["chrf"]] == pytest.approx([100, 100])
    assert "tok:none" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_signature"]


@pytest.mark.parametrize(("predictions", "references"), [(["a"], ["a", "b"]), ([], [])])
def test_different_numbers_of_translations_and_references_are_reported(predictions, references):
    message = f"{len(predictions)} translations for {len(references)} references"
    with pytest.raises(ValueError, match=message):
        score_translations(predictions, references)


def test_token_ids_from_a_trainer_are_decoded_and_scored(tokenizer):
    rows = [tokenizer(text)["input_ids"] for text in ("ein Haus", "der See ist tief")]
    labels = np.full((2, 20), -100)
    for row, ids in enumerate(rows):
        labels[row, : len(ids)] = ids
    predictions = labels.copy()
    predictions[1, 0] = -100
    metrics = make_compute_metrics(tokenizer)(EvalPrediction(predictions, labels))
    assert metrics["exact_match"] == 50
    assert set(metrics) == {"bleu", "chrf", "exact_match"}
    chosen = make_compute_metrics(tokenizer, ["wer", "cer"])
    assert set(chosen(EvalPrediction(predictions, labels))) == {"wer", "cer"}


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_first_translations_of_an_evaluation_are_logged_with_their_references(
    tokenizer, number, caplog
):
    caplog.set_level("INFO", "vanilla_transformer")
    rows = [tokenizer(text)["input_ids"] for text in ("ein Haus", "der See")]
    labels = np.full((2, 20), -100)
    for row, ids in enumerate(rows):
        labels[row, : len(ids)] = ids
    compute_metrics = make_compute_metrics(tokenizer, ["chrf"], log_translations=number)
    compute_metrics(EvalPrediction(labels[::-1], labels))
    logged = [
        "Translation: der See\n  reference: ein Haus",
        "Translation: ein Haus\n  reference: der See",
    ]
    assert caplog.messages == logged[:number]


def test_an_unknown_word_in_a_reference_counts_as_an_error():
    words = train_tokenizer(["a b c"] * 2, tokenizer_type="word", show_progress=False)
    labels = np.array([words(text)["input_ids"] for text in ("a x b", "y z b", "a b c")])
    metrics = make_compute_metrics(words, ["wer", "exact_match"])
    assert metrics(EvalPrediction(labels, labels)) == pytest.approx(
        {"wer": 100 * 3 / 9, "exact_match": 100 / 3}
    )


def test_an_unknown_word_in_a_reference_counts_as_one_word_in_bleu():
    words = train_tokenizer(["a b c d"] * 2, tokenizer_type="word", show_progress=False)
    labels = np.array([words("a b c d x")["input_ids"]])
    found = make_compute_metrics(words, ["bleu"])(EvalPrediction(labels, labels))
    assert found["bleu"] == pytest.approx(100 * math.exp(1 - 5 / 4))  # 4 of 5 words, all correct


def test_an_unknown_word_counts_as_an_error_if_decoding_prints_it():
    # As with SentencePiece models and BPE codes, for which transformers has no `unk_token`.
    vocab = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a"])}
    words = vocabularies.words(vocab, vocabularies.Specials())
    assert words.unk_token is None
    labels = np.array([words(text)["input_ids"] for text in ("a x", "a a")])
    metrics = make_compute_metrics(words, ["wer", "exact_match"])
    assert metrics(EvalPrediction(labels, labels)) == {"wer": 25, "exact_match": 50}


def test_coverage_counts_unknown_words_whatever_decoding_prints(caplog):
    caplog.set_level("INFO", "vanilla_transformer")
    vocab = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a"])}
    words = vocabularies.words(vocab, vocabularies.Specials())
    rows = words(["a x", "x x a a"])["input_ids"]
    log_coverage(Dataset.from_dict({"input_ids": rows, "labels": rows}), words)
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["62.500%"] * 2


def test_padding_is_not_an_error_if_it_is_also_the_unknown_token():
    words = train_tokenizer(["a b c"] * 2, tokenizer_type="word", show_progress=False)
    words.pad_token = words.unk_token
    rows = [words(text)["input_ids"] for text in ("a b c", "a", "a x")]
    labels = np.array([row + [-100] * (len(rows[0]) - len(row)) for row in rows])
    metrics = make_compute_metrics(words, ["exact_match"])
    found = metrics(EvalPrediction(labels, labels))
    assert found == pytest.approx({"exact_match": 100 * 2 / 3})  # "x" is unknown


# ---------------------------------------------------------------- Error rates

SPOKEN = ["the lake is deep", "a house by a lake", "b l uː"]
HEARD = ["the lake deep", "a house by the lake", "b l uː"]


def test_error_rates_are_edits_in_units_of_the_reference():
    scores = score_translations(HEARD, SPOKEN, metrics=["wer", "per", "cer", "ser", "exact_match"])
    assert scores["wer"] == pytest.approx(100 * 2 / 12)
    assert scores["per"] == scores["wer"]
    assert scores["cer"] == pytest.approx(100 * (3 + 3) / (16 + 17 + 6))
    assert scores["ser"] == pytest.approx(100 * 2 / 3)
    assert scores["exact_match"] == pytest.approx(100 / 3)


def test_error_rates_equal_those_of_jiwer():
    jiwer = pytest.importorskip("jiwer")
    scores = score_translations(HEARD, SPOKEN, metrics=["wer", "cer"])
    assert scores["wer"] == pytest.approx(100 * jiwer.wer(SPOKEN, HEARD))
    assert scores["cer"] == pytest.approx(100 * jiwer.cer(SPOKEN, HEARD))


def test_a_translation_is_compared_with_the_closest_of_several_references():
    other = ["the lake deep", "a house", ""]
    scores = score_translations(HEARD, SPOKEN, other, metrics=["bleu", "ter", "exact_match", "wer"])
    references = [SPOKEN, other]
    assert scores["bleu"] == sacrebleu.corpus_bleu(HEARD, references).score
    assert scores["ter"] == sacrebleu.corpus_ter(HEARD, references).score
    assert "nrefs:2" in scores["bleu_signature"]
    assert scores["exact_match"] == pytest.approx(200 / 3)
    assert scores["wer"] == pytest.approx(100 * 1 / (3 + 5 + 3))


def test_empty_references_have_an_error_rate():
    assert score_translations(["a b"], [""], metrics=["wer"])["wer"] == 200
    assert score_translations([""], [""], metrics=["wer", "cer"]) == {"wer": 0, "cer": 0}


@pytest.mark.parametrize("name", ["predictions", "references", "metrics"])
def test_a_single_string_is_not_several(name):
    given = {"predictions": ["a house"], "references": ["a mouse"], "metrics": ["exact_match"]}
    given[name] = "a house"
    with pytest.raises(TypeError, match=f"^{name}='a house': expected an iterable of strings"):
        score_translations(given["predictions"], given["references"], metrics=given["metrics"])


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="metrics=blue: expected one of bleu, chrf, ter, "):
        score_translations(HEARD, SPOKEN, metrics=["bleu", "blue"])


# ---------------------------------------------------------------- COMET


def test_comet_reads_sources_translations_and_references(monkeypatch):
    """In the format that unbabel-comet expects; the model here counts common letters."""

    class Model:
        def predict(self, lines, batch_size, gpus, progress_bar):
            scores = [len(set(line["mt"]) & set(line["ref"] + line["src"])) / 10 for line in lines]
            return SimpleNamespace(scores=scores, system_score=None)

    loaded = []
    comet = ModuleType("comet")
    comet.__spec__ = ModuleSpec("comet", None)
    comet.download_model = lambda name: f"cache/{name}.ckpt"
    comet.load_from_checkpoint = lambda path: loaded.append(path) or Model()
    monkeypatch.setitem(sys.modules, "comet", comet)
    sources, said, references = ["x", "cc"], ["ab", "ce"], (["a", ""], ["ab", "d"])
    metrics = make_metrics(["comet"], sources=sources)
    scores = score_translations(said, *references, metrics=metrics)
    assert scores["comet"] == pytest.approx(10 * np.mean([(1 + 2) / 2, (1 + 1) / 2]))
    _, found = scores_by_length({"one": said}, *references, metrics=metrics, sources=sources)
    assert found["comet"]["one"] == pytest.approx([15, 10])
    systems = compare_systems({"one": said, "other": said}, *references, metrics=metrics)
    assert systems["other"]["comet"] == pytest.approx(scores["comet"])
    make_metrics(["comet"], sources=[], comet_model="own.ckpt")
    assert loaded == ["cache/Unbabel/wmt22-comet-da.ckpt", "own.ckpt"]


def test_comet_is_refused_without_sources_or_if_not_installed(monkeypatch):
    with pytest.raises(ValueError, match="metrics=comet: expected the sources too"):
        make_metrics(["comet"])
    monkeypatch.setattr("vanilla_transformer.inference.metrics.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="metrics=comet: needs the package unbabel-comet"):
        make_metrics(["comet"], sources=["a"])


# ---------------------------------------------------------------- Systems and lengths

RIGHT = [f"line {number} of the text" for number in range(40)]
WRONG = [line.replace("line", "row") if number % 2 else line for number, line in enumerate(RIGHT)]


@pytest.mark.parametrize("test", ["bootstrap", "ar"])
def test_a_difference_between_systems_has_a_p_value(monkeypatch, test):
    monkeypatch.setitem(PairedTest._DEFAULT_SAMPLES, "ar", 500)
    metrics = make_metrics(["bleu", "wer", "exact_match"])
    systems = {"right": RIGHT, "wrong": WRONG, "again": RIGHT}
    scores = compare_systems(systems, RIGHT, metrics=metrics, test=test)
    for name in metrics:
        assert f"{name}_p" not in scores["right"]
        assert scores["wrong"][f"{name}_p"] < 0.01
        assert scores["again"][f"{name}_p"] == 1
        assert scores["wrong"][name] == score_translations(WRONG, RIGHT, metrics=metrics)[name]
        assert (f"{name}_ci" in scores["wrong"]) == (test == "bootstrap")
    samples = {"bootstrap": "bs:1000", "ar": "ar:500"}[test]
    assert f"{samples}|seed:" in scores["wrong"]["bleu_signature"]
    assert "wer_signature" not in scores["wrong"]


def without(*numbers):
    """A system that has a wrong word in these lines."""
    return [line.replace("text", "song") if n in numbers else line for n, line in enumerate(RIGHT)]


@pytest.mark.parametrize("worse", [0, 1, 2, 3])
def test_randomization_of_correct_and_wrong_lines_is_a_sign_test(worse):
    """A system is better in some of ten lines, and worse in the others."""
    metrics = make_metrics(["bleu", "exact_match", "ser", "wer"])
    systems = {"one": without(*range(worse, 10)), "other": without(*range(worse))}
    found = compare_systems(systems, RIGHT, metrics=metrics, test="ar")["other"]
    expected = 2 * sum(comb(10, number) for number in range(worse + 1)) / 2**10
    for name in metrics:
        assert found[f"{name}_p"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("test", ["bootstrap", "ar"])
def test_a_difference_in_one_line_is_not_significant(test):
    metrics = make_metrics(["bleu", "exact_match"])
    systems = {"right": RIGHT, "wrong": without(0)}
    found = compare_systems(systems, RIGHT, metrics=metrics, test=test)["wrong"]
    for name in metrics:
        assert found[f"{name}_p"] == 1 if test == "ar" else found[f"{name}_p"] > 0.05
    equal = {"one": without(0), "other": without(1)}
    found = compare_systems(equal, RIGHT, metrics=make_metrics(["exact_match"]), test=test)
    assert found["other"]["exact_match_p"] == 1


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_the_bootstrap_finds_no_smaller_p_value_in_a_few_lines_than_a_sign_test(lines):
    """All its samples have the same difference if all lines have."""
    systems, metrics = {"wrong": without(*range(lines))[:lines]}, make_metrics(["bleu", "wer"])
    systems["right"] = RIGHT[:lines]
    found = compare_systems(systems, RIGHT[:lines], metrics=metrics)["right"]
    assert found["bleu_p"] == found["wer_p"] == 2 / 2**lines


def test_p_values_of_the_bootstrap_are_below_half_of_those_of_randomization():
    """Of the two numbers in docs/evaluation.md, only that of randomization is the probability."""
    metrics = make_metrics(["exact_match"])
    systems = {"one": without(*range(3)), "other": without(*range(3, 12))}
    chance = 2 * sum(comb(12, number) for number in range(4)) / 2**12  # a sign test
    bootstrap, randomization = (
        compare_systems(systems, RIGHT, metrics=metrics, test=test)["other"]["exact_match_p"]
        for test in ("bootstrap", "ar")
    )
    assert randomization == pytest.approx(chance, abs=0.02)
    assert bootstrap < chance / 2


def test_systems_are_compared_by_names_of_metrics_too():
    systems = {"a": RIGHT, "b": without(1, 2, 3)}
    expected = compare_systems(systems, RIGHT, metrics=make_metrics(["bleu"]))
    assert compare_systems(systems, RIGHT, metrics=["bleu"]) == expected


def test_a_comparison_of_nothing_or_by_an_unknown_test_is_refused():
    with pytest.raises(ValueError, match="test='t': expected one of bootstrap, ar"):
        compare_systems({"a": RIGHT}, RIGHT, test="t")
    with pytest.raises(ValueError, match=r"^systems={}: expected at least one"):
        compare_systems({}, RIGHT)


def test_systems_with_different_numbers_of_lines_are_refused():
    with pytest.raises(ValueError, match="39 translations for 40 references"):
        compare_systems({"a": RIGHT, "b": RIGHT[1:]}, RIGHT, metrics=make_metrics())


def test_scores_by_length_are_those_of_the_lines_of_that_length():
    sources = ["x " * (1 + number // 10) for number in range(40)]
    metrics = make_metrics(["bleu", "wer"])
    ranges, scores = scores_by_length(
        {"wrong": WRONG}, RIGHT, metrics=metrics, sources=sources, groups=4
    )
    assert ranges == [(1, 1, 10), (2, 2, 10), (3, 3, 10), (4, 4, 10)]
    for group in range(4):
        lines = slice(10 * group, 10 * group + 10)
        expected = score_translations(WRONG[lines], RIGHT[lines], metrics=metrics)
        assert scores["bleu"]["wrong"][group] == pytest.approx(expected["bleu"])
        assert scores["wer"]["wrong"][group] == pytest.approx(expected["wer"])


def test_the_length_of_words_is_in_characters():
    options = {"metrics": make_metrics(["ser"]), "groups": 2}
    ranges, _ = scores_by_length(
        {"a": ["b"] * 4}, ["b"] * 4, sources=["a", "be", "see", "lake"], **options
    )
    assert ranges == [(1, 2, 2), (3, 4, 2)]
    sources = ["a", "be", "see", "the lake"]
    ranges, _ = scores_by_length({"a": ["b"] * 4}, ["b"] * 4, sources=sources, **options)
    assert ranges == [(1, 1, 3), (2, 2, 1)]


def test_the_length_of_sentences_without_spaces_is_in_characters():
    sources = ["我们昨天去了", "我们昨天去了北京的公园", "我们 昨天去了北京的公园散步"]
    options = {"metrics": make_metrics(["ser"]), "sources": sources}
    ranges, _ = scores_by_length({"a": ["b"] * 3}, ["b"] * 3, **options)
    assert ranges == [(6, 6, 1), (11, 11, 1), (14, 14, 1)]


def test_the_amount_of_white_space_is_not_an_error():
    predictions, references = ["a b", "a b c"], ["a  b ", "a bc"]
    scores = score_translations(predictions, references, metrics=["exact_match", "ser"])
    assert (scores["exact_match"], scores["ser"]) == (50, 50)
    assert score_translations([" a b "], ["a b\t"], metrics=["cer", "wer"]) == {"cer": 0, "wer": 0}


def test_bleu_of_references_that_are_too_short_for_it_is_explained_once(caplog):
    short, enough = ["1 2 3"] * 71, ["1 2 3"] * 71 + ["1 2 3 4"]
    for _ in range(2):
        assert score_translations(short, short)["bleu"] == 0
        assert score_translations([f"{line} 4 5" for line in short], short)["bleu"] > 0
    assert score_translations(enough, enough)["bleu"] == pytest.approx(100)
    assert score_translations(short, short, metrics=["chrf"])["chrf"] == pytest.approx(100)
    assert score_translations(["ab cde"], ["ab cde"], tokenize="char")["bleu"] > 99
    (message,) = caplog.messages
    assert message.startswith("None of 71 references has 4 tokens: BLEU is 0 for perfect")


UNSPACED = {
    "Chinese": "2019年，GDP增长 6.1%，美国 总统 Joe Biden周三表示，他将在10月5日访问北京。",
    "Japanese": "OpenAI は 新しいモデルを 発表した。彼は昨日、東京 の大学で三冊の本を買いました。",
    "Tibetan": "ང་ཚོས་དེ་རིང་སློབ་གྲྭར་འགྲོ་གི་ཡིན། ཁོང་ཁ་ས་སླེབས་སོང་། ང་རང་དགེ་རྒན་ཡིན། ཁོ་ཡང་སློབ་མ་ཡིན།",
    "Thai": "นักวิจัย กล่าวว่า แบบจำลองนี้ ทำงานได้ดีกว่าเดิมมากเมื่อเทียบกับปีก่อน",
}


@pytest.mark.parametrize("text", UNSPACED.values(), ids=UNSPACED)
def test_bleus_default_tokenizer_warns_of_text_without_spaces(text, caplog):
    transformers_logging.warning_once.cache_clear()
    for _ in range(2):
        score_translations([text], [text])
    transformers_logging.warning_once.cache_clear()
    compare_systems({"a": [text], "b": [text]}, [text], metrics=make_metrics(["bleu"]), test="ar")
    message, of_systems = caplog.messages
    assert message == of_systems
    assert message.startswith(
        "The references have no spaces between words, where BLEU's tokenizer 13a"
    )
    assert "Use zh for Chinese, ja-mecab for Japanese, char or flores200" in message


@pytest.mark.parametrize("text", UNSPACED.values(), ids=UNSPACED)
def test_error_rates_of_words_need_spaces_between_them(text, caplog):
    transformers_logging.warning_once.cache_clear()
    score_translations([text], [text], metrics=["cer", "chrf", "exact_match"])
    assert not caplog.messages
    score_translations([text], [text], metrics=["wer"])
    score_translations([text], [text], metrics=["ter", "wer"])
    for message, names in zip(caplog.messages, ["wer", "ter and wer"], strict=True):
        assert f"no spaces between words, where {names} split text" in message


def test_bleu_does_not_warn_of_text_with_spaces_in_any_script(caplog):
    transformers_logging.warning_once.cache_clear()
    split = "美国 总统 周三 表示 ， 他 将 在 10月 5日 访问 北京 。"
    score_translations([split], [split], metrics=["bleu", "ter", "wer"])
    score_translations([split], [split], tokenize="none")
    score_translations([UNSPACED["Chinese"]], [UNSPACED["Chinese"]], tokenize="zh")
    score_translations([UNSPACED["Thai"]], [UNSPACED["Thai"]], tokenize="char")
    for text in (
        "대학교 도서관에서 책을 빌렸습니다 어제",
        "Donaudampfschifffahrtsgesellschaften fahren oft hier",
    ):
        score_translations([text], [text])
    assert not caplog.messages


def test_references_in_a_different_unicode_form_are_reported(caplog):
    transformers_logging.warning_once.cache_clear()
    plain, hindi = "Ein Haus", "लड\u093cका बड\u093cा है"
    whole = hindi.replace("ड\u093c", "\u095c")  # which NFC decomposes
    metrics = make_metrics(["ser"])
    for one, other in ((hindi, hindi), (whole, whole), (whole, hindi)):
        score_translations([plain, one], [plain, other], metrics=metrics)
    assert not caplog.messages
    assert score_translations([plain, hindi], [plain, whole], metrics=metrics)["ser"] == 50
    systems = {"a": [plain, hindi], "b": [hindi, hindi]}
    transformers_logging.warning_once.cache_clear()
    compare_systems(systems, [plain, whole], metrics=metrics, test="ar")
    score_translations([plain, whole], [plain, hindi], metrics=metrics)
    score_translations([whole, whole], [hindi, hindi], metrics=metrics)
    for message, count in zip(caplog.messages, (1, 1, 2), strict=True):
        assert message.startswith(f"{count} of 2 lines have a translation in Unicode's form NFC")


def test_a_bleu_tokenizer_that_cannot_be_downloaded_is_reported_at_once(monkeypatch):
    class Offline:
        TOKENIZERS = ("flores200",)

        def __init__(self, tokenize):
            raise OSError("no connection")

    monkeypatch.setattr(metrics, "BLEU", Offline)
    with pytest.raises(OSError, match=r"^bleu_tokenize='flores200': .* downloaded: no connection"):
        metrics.expect_bleu_tokenizer("flores200", "bleu_tokenize")


def test_a_bleu_tokenizer_with_missing_packages_is_reported(monkeypatch):
    class Lacking:
        TOKENIZERS = ("ja-mecab",)

        def __init__(self, tokenize):
            raise RuntimeError("Japanese tokenization needs\n  extra packages")

    monkeypatch.setattr(metrics, "BLEU", Lacking)
    with pytest.raises(ImportError, match=r"^tokenize='ja-mecab': Japanese .* extra packages"):
        metrics.expect_bleu_tokenizer("ja-mecab")


def test_scores_of_lines_are_those_of_sacrebleu():
    predictions = ["der See", "ein altes Haus am See", "kein Haus"]
    references = ["der See", "ein Haus am See", "der Himmel"], ["ein See", "ein Haus", "kein Haus"]
    metrics = make_metrics(["bleu", "chrf", "ter", "exact_match"])
    found = line_scores(predictions, *references, metrics=metrics)
    for number, (prediction, *right) in enumerate(zip(predictions, *references, strict=True)):
        assert found["bleu"][number] == sacrebleu.sentence_bleu(prediction, right).score
        assert found["chrf"][number] == sacrebleu.sentence_chrf(prediction, right).score
        assert found["ter"][number] == sacrebleu.sentence_ter(prediction, right).score
    assert found["exact_match"] == [100, 0, 100]
    assert not metrics["bleu"].effective_order  # which the score of all lines does without
