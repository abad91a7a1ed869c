"""Compare exported models with the original model.

    python -m scripts.benchmarks.engines --model outputs/mine --source test.en --target test.de \\
        --output_dir outputs/engines

Each model is exported for every engine that is installed. All of them translate the source with the
model's own generation config, for the number of equal lines and BLEU. Then they take turns on a
part of it, and the table has medians of the rounds. A start-up is a new process that imports, loads
and translates a line. Writes engines.json and engines.md.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from scripts.benchmarks.turns import in_own_process, settle
from scripts.reports import markdown, read_options, write
from vanilla_transformer.data.text_files import expect_parallel, read_file
from vanilla_transformer.export import export
from vanilla_transformer.export.check import size
from vanilla_transformer.inference.engines import find_engine
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.metrics import expect_bleu_tokenizer, score_translations
from vanilla_transformer.inference.translation import translate

# Targets of `export` and their quantizations. None means torch, with the model itself.
VARIANTS = (
    (None, None), ("ctranslate2", None), ("ctranslate2", "int8"), ("onnx", None), ("onnx", "int8"),
)  # fmt: skip
HEADER = (
    "model", "engine", "weights", "equal lines", "BLEU", "lines/s, batch 32", "lines/s, batch 1",
    "MB", "start-up, s",
)  # fmt: skip


@dataclass
class EnginesArguments:
    model: list[str] = HfArg(help="Model folders.")
    source: str = HfArg(help="File of source lines.")
    target: str = HfArg(help="File of their references.")
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    lines: int | None = HfArg(default=None, help="Translate only the first lines.")
    batch_lines: int = HfArg(default=256, help="Lines timed in batches of 32.")
    single_lines: int = HfArg(default=32, help="Lines timed one by one.")
    rounds: int = HfArg(default=5, help="Number of turns of each engine.")
    threads: int = HfArg(default=1, help="Threads of each engine.")
    tokenize: str | None = HfArg(default=None, help="sacreBLEU's tokenizer.")

    def __post_init__(self) -> None:
        for name in ("lines", "batch_lines", "single_lines", "rounds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: expected a positive number")
        expect_bleu_tokenizer(self.tokenize)
        expect_parallel(self.source, self.target)


def main() -> None:
    arguments = read_options(EnginesArguments, __doc__)
    settle(arguments.threads)
    sources, references = (
        list(read_file(path))[: arguments.lines] for path in (arguments.source, arguments.target)
    )
    results = []
    for model in arguments.model:
        with tempfile.TemporaryDirectory() as scratch:
            folders = export_all(Path(model), Path(scratch))
            results += measure(Path(model).name, folders, sources, references, arguments)
    rows = [
        [
            result["model"],
            result["engine"],
            result["weights"],
            f"{result['equal']:.1%}",
            f"{result['bleu']:.2f}",
            f"{result['batch']:.1f}",
            f"{result['single']:.1f}",
            f"{result['megabytes']:.1f}",
            f"{result['start']:.1f}",
        ]
        for result in results
    ]
    write(arguments.output_dir, "engines", results, markdown(HEADER, rows))


def export_all(model: Path, scratch: Path) -> dict[tuple[str, str], Path]:
    """The folders by engine and weights, the model's own first."""
    folders = {}
    for to, quantization in VARIANTS:
        folder, weights = model, quantization or "float32"
        if to is not None:
            try:
                folder = export(model, scratch / f"{to}-{weights}", to, quantization)
            except ImportError as error:
                print(f"left out: {error}")
                continue
        engine = find_engine(folder)
        folders["torch" if engine is None else engine.NAME, weights] = folder
    return folders


def measure(
    name: str,
    folders: dict[tuple[str, str], Path],
    sources: list[str],
    references: list[str],
    arguments: EnginesArguments,
) -> list[dict[str, Any]]:
    """Quality, speed, size and start-up of each folder."""
    loaded = {key: load(path) for key, path in folders.items()}
    texts = {key: list(translate(sources, *pair)) for key, pair in loaded.items()}
    seconds: dict[Any, list[float]] = {}
    jobs = {"batch": (arguments.batch_lines, 32), "single": (arguments.single_lines, 1)}
    for _ in range(arguments.rounds):
        for job, (number, batch_size) in jobs.items():
            for key, pair in loaded.items():
                began = time.perf_counter()
                list(translate(sources[:number], *pair, batch_size=batch_size))
                taken = time.perf_counter() - began
                seconds.setdefault((job, key), []).append(taken / len(sources[:number]))
        for key, path in folders.items():
            began = time.perf_counter()
            in_own_process(start, path, sources[0], arguments.threads)
            seconds.setdefault(("start", key), []).append(time.perf_counter() - began)
    expected = next(iter(texts.values()))
    scoring = partial(score_translations, metrics=("bleu",), tokenize=arguments.tokenize)
    return [
        {
            "model": name,
            "engine": key[0],
            "weights": key[1],
            "equal": sum(map(str.__eq__, texts[key], expected)) / len(expected),
            "bleu": scoring(texts[key], references)["bleu"],
            **{job: 1 / statistics.median(seconds[job, key]) for job in jobs},
            "megabytes": size(path) / 1e6,
            "start": statistics.median(seconds["start", key]),
            "seconds": {job: seconds[job, key] for job in (*jobs, "start")},
        }
        for key, path in folders.items()
    ]


def load(folder: Path) -> tuple[Any, Any]:
    """A model and its tokenizer. torch computes in float32, as the table says, whatever the dtype
    of the checkpoint."""
    dtype = "float32" if find_engine(folder) is None else "auto"
    return LoadingArguments(device="cpu", dtype=dtype).load(folder)


def start(folder: Path, line: str, threads: int) -> list[str]:
    """The work of a new process after importing this file."""
    settle(threads)
    return list(translate([line], *load(folder)))


if __name__ == "__main__":
    main()
