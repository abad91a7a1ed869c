"""Transforms a file line by line, on any number of processes, and resumes after interruptions.

Each process works on every n-th chunk of lines. The result of a chunk is a file in a folder next to
the output, which gets its name once it is complete. At the end, the files are merged into the
output.

Sources and outputs are text or parquet files, by a local path or a URL.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from hashlib import blake2b, file_digest
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..data.parquet_files import add_column, find_text_column, is_parquet
from ..data.paths import as_path, is_no_file, is_url
from ..data.text_files import expect_inputs, expect_output, expect_text, is_gzip, read_file

Chunk = tuple[int, list[str]]  # the index of the first line, and lines

LINES_PER_CHUNK = 2048
JOB_FILE = "job.json"
DONE_FILE = "done.json"  # the name of this file while the parts are removed
PARTS = "[0-9]*"  # chunks, finished or not
TARGET_COLUMN = "translation"

# Fields of a configuration about its origin, which do not affect the model.
ORIGIN_FIELDS = {
    "_name_or_path",
    "auto_map",
    "base_model_name_or_path",
    "custom_pipelines",
    "is_local",
    "local_files_only",
    "name_or_path",
    "transformers_version",
}


def fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Settings that identify the output of a model, for `transform_file`. They depend on the
    contents of model and tokenizer, not on their location.

    Args:
        model: A model of transformers, or one of `inference.engines`.
        tokenizer: Its tokenizer.

    Returns:
        `versions` of this package and the libraries, `device` and `attn_implementation`, and
        digests of `weights`, `config`, `generation_config` and `tokenizer`.
    """
    weights = blake2b(digest_size=8)
    version = getattr(model, "version", f"torch {torch.__version__}")
    if isinstance(model, torch.nn.Module):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for part in _plain_tensors(tensor.detach().cpu()):
                weights.update(part.contiguous().view(-1).view(torch.uint8).numpy())
    else:  # an engine
        for path in model.weight_files:
            weights.update(path.read_bytes())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {
        "versions": f"vanilla_transformer {__version__}, {version}, "
        f"transformers {transformers.__version__}",
        "device": model.device.type,
        "attn_implementation": str(model.config._attn_implementation),
        "weights": weights.hexdigest(),
        "config": digest(*_configurations(model)),
        "generation_config": digest(
            model.generation_config.to_json_string(ignore_metadata=True).encode()
        ),
        "tokenizer": digest(*files),
    }


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor or, for one of torchao, the integers and scales that it consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_tensors(getattr(tensor, name))]


def _configurations(model: Any) -> Iterator[bytes]:
    """The configurations of a model or of an ensemble's members, and of PEFT's adapters, as
    JSON."""
    for member in getattr(model, "members", [model]):
        yield member.config.to_json_string().encode()
        for name, adapter in getattr(member, "peft_config", {}).items():
            yield json.dumps({name: adapter.to_dict()}, default=_as_json).encode()


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def digest(*files: bytes) -> str:
    """The digest of files, without `ORIGIN_FIELDS` in JSON files."""
    summary = blake2b(digest_size=8)
    for content in files:
        with suppress(ValueError):
            kept = json.loads(
                content,
                object_hook=lambda entries: {
                    k: v for k, v in entries.items() if k not in ORIGIN_FIELDS
                },
            )
            content = json.dumps(kept, sort_keys=True).encode()
        summary.update(content)
    return summary.hexdigest()


def transform_file(
    transform: Callable[[list[str], int], Iterable[str]],
    source: str | Path,
    output: str | Path,
    settings: dict[str, Any],
    **options: Any,
) -> None:
    """`transform_chunks` with a function that takes the lines of a chunk and the index of its first
    line, and returns lines."""

    def one_by_one(chunks: Iterator[Chunk]) -> Iterator[tuple[int, Iterable[str]]]:
        for first, lines in chunks:
            yield first, transform(lines, first)

    transform_chunks(one_by_one, source, output, settings, **options)


