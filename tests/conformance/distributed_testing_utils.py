"""Helpers that run a test in several processes. The mixins of transformers for FSDP and tensor
parallelism import them under this name; only a checkout of its repository has the original."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def _get_distributed_backend() -> str:
    return dist.get_default_backend_for_device(_get_distributed_device_type())


def _get_rank_device(rank: int) -> torch.device:
    kind = _get_distributed_device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, rank)


def _set_rank_device(rank: int) -> None:
    if _get_distributed_device_type() != "cpu":
        torch.accelerator.set_device_index(rank)


def _start_rank_processes(function: Callable[..., None], args: tuple, nprocs: int) -> None:
    mp.spawn(function, args=args, nprocs=nprocs)


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test's body, which takes its rank first, to run in `world_size` processes."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _start_rank_processes(
                _run_rank, (world_size, store.port, function, args, kwargs), world_size
            )
            del store

        return run

    return decorate


def _run_rank(
    rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple, kwargs: dict
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    _set_rank_device(rank)
    dist.init_process_group(
        _get_distributed_backend(),
        store=dist.TCPStore("localhost", port, is_master=False),
        rank=rank,
        world_size=world_size,
    )
    function(rank, *args, **kwargs)
    dist.barrier()
    dist.destroy_process_group()
