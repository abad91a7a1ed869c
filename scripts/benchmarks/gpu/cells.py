"""The benchmark's cells: each has figures, or a reason why there are none.

Cells are measured one after another in a separate process, or in several at once if they are not
timed. A cell that takes too long or breaks its process has no figures; the next one gets a new
process.
"""

import gc
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock
from typing import Any

# After these errors, nothing works in a process.
FATAL = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "Triton Error")


@dataclass(frozen=True)
class Cell:
    """A measurement.

    Args:
        labels: Its description: the first columns of its row.
        measure: A function that returns the figures, the other columns.
        arguments: The arguments of that function.
        seconds: The time that it may take.
        gets_end: Whether the function's last argument is the `time.monotonic()` at which it is
            stopped, so that it can return its results in time.
    """

    labels: dict[str, Any]
    measure: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...] = ()
    seconds: float = 100.0
    gets_end: bool = False

    @property
    def name(self) -> str:
        return " ".join(str(label) for label in self.labels.values())


class Worker:
    """The process in which cells are measured. It starts with the first cell, and again after each
    cell that has broken it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def measure(self, cell: Cell, seconds: float) -> dict[str, Any]:
        """The figures of a cell; `reason` in their place if there are none within this time."""
        if self._process is None:
            self._start()
        # An absolute time, which processes share, as a new one loads its modules first.
        end = (time.monotonic() + seconds,) if cell.gets_end else ()
        try:
            self._connection.send((cell.measure, (*cell.arguments, *end)))
            if self._connection.poll(seconds):
                figures = self._connection.recv()
            else:
                figures = {"reason": f"took longer than {seconds:.0f} s"}
                self.stop()
        except (EOFError, OSError):
            self._process.join(10)
            figures = {"reason": f"its process ended with exit code {self._process.exitcode}"}
            self.stop()
        if any(error in str(figures) for error in FATAL):
            self.stop()
        return figures

    def stop(self) -> None:
        """End the process, even if it is busy."""
        if self._process is not None:
            self._connection.close()
            self._process.join(2)  # it ends by itself unless it is busy
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _start(self) -> None:
        context = get_context("spawn")  # a copy of this process could not use the GPU
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()


def _serve(connection: Connection) -> None:
    """Measure the requested cells until the connection is closed."""
    while True:
        try:
            measure, arguments = connection.recv()
        except EOFError:
            return
        except Exception as error:  # a module can't be imported
            connection.send({"reason": describe(error)})
            continue
        try:
            figures = measure(*arguments)
        except Exception as error:
            traceback.print_exc()
            figures = {"reason": describe(error)}
        connection.send(figures)
        _forget()


def _forget() -> None:
    """Free the GPU memory of a cell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def describe(error: BaseException) -> str:
    """The error in one line; some errors name the cause only in later lines."""
    return f"{type(error).__name__}: {one_line(' '.join(str(error).strip().splitlines()[:3]))}"


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def measure_all(
    cells: list[Cell],
    workers: list[Worker],
    seconds: float,
    keep: Callable[[list[dict]], None],
) -> list[dict[str, Any]]:
    """A row for each cell. Each worker measures one at a time, in their order. `keep` gets the rows
    after each cell, including those not measured yet."""
    end = time.monotonic() + seconds
    rows = [{**cell.labels, "reason": "not measured yet"} for cell in cells]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    lock = Lock()

    def measure(place: int) -> None:
        cell, worker, left = cells[place], idle.get(), end - time.monotonic()
        if left > 0:
            figures = worker.measure(cell, min(left, cell.seconds))
        else:
            figures = {"reason": "not measured: the time of this part was up"}
        idle.put(worker)
        with lock:
            rows[place] = {**cell.labels, **figures}
            keep(rows)

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(measure, range(len(cells))))
    return rows
