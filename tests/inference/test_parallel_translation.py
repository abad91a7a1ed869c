"""A file is translated completely, in order, once, despite interruptions and with any number of
workers."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow
import pytest
import torch
from conftest import BackgroundCopy, run_command, run_program, run_ranks
from pyarrow import parquet
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, CTRLTokenizer

from vanilla_transformer.data.paths import as_path
from vanilla_transformer.data.text_files import read_file
from vanilla_transformer.inference import parallel_translation
from vanilla_transformer.inference.ensemble import VanillaTransformerEnsemble
from vanilla_transformer.inference.parallel_translation import (
    LINES_PER_CHUNK,
    fingerprint,
    transform_chunks,
    transform_file,
)

LINES = [f"line {number}" for number in range(23)] + ["", "last, without an end"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES))
    return path


class Worker:
    """Doubles each line, records the lines it has seen, and can fail at one of them."""

    def __init__(self, fails_at=None):
        self.seen, self.fails_at = [], fails_at

    def __call__(self, lines, first):
        for number, line in enumerate(lines, first):
            if number == self.fails_at:
                raise RuntimeError("stopped")
            self.seen.append(number)
            yield f"{number} {line}"


EXPECTED = "".join(f"{number} {line}\n" for number, line in enumerate(LINES))


def run(worker, source, **options):
    output = source.with_name("out.txt")
    transform_file(worker, source, output, {"model": "m"}, **{"lines_per_chunk": 4, **options})
    return output


def test_lines_come_out_in_order(source):
    assert run(Worker(), source).read_text() == EXPECTED
    assert {path.name for path in source.parent.iterdir()} == {"in.txt", "out.txt"}


def test_an_empty_file_gives_an_empty_file(source):
    source.write_text("")
    assert run(Worker(), source).read_text() == ""


def test_finished_chunks_are_not_repeated(source):
    source.with_name("out.txt").write_text("of an earlier job\n")
    first = Worker(fails_at=14)
    with pytest.raises(RuntimeError, match="stopped"):
        run(first, source)
    assert source.with_name("out.txt").read_text() == "of an earlier job\n"
    second = Worker()
    assert run(second, source).read_text() == EXPECTED
    assert second.seen == list(range(12, len(LINES)))  # all lines of the interrupted chunk


def test_a_job_interrupted_while_merging_only_merges(source, monkeypatch):
    """What it has written of the output does not stay on a full disk."""

    def fill(part, to):
        to.write(part.read(9))
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fill)
        with pytest.raises(OSError, match="No space left"):
            run(Worker(), source)
    assert {path.name for path in source.parent.iterdir()} == {"in.txt", "out.txt.parts"}
    again = Worker()
    assert run(again, source).read_text() == EXPECTED
    assert again.seen == []


def test_chunks_can_be_finished_in_any_order_and_are_kept(source):
    """As when several machines finish them, until one stops all."""
    worker, output = Worker(), source.with_name("out.txt")

    def backwards(chunks, until=0):
        for first, lines in reversed(list(chunks)):
            if first < until:
                raise RuntimeError("stopped")
            yield first, worker(lines, first)

    with pytest.raises(RuntimeError, match="stopped"):
        transform_chunks(partial(backwards, until=9), source, output, {}, lines_per_chunk=4)
    assert min(worker.seen) == 12
    transform_chunks(backwards, source, output, {}, lines_per_chunk=4)
    assert output.read_text() == EXPECTED
    assert sorted(worker.seen) == list(range(len(LINES)))


def test_an_output_is_replaced_if_rename_refuses_existing_names(source, monkeypatch):
    """As on Windows."""
    rename = Path.rename

    def rename_on_windows(path, target):
        if Path(target).exists():
            raise FileExistsError(17, "Cannot create a file when that file already exists")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_on_windows)
    source.with_name("out.txt").write_text("of an earlier job\n")
    assert run(Worker(), source).read_text() == EXPECTED


def test_a_job_started_twice_writes_complete_files(source, monkeypatch):
    """If both wrote to the same file, the first could end with a gap in its output."""
    monkeypatch.setattr(os, "getpid", threading.get_ident)  # as in two processes
    source.write_text("".join(f"line {number}\n" for number in range(20_000)))
    output, (at_work, both, first_ended) = (
        source.with_name("twice"),
        (threading.Event() for _ in range(3)),
    )

    def first(lines, index):
        yield from map(str.upper, lines[:10_000])
        at_work.set()
        assert both.wait(10)
        yield from map(str.upper, lines[10_000:])

    def second(lines, index):
        both.set()
        assert first_ended.wait(10)
        yield from map(str.upper, lines)

    with ThreadPoolExecutor(2) as threads:
        job = threads.submit(transform_file, first, source, output, {}, lines_per_chunk=20_000)
        assert at_work.wait(10)
        other = threads.submit(transform_file, second, source, output, {}, lines_per_chunk=20_000)
        job.result()
        first_ended.set()
        with pytest.raises(FileNotFoundError, match=r"twice\.parts is gone: expected no other"):
            other.result()
    assert output.read_text() == source.read_text().upper()


def test_a_job_that_another_one_merges_at_the_same_time_is_reported(source, monkeypatch):
    parts = source.with_name("out.txt.parts")
    monkeypatch.setattr(shutil, "copyfileobj", lambda part, to: shutil.rmtree(parts))
    with pytest.raises(FileNotFoundError, match=r"out\.txt\.parts is gone: expected no other"):
        run(Worker(), source)


def test_files_on_any_file_system_are_read_and_written(tmp_path):
    """They are given by URL; finished chunks are kept there too."""
    pytest.importorskip("upath", reason="needs vanilla-transformer[ray]")
    folder = as_path(f"memory://{tmp_path.name}/texts")
    folder.mkdir(parents=True)
    source, output = folder / "in.txt", folder / "out.txt"
    source.write_text("\n".join(LINES))
    with pytest.raises(RuntimeError, match="stopped"):
        run(Worker(fails_at=14), source)
    again = Worker()
    assert run(again, source).read_text() == EXPECTED
    assert again.seen == list(range(12, len(LINES)))
    assert sorted(path.name for path in folder.iterdir()) == ["in.txt", "out.txt"]
    assert list(read_file(str(output))) == EXPECTED.splitlines()


def test_a_missing_package_for_a_url_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(
        ImportError, match=r"s3://b/in.txt needs the package universal-pathlib: pip"
    ):
        as_path("s3://b/in.txt")


@pytest.fixture
def table(tmp_path):
    """A parquet file of several row groups, with texts that contain line breaks."""
    texts = [None, "", "two\nlines", *(f"row {number}" for number in range(20))]
    ids = list(range(len(texts)))
    table = pyarrow.table({"id": ids, "text": texts}).replace_schema_metadata({"licence": "mine"})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=5)
    return tmp_path / "in.parquet"


def test_a_parquet_file_gets_a_column(table):
    """The other columns stay, and chunks do not follow the row groups."""
    output = table.with_name("out.parquet")

    def shout(lines, first):
        return (
            f"{number} {' '.join(line.splitlines())}!" for number, line in enumerate(lines, first)
        )

    transform_file(shout, table, output, {}, lines_per_chunk=4, target_column="loud")
    before, after = parquet.read_table(table), parquet.read_table(output)
    assert after.drop_columns("loud").equals(before, check_metadata=True)
    expected = ["0 !", "1 !", "2 two lines!", *(f"{n + 3} row {n}!" for n in range(20))]
    assert after["loud"].to_pylist() == expected


def test_a_column_named_like_a_part_of_another_is_read_by_its_name(tmp_path):
    """pyarrow then reads both columns."""
    columns = {"pair": [{"en": "inner"}], "pair.en": ["outer"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    assert list(read_file(tmp_path / "in.parquet", "pair.en")) == ["outer"]


def test_a_column_of_a_parquet_file_becomes_a_text_file(table):
    output = table.with_name("out.txt")
    transform_file(lambda lines, first: map(repr, lines), table, output, {}, source_column="text")
    assert output.read_text().splitlines()[:4] == ["''", "''", "'two\\nlines'", "'row 0'"]


@pytest.mark.parametrize(
    ("source", "output", "options", "message"),
    [
        ("in.parquet", "out.parquet", {"source_column": "id"},
         "source_column='id': expected a column of text in in.parquet, one of text"),
        ("in.parquet", "out.parquet", {"target_column": "text"}, "target_column='text': expected"),
        ("in.txt", "out.txt", {"source_column": "text"}, "source_column='text': expected"),
        ("in.parquet", "out.txt", {"target_column": "de"}, "target_column='de': expected"),
        ("in.txt", "out.parquet", {}, "output='out.parquet': expected a text file"),
        ("in.txt", "out.csv", {}, "out.csv: expected text, a sentence a line, or parquet"),
        ("not.parquet", "out.txt", {}, "not.parquet: expected a parquet file"),
    ],
)  # fmt: skip
def test_invalid_columns_and_files_are_reported(
    table, source, output, options, message, monkeypatch
):
    monkeypatch.chdir(table.parent)
    for name in ("in.txt", "not.parquet"):
        table.with_name(name).write_text("text")
    with pytest.raises(ValueError, match=re.escape(message)):
        transform_file(Worker(), source, output, {}, **options)
    assert not table.with_name(f"{output}.parts").exists()


def test_an_output_that_is_not_a_regular_file_is_refused(source, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe': expected a file, which is replaced"):
        transform_file(Worker(), source, tmp_path / "pipe", {})
    with pytest.raises(FileNotFoundError, match=r"none/out.txt': expected a folder that exists"):
        transform_file(Worker(), source, tmp_path / "none/out.txt", {})
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "pipe"}


def test_an_output_that_is_a_link_stays_one(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    source.with_name("out.txt").symlink_to(tmp_path / "elsewhere/real.txt")
    assert run(Worker(), source).is_symlink()
    assert (tmp_path / "elsewhere/real.txt").read_text() == EXPECTED


@pytest.mark.parametrize("change", ["source", "settings", "lines_per_chunk"])
def test_an_output_of_an_unfinished_different_job_is_refused(source, change):
    with pytest.raises(RuntimeError):
        run(Worker(fails_at=9), source)
    options = {}
    if change == "source":
        source.write_text("other")
    elif change == "lines_per_chunk":
        options = {"lines_per_chunk": 5}
    else:
        parts = source.with_name("out.txt.parts")
        job = json.loads((parts / "job.json").read_text())
        (parts / "job.json").write_text(json.dumps({**job, "model": "another"}))
    unfinished = r"=.*: expected .* as in the unfinished .*out\.txt\.parts; remove"
    with pytest.raises(ValueError, match=unfinished):
        run(Worker(), source, **options)


@pytest.mark.parametrize("content", ["\n".join(LINES), "\n".join(LINES).upper()])
def test_a_source_is_identified_by_its_content(source, content):
    """`cp --preserve` and archives can keep size and time of changed files, and copies change the
    time of unchanged ones."""
    before = source.stat()
    with pytest.raises(RuntimeError, match="stopped"):
        run(Worker(fails_at=9), source)
    is_same = content == source.read_text()
    source.write_text(content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + is_same))
    if is_same:
        assert run(Worker(), source).read_text() == EXPECTED
    else:
        with pytest.raises(ValueError, match=r"source_content=.*: expected .*, as in the unfin"):
            run(Worker(), source)


def test_a_kill_during_cleanup_leaves_no_chunk_to_a_different_job(source, monkeypatch):
    """Whichever file is removed last: the next job is refused, or all lines are its own."""
    output, parts = source.with_name("out.txt"), source.with_name("out.txt.parts")
    for survived in range(20):
        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir", "rename"):
                patch.setattr(os, name, dies_after(survived, getattr(os, name)))
            try:
                run(Worker(), source)
            except Killed:
                killed = True
            else:
                killed = False
        kept = parts.exists() and "job.json" in os.listdir(parts)
        another = {"model": "another"}
        try:
            transform_file(lambda lines, _: lines, source, output, another, lines_per_chunk=4)
        except ValueError:
            assert kept
            assert run(Worker(), source).read_text() == EXPECTED
        else:
            assert output.read_text() == "".join(f"{line}\n" for line in LINES)
        assert not parts.exists()
        if not killed:
            assert survived > len(LINES) / 4
            return
    pytest.fail("the clean-up does not end")


class Killed(BaseException):
    """No code handles it."""


def dies_after(calls, function):
    def counted(*args, **kwargs):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise Killed
        return function(*args, **kwargs)

    return counted


def test_other_files_in_the_folder_of_chunks_are_kept(source):
    parts = source.with_name("out.txt.parts")
    parts.mkdir()
    (parts / "notes").write_text("mine")
    assert run(Worker(), source).read_text() == EXPECTED
    assert [path.name for path in parts.iterdir()] == ["notes"]


def test_files_that_look_like_chunks_of_another_job_are_not_deleted(source):
    """As `split -d big.txt out.txt.parts/` makes them."""
    parts = source.with_name("out.txt.parts")
    parts.mkdir()
    (parts / "01").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out\.txt\.parts has files with numbers as"):
        run(Worker(), source)
    assert (parts / "01").read_text() == "mine"
    assert not source.with_name("out.txt").exists()


def test_a_job_without_finished_chunks_is_discarded(source):
    def fails(chunks):
        raise ValueError("the first line")

    output = source.with_name("out.txt")
    with pytest.raises(ValueError, match="the first line"):
        transform_chunks(fails, source, output, {"model": "wrong"})
    assert run(Worker(), source).read_text() == EXPECTED


def test_a_job_of_several_processes_is_not_discarded_if_one_fails(source):
    """Others may be at work on their first chunks."""
    with pytest.raises(RuntimeError, match="stopped"):
        run(Worker(fails_at=0), source, num_processes=2)
    assert source.with_name("out.txt.parts").exists()


def test_a_running_job_is_not_replaced_by_a_different_one(source):
    def starts_another(lines, first):
        with pytest.raises(ValueError, match="model='n': expected 'm', as in the unfinished"):
            transform_file(Worker(), source, source.with_name("out.txt"), {"model": "n"})
        return Worker()(lines, first)

    assert run(starts_another, source).read_text() == EXPECTED


@pytest.mark.parametrize("processes", [2, 3, 9])
def test_processes_share_the_chunks(source, processes):
    barrier = threading.Barrier(processes)
    workers = [Worker() for _ in range(processes)]
    threads = [
        threading.Thread(
            target=run,
            args=(worker, source),
            kwargs={
                "process_index": index,
                "num_processes": processes,
                "wait_for_everyone": lambda: barrier.wait(10),
            },
        )
        for index, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.with_name("out.txt").read_text() == EXPECTED
    assert sorted(number for worker in workers for number in worker.seen) == list(range(len(LINES)))


WAITING = """
from datetime import timedelta
import torch
from torch import distributed
from vanilla_transformer.cli.processes import join_processes

