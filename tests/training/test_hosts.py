"""Two hosts, here two network namespaces, learn the same as one process; and if one of them is
lost, the other continues."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_layouts import assert_same, layouts

ADDRESSES = {"one": "10.77.0.1", "two": "10.77.0.2"}


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def namespace(host):
    return f"vt-{os.getpid()}-{host}"


@pytest.fixture(scope="module")
def hosts():
    """Two namespaces, joined by a virtual cable whose ends have the names of the hosts."""
    try:
        for host in ADDRESSES:
            ip("netns", "add", namespace(host))
        ends = ("one", "type", "veth", "peer", "name", "two", "netns", namespace("two"))
        ip("link", "add", "netns", namespace("one"), *ends)
        for host, address in ADDRESSES.items():
            ip("-n", namespace(host), "address", "add", f"{address}/24", "dev", host)
            for device in ("lo", host):
                ip("-n", namespace(host), "link", "set", device, "up")
        yield
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces can't be made: {getattr(error, 'stderr', error)}")
    finally:
        for host in ADDRESSES:
            with contextlib.suppress(FileNotFoundError):
                ip("netns", "delete", namespace(host), check=False)


@pytest.fixture
def harness(tmp_path):
    arguments = layouts.LayoutArguments(steps=60, pairs=1000)
    return layouts.Harness(tmp_path, arguments)


@pytest.fixture
def start(hosts, tmp_path):
    """Starts a host's torchrun; its processes are ended after the test."""

    def start(host, nodes, script):
        command = [
            "ip", "netns", "exec", namespace(host), sys.executable, "-m", "torch.distributed.run",
            "--nnodes", nodes, "--nproc_per_node", "1", "--max_restarts", "3",
            "--local_addr", ADDRESSES[host], "--rdzv_id", "hosts", "--rdzv_backend", "c10d",
            "--rdzv_endpoint", f"{ADDRESSES['one']}:29511",
            "--rdzv_conf", f"is_host={host == 'one'},last_call_timeout=5", *script,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host}
        with (tmp_path / f"{host}.log").open("w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    yield start
    for host in ADDRESSES:
        kill_processes(host)


def end_of(process, log, seconds):
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = "none"
    assert code == 0, f"exit code {code}:\n{log.read_text()[-4000:]}"


def wait_for(path, seconds):
    limit = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < limit, f"{path} does not appear"
        time.sleep(0.1)


@pytest.mark.slow
def test_two_hosts_learn_the_same_as_one_process(harness, start, tmp_path):
    script = harness.script(tmp_path / "hosts")
    nodes = [start(host, "2", script) for host in ADDRESSES]
    for node, host in zip(nodes, ADDRESSES, strict=True):
        end_of(node, tmp_path / f"{host}.log", 300)
    harness.train("1 process", tmp_path / "alone", None)
    assert_same(tmp_path / "hosts", tmp_path / "alone")


def kill_processes(host):
    """Kill torchrun and the processes that it has started, each in its own session."""
    for process in ip("netns", "pids", namespace(host), check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def cut_cable(host):
    """Packets are lost from now on, without an error."""
    ip("-n", namespace(host), "link", "set", host, "down")


@pytest.mark.slow
@pytest.mark.parametrize("lose", [kill_processes, cut_cable])
def test_one_host_continues_when_the_other_is_lost(harness, start, tmp_path, lose):
    """In mid-epoch, and without an error. torchrun continues with one node, from the last
    checkpoint, and with as many batches in an update, so that the result is the same."""
    options = ["--resume_from_checkpoint", "auto", "--ddp_timeout", "20"]
    script = [*harness.script(tmp_path / "hosts"), *options]
    one, _ = (start(host, "1:2", script) for host in ADDRESSES)
    wait_for(tmp_path / "hosts/checkpoint-30", 300)
    lose("two")
    end_of(one, tmp_path / "one.log", 300)
    history = json.loads((tmp_path / "hosts/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, 61))
    log = (tmp_path / "one.log").read_text()
    assert log.count(" parameters, ") == 2  # it started twice,
    assert log.count("Training a tokenizer") == 1  # the second time from a checkpoint
    harness.train("1 process", tmp_path / "alone", None)
    assert_same(tmp_path / "hosts", tmp_path / "alone")
