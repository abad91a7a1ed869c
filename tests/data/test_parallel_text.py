"""Parallel text: what is accepted, how it is read, and what is refused with which message."""

import gzip
import importlib.metadata
import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from conftest import needs
from datasets import Dataset, DatasetDict, IterableDataset
from pyarrow import parquet
from transformers import DataCollatorForSeq2Seq, HfArgumentParser, PreTrainedTokenizerFast

from vanilla_transformer.data import parallel_text
from vanilla_transformer.data.parallel_text import (
    PAIR_FEATURES,
    DataArguments,
    iter_texts,
    load_parallel_dataset,
    tokenize_dataset,
)
from vanilla_transformer.data.tokenization import train_tokenizer

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"

PAIRS = [
    ("the dog", "der Hund"),
    (" spaces  inside ", "tab\tinside "),
    ("007", "NA"),
    ("2024-01-01", "null"),
    ('"quoted, text"', "it's \\n 5' 3\""),
    ("separators \u2028 \u2029 \x0b \x0c \x1c \x85 of Unicode", "Bu\u0308cher"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(itertools.chain(*PAIRS), 300, show_progress=False)


def write(path: Path, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def write_sides(folder: Path, pairs: list[tuple[str, str]], split: str = "train") -> dict[str, str]:
    """The arguments that name two text files with these pairs."""
    names = (f"{split}_source", f"{split}_target")
    return {
        name: write(folder / name, "".join(f"{line}\n" for line in side))
        for name, side in zip(names, zip(*pairs, strict=True), strict=True)
    }


def load(**arguments: Any) -> DatasetDict:
    return load_parallel_dataset(DataArguments(**arguments))


def pairs_of(dataset: Dataset | IterableDataset) -> list[tuple[str, str]]:
    rows = list(dataset)
    assert all(set(row) == {"source", "target"} for row in rows)
    return [(row["source"], row["target"]) for row in rows]


# Arguments


def test_arguments_come_from_the_command_line_and_have_help(tmp_path):
    files = write_sides(tmp_path, PAIRS)
    line = [f"--{name}={value}" for name, value in files.items()]
    line += ["--max_source_length=9", "--streaming", "--source_lang=en", "--target_lang=de"]
    (arguments,) = HfArgumentParser(DataArguments).parse_args_into_dataclasses(line)
    assert arguments == DataArguments(
        **files, max_source_length=9, streaming=True, source_lang="en", target_lang="de"
    )
    assert all(option.metadata["help"] for option in fields(DataArguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "dataset_name=None: expected a data set, or train_source and train_target"),
        ({"source_lang": "en", "target_lang": "de"}, "dataset_name=None"),
        ({"train_source": "{text}"}, "train_source=.*text.txt.*: expected train_target as well"),
        ({"test_target": "{text}"}, "test_target=.*: expected test_source as well"),
        (
            {"dataset_name": "a", "source_column": "b"},
            "source_column='b': expected target_column as well",
        ),
        (
            {"dataset_name": "a", "target_lang": "de"},
            "target_lang='de': expected source_lang as well",
        ),
        (
            {"dataset_name": "a", "validation_file": "{csv}"},
            "dataset_name='a': expected no local validation files as well",
        ),
        (
            {"train_file": "{csv}", "train_source": "{text}", "train_target": "{text}"},
            "train_file=.*: expected no train_source as well",
        ),
        (
            {"train_file": "{csv}", "dataset_config_name": "de-en"},
            "dataset_config_name='de-en': expected dataset_name as well",
        ),
        (
            {
                "train_source": "{text}",
                "train_target": "{text}",
                "source_column": "en",
                "target_column": "de",
            },
            "source_column='en': expected a table, such as train_file",
        ),
        ({"train_file": "{folder}/no.csv"}, "train data '.*no.csv': expected a file"),
        ({"test_file": "{folder}"}, "test data '.*': expected a file"),
        (
            {"train_source": "{text}", "train_target": "{folder}/no.de"},
            "train data '.*no.de': expected a file",
        ),
        (
            {"train_file": "{text}"},
            "train_file='.*text.txt': expected a name that ends in one of .csv, .tsv, .json",
        ),
        (
            {"train_file": "{parquet}"},
            r"train_file='.*table.parquet.gz': expected parquet without .gz",
        ),
        (
            {"dataset_name": "phrases", "source_lang": "de"},
            "source_lang='de': expected 'en', as in phrases",
        ),
        (
            {"dataset_name": "phrases", "phrases_train_size": -1},
            "phrases_train_size=-1: expected at least 0",
        ),
        ({"dataset_name": "a", "max_source_length": 0}, "max_source_length=0: expected at least 1"),
        (
            {"dataset_name": "a", "max_predict_samples": -5},
            "max_predict_samples=-5: expected at least 1",
        ),
        (
            {"dataset_name": "a", "preprocessing_num_workers": 0},
            "preprocessing_num_workers=0: expected at least 1",
        ),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, arguments, message):
    places = {
        "text": write(tmp_path / "text.txt", "a\n"),
        "csv": write(tmp_path / "table.csv", "source,target\na,b\n"),
        "parquet": write(tmp_path / "table.parquet.gz", ""),
        "folder": str(tmp_path),
    }
    filled = {
        name: value.format(**places) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        DataArguments(**filled)


# Two text files


def test_two_text_files_become_pairs_in_order(tmp_path):
    files = write_sides(tmp_path, PAIRS) | write_sides(tmp_path, PAIRS[1:], "test")
    loaded = load(**files)
    assert set(loaded) == {"train", "test"}
    assert pairs_of(loaded["train"]) == PAIRS
    assert pairs_of(loaded["test"]) == PAIRS[1:]
    assert loaded["train"].split == "train"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_only_end_at_newlines(tmp_path, suffix):
    """A reader with universal newlines would split the first three lines into five."""
    source = write(tmp_path / f"a{suffix}", b"\xef\xbb\xbfone\rstill one\r\n\xef\xbb\xbftwo\r\r\nx")
    target = write(tmp_path / f"b{suffix}", "eins\nzwei\x85\u2028\x1c\ndrei\n")
    loaded = load(train_source=source, train_target=target)
    assert pairs_of(loaded["train"]) == [
        ("one\rstill one", "eins"),
        ("\ufefftwo\r", "zwei\x85\u2028\x1c"),
        ("x", "drei"),
    ]


@pytest.mark.parametrize(("source", "target"), [(3, 1), (2, 3), (0, 1)])
def test_sides_of_different_length_are_refused(tmp_path, source, target):
    a, b = write(tmp_path / "a.en", "x\n" * source), write(tmp_path / "a.de", "x\n" * target)
    with pytest.raises(ValueError, match=rf"a\.en has {source} lines and .*a\.de has {target}: "):
        load(train_source=a, train_target=b)


def test_invalid_utf8_is_reported_with_file_and_line(tmp_path):
    files = write_sides(tmp_path, PAIRS)
    bad = write(tmp_path / "bad", b"fine\nalso \xc3\xa4\nnot \xe4 this\n" + b"fine\n" * 3)
    with pytest.raises(ValueError, match=r"bad, line 3: not UTF-8 \(invalid continuation byte\)"):
        load(**files | {"train_target": bad})


def test_a_table_as_one_side_of_parallel_text_is_refused(tmp_path):
    table, text = write(tmp_path / "a.jsonl", '{"en": "a"}\n'), write(tmp_path / "a.de", "a\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: expected text, .*; only --train_file, "):
        load(train_source=table, train_target=text)


@pytest.mark.parametrize("streaming", [False, True])
def test_each_side_can_be_a_column_of_a_parquet_file(tmp_path, streaming):
    files = {}
    for side, texts in (("source", ["a", "b"]), ("target", ["c", "d"])):
        files[f"train_{side}"] = str(tmp_path / f"{side}.parquet")
        parquet.write_table(pyarrow.table({side[0]: texts}), files[f"train_{side}"])
    loaded = load(**files, streaming=streaming)
    assert pairs_of(loaded["train"]) == [("a", "c"), ("b", "d")]


def test_a_column_of_repeated_texts_can_be_a_side(tmp_path):
    """Parquet then stores each text once, as for categories of pandas and polars."""
    texts = pyarrow.array(["a", None, "a"]).dictionary_encode()
    numbers = pyarrow.array([1, 1, 2]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": texts, "id": numbers}), tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    loaded = load(validation_source=file, validation_target=write(tmp_path / "a.de", "b\nc\nd\n"))
    assert pairs_of(loaded["validation"]) == [("a", "b"), ("", "c"), ("a", "d")]


def test_a_damaged_gzip_file_is_reported(tmp_path):
    whole = gzip.compress(b"".join(b"line %d\n" % i for i in range(1000)))
    path = tmp_path / "text.gz"
    for content in (whole[:-20], whole[:99] + bytes(99) + whole[99:], b"plain text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"text\.gz: damaged gzip"):
            load(train_source=str(path), train_target=str(path))


def test_every_file_is_checked_before_anything_is_cached(tmp_path, cache):
    files = write_sides(tmp_path, PAIRS) | write_sides(tmp_path, PAIRS, "test")
    write(Path(files["test_target"]), "one line\n")
    with pytest.raises(ValueError, match=r"test_source has 6 lines and .*test_target has 1"):
        load(**files)
    assert not cache.exists()


def test_a_corpus_is_memory_mapped_from_a_file_that_is_written_once(tmp_path):
    files = write_sides(tmp_path, PAIRS)
    first, second = load(**files)["train"], load(**files)["train"]
    assert first.cache_files
    assert first.cache_files == second.cache_files


def test_an_upgrade_reads_a_corpus_again(tmp_path, monkeypatch):
    files = write_sides(tmp_path, PAIRS)
    before = load(**files)["train"].cache_files
    monkeypatch.setattr(parallel_text, "_code_version", lambda: "the next version")
    assert load(**files)["train"].cache_files != before


def test_an_upgrade_rereads_the_columns_of_parquet(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "train.parquet", {"source": ["a"], "target": ["b"]})
    before = load(train_file=file)["train"].cache_files
    assert load(train_file=file)["train"].cache_files == before
    monkeypatch.setattr(parallel_text, "_code_version", lambda: "the next version")
    assert load(train_file=file)["train"].cache_files != before


def test_a_changed_parquet_file_with_the_same_mtime_gives_new_data(tmp_path):
    file = tmp_path / "train.parquet"
    for text in ("one", "six"):
        write_parquet(file, {"source": [text], "target": ["x"]})
        os.utime(file, (1, 1))
        assert pairs_of(load(train_file=str(file))["train"]) == [(text, "x")]


def test_a_changed_file_with_the_same_mtime_in_a_named_folder_gives_new_data(tmp_path):
    file = tmp_path / "data" / "train.jsonl"
    file.parent.mkdir()
    for text in ("one", "six"):
        write(file, json.dumps({"source": text, "target": "x"}))
        os.utime(file, (1, 1))
        loaded = load(dataset_name=str(file.parent))["train"]
        assert pairs_of(loaded) == [(text, "x")]
    assert load(dataset_name=str(file.parent))["train"].cache_files == loaded.cache_files


def test_a_changed_file_gives_new_data(tmp_path):
    files = write_sides(tmp_path, [("a", "b")])
    assert pairs_of(load(**files)["train"]) == [("a", "b")]
    write_sides(tmp_path, [("a", "c"), ("d", "e")])
    assert pairs_of(load(**files)["train"]) == [("a", "c"), ("d", "e")]


@pytest.mark.parametrize("replace_file", [False, True])
def test_a_changed_file_with_the_same_size_and_mtime_gives_new_data(tmp_path, replace_file):
    """As after `rsync --times`, `cp --preserve` or from an archive."""
    files = write_sides(tmp_path, [("one", "eins")])
    source = Path(files["train_source"])
    before = source.stat()
    assert pairs_of(load(**files)["train"]) == [("one", "eins")]
    if replace_file:
        Path(write(tmp_path / "new", "six\n")).replace(source)
    else:
        write(source, "six\n")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pairs_of(load(**files)["train"]) == [("six", "eins")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("valid.tsv", "source\ttarget\none\teins\n"),
        ("valid.jsonl.gz", '{"source": "one", "target": "eins"}\n'),
    ],
)
def test_the_format_of_a_link_follows_from_its_own_name(tmp_path, name, content):
    """Its target in the Hub's cache, or in that of DVC, has a name without a suffix."""
    file = Path(write(tmp_path / name, content)).rename(tmp_path / "4766446201d1")
    (tmp_path / name).symlink_to(file)
    loaded = load(validation_file=str(tmp_path / name))
    assert pairs_of(loaded["validation"]) == [("one", "eins")]


# One file with columns


def quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def write_parquet(path: Path, rows: dict[str, list[Any]]) -> str:
    Dataset.from_dict(rows).to_parquet(path)
    return str(path)


WRITERS: dict[str, Callable[[Path, list[tuple[str, str]]], str]] = {
    "csv": lambda path, pairs: write(
        path, "".join(f"{quote(a)},{quote(b)}\r\n" for a, b in [("en", "de"), *pairs])
    ),
    "json": lambda path, pairs: write(path, json.dumps([{"en": a, "de": b} for a, b in pairs])),
    "jsonl": lambda path, pairs: write(
        path, "".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in pairs)
    ),
    "parquet": lambda path, pairs: write_parquet(
        path, {"en": [a for a, _ in pairs], "de": [b for _, b in pairs]}
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "suffix", ["csv", "csv.gz", "json", "json.gz", "jsonl", "jsonl.gz", "parquet"]
)
def test_text_in_columns_is_read_unchanged(tmp_path, suffix, streaming):
    """Dates, numbers and names of missing values such as "NA" stay text."""
    pairs = [*PAIRS, ("two\nlines", "zwei\r\nZeilen")]
    file = WRITERS[suffix.removesuffix(".gz")](tmp_path / f"train.{suffix}", pairs)
    loaded = load(train_file=file, source_lang="en", target_lang="de", streaming=streaming)
    assert pairs_of(loaded["train"]) == pairs


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("run [1]/train.parquet", "run 1/train.parquet"),
        ("part[1].parquet", "part1.parquet"),
        ("part?.parquet", "part1.parquet"),
        ("*.parquet", "part1.parquet"),
    ],
)
@pytest.mark.parametrize("here", [".", "here [1]"])
def test_the_name_of_a_parquet_file_is_not_a_glob_pattern(
    tmp_path, monkeypatch, name, other, here, streaming
):
    for folder in (here, "here 1"):
        for file in (name, other):
            path = tmp_path / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            write_parquet(path, {"source": [f"{folder}/{file}"], "target": ["x"]})
    monkeypatch.chdir(tmp_path / here)
    loaded = load(train_file=name, streaming=streaming)
    assert pairs_of(loaded["train"]) == [(f"{here}/{name}", "x")]


@pytest.mark.parametrize(
    ("header", "is_suspicious"), [("en\tde", False), ("a dog\tein Hund", True)]
)
def test_a_first_line_that_is_not_a_header_is_reported(tmp_path, caplog, header, is_suspicious):
    file = write(tmp_path / "train.tsv", f"{header}\nx\ty\n")
    assert load(train_file=file)["train"][0] == {"source": "x", "target": "y"}
    message = "its column 'a dog' is the source, and 'ein Hund' the target, by their order in its"
    assert any(message in line for line in caplog.messages) == is_suspicious
    caplog.clear()
    source, target = header.split("\t")
    load(train_file=file, source_column=source, target_column=target)
    assert not caplog.messages  # the user has named the columns


def test_columns_that_are_not_named_after_the_languages_are_reported(tmp_path, caplog):
    file = write(tmp_path / "train.jsonl", '{"German": "ja", "English": "yes"}')
    load(train_file=file, source_lang="en", target_lang="de")
    message = "its column 'German' is the source, and 'English' the target, by their order; source"
    assert message in caplog.text


@pytest.mark.parametrize(
    ("header", "is_suspicious"),
    [("Target,English", True), ("German,src", True), ("src,German", False), ("a,b", False)],
)
def test_an_order_of_columns_that_a_name_contradicts_is_reported(
    tmp_path, caplog, header, is_suspicious
):
    file = write(tmp_path / "train.csv", f"{header}\nx,y\n")
    assert load(train_file=file)["train"][0] == {"source": "x", "target": "y"}
    assert any("by their order" in line for line in caplog.messages) == is_suspicious


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_empty_lines_of_a_table_are_skipped(tmp_path, suffix):
    between = {"csv": ",", "tsv": "\t"}[suffix]
    rows = [f"en{between}de", f"yes{between}ja", "", f"no{between}nein", ""]
    file = write(tmp_path / f"test.{suffix}", "\n".join(rows) + "\n")
    assert pairs_of(load(test_file=file)["test"]) == [("yes", "ja"), ("no", "nein")]


def test_columns_of_a_table_need_no_name(tmp_path):
    file = write(tmp_path / "test.csv", "en,de,,\nyes,ja,,\n")
    found = load(test_file=file, source_lang="en", target_lang="de")["test"]
    assert pairs_of(found) == [("yes", "ja")]


def test_spaces_before_the_fields_of_csv_are_dropped(tmp_path):
    # A space before a quote would make the quotes part of the text.
    file = write(
        tmp_path / "test.csv", 'en, de\n"a lake, deep", "ein See, tief"\na house, ein Haus\n'
    )
    loaded = load(test_file=file, source_lang="en", target_lang="de")["test"]
    assert pairs_of(loaded) == [("a lake, deep", "ein See, tief"), ("a house", "ein Haus")]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.csv", "en;de\na;b\n", "'en;de'"),
        ("a.jsonl", '{"en": "a"}\n{"en": "a", "de": "b"}\n', "'en'"),
        ("a.jsonl", '{"translation": {"en": "a"}}\n', "'translation.en'"),
        ("a.jsonl", "{}\n", ""),
    ],
)
def test_missing_columns_are_reported_by_language(tmp_path, name, content, found):
    message = f"{name}: there are no columns 'en' and 'de', only: {found}$"
    with pytest.raises(ValueError, match=message):
        load(train_file=write(tmp_path / name, content), source_lang="en", target_lang="de")


def test_tsv_has_no_quoting(tmp_path):
    file = write(tmp_path / "test.TSV", 'en\tde\n"open, quote\tsay "a" ""\r\n\t\\n\n')
    assert pairs_of(load(test_file=file)["test"]) == [('"open, quote', 'say "a" ""'), ("", "\\n")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("field", ['he said "hi", ok', '"', '"a" and "b"'])
def test_quotes_as_in_csv_give_one_warning_in_a_tsv_file(tmp_path, caplog, field, streaming):
    lines = ["source\ttarget", "a\tb", "", *[f"{quote(field)}\tc"] * 2]
    file = write(tmp_path / "train.tsv", "\n".join(lines))
    loaded = load(train_file=file, streaming=streaming)["train"]
    assert pairs_of(loaded) == pairs_of(loaded) == [("a", "b"), *[(quote(field), "c")] * 2]
    (message,) = caplog.messages
    assert "train.tsv: some fields are in quotes, which are read as text" in message
    assert "tsv files have no quoted fields; use .csv for these" in message


def test_a_header_in_quotes_gives_a_warning_in_a_tsv_file(tmp_path, caplog):
    file = write(tmp_path / "train.tsv", '"source"\t"target"\na\tb\n')
    load(train_file=file)
    (message,) = (text for text in caplog.messages if "in quotes" in text)
    assert message.startswith(file)


@pytest.mark.parametrize("field", ['"open', '"a"', '""', 'a ""', '"" b', '"a" "" "b"', '"" "" ""'])
def test_quotes_unlike_those_of_csv_are_text_without_a_warning(tmp_path, caplog, field):
    file = write(tmp_path / "train.tsv", f'source\ttarget\n{field}\t"b"\n')
    assert pairs_of(load(train_file=file)["train"]) == [(field, '"b"')]
    assert not caplog.messages


def test_json_without_a_list_has_an_object_per_line(tmp_path):
    rows = [{"translation": {"en": "a", "de": "b"}}, {"translation": {"en": "c", "de": "d"}}]
    file = write(tmp_path / "train.json", "\n".join(map(json.dumps, rows)) + "\n\n")
    loaded = load(train_file=file, source_lang="de", target_lang="en")
    assert pairs_of(loaded["train"]) == [("b", "a"), ("d", "c")]


@pytest.mark.parametrize("before", ["", " ", "\n \n\t"], ids=ascii)
def test_json_in_a_list_can_start_with_white_space(tmp_path, before):
    content = f'{before}[{{"source": "a",\n"target": "b"}},\n{{"source": "c", "target": "d"}}]\n'
    file = write(tmp_path / "train.json", content)
    assert pairs_of(load(train_file=file)["train"]) == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "en,de\na,b\n\nc\n", "a.csv, record 3: 1 fields, but the header has 2"),
        ("a.csv", 'en,de\na,b\n"a" b,c\n', "a.csv, line 3: ',' expected after '\"'"),
        ("a.csv", "en,de,de\na,b,c\n", "a.csv: expected a header with each name once, not 'de' "),
        ("a.tsv", "en\tde\na\tb\na\tb\tc\n", "a.tsv, record 3: 3 fields, but the header has 2"),
        (
            "a.jsonl",
            '{"a": "b", "c": "d"}\n\n{"a": }\n',
            r"a.jsonl, line 3: not valid JSON \(Expecting",
        ),
        ("a.json", '[{"a": "b"},\n{"a": }]', r"a.json, line 2: not valid JSON \(Expecting"),
        ("a.jsonl", '{"a": "x", "b": "y"}\n7\n', "a.jsonl, line 2: int is not an object"),
        (
            "a.jsonl",
            '{"a": ' + "7" * 5000 + "}",
            r"a.jsonl, line 1: not readable JSON \(Exceeds the l",
        ),
        ("a.jsonl", '{"a": ' * 99_999, "a.jsonl, line 1: not readable JSON"),
        (
            "a.jsonl",
            '{"a": "b", "c": ""}\n{"a": "b", "c": 7}\n',
            "a.jsonl, pair 2: column 'c' must hold text, not 7",
        ),
        (
            "a.jsonl",
            '{"a": "b", "c": "d"}\n{"a": "b", "c": "x\\ud800"}\n',
            "a.jsonl, pair 2: column 'c' has the surrogate",
        ),
        ("a.csv", "en,de\n", "a.csv: there is no sentence pair"),
        ("a.csv", "", "a.csv: there is no sentence pair"),
        ("a.csv", "en,de\na,\n ,b\n", "a.csv: every sentence pair of the train data has a blank"),
    ],
)
def test_a_defect_in_a_file_is_reported(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        load(train_file=write(tmp_path / name, content))


def test_a_column_that_is_not_text_is_refused(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"a": ["x"] * 1501, "b": [None] * 1500 + [7]})
    with pytest.raises(ValueError, match="pair 1501: column 'b' must hold text, not 7"):
        load(train_file=file)


