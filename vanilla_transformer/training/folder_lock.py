"""Keeps a second training out of a folder in which one is at work."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .distributed import run_on_main_process

LOCK = "_lock"  # `Trainer` pushes no file with a leading underscore to the Hub


@contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Keep other trainings out of a folder. The main process holds the lock, and decides for all.

    Raises:
        FileExistsError: Another training is at work there.
    """
    folder = Path(output_dir)
    held: list[IO[bytes] | None] = []
    is_new = not folder.exists()
    run_on_main_process(lambda: held.append(_lock(folder)))
    try:
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
    """A file that is locked until it is closed, or the process ends, however it does. None where
    there are no locks, or nothing can be written."""
    try:
        import fcntl  # Windows has none

        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("ab")
    except (ImportError, OSError):
        return None
    try:
        # Unlike that of `flock`, this lock is not shared by workers, which may outlive the process.
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
