"""Helpers of the benchmarks: processes that take turns, time and memory."""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from tqdm.auto import tqdm
from transformers import logging as transformers_logging


def settle(threads: int = 1, seed: int = 0) -> None:
    """Prepare a process for measurements: threads, seed, no logging."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


# ---------------------------------------------------------------- Turns


def in_own_process(function: Callable[..., Any], *args: object) -> Any:
    """Call the function in a new process and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *args).result()


class Runner:
    """A separate process for one model, whose memory no other model uses.

    Args:
        threads (`int`): How many threads torch uses.
        seed (`int`): The seed of torch.
        checkout (`Path`, *optional*): Import `vanilla_transformer` from this folder, and everything
            else as in this process.
    """

    _work: Callable[[], object]  # in the process

    def __init__(self, threads: int, seed: int, checkout: Path | None = None):
        start = (threads, seed)
        self._process = ProcessPoolExecutor(1, get_context("spawn"), Runner._start, start)
        if checkout is None:
            return
        self._packages = tempfile.TemporaryDirectory()  # removed together with this object
        package = Path(self._packages.name, "vanilla_transformer")
        package.symlink_to(Path(checkout, "vanilla_transformer").resolve())
        with mock.patch.object(sys, "path", [self._packages.name, *sys.path]):
            self._process.submit(int)  # a new process takes over this path

    def prepare(self, make: Callable[..., Callable[[], object]], *args: object) -> Future[None]:
        """Start creating the work, `make(*args)`, in the process."""
        return self._process.submit(Runner._keep, make, args)

    def begin(self) -> Future[float]:
        """Start the work; the result is its seconds."""
        return self._process.submit(Runner._timed)

    def run(self) -> float:
        """Do the work once, and return its seconds."""
        return self.begin().result()

    def stop(self) -> None:
        self._process.shutdown()

    @staticmethod
    def _start(threads: int, seed: int) -> None:
        settle(threads, seed)
        touch_memory()

    @staticmethod
    def _keep(make: Callable[..., Callable[[], object]], args: tuple[object, ...]) -> None:
        Runner._work = make(*args)

    @staticmethod
    def _timed() -> float:
        return timed(Runner._work)


def touch_memory(gigabytes: float = 1.0) -> None:
    """Touch memory once: the first access is slow, especially in virtual machines."""
    torch.ones(int(gigabytes * 2**28))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def take_turns(
    runs: dict[str, Callable[[], float]], rounds: int, reference: str, title: str = "rounds"
) -> dict[str, list[float]]:
    """The seconds of each run in each round. The order rotates from round to round, and the
    reference never comes first. The first round is a warm-up and is not counted."""
    others = [name for name in runs if name != reference]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in tqdm(range(rounds + 1), desc=title, leave=False):
        order = others[turn % len(others) :] + others[: turn % len(others)]
        order.insert(1 + turn % len(others), reference)
        for name in order:
            took = runs[name]()
            if turn > 0:
                seconds[name].append(took)
    return seconds


def speeds(seconds: dict[str, list[float]], reference: str) -> dict[str, float]:
    """The speed of each run relative to the reference, by medians."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {name: medians[reference] / median for name, median in medians.items()}


# ---------------------------------------------------------------- Memory, in mebibytes


def resident_memory() -> float:
    return psutil.Process().memory_info().rss / 2**20


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