# Columns


@pytest.mark.parametrize(
    ("row", "arguments", "chosen"),
    [
        ({"en": "s", "de": "t", "id": "-"}, {"source_lang": "en", "target_lang": "de"}, "st"),
        ({"en": "t", "de": "s", "id": "-"}, {"source_lang": "de", "target_lang": "en"}, "st"),
        (
            {"id": "-", "translation": {"de": "t", "en": "s"}},
            {"source_lang": "en", "target_lang": "de"},
            "st",
        ),
        ({"de": "t", "en": "s"}, {"source_lang": "en_XX", "target_lang": "de_DE"}, "st"),
        ({"DE": "t", "EN-us": "s"}, {"source_lang": "en", "target_lang": "de"}, "st"),
        ({"x": "-", "source": "s", "target": "t"}, {}, "st"),
        ({"target": "t", "source": "s"}, {}, "st"),
        ({"text": {"de": "t", "en": "s"}}, {"source_lang": "en", "target_lang": "de"}, "st"),
        (
            {"translation": {"de": "t", "en": "s"}},
            {"source_lang": "en_XX", "target_lang": "de_DE"},
            "st",
        ),
        (
            {"tokens": {"de": "-", "en": "-"}, "target": "t", "source": "s"},
            {"source_lang": "en", "target_lang": "de"},
            "st",
        ),
        ({"Target": "t", "Source": "s"}, {}, "st"),
        ({"tgt": "t", "src": "s"}, {}, "st"),
        ({"TRG": "t", "x": "-", "Src": "s"}, {}, "st"),
        ({"Target": "-", "target": "t", "source": "s"}, {}, "st"),
        ({"source": "-", "tgt": "t", "src": "s"}, {}, "st"),  # `source` can be its origin
        ({"TARGET": "t", "SOURCE": "s"}, {"source_lang": "en", "target_lang": "de"}, "st"),
        (
            {"src": "-", "tgt": "-", "DE": "t", "EN": "s"},
            {"source_lang": "en", "target_lang": "de"},
            "st",
        ),
        ({"anything": "s", "else": "t"}, {}, "st"),
        ({"anything": "s", "else": "t"}, {"source_lang": "en", "target_lang": "de"}, "st"),
        (
            {"en": "-", "de": "-", "b": "s", "c": "t"},
            {
                "source_lang": "en",
                "target_lang": "de",
                "source_column": "b",
                "target_column": "c",
            },
            "st",
        ),
        ({"a": "-", "b": "s"}, {"source_column": "b", "target_column": "b"}, "ss"),
        ({"a.b": "s", "a.c": "t"}, {"source_column": "a.b", "target_column": "a.c"}, "st"),
        (
            {"source": "t", "target": "s"},
            {"source_column": "target", "target_column": "source"},
            "st",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_are_chosen_by_name_then_language_then_order(
    tmp_path, suffix, row, arguments, chosen
):
    path = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        write(path, json.dumps(row))
    else:
        Dataset.from_list([row]).to_parquet(path)
    loaded = load(train_file=str(path), **arguments)
    assert pairs_of(loaded["train"]) == [tuple(chosen)]


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (None, [], r"train.parquet: expected a parquet file \(Parquet file size is 0 bytes\)"),
        ([], [], "train.parquet: there is no sentence pair"),
        (["en", "de"], [[], []], "train.parquet: there is no sentence pair"),
        (["en", "de", "de"], ["a", "b", "c"], "train.parquet has several columns 'de': expected"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_that_datasets_cannot_read_is_reported(
    tmp_path, names, values, message, streaming
):
    file = tmp_path / "train.parquet"
    file.touch()
    if names is not None:
        columns = [pyarrow.array(list(value), pyarrow.string()) for value in values]
        parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), file)
    with pytest.raises(ValueError, match=message):
        load(train_file=str(file), source_lang="en", target_lang="de", streaming=streaming)


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        (
            {"a": "s", "b": "t"},
            {"source_column": "a", "target_column": "c"},
            "no columns 'a' and 'c', only: 'a', 'b'$",
        ),
        (
            {"a": "s", "b": "t"},
            {"source_column": "c", "target_column": "b"},
            "no columns 'c' and 'b', only: 'a', 'b'$",
        ),
        (
            {"a": "s", "b": "t", "c": "-"},
            {},
            "no columns 'source' and 'target', only: 'a', 'b', 'c'$",
        ),
        (
            {"translation": {"en": "s", "de": "t"}},
            {"source_lang": "en", "target_lang": "fr"},
            "no columns 'en' and 'fr', only: 'translation.en', ",
        ),
        (
            {"translation": {"en": "s", "de": "t"}},
            {},
            "no columns 'source' and 'target', only: 'translation.en', 'translation.de'",
        ),
        (
            {"en": "s", "fr": "t", "de": "-"},
            {"source_lang": "en_US", "target_lang": "en_GB"},
            "no columns 'en_US' and 'en_GB', only: 'en', ",
        ),
    ],
)
def test_a_missing_column_is_reported_along_with_those_present(tmp_path, row, arguments, message):
    file = write(tmp_path / "train.jsonl", json.dumps(row))
    with pytest.raises(ValueError, match=f"train.jsonl: there are {message}"):
        load(train_file=file, **arguments)


