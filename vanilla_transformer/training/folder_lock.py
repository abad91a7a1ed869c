"""Keeps a second training out of a folder that one uses, and all processes of a training in the
same folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from accelerate import PartialState

from .distributed import expect_in_all_processes, run_on_main_process

LOCK = "_lock"  # `Trainer` pushes no file with a leading underscore to the Hub
SECONDS_TO_APPEAR = 30.0  # how long a network file system may hide a new file from other hosts


@contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Keep other trainings out of a folder. The main process holds the lock, and decides for all.

    Raises:
        FileExistsError: Another training uses it.
        PermissionError: Nothing can be written into it.
        FileNotFoundError: Some processes see a different folder, on the disk of another host.
    """
    folder = Path(output_dir)
    held: list[IO[bytes] | None] = []
    is_new = not folder.exists()

    def hold() -> bytes | None:
        held.append(_lock(folder))
        return _mark(held[0])

    mark = run_on_main_process(hold)
    try:
        _expect_mark(folder, mark)
        yield
    finally:
        for lock in filter(None, held):
            with suppress(OSError):
                (folder / LOCK).unlink()
            lock.close()
            with suppress(OSError):  # it is not empty, or gone
                if is_new:
                    folder.rmdir()


def _lock(folder: Path) -> IO[bytes] | None:
    """A file that is locked until it is closed or the process ends in any way. None if there are no
    locks, or the file belongs to another user."""
    try:
        import fcntl  # Windows does not have it

        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("ab")
    except ImportError:
        return None
    except OSError as error:
        if not folder.exists() or (folder.is_dir() and not os.access(folder, os.W_OK)):
            raise PermissionError(
                f"output_dir={folder}: expected a folder that can be written ({error.strerror})"
            ) from error
        return None
    try:
        # Unlike `flock`'s, this lock is not shared with workers, which may outlive the process.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise FileExistsError(
            f"output_dir={folder}: expected a folder in which no other training is at work (one "
            f"has locked its file {LOCK})"
        ) from None
    except OSError:  # the file system has no locks
        pass
    return lock


def _mark(lock: IO[bytes] | None) -> bytes | None:
    """Write a unique mark into the locked file and return it; None if that fails."""
    mark = uuid4().bytes
    if lock is not None:
        with suppress(OSError):
            lock.truncate(0)
            lock.write(mark)
            lock.flush()
            os.fsync(lock.fileno())
            return mark
    return None


def _expect_mark(folder: Path, mark: bytes | None) -> None:
    if mark is None:
        return
    # The main process must not open the file again: closing it would release the lock.
    is_seen = PartialState().is_main_process or _appears(folder / LOCK, mark)
    expect_in_all_processes(f"output_dir={folder}", is_seen)


def _appears(file: Path, mark: bytes) -> bool:
    limit = time.monotonic() + SECONDS_TO_APPEAR
    while True:
        with suppress(OSError):
            os.listdir(file.parent)  # makes a network file system refresh its entries
            if file.read_bytes() == mark:
                return True
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
