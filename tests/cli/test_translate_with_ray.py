"""`translate --ray` on two machines, one of which is lost during the work."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from conftest import REPOSITORY, run_command

from vanilla_transformer.cli.ray_translation import absolute
from vanilla_transformer.inference import ray_workers
from vanilla_transformer.inference.parallel_translation import LINES_PER_CHUNK

CHUNKS = 12
OPTIONS = ["--source", "in.txt", "--max_new_tokens", "4", "--num_beams", "2", "--n_best", "1"]


@pytest.fixture
def cluster(ray_environment, monkeypatch):
    """Two nodes with a CPU each."""
    for name, value in ray_environment.items():
        monkeypatch.setenv(name, value)
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster_utils = pytest.importorskip(
        "ray.cluster_utils", reason="needs vanilla-transformer[ray]"
    )
    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    try:
        cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


def wait_until(condition, process):
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_format_of_a_link_follows_from_its_own_name_for_workers_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "4766446201d1").touch()
    (tmp_path / "in.txt.gz").symlink_to("4766446201d1")
    assert absolute("in.txt.gz") == str(tmp_path / "in.txt.gz")


@pytest.mark.slow
def test_losing_a_machine_or_the_command_loses_no_lines(cluster, checkpoint, tmp_path):
    """The output is that of `translate` on one machine, line by line."""
    lines = ["a house", "", "the lake is deep", "der See ist tief", " ", "tief"]
    numbered = (
        f"{lines[n % 6]} {n}" if n % 6 != 1 else "" for n in range(CHUNKS * LINES_PER_CHUNK)
    )
    (tmp_path / "in.txt").write_text("\n".join(numbered))
    flags = ["--model", os.path.relpath(checkpoint, tmp_path), *OPTIONS, "--batch_size", "256"]
    parts = tmp_path / "ray.txt.parts"
    (lost,) = cluster.worker_nodes

    def start():
        command = [sys.executable, "-m", "vanilla_transformer", "translate", *flags]
        command += ["--output", "ray.txt", "--ray", "--ray_address", cluster.address]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def finished():
        return {path.name: path.stat().st_mtime_ns for path in parts.glob("*[0-9]")}

    def works():
        raylet = psutil.Process(lost.all_processes["raylet"][0].process.pid)
        return any("ray::work" in " ".join(one.cmdline()) for one in raylet.children(True))

    with start() as command:
        wait_until(lambda: len(finished()) > 1, command)
        command.kill()
    before = finished()
    with start() as command:
        wait_until(lambda: len(finished()) > len(before) and works(), command)
        cluster.remove_node(lost, allow_graceful=False)
        after = finished()
        assert len(after) < CHUNKS
        assert after.items() >= before.items()
        _, log = command.communicate(timeout=240)
    assert command.returncode == 0, log
    run_command("translate", *flags, "--output", "plain.txt", "--device", "cpu", cwd=tmp_path)
    assert (tmp_path / "ray.txt").read_bytes() == (tmp_path / "plain.txt").read_bytes()
    assert not parts.exists()


@pytest.mark.slow
def test_chunks_are_read_lazily_and_errors_of_workers_are_raised(cluster, monkeypatch):
    monkeypatch.setattr(ray_workers, "CHUNKS_UNDER_WAY", 3)
    arguments = ray_workers.RayWorkerArguments(ray=True, ray_address=cluster.address)
    workers, read, found = ray_workers.RayWorkers(arguments), [], {}

    def chunks():
        for first in range(12):
            read.append(first)
            yield first, [f"line {first}"]

    def fail(lines, first):
        raise ValueError(f"{lines} at {first}")

    with workers.connected():
        for first, lines in workers.map(lambda lines, first: lines * 2, chunks()):
            found[first] = lines
            assert len(read) <= len(found) + 3
        with pytest.raises(ValueError, match=r"^\['line 0'\] at 0$"):
            next(workers.map(fail, chunks()))
    assert found == {first: [f"line {first}"] * 2 for first in range(12)}