# Blank sides and limits

GAPS = [
    {"a": "1", "b": "2"},
    {"a": None, "b": "3"},
    {"a": "4", "b": " \t"},
    {"a": "\u200b", "b": "7"},
    {"a": "5", "b": "6"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_blank_pairs_are_only_dropped_from_training_data_and_counted(tmp_path, suffix, caplog):
    file = tmp_path / f"gaps.{suffix}"
    if suffix == "jsonl":
        write(file, "\n".join(map(json.dumps, GAPS)))
    else:
        Dataset.from_list(GAPS).to_parquet(file)
    with caplog.at_level(logging.WARNING, "vanilla_transformer"):
        loaded = load(train_file=str(file), validation_file=str(file), test_file=str(file))
    assert pairs_of(loaded["train"]) == [("1", "2"), ("5", "6")]
    for split in ("validation", "test"):
        kept = [("1", "2"), ("", "3"), ("4", ""), ("", "7"), ("5", "6")]
        assert pairs_of(loaded[split]) == kept
    messages = [record.message for record in caplog.records]
    assert messages == [f"{file}: dropped 3 pairs with a blank side"]


@pytest.mark.parametrize("streaming", [False, True])
def test_limits_take_the_first_pairs(tmp_path, streaming):
    files = write_sides(tmp_path, [("", "x"), *PAIRS]) | write_sides(tmp_path, PAIRS, "test")
    limits = {"max_train_samples": 2, "max_predict_samples": 99, "max_eval_samples": 1}
    loaded = load(**files, **limits, streaming=streaming)
    assert pairs_of(loaded["train"]) == PAIRS[:2]
    assert pairs_of(loaded["test"]) == PAIRS


# Datasets by name


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """A folder with the layout of a dataset on the Hub, with a `translation` column like that of
    wmt14."""
    languages = datasets.Translation(languages=["de", "en"])
    features = datasets.Features({"translation": languages, "score": datasets.Value("float32")})
    folder = tmp_path / "repository"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        rows = [{"translation": {"en": a, "de": b}, "score": 0.5} for a, b in [*PAIRS, ("", "x")]]
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_named_dataset_has_its_translations_split_into_two_columns(repository, streaming):
    names = {"dataset_name": repository, "source_lang": "de", "target_lang": "en"}
    loaded = load(**names, streaming=streaming)
    assert set(loaded) == {"train", "validation", "test"}
    kinds = {split: type(dataset) for split, dataset in loaded.items()}
    stored = {"validation": Dataset, "test": Dataset}  # evaluations need their length
    assert kinds == {"train": IterableDataset if streaming else Dataset, **stored}
    swapped = [(de, en) for en, de in PAIRS]
    assert pairs_of(loaded["train"]) == swapped
    assert pairs_of(loaded["test"]) == [*swapped, ("x", "")]


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_missing_values_are_text_in_a_named_dataset_too(tmp_path, streaming):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "train.csv").write_text("source,target,score\nNA,null,1\nNone,,2\nnan,NaN,\n")
    loaded = load(dataset_name=str(folder), streaming=streaming)
    assert pairs_of(loaded["train"]) == [("NA", "null"), ("nan", "NaN")]


@pytest.mark.parametrize("streaming", [False, True])
def test_quotes_in_tsv_files_of_a_local_folder_are_text(tmp_path, streaming):
    """pandas would read the lines between two quotes as one field."""
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "train.tsv").write_text('en\tde\n"one\teins\ntwo\tzwei\nthree"\t"drei"\n')
    loaded = load(dataset_name=str(folder), streaming=streaming)
    pairs = [('"one', "eins"), ("two", "zwei"), ('three"', '"drei"')]
    assert pairs_of(loaded["train"]) == pairs


