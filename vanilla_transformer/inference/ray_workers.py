"""Applies a function to the chunks of a file on any number of machines, with Ray.

Each chunk is a task of Ray. If a machine is lost, its tasks run again on the others, and machines
that join get tasks as well. A worker process runs many tasks, so a function can keep a model
between its calls.

Why not actors, as in `ray.util.ActorPool` or Ray Data's `map_batches`: an actor that dies waits for
room to start again, and its chunk waits with it, forever if no new machine joins. Ray Data also
drops empty lines by default, does not promise an order, writes a file for each block, and resumes
only rows that have a unique id.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from transformers.hf_argparser import HfArg

CHUNKS_UNDER_WAY = 512  # running or waiting for a worker: about 100 MB of text


@dataclass
class RayWorkerArguments:
    """Whether to run on a Ray cluster, and what each worker needs.

    Raises:
        ValueError: A number is negative, or an option needs `ray`.
    """

    ray: bool = HfArg(default=False, help="Run on a Ray cluster.")
    ray_address: str | None = HfArg(
        default=None, help="Address of a running cluster, or auto. Default: start one here."
    )
    num_cpus: float = HfArg(default=1.0, help="CPUs that a worker needs.")
    num_gpus: float = HfArg(default=0.0, help="GPUs that a worker needs, such as 0.5.")

    def __post_init__(self) -> None:
        if min(self.num_cpus, self.num_gpus) < 0:
            raise ValueError(
                f"num_cpus={self.num_cpus}, num_gpus={self.num_gpus}: expected at least 0"
            )
        for option in fields(self):
            if not self.ray and getattr(self, option.name) != option.default:
                raise ValueError(f"{option.name}={getattr(self, option.name)!r}: expected --ray")


class RayWorkers:
    """As many workers as a Ray cluster has room for.

    Args:
        arguments: What a worker needs.

    Raises:
        ImportError: Ray is not installed.
    """

    def __init__(self, arguments: RayWorkerArguments):
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ImportError(
                "ray=True needs the package ray: pip install 'vanilla-transformer[ray]'"
            ) from error
        self.ray: Any = ray
        self.arguments = arguments

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster, or start one on this machine and stop it at the end."""
        self.ray.init(self.arguments.ray_address)
        try:
            yield
        finally:
            self.ray.shutdown()

    def _task(self, function: Callable[..., Any]) -> Any:
        def work(*arguments: Any) -> Any:  # the name in Ray's logs
            return function(*arguments)

        # By default, a process with a GPU ends after each task, and would load the model again.
        needs = self.arguments
        options = {"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus, "max_calls": 0}
        return self.ray.remote(**options)(work)

    def _result(self, task: Any) -> Any:
        """The result of a task. Raises the task's own errors instead of Ray's wrappers."""
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on a worker, and return its result."""
        return self._result(self._task(function).remote())

    def map(
        self, function: Callable[[list[str], int], Any], chunks: Iterable[tuple[int, list[str]]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the results of a function as soon as they arrive, each with the index of the
        chunk's first line.

        Args:
            function: Takes the lines of a chunk and the index of its first line. Workers call it,
                again if a chunk was lost with a machine.
            chunks: The chunks, each with the index of its first line. At most `CHUNKS_UNDER_WAY`
                are read in advance.
        """
        task = self._task(lambda first, lines: (first, function(lines, first)))
        under_way: list[Any] = []
        for chunk in chunks:
            if len(under_way) == CHUNKS_UNDER_WAY:
                (done,), under_way = self.ray.wait(under_way)
                yield self._result(done)
            under_way.append(task.remote(*chunk))
        while under_way:
            (done,), under_way = self.ray.wait(under_way)
            yield self._result(done)
