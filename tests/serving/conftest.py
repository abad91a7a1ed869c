import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from conftest import REPOSITORY


class NoLoading:
    """Where nothing is to be loaded."""

    def load(self, name):
        raise AssertionError(f"{name} was loaded")


@pytest.fixture
def no_loading():
    return NoLoading()


@pytest.fixture
def start_server(tmp_path):
    """A server in a new process: `with start_server(*words) as (process, url)`."""

    @contextmanager
    def start(*words, **environment):
        command = [sys.executable, "-m", "vanilla_transformer", "serve", *map(str, words)]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        log = tmp_path / "server.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--port", "0"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, **environment},
                stderr=stderr,
            )
        try:
            while "startup complete" not in log.read_text():
                assert process.poll() is None, log.read_text()[-2000:]
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
            yield process, re.search(r"http://\S+", log.read_text())[0]
        finally:
            process.kill()
            process.wait()

    return start