def transform_chunks(
    transform: Callable[[Iterator[Chunk]], Iterable[tuple[int, Iterable[str]]]],
    source: str | Path,
    output: str | Path,
    settings: dict[str, Any],
    *,
    source_column: str | None = None,
    target_column: str = TARGET_COLUMN,
    process_index: int = 0,
    num_processes: int = 1,
    wait_for_everyone: Callable[[], None] = lambda: None,
    lines_per_chunk: int = LINES_PER_CHUNK,
    show_progress: bool = False,
) -> None:
    """Transform the lines of `source` in chunks, and write the results to `output` in order.

    Chunks that an interrupted call has finished are kept. All processes must share a file system.

    Args:
        transform: Takes chunks, each with the index of its first line, and yields their lines with
            the same index, in any order.
        source: A UTF-8 text file, or a parquet file.
        output: The output file, which is replaced once everything is done, compressed if its name
            ends in .gz. A parquet file has the columns of the source and a new one.
        settings: All other settings that affect the result, as JSON values by name.
        source_column: The column of a parquet source. Default: the only one with text.
        target_column: The new column of a parquet output.
        process_index: The index of this process.
        num_processes: The number of processes.
        wait_for_everyone: A barrier: returns once all processes have called it.
        lines_per_chunk: Lines per chunk. An interruption loses at most one chunk per process.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: An unfinished call had a different source or different settings, the source is
            not UTF-8, or several processes would read the same pipe; also as in `expect_files`.
        FileExistsError: The folder for the chunks holds someone else's files with such names.
    """
    expect_files(source, output, source_column, target_column)
    if num_processes > 1 and is_no_file(source):
        raise ValueError(
            f"source={str(source)!r}: expected a file, not a pipe, as each of {num_processes} "
            "processes reads it"
        )
    parts = as_path(f"{output}.parts")
    job = {**settings, **_origin(as_path(source)), "lines_per_chunk": lines_per_chunk}
    if process_index == 0 and not (parts / JOB_FILE).exists():
        _begin(parts, job)
    wait_for_everyone()
    _check_same_job(parts, job)
    finished = {path.name for path in parts.iterdir()}
    sizes = []  # sizes of the chunks so far
    with tqdm(desc="Lines", unit="line", disable=not show_progress) as progress:

        def unfinished() -> Iterator[Chunk]:
            for number, lines in enumerate(_chunks(source, source_column, lines_per_chunk)):
                sizes.append(len(lines))
                if number % num_processes == process_index and str(number) not in finished:
                    yield number * lines_per_chunk, lines
                else:
                    progress.update(len(lines))

        with _removing_failed_job(parts, num_processes):
            for first, results in transform(unfinished()):
                number = first // lines_per_chunk
                _write(parts / str(number), results)
                progress.update(sizes[number])
    wait_for_everyone()
    if process_index == 0:
        with _removing_failed_job(parts, num_processes):
            names = map(str, range(len(sizes)))
            _merge([parts / name for name in names], source, output, target_column)
            _clear(parts)
    wait_for_everyone()


@contextmanager
def _removing_failed_job(parts: Path, num_processes: int) -> Iterator[None]:
    """Remove a job that fails before it has finished a part, so that it does not block the next
    one. A job of several processes stays, as others may still work on it.

    Raises:
        FileNotFoundError: The job has been removed.
    """
    try:
        yield
    except BaseException as error:
        if not parts.exists():
            message = f"{parts} is gone: expected no other process at work on this output"
            raise FileNotFoundError(message) from error
        if num_processes == 1 and not any(path.name.isdigit() for path in parts.iterdir()):
            _clear(parts)
        raise