def test_a_configuration_of_a_named_dataset_can_be_chosen(tmp_path):
    for name in ("de-en", "fr-en"):
        Dataset.from_dict({"a": [name], "b": ["x"]}).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: de-en\n  data_files: de-en.parquet\n"
        "- config_name: fr-en\n  data_files: fr-en.parquet\n---\n"
    )
    loaded = load(dataset_name=str(tmp_path), dataset_config_name="fr-en")
    assert pairs_of(loaded["train"]) == [("fr-en", "x")]


def test_a_named_dataset_without_the_usual_splits_is_refused(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    Dataset.from_dict({"a": ["x"], "b": ["y"]}).to_parquet(folder / "dump.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: dump\n    path: dump.parquet\n---\n"
    )
    with pytest.raises(ValueError, match="none of the splits train, validation, test, only: dump"):
        load(dataset_name=str(folder))


@pytest.mark.parametrize("name", ["v[1]", "v?", "*"])
@pytest.mark.parametrize("inside", ["", "data"])
def test_a_folder_whose_name_is_a_glob_pattern_is_refused(tmp_path, monkeypatch, name, inside):
    for folder in (name, "v1"):
        (tmp_path / folder / inside).mkdir(parents=True)
        write_parquet(tmp_path / folder / inside / "train.parquet", {"a": [folder], "b": ["x"]})
    monkeypatch.chdir(tmp_path / name)
    for written in (tmp_path / name / inside, inside or "."):
        with pytest.raises(ValueError, match=r"expected a folder without \*, \? or \[ in .*"):
            load(dataset_name=str(written))


def test_a_named_dataset_without_rows_is_refused(tmp_path):
    empty = Dataset.from_dict({"source": [], "target": []}, features=PAIR_FEATURES)
    empty.to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"the test data of .* holds no sentence pair"):
        load(dataset_name=str(tmp_path), streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("language", [None, "fr"])
def test_phrases_are_generated_in_the_requested_sizes(streaming, language):
    pytest.importorskip("num2words")
    pytest.importorskip("babel")
    loaded = load(
        dataset_name="phrases",
        target_lang=language,
        phrases_train_size=20,
        phrases_validation_size=0,
        phrases_test_size=1,
        phrases_seed=3,
        streaming=streaming,
    )
    from vanilla_transformer.data.phrases import load_phrases

    assert set(loaded) == {"train", "test"}
    assert isinstance(loaded["train"], IterableDataset) == streaming
    for split, size in (("train", 20), ("test", 1)):
        expected = load_phrases(size, target_language=language or "de", split=split, seed=3)
        assert pairs_of(loaded[split]) == pairs_of(expected)


# Tokens


@pytest.fixture
def parallel(tmp_path: Path) -> tuple[DatasetDict, DataArguments]:
    files = write_sides(tmp_path, PAIRS) | write_sides(tmp_path, PAIRS[:2], "validation")
    arguments = DataArguments(**files)
    return load_parallel_dataset(arguments), arguments


def test_sources_and_targets_become_ids(parallel, tokenizer):
    tokens = tokenize_dataset(parallel[0], tokenizer, parallel[1])
    assert set(tokens) == {"train", "validation"}
    assert tokens["train"].column_names == ["input_ids", "labels", "length"]
    for row, (source, target) in zip(tokens["train"], PAIRS, strict=True):
        assert row["input_ids"] == tokenizer(source)["input_ids"]
        assert row["labels"] == tokenizer(text_target=target)["input_ids"]
        assert row["length"] == max(len(row["input_ids"]), len(row["labels"]))


def test_each_side_is_truncated_to_its_own_limit_and_keeps_eos(parallel, tokenizer):
    whole = tokenize_dataset(parallel[0], tokenizer, parallel[1])["train"]
    limits = replace(parallel[1], max_source_length=4, max_target_length=3)
    cut = tokenize_dataset(parallel[0], tokenizer, limits)["train"]
    for long, short in zip(whole, cut, strict=True):
        assert len(long["input_ids"]) > 4
        assert short["input_ids"] == [*long["input_ids"][:3], tokenizer.eos_token_id]
        assert short["labels"] == [*long["labels"][:2], tokenizer.eos_token_id]
        assert short["length"] == 4
    assert tokenizer.backend_tokenizer.truncation is None  # it would be saved


def test_workers_give_the_same_ids(parallel, tokenizer):
    arguments = replace(parallel[1], preprocessing_num_workers=2)
    tokens = tokenize_dataset(parallel[0], tokenizer, arguments)["train"]
    assert len(tokens.cache_files) == 2  # a part from each worker
    assert tokens["input_ids"][:] == [tokenizer(source)["input_ids"] for source, _ in PAIRS]
    assert tokens["labels"][:] == [tokenizer(target)["input_ids"] for _, target in PAIRS]


def test_a_stream_gives_the_same_ids(parallel, tokenizer):
    arguments = replace(parallel[1], streaming=True, max_source_length=4)
    stream = tokenize_dataset(load_parallel_dataset(arguments), tokenizer, arguments)["train"]
    assert isinstance(stream, IterableDataset)
    assert list(stream) == list(tokenize_dataset(parallel[0], tokenizer, arguments)["train"])


@needs("datasets", "4.7", "hashes of tokenizers without their padding and truncation")
def test_the_cache_depends_on_the_tokenizer_but_not_on_its_earlier_use(parallel, tokenizer):
    """Padding and truncation change the state of a fast tokenizer; only its vocabulary counts."""
    dataset, arguments = parallel
    first = tokenize_dataset(dataset, tokenizer, arguments)["train"]
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)
    again = tokenize_dataset(dataset, tokenizer, arguments)["train"]
    assert first.cache_files == again.cache_files

    other = train_tokenizer(["other text"], 300, show_progress=False)
    different = tokenize_dataset(dataset, other, arguments)["train"]
    assert different[0]["input_ids"] == other(PAIRS[0][0])["input_ids"]
    assert different[0]["input_ids"] != first[0]["input_ids"]


