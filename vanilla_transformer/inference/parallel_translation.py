"""A file, line by line, through any number of processes and as many attempts as it takes.

Chunks of lines are dealt out to processes. A chunk's result is a file of its own in a folder beside
the output, with its name only once it is whole; the output is made of them when there are all.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.text_files import read_file

LINES_PER_CHUNK = 2048
JOB = "job.json"

# What a configuration says about where it comes from, not about what a model does.
ORIGIN = {
    "_name_or_path",
    "auto_map",
    "custom_pipelines",
    "is_local",
    "local_files_only",
    "name_or_path",
    "transformers_version",
}


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What the model's output depends on, as settings of a job: digests of contents, whatever
    folder or repository they were loaded from.

    Returns:
        `versions` of the libraries, `device` and `attn_implementation`, and digests of `weights`,
        `config`, `generation_config` and `tokenizer`.
    """
    weights = blake2b(digest_size=8)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "device": model.device.type,
        "attn_implementation": str(model.config._attn_implementation),
        "weights": weights.hexdigest(),
        "config": _digest(model.config.to_json_string().encode()),
        "generation_config": _digest(
            model.generation_config.to_json_string(ignore_metadata=True).encode()
        ),
        "tokenizer": _digest(*files),
    }


def _digest(*files: bytes) -> str:
    """Of files, the `ORIGIN` aside in those that are JSON."""
    digest = blake2b(digest_size=8)
    for content in files:
        with suppress(ValueError):
            kept = json.loads(
                content,
                object_hook=lambda entries: {k: v for k, v in entries.items() if k not in ORIGIN},
            )
            content = json.dumps(kept, sort_keys=True).encode()
        digest.update(content)
    return digest.hexdigest()


def transform_file(
    transform: Callable[[list[str], int], Iterable[str]],
    source: str | Path,
    output: str | Path,
    settings: dict[str, Any],
    *,
    process_index: int = 0,
    num_processes: int = 1,
    wait_for_everyone: Callable[[], None] = lambda: None,
    lines_per_chunk: int = LINES_PER_CHUNK,
    show_progress: bool = False,
) -> None:
    """Write into `output` what `transform` makes of each chunk of the lines of `source`, in order.

    What an earlier attempt has finished is kept. All processes must see the same files.

    Args:
        transform: From the lines of a chunk, and the number of the first from 0, to lines.
        source: UTF-8 text.
        output: A file; it is replaced when all is done.
        settings: What the result depends on besides the source, for JSON.
        process_index: Which of the processes this is.
        num_processes: How many take part.
        wait_for_everyone: Returns when all processes have called it.
        lines_per_chunk: Lines that are lost at most where an attempt is stopped.
        show_progress: Whether to show a bar.

    Raises:
        ValueError: An earlier attempt had another source or settings; the source is not UTF-8.
    """
    parts = Path(f"{output}.parts")
    stat = Path(source).stat()
    job = {
        **settings,
        "source": str(Path(source).resolve()),
        "bytes": stat.st_size,
        "modified": stat.st_mtime_ns,
        "lines_per_chunk": lines_per_chunk,
    }
    if process_index == 0 and not (parts / JOB).exists():
        _clear(parts)  # what a kill has left of a job that was being removed
        parts.mkdir(exist_ok=True)
        _write(parts / JOB, [json.dumps(job)])
    wait_for_everyone()
    _expect_same_job(parts, job)
    chunks = 0
    with tqdm(desc="Lines", unit="line", disable=not show_progress) as progress:
        for number, lines in zip(count(), _chunks(source, lines_per_chunk)):
            part = parts / str(number)
            if number % num_processes == process_index and not part.exists():
                _write(part, transform(lines, number * lines_per_chunk))
            progress.update(len(lines))
            chunks += 1
    wait_for_everyone()
    if process_index == 0:
        _merge([parts / str(number) for number in range(chunks)], Path(output))
        _clear(parts)
        with suppress(OSError):  # of a folder in which there is something else
            parts.rmdir()
    wait_for_everyone()


def _clear(parts: Path) -> None:
    """Remove a job and its parts: the job first, for parts without one are nobody's."""
    for path in (parts / JOB, *parts.glob("[0-9]*")):
        path.unlink(missing_ok=True)


def _chunks(source: str | Path, size: int) -> Iterator[list[str]]:
    lines = read_file(source)
    while chunk := list(islice(lines, size)):
        yield chunk


def _expect_same_job(parts: Path, job: dict[str, Any]) -> None:
    before = json.loads((parts / JOB).read_text())
    for name in {**job, **before}:
        if before.get(name) != job.get(name):
            raise ValueError(
                f"{name}={job.get(name)!r}: expected {before.get(name)!r}, as in the unfinished "
                f"{parts}; remove that folder to start again"
            )


def _write(path: Path, lines: Iterable[str]) -> None:
    with _whole(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


def _merge(parts: list[Path], output: Path) -> None:
    with _whole(output) as file:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name only once all of it is on the disk."""
    aside = path.with_name(f"{path.name}.incomplete")
    with aside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