def expect_files(
    source: str | Path | None,
    output: str | Path | None,
    source_column: str | None = None,
    target_column: str = TARGET_COLUMN,
) -> None:
    """Raise a ValueError, or a FileNotFoundError for the source or the output's folder, unless
    these files can be a source and an output. `None` is a stream."""
    expect_output(output, source=source)
    expect_inputs(source=source)
    if output is not None:
        expect_text(output)  # the format that is written, and that other commands read
    if output is not None and not is_url(output) and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"output={str(output)!r}: expected a folder that exists")
    if output is not None and is_no_file(output):
        raise ValueError(
            f"output={str(output)!r}: expected a file, which is replaced; without it, standard "
            "output is used"
        )
    for name, path, other in (("source", source, output), ("output", output, source)):
        if path is not None and other is None and (is_parquet(path) or is_url(path)):
            expected = "output" if name == "source" else "source"
            raise ValueError(f"{name}={str(path)!r}: expected --{expected} as well")
    adds_column = output is not None and is_parquet(output)
    if target_column != TARGET_COLUMN and not adds_column:
        raise ValueError(f"target_column={target_column!r}: expected a parquet file as the output")
    if source is not None and is_parquet(source):
        find_text_column(source, source_column, target_column if adds_column else None)
    elif source_column is not None:
        raise ValueError(f"source_column={source_column!r}: expected a parquet file as the source")
    elif adds_column:
        raise ValueError(f"output={str(output)!r}: expected a text file, as for source")


def _origin(source: Path) -> dict[str, Any]:
    """The identity of the source: its content, as another file may have the same size and time."""
    path = str(source.resolve())
    if is_no_file(source):  # a pipe can only be read once
        return {"source": path, "modified": source.stat().st_mtime_ns}
    with source.open("rb") as file:
        content = file_digest(file, partial(blake2b, digest_size=8)).hexdigest()
    return {"source": path, "source_content": content}


def _begin(parts: Path, job: dict[str, Any]) -> None:
    """Make the folder for the chunks of a job. Raise a FileExistsError if it holds someone else's
    files with such names."""
    if (parts / DONE_FILE).exists():
        _clear(parts)  # parts of a job whose removal was interrupted
    if any(parts.glob(PARTS)):
        raise FileExistsError(
            f"{parts} has files with numbers as names, which this job would replace: expected "
            "no such folder, or that of an unfinished job"
        )
    parts.mkdir(exist_ok=True)
    _write(parts / JOB_FILE, [json.dumps(job)])


def _clear(parts: Path) -> None:
    """Remove a job and its parts. The job is renamed first: parts without a job are never
    reused."""
    with suppress(FileNotFoundError):
        (parts / JOB_FILE).rename(parts / DONE_FILE)
    for path in (*parts.glob(PARTS), parts / DONE_FILE):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder has other files, or does not exist
        parts.rmdir()


def _chunks(source: str | Path, column: str | None, size: int) -> Iterator[list[str]]:
    lines = read_file(source, column)
    while chunk := list(islice(lines, size)):
        yield chunk


def _check_same_job(parts: Path, job: dict[str, Any]) -> None:
    if not (parts / JOB_FILE).exists():  # written by the first process
        raise FileNotFoundError(f"{parts}: expected a file system that all processes share")
    before = json.loads((parts / JOB_FILE).read_text(encoding="utf-8"))
    for name in {**job, **before}:
        if before.get(name) != job.get(name):
            raise ValueError(
                f"{name}={job.get(name)!r}: expected {before.get(name)!r}, as in the unfinished "
                f"{parts}; remove that folder to start again"
            )


def _write(path: Path, lines: Iterable[str]) -> None:
    with _atomic_file(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


def _merge(parts: list[Path], source: str | Path, output: str | Path, target_column: str) -> None:
    with new_file(output) as file:
        if is_parquet(output):
            add_column(source, target_column, chain.from_iterable(map(read_file, parts)), file)
            return
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)


@contextmanager
def new_file(path: str | Path) -> Iterator[Any]:
    """A file that replaces another one once it is complete, compressed if its name ends in .gz."""
    with (
        _atomic_file(as_path(path)) as file,
        gzip.GzipFile("", "wb", fileobj=file) if is_gzip(path) else nullcontext(file) as to,
    ):
        yield to


@contextmanager
def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only once it is complete and on the disk. A failure leaves none."""
    is_local = isinstance(path, Path)  # rather than an object for a URL
    path = path.resolve() if is_local else path  # to keep a link
    # A job that was started twice would write into the same file twice.
    incomplete = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    try:
        with incomplete.open("wb") as file:
            yield file
            file.flush()
            if is_local:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):  # the folder may be gone
            incomplete.unlink()
        raise
    if is_local:
        incomplete.replace(path)  # on Windows, `rename` fails if the name exists
    else:
        incomplete.rename(path)  # `replace` is not implemented for these