@pytest.mark.parametrize("name", ["parallel_text.py", "tokenization_vanilla_transformer.py"])
def test_an_upgrade_tokenizes_again(parallel, tokenizer, monkeypatch, name):
    """Also data that was not read again, such as `phrases`."""
    before, same = (tokenize_dataset(parallel[0], tokenizer, parallel[1]) for _ in range(2))
    assert before["train"].cache_files == same["train"].cache_files
    content = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: content(path) + b"#" * (path.name == name))
    after = tokenize_dataset(parallel[0], tokenizer, parallel[1])
    assert after["train"].cache_files != before["train"].cache_files


@pytest.mark.parametrize("upgraded", ["tokenizers", "transformers"])
def test_an_upgrade_of_a_library_tokenizes_again(parallel, tokenizer, monkeypatch, upgraded):
    before = tokenize_dataset(parallel[0], tokenizer, parallel[1])["train"].cache_files
    version = importlib.metadata.version
    new = {upgraded: "99.9"}
    monkeypatch.setattr(parallel_text, "version", lambda name: new.get(name) or version(name))
    after = tokenize_dataset(parallel[0], tokenizer, parallel[1])["train"].cache_files
    assert after != before


def test_the_stock_collator_can_make_the_batches(parallel, tokenizer):
    tokens = tokenize_dataset(parallel[0], tokenizer, parallel[1])["train"]
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    rows = [tokens[0], tokens[1]]
    batch = collator(tokens.remove_columns("length").select(range(2)).to_list())
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for name, padding in (("input_ids", tokenizer.pad_token_id), ("labels", -100)):
        width = batch[name].shape[1]
        assert width % 8 == 0
        assert batch[name].tolist() == [
            row[name] + [padding] * (width - len(row[name])) for row in rows
        ]
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_texts_of_both_sides_train_a_tokenizer(tmp_path, streaming):
    loaded = load(**write_sides(tmp_path, PAIRS), streaming=streaming)
    texts = iter_texts(loaded["train"])
    assert next(texts) == PAIRS[0][0]
    rest = sorted([PAIRS[0][0], *texts])
    assert rest == sorted(itertools.chain(*PAIRS))


