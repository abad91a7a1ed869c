import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib import request

import pytest
from conftest import BackgroundCopy

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class NoLoading:
    """Fails a test that loads a model."""

    def load(self, name):
        raise AssertionError(f"{name} was loaded")


@pytest.fixture
def no_loading():
    return NoLoading()


@pytest.fixture
def start_server(tmp_path):
    """A server in a new process: `with start_server(*words) as (process, url)`. It is a copy of
    this process unless `fresh` is set."""

    @contextmanager
    def start(*words, fresh=True, **environment):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = ["vanilla_transformer", "serve", *map(str, words), "--port", str(port)]
        path = os.pathsep.join([REPOSITORY, os.environ.get("PYTHONPATH", "")])
        log = tmp_path / "server.log"
        with log.open("w") as output:
            if fresh:
                process = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONPATH": path, **environment},
                    stderr=output,
                )
            else:
                process = BackgroundCopy(*command, cwd=tmp_path, output=output, **environment)
        try:
            while not answers(f"{url}/health"):
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    return start


def answers(url):
    try:
        return request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False
