"""Several corpora in one training text: shares, tags, prefixes, and pairs that are dropped."""

import logging
from collections import Counter

import datasets
import pytest

from vanilla_transformer.data.parallel_text import DataArguments, load_parallel_dataset


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def corpus(folder, name, pairs):
    """The options of a corpus of these pairs: its files."""
    files = folder / f"{name}.source", folder / f"{name}.target"
    for file, side in zip(files, zip(*pairs, strict=True), strict=True):
        file.write_text("".join(f"{text}\n" for text in side), encoding="utf-8")
    return list(map(str, files))


def numbered(folder, name, count):
    return corpus(folder, name, [(f"{name} {n}", f"target {n}") for n in range(count)])


def load(corpora, split="train", **options):
    sources, targets = zip(*corpora, strict=True)
    files = {f"{split}_source": list(sources), f"{split}_target": list(targets)}
    return DataArguments(**files, **options)


def sources(arguments, split="train", seed=0):
    return load_parallel_dataset(arguments, seed)[split]["source"][:]


def test_corpora_without_weights_follow_each_other_once(tmp_path):
    corpora = [numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 2)]
    assert sources(load(corpora)) == ["a 0", "a 1", "a 2", "b 0", "b 1"]


def test_weights_are_proportions_and_every_pair_occurs(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    corpora = [numbered(tmp_path, "a", 400), numbered(tmp_path, "b", 20)]
    found = sources(load(corpora, corpus_weights=[3, 1]))
    assert len(set(found)) == 420
    assert sum(text.startswith("b") for text in found) / len(found) == pytest.approx(0.25, abs=0.05)
    assert "400, 20 pairs, with shares of 75.0%, 25.0%" in caplog.text


def test_the_seed_determines_the_order(tmp_path):
    corpora = [numbered(tmp_path, "a", 9), numbered(tmp_path, "b", 9)]
    arguments = load(corpora, corpus_weights=[1, 1])
    assert sources(arguments, seed=1) == sources(arguments, seed=1)
    assert sources(arguments, seed=1) != sources(arguments, seed=2)


def test_a_temperature_evens_out_sizes():
    def shares(temperature):
        arguments = DataArguments(dataset_name="phrases", corpus_temperature=temperature)
        return arguments.shares([900, 100])

    assert shares(2.0) == pytest.approx([0.75, 0.25])
    assert shares(1.0) == pytest.approx([0.9, 0.1])


def test_shares_that_make_an_epoch_endless_are_refused(tmp_path):
    corpora = [numbered(tmp_path, "a", 400), numbered(tmp_path, "b", 20)]
    for temperature, shares in ((0.1, r"1\.0e\+00, 9\.8e-14"), (0.001, r"1.*, 0\.0e\+00")):
        message = f"training corpora of 400, 20 pairs with shares of {shares}.*: expected shares"
        with pytest.raises(ValueError, match=message):
            sources(load(corpora, corpus_temperature=temperature))
    assert len(set(sources(load(corpora, corpus_weights=[99, 1])))) == 420


def test_streams_mix_by_weight(tmp_path):
    arguments = load(
        [numbered(tmp_path, "a", 9), numbered(tmp_path, "b", 9)],
        corpus_weights=[1, 1], corpus_tags=["", "<b>"], streaming=True,
    )  # fmt: skip
    found = [pair["source"] for pair in load_parallel_dataset(arguments)["train"]]
    assert {"a 8", "<b> b 8"} <= set(found)


def test_a_tag_and_a_prefix_are_added_before_each_source(tmp_path):
    corpora = [numbered(tmp_path, "a", 1), numbered(tmp_path, "b", 1)]
    options = {"corpus_tags": ["<2fr>", ""], "source_prefix": "translate: "}
    assert sources(load(corpora, **options)) == ["<2fr> translate: a 0", "translate: b 0"]


def test_a_blank_source_stays_blank(tmp_path):
    (tmp_path / "a.en").write_text("a\n \n")
    (tmp_path / "a.de").write_text("b\nc\n")
    sides = {"source": [str(tmp_path / "a.en")], "target": [str(tmp_path / "a.de")]}
    files = {f"test_{side}": paths for side, paths in sides.items()}
    arguments = load([numbered(tmp_path, "b", 1)], corpus_tags=["<x>"], **files)
    assert [source.strip() for source in sources(arguments, "test")] == ["<x> a", ""]


def test_other_splits_get_the_tags_if_they_have_as_many_corpora(tmp_path):
    corpora = [numbered(tmp_path, "a", 1), numbered(tmp_path, "b", 1)]
    files = {
        "validation_source": [corpora[0][0]], "validation_target": [corpora[0][1]],
        "test_source": [c[0] for c in corpora], "test_target": [c[1] for c in corpora],
    }  # fmt: skip
    arguments = load(corpora, corpus_tags=["<x>", "<y>"], **files)
    assert sources(arguments, "validation") == ["a 0"]
    assert sources(arguments, "test") == ["<x> a 0", "<y> b 0"]
    arguments = load(corpora[:1], corpus_tags=["<x>"], **files)
    assert sources(arguments, "test") == ["a 0", "b 0"]


PAIRS = [
    ("a dog", "ein Hund"), ("a dog", "ein Hund"), ("same here", "same here"), ("12", "zwölf"),
    ("caf\ufffd", "Café"), ("Café", "caf\x1a"), ("a b c", "ein"),
    ("one two three four five six seven", "x y z a"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"drop_pairs": ["duplicates"]}, {"duplicates": 1}),
        ({"drop_pairs": ["copies", "broken"]}, {"copies": 1, "broken": 2}),
        ({"drop_pairs": ["letterless"]}, {"letterless": 1}),
        ({"max_pair_length": 6}, {"too long": 1}),
        ({"max_pair_ratio": 2.0}, {"of too different lengths": 1}),
        ({"max_pair_length": 12, "length_unit": "char"}, {"too long": 1}),
    ],
)
def test_pairs_are_dropped_for_a_reason_that_is_logged(options, dropped, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kept = sources(load([corpus(tmp_path, "text", PAIRS)], **options))
    assert len(kept) == len(PAIRS) - sum(dropped.values())
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    assert f"kept {len(kept)} of {len(PAIRS)} pairs, dropped {counts}" in caplog.text


def test_a_pair_with_exactly_the_maximum_ratio_is_kept(tmp_path):
    """63 / 45 is 1.4, but 1.4 * 45 is less than 63 in floating point."""
    text = corpus(tmp_path, "text", [("a" * 63, "b" * 45), ("a b", "c d")])
    assert len(sources(load([text], max_pair_ratio=1.4, length_unit="char"))) == 2
    assert sources(load([text], max_pair_ratio=1.0, length_unit="char")) == ["a b"]


def test_duplicates_are_found_across_corpora(tmp_path):
    twice = [corpus(tmp_path, name, [("a dog", "ein Hund"), (name, "x")]) for name in ("c", "d")]
    assert Counter(sources(load(twice, drop_pairs=["duplicates"]))) == Counter(["a dog", "c", "d"])


def test_validation_data_keeps_all_pairs(tmp_path):
    arguments = load([corpus(tmp_path, "v", PAIRS)], "validation", drop_pairs=["duplicates"])
    assert len(sources(arguments, "validation")) == len(PAIRS)


@pytest.mark.parametrize(("tags", "warns"), [(["<a>", "<b>"], True), (["", "<b>"], False)])
def test_validation_data_without_tags_gives_a_warning_if_all_training_data_has_them(
    tmp_path, caplog, tags, warns
):
    corpora = [numbered(tmp_path, "a", 2), numbered(tmp_path, "b", 2)]
    source, target = numbered(tmp_path, "c", 2)
    files = {"validation_source": source, "validation_target": target}
    arguments = load(corpora, corpus_tags=tags, **files)
    assert sources(arguments, "validation") == ["c 0", "c 1"]
    assert ("corpus_tags: the validation data gets none" in caplog.text) == warns


def test_validation_data_keeps_each_pair_once(tmp_path):
    corpora = [numbered(tmp_path, "a", 9), numbered(tmp_path, "b", 1)]
    source, target = map(list, zip(*corpora, strict=True))
    files = {"validation_source": source, "validation_target": target}
    arguments = load(corpora, corpus_weights=[1, 1], **files)
    assert sources(arguments, "validation") == [f"a {n}" for n in range(9)] + ["b 0"]


def test_a_corpus_without_remaining_pairs_is_reported(tmp_path):
    with pytest.raises(ValueError, match="training corpus 1: all pairs dropped"):
        sources(load([corpus(tmp_path, "text", PAIRS)], max_pair_length=1, length_unit="char"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus_weights": [1.0]}, "corpus_weights=.*one for each of 2 training corpora"),
        ({"corpus_weights": [1, -2]}, "corpus_weights has -2: expected a positive number"),
        ({"corpus_weights": [1, 0]}, "corpus_weights has 0: expected a positive number"),
        ({"corpus_weights": [1, float("inf")]}, "corpus_weights has inf"),
        ({"corpus_weights": [1, float("nan")]}, "corpus_weights has nan"),
        ({"corpus_tags": ["<x>"]}, "corpus_tags=.*one for each of 2"),
        ({"corpus_temperature": 0.0}, "corpus_temperature=0.0: expected a positive"),
        ({"corpus_temperature": 5.0, "corpus_weights": [1, 1]}, "expected no corpus_weights"),
        ({"drop_pairs": ["typos"]}, "drop_pairs has 'typos': expected one of duplicates,"),
        ({"max_pair_ratio": 0.5}, "max_pair_ratio=0.5: expected 1 or more"),
        ({"length_unit": "token"}, "length_unit='token': expected word or char"),
        ({"streaming": True}, "streaming=True: expected corpus_weights"),
        ({"streaming": True, "drop_pairs": ["copies"]}, "streaming=True: expected no drop_pairs"),
    ],
)
def test_invalid_options_are_reported_at_once(options, message, tmp_path):
    corpora = [numbered(tmp_path, "a", 1), numbered(tmp_path, "b", 1)]
    with pytest.raises(ValueError, match=message):
        load(corpora, **options)


def test_sources_and_targets_must_come_in_pairs(tmp_path):
    a, b = numbered(tmp_path, "a", 1), numbered(tmp_path, "b", 1)
    with pytest.raises(ValueError, match="train_source names 2 files and train_target 1"):
        DataArguments(train_source=[a[0], b[0]], train_target=[a[1]])


def test_tables_without_common_columns_are_reported(tmp_path):
    files = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    files[0].write_text("source\ttarget\nx\ty\n")
    files[1].write_text("german\tenglish\nx\ty\n")
    with pytest.raises(ValueError, match=r"b\.tsv: there are no columns 'source' and 'target'"):
        load_parallel_dataset(DataArguments(train_file=list(map(str, files))))