# Real text


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="needs the Multi30k text in ../shared/data")
def test_multi30k_is_read_completely(tmp_path):
    stems = {"validation": "val", "test": "test_2016_flickr"}
    files = {
        f"{split}_{side}": str(MULTI30K / f"{stem}.{language}")
        for split, stem in stems.items()
        for side, language in (("source", "en"), ("target", "de"))
    }
    loaded = load(**files)
    assert loaded.num_rows == {"validation": 1014, "test": 1000}
    for split in stems:
        for side in ("source", "target"):
            text = "".join(f"{line}\n" for line in loaded[split][side])
            assert text.encode() == Path(files[f"{split}_{side}"]).read_bytes()


@pytest.mark.parametrize("other", ["valid.csv", "valid.jsonl"])
def test_two_columns_in_reverse_order_do_not_reverse_the_direction(tmp_path, other):
    train = write(tmp_path / "train.csv", "en,de\nyes,ja\n")
    reversed_columns = {"valid.csv": "de,en\nja,yes\n", "valid.jsonl": '{"de": "ja", "en": "yes"}'}
    files = {
        "train_file": train,
        "validation_file": write(tmp_path / other, reversed_columns[other]),
    }
    with pytest.raises(ValueError, match=r"valid.* other way round: expected source_column"):
        load_parallel_dataset(DataArguments(**files))
    named = DataArguments(**files, source_column="en", target_column="de")
    assert load_parallel_dataset(named)["validation"][0] == {"source": "yes", "target": "ja"}


def test_the_order_of_columns_is_ignored_with_several_corpora(tmp_path):
    tables = [write(tmp_path / f"{name}.csv", "en,de\nyes,ja\n") for name in "abc"]
    assert pairs_of(load(train_file=tables[0])["train"]) == [("yes", "ja")]
    message = "no columns 'source' and 'target', only: 'en', 'de'"
    with pytest.raises(ValueError, match=message):
        load(train_file=tables[:2], validation_file=tables[2])


def test_column_options_are_for_tables_and_not_for_text_files(tmp_path):
    table = write(tmp_path / "train.csv", "en,de\nyes,ja\n")
    sides = write_sides(tmp_path, [("no", "nein")], "validation")
    arguments = DataArguments(train_file=table, source_column="en", target_column="de", **sides)
    assert load_parallel_dataset(arguments)["validation"][0] == {"source": "no", "target": "nein"}