state = join_processes(use_cpu=True)
limit = distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout
assert limit == timedelta(days=1), limit
state.destroy_process_group()
"""


def test_a_process_waits_for_others_whose_shares_take_hours_longer(tmp_path):
    """torch would give up after 30 minutes, or after 10 on GPUs."""
    failed, output = run_program(2, WAITING, cwd=tmp_path)
    assert not failed, output


def test_several_processes_cannot_read_what_can_be_read_once(tmp_path):
    """Each would get some of the lines of a pipe. Here it is a device, which does not block."""
    message = f"source='{os.devnull}': expected a file, not a pipe, as each of 2 processes reads it"
    with pytest.raises(ValueError, match=message):
        transform_file(Worker(), os.devnull, tmp_path / "out", {}, num_processes=2)
    transform_file(Worker(), os.devnull, tmp_path / "out", {})
    assert (tmp_path / "out").read_text() == ""


def test_a_job_is_not_resumed_with_other_lines_from_its_pipe(tmp_path):
    os.mkfifo(tmp_path / "in")
    writer = threading.Thread(target=(tmp_path / "in").write_text, args=["\n".join(LINES)])
    writer.start()
    with pytest.raises(RuntimeError, match="stopped"):
        run(Worker(fails_at=9), tmp_path / "in")
    writer.join()
    os.utime(tmp_path / "in", ns=(0, 0))  # as a writer would change it
    with pytest.raises(ValueError, match=r"^modified=0: expected \d+, as in the unfinished"):
        run(Worker(), tmp_path / "in")


def test_a_process_on_a_different_file_system_is_refused(source):
    message = r"out\.txt\.parts: expected a file system that all processes share"
    with pytest.raises(FileNotFoundError, match=message):
        run(Worker(), source, process_index=1, num_processes=2)


def test_more_lines_need_no_more_memory(tmp_path):
    """Lines are read a chunk at a time: the file is never completely in memory."""
    import tracemalloc

    source = tmp_path / "in.txt"
    with source.open("w") as file:
        for number in range(200_000):
            file.write(f"{number} {'x' * 40}\n")
    tracemalloc.start()
    transform_file(lambda lines, first: lines, source, tmp_path / "out.txt", {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
    assert peak < source.stat().st_size / 4


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def fingerprint_of(folder):
    return fingerprint(
        AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )


def train_further(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    model.save_pretrained(folder)


def test_a_fingerprint_only_depends_on_the_content(folder):
    before = fingerprint_of(folder)
    assert fingerprint_of(folder.rename(folder.with_name("moved"))) == before


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ("weights", train_further),
        ("config", lambda folder: edit_json(folder / "config.json", activation_function="gelu")),
        (
            "generation_config",
            lambda folder: edit_json(folder / "generation_config.json", num_beams=3),
        ),
        ("tokenizer", lambda folder: edit_json(folder / "tokenizer.json", normalizer=None)),
        (
            "tokenizer",
            lambda folder: edit_json(folder / "tokenizer_config.json", split_special_tokens=False),
        ),
    ],
)
def test_a_fingerprint_shows_what_changed(folder, changed, change):
    before = fingerprint_of(folder)
    change(folder)
    after = fingerprint_of(folder)
    assert {name for name in before if before[name] != after[name]} == {changed}


def test_a_fingerprint_includes_what_computes(model, tokenizer, monkeypatch):
    """Scores differ in their last digits, and with them a few translations."""
    before = fingerprint(model, tokenizer)
    model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "device", torch.device("xpu"))
    after = fingerprint(model, tokenizer)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"attn_implementation", "device"}


def test_a_fingerprint_includes_the_scales_of_quantized_weights(model, tokenizer):
    """torchao's weights consist of several tensors, as do these of torch's own tests."""
    layer, found = model.model.encoder.layers[0].ffn.fc1, set()
    integers = torch.ones_like(layer.weight)
    for scale in (1, 2):
        pair = TwoTensor(integers, torch.full_like(integers, scale))
        layer.weight = torch.nn.Parameter(pair, requires_grad=False)
        found.add(fingerprint(model, tokenizer)["weights"])
    assert len(found) == 2


def test_a_fingerprint_depends_on_the_version_of_this_package(folder, monkeypatch):
    before = fingerprint_of(folder)
    monkeypatch.setattr(parallel_translation, "__version__", "99.9")
    after = fingerprint_of(folder)
    assert {name for name in before if before[name] != after[name]} == {"versions"}
    assert after["versions"].startswith("vanilla_transformer 99.9, torch ")


def test_a_fingerprint_includes_the_configuration_of_each_member_of_an_ensemble(folder, tokenizer):
    def of_members():
        models = [AutoModelForSeq2SeqLM.from_pretrained(folder) for _ in range(2)]
        return fingerprint(VanillaTransformerEnsemble(models), tokenizer), models

    before, (first, second) = of_members()
    assert of_members()[0] == before
    second.config.activation_function = "gelu"
    after = fingerprint(VanillaTransformerEnsemble([first, second]), tokenizer)
    assert {name for name in before if before[name] != after[name]} == {"config"}


def test_a_fingerprint_includes_an_adapters_configuration(model, folder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def of_adapter(**changes):
        edit_json(folder / "adapter/adapter_config.json", **changes)
        adapted = AutoModelForSeq2SeqLM.from_pretrained(folder)
        adapted.load_adapter(folder / "adapter")
        return fingerprint(adapted, tokenizer)

    before = of_adapter()
    assert of_adapter(base_model_name_or_path="elsewhere") == before
    after = of_adapter(lora_alpha=64)
    assert {name for name in before if before[name] != after[name]} == {"config"}


def test_a_fingerprint_includes_the_precision_and_slow_tokenizers(model, tmp_path):
    def with_merges(*merges):
        (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a": 1, "b": 2, "c": 3}))
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        return fingerprint(model, CTRLTokenizer.from_pretrained(tmp_path))

    before = with_merges("a b", "b c")
    assert with_merges("a b", "b c") == before
    assert with_merges("b c", "a b")["tokenizer"] != before["tokenizer"]
    model.bfloat16()
    assert with_merges("a b", "b c")["weights"] != before["weights"]


def test_a_killed_translation_is_only_resumed_with_the_same_model(folder):
    """Killed half way, then run with different weights in the same folder, then with the same
    weights in a different folder."""
    cwd, chunks = folder.parent, 3
    (cwd / "in.txt").write_text("a house\nthe lake is deep\n" * (LINES_PER_CHUNK // 2 * chunks))
    flags = ["--source", "in.txt", "--output", "out.txt", "--max_new_tokens", "1"]
    flags += ["--batch_size", "512", "--device", "cpu", "--model"]
    with (cwd / "log").open("w") as log:
        translate = ("vanilla_transformer", "translate")
        process = BackgroundCopy(*translate, *flags, "model", cwd=cwd, output=log)
    while not (cwd / "out.txt.parts/0").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = (cwd / "out.txt.parts/0").read_text()

    shutil.copytree(folder, cwd / "moved")
    train_further(folder)
    refused = run_command("translate", *flags, "model", cwd=cwd, check=False)
    assert refused.returncode != 0
    assert "error: weights='" in refused.stderr.splitlines()[-1]
    assert "out.txt.parts; remove" in refused.stderr.splitlines()[-1]

    run_command("translate", *flags, "moved", cwd=cwd)
    assert (cwd / "out.txt").read_text() == done * chunks
    assert not (cwd / "out.txt.parts").exists()


def test_two_processes_translate_the_same_as_one(checkpoint, tmp_path):
    (tmp_path / "in.txt").write_text("a house\n\nthe lake is deep\n" * 5)
    flags = ["--model", checkpoint, "--source", "in.txt", "--max_new_tokens", 4, "--device", "cpu"]
    run_command("translate", *flags, "--output", "one.txt", cwd=tmp_path)
    translate = ("-m", "vanilla_transformer", "translate")
    failed, printed = run_ranks(2, *translate, *flags, "--output", "two.txt", cwd=tmp_path)
    assert not failed, printed
    assert (tmp_path / "two.txt").read_text() == (tmp_path / "one.txt").read_text()
    assert (tmp_path / "one.txt").read_text().count("\n") == 15
