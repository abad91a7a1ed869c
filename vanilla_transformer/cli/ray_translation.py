"""`translate --ray`: the command reads and writes the files, and workers translate their chunks."""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from socket import gethostname
from typing import Any

from ..data.paths import is_url
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import Chunk, transform_chunks
from ..inference.ray_workers import RayWorkerArguments, RayWorkers
from .translation_job import TranslateArguments, TranslationJob, report_limit


def expect_ray_options(
    arguments: TranslateArguments,
    loading: LoadingArguments,
    workers: RayWorkerArguments,
    num_processes: int,
) -> None:
    """Raise a ValueError about the first option that contradicts --ray."""
    for name in ("source", "output"):
        if getattr(arguments, name) is None:
            raise ValueError(f"ray=True without {name}: expected both --source and --output")
    if num_processes > 1:
        raise ValueError(f"ray=True in {num_processes} processes: expected one, without a launcher")
    if not workers.num_cpus and not workers.num_gpus:
        raise ValueError("num_cpus=0.0, num_gpus=0.0: expected a positive number")
    default = LoadingArguments().device
    if loading.device != default and (loading.device != "cpu" or workers.num_gpus > 0):
        raise ValueError(f"device={loading.device!r} with ray=True: expected --num_gpus instead")


def translate_with_ray(
    arguments: TranslateArguments,
    loading: LoadingArguments,
    options: dict[str, Any],
    cluster: RayWorkerArguments,
) -> None:
    """Translate from file to file with the workers of a Ray cluster. This process reads and writes
    the files. The workers need the models under the same paths, and the target prefixes."""
    arguments.model = [absolute(name) for name in arguments.model]
    for name in ("source", "reverse_model", "target_prefix_file", "custom_generate"):
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, absolute(path))
    loading.device = None if cluster.num_gpus > 0 else "cpu"
    call, counts = pickle.dumps((arguments, loading, options)), [0, 0]
    workers = RayWorkers(cluster)
    with workers.connected():
        settings = workers.call(partial(check_call, call))

        def translate(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            work = partial(translate_chunk, call, settings)
            for first, (lines, counts_of_chunk) in workers.map(work, chunks):
                counts[:] = map(sum, zip(counts, counts_of_chunk, strict=True))
                yield first, lines

        transform_chunks(
            translate,
            str(arguments.source),
            str(arguments.output),
            settings,
            source_column=arguments.source_column,
            target_column=arguments.target_column,
            show_progress=sys.stderr.isatty(),
        )
    report_limit(*counts)


def absolute(name: str) -> str:
    """The path of a file or folder that exists here, for a process with a different working
    directory; otherwise the name, for a model on the Hub or on other machines."""
    return str(Path(name).absolute()) if not is_url(name) and Path(name).exists() else name


@cache
def load_job(call: bytes) -> tuple[TranslationJob, dict[str, Any]]:
    """The job of a pickled call and its settings. A worker caches these for its next chunks."""
    arguments, loading, options = pickle.loads(call)
    job = TranslationJob(arguments, replace(loading), options)  # chooses this machine's device
    return job, job.settings()


def check_call(call: bytes) -> dict[str, Any]:
    """Check the options of a call, and return its settings."""
    job, settings = load_job(call)
    job.check()
    return settings


def translate_chunk(
    call: bytes, settings: dict[str, Any], lines: list[str], first: int
) -> tuple[list[str], list[int]]:
    """The output for the lines of a chunk, and the job's counts for it.

    Raises:
        ValueError: The models or the libraries on this machine differ from those in the settings.
    """
    job, found = load_job(call)
    for name, value in found.items():
        if value != settings[name]:
            raise ValueError(
                f"{name}={value!r} on {gethostname()}: expected {settings[name]!r}, as on the "
                "machine that started first"
            )
    job.counts = [0, 0]
    return list(job.translate(lines, first)), job.counts
