"""Run commands as users do, in new processes."""

import math
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx


def train(
    flags: Sequence[str], log: Path | None = None, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    """Train with these flags; see `run`."""
    return run("train", ["--report_to=none", *flags], log, processes)


def run(
    name: str, flags: Sequence[str], log: Path | None = None, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run a command of `vanilla-transformer`.

    Args:
        name: The command, such as "translate".
        flags: Its options.
        log: A file for its standard error.
        processes: The number of processes that share the work. `torchrun` starts more than one.

    Raises:
        RuntimeError: It fails.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = torchrun if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "vanilla_transformer", name, *flags]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if log is not None:
        log.write_text(process.stderr, encoding="utf-8")
    if process.returncode:
        raise RuntimeError(process.stderr[-4000:])
    return process


def cpu_seconds() -> float:
    """The CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def serving(
    command: Sequence[str], path: str, seconds: float = math.inf, **options: Any
) -> Iterator[tuple[str, int]]:
    """The address of a server, once it answers at `path`, and the id of its process.

    Args:
        command: Starts the server; the option --port is added.
        path: A page with status 200, such as "/health".
        seconds: How long to wait for it.
        options: Options of `subprocess.Popen`.

    Raises:
        RuntimeError: The server ends, or does not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    process = subprocess.Popen([*command, "--port", port], **options)
    try:
        while not _answers(url + path):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not answer: {' '.join(command)}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False
