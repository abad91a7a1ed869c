"""Lines of text: as many at once as have arrived, in UTF-8 for input and output."""

import bz2
import gzip
import io
import lzma
import os
import sys
import zipfile
from itertools import chain

import pytest

from vanilla_transformer.data.text_files import (
    expect_inputs,
    expect_output,
    open_output,
    open_text,
    read_arrived,
    read_file,
)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with open(read, "rb") as source, open(write, "wb", buffering=0) as sink:
        yield source, sink


def test_a_line_is_read_before_the_next_is_written(pipe):
    source, sink = pipe
    lists = read_arrived(source, "pipe")
    for line in ("a house", "", "der See"):
        sink.write(f"{line}\n".encode())
        assert next(lists) == [line]
    sink.write(b"cut ")
    sink.write(b"in two\nwithout ")
    assert next(lists) == ["cut in two"]
    sink.write(b"an end")
    sink.close()
    assert list(lists) == [["without an end"]]


def test_lines_that_have_arrived_are_returned_together(pipe):
    source, sink = pipe
    sink.write(b"see\n" * 1000)
    sink.close()
    assert list(read_arrived(source, "pipe")) == [["see"] * 1000]


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_lines_do_not_depend_on_the_size_of_reads(tmp_path, monkeypatch, size):
    monkeypatch.setattr("vanilla_transformer.data.text_files.READ_SIZE", size)
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntw\ro\xe2\x80\xa8\n\nlast")
    with path.open("rb") as file:
        lines = [line for lines in read_arrived(file, "lines") for line in lines]
    assert lines == ["one", "tw\ro\u2028", "", "last"]


def test_a_compressed_file_has_the_lines_of_a_plain_one(tmp_path):
    path = tmp_path / "text.GZ"
    path.write_bytes(gzip.compress(b"ein Haus\r\n\nder See"))
    assert list(read_file(path)) == ["ein Haus", "", "der See"]
    with open_text(path) as file:
        assert list(chain.from_iterable(read_arrived(file, "text"))) == ["ein Haus", "", "der See"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"text\.GZ: damaged gzip"):
        list(read_file(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
def test_text_with_unsupported_compression_is_reported(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("text", "ein Haus\n")
    else:
        module = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
        path.write_bytes(module.compress(b"ein Haus\n"))
    path = path.rename(tmp_path / "text")
    with pytest.raises(ValueError, match=f"text: its content is that of a {suffix} file, expected"):
        list(read_file(path))
    if suffix != ".gz":
        with pytest.raises(ValueError, match=f"output='out{suffix}': expected a plain text file"):
            expect_output(f"out{suffix}")


def test_zstandard_is_recognized_by_its_first_bytes(tmp_path):  # RFC 8878, section 3.1.1
    (tmp_path / "text").write_bytes(0xFD2FB528.to_bytes(4, "little") + b"a\n")
    with pytest.raises(ValueError, match=r"text: its content is that of a \.zst file"):
        list(read_file(tmp_path / "text"))


def test_text_that_starts_like_a_compressed_file_is_text(tmp_path):
    (tmp_path / "text").write_text("BZh91\nPK\n")
    assert list(read_file(tmp_path / "text")) == ["BZh91", "PK"]


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.json", "a.jsonl", "a.jsonl.gz", "a.csv.GZ"])
def test_a_table_as_text_is_refused(tmp_path, name):
    """Its commas and braces must not be scored or translated."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a\n") if name.lower().endswith(".gz") else b"a\n")
    message = rf"{name}: expected text, a sentence a line, or parquet; only --train_file, --vali"
    with pytest.raises(ValueError, match=message):
        list(read_file(path))
    with pytest.raises(ValueError, match=message):
        expect_inputs(target=None, source=path)
    with pytest.raises(ValueError, match=message):
        expect_inputs(source=f"s3://bucket/{name}")
    expect_output(path)  # an output can have any name


def test_an_output_that_would_overwrite_an_input_is_refused(tmp_path):
    (tmp_path / "in").write_text("a\n")
    (tmp_path / "link").symlink_to("in")
    url = "s3://bucket/in"
    for source, output in (("in", "in"), ("in", "link"), ("in", "./in")):
        with pytest.raises(ValueError, match="expected another file than source"):
            expect_output(tmp_path / output, target=None, source=tmp_path / source)
    with pytest.raises(ValueError, match="output='s3://bucket/in': expected another file than so"):
        expect_output(url, source=url)
    expect_output(tmp_path / "out", source=tmp_path / "in")
    expect_output(None, source=tmp_path / "in")
    expect_output("s3://bucket/out", source=url)
    expect_output(os.devnull, source=os.devnull)  # like a terminal, which can be both


@pytest.mark.parametrize("name", ["tsv", "csv.en", "a.tsv.txt", "a.parts/0"])
def test_a_name_that_only_mentions_a_table_is_text(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("a\tb\n")
    expect_inputs(source=path)
    assert list(read_file(path)) == ["a\tb"]


def test_a_line_that_is_not_utf8_is_reported_with_its_number_in_the_file(pipe):
    source, sink = pipe
    lists = read_arrived(source, "pipe")
    sink.write(b"one\ntwo\n")
    assert next(lists) == ["one", "two"]
    sink.write(b"three\n\xff\n")
    with pytest.raises(ValueError, match="pipe, line 4: not UTF-8"):
        next(lists)


def test_standard_output_is_utf8_in_any_locale(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with open_output(None) as file:
        file.write("größer\n")
        file.flush()
    assert written.getvalue() == "größer\n".encode()
