"""A file goes through whole, in order, once: whatever stops on the way, however many work on it."""

import json
import threading

import pytest
from conftest import REPOSITORY, run_ranks, run_script

from vanilla_transformer.bulk import transform_file

LINES = [f"line {number}" for number in range(23)] + ["", "last, without an end"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES))
    return path


class Worker:
    """Doubles each line, remembers which it has seen, and fails at one of them if told to."""

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


def test_what_is_done_is_not_done_again(source):
    source.with_name("out.txt").write_text("of an earlier job\n")
    first = Worker(fails_at=14)
    with pytest.raises(RuntimeError, match="stopped"):
        run(first, source)
    assert source.with_name("out.txt").read_text() == "of an earlier job\n"
    second = Worker()
    assert run(second, source).read_text() == EXPECTED
    assert second.seen == list(range(12, len(LINES)))  # of the chunk that was stopped, all


def test_an_attempt_that_ended_while_merging_only_merges(source, monkeypatch):
    merge = "vanilla_transformer.bulk._merge"
    with monkeypatch.context() as patch:
        patch.setattr(merge, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            run(Worker(), source)
    again = Worker()
    assert run(again, source).read_text() == EXPECTED
    assert again.seen == []


@pytest.mark.parametrize("change", ["source", "settings", "lines_per_chunk"])
def test_another_job_is_refused(source, change):
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
    with pytest.raises(ValueError, match=r"out.txt.parts is of another attempt: its \w+ was"):
        run(Worker(), source, **options)


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


def test_more_lines_take_no_more_memory(tmp_path):
    """Lines are read a chunk at a time: the file is never there as a whole."""
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


def test_two_processes_translate_as_one(checkpoint, tmp_path):
    (tmp_path / "in.txt").write_text("a house\n\nthe lake is deep\n" * 5)
    flags = ["--model", checkpoint, "--input", "in.txt", "--max_new_tokens", 4, "--device", "cpu"]
    run_script("translate.py", *flags, "--output", "one.txt", cwd=tmp_path)
    translate = REPOSITORY / "scripts/translate.py"
    failed, printed = run_ranks(2, translate, *flags, "--output", "two.txt", cwd=tmp_path)
    assert not failed, printed
    assert (tmp_path / "two.txt").read_text() == (tmp_path / "one.txt").read_text()
    assert (tmp_path / "one.txt").read_text().count("\n") == 15
