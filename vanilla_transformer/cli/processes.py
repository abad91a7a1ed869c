"""The processes that share the work of a command.

accelerate provides them. If it is not installed, there is one.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

# How long a process waits for the others. Their shares of a large file may take hours longer, and
# torch would give up after 30 minutes, or after 10 on GPUs.
PATIENCE = timedelta(days=1)


class Processes(Protocol):
    """The attributes of `accelerate.PartialState` that commands use."""

    process_index: int
    num_processes: int
    is_main_process: bool

    def wait_for_everyone(self) -> None: ...

    def destroy_process_group(self) -> None: ...


class OneProcess:
    """The only process."""

    process_index, num_processes, is_main_process = 0, 1, True

    def wait_for_everyone(self) -> None:
        """Do nothing: there is no other process."""

    def destroy_process_group(self) -> None:
        """Do nothing: there is no group."""


def join_processes(use_cpu: bool) -> Processes:
    """Join the processes that, for example, torchrun started.

    Raises:
        ModuleNotFoundError: There are several, and accelerate is not installed.
    """
    try:
        from accelerate import PartialState
    except ModuleNotFoundError:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise
        return OneProcess()
    return PartialState(cpu=use_cpu, timeout=PATIENCE)


def expect_one_process() -> None:
    """Raise a ValueError if a launcher has started several: each would do all of the work."""
    if (number := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"{number} processes: expected one, without torchrun or accelerate launch")


def sum_over_processes(counts: Sequence[int], processes: Processes) -> list[int]:
    """Each count, summed over all processes."""
    if processes.num_processes == 1:
        return list(counts)
    from accelerate.utils import gather_object

    return [sum(column) for column in zip(*gather_object([list(counts)]), strict=True)]
