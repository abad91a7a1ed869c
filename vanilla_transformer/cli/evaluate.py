r"""Score a model, or existing translations, against references.

    vanilla-transformer evaluate --model outputs/multi30k --source test.en --target test.de
    vanilla-transformer evaluate --predictions out.de --target test.de --tokenize none --lowercase
    vanilla-transformer evaluate --predictions a.de b.de --target test.de --paired bootstrap \
        --format table

Prints one line of JSON, or a table. For several systems, the JSON has an object for each, under the
name of its file. See docs/evaluation.md.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sacrebleu.metrics.base import Metric
from transformers.hf_argparser import HfArg

from ..data.text_files import expect_output, read_file
from ..inference.loading import LoadingArguments
from ..inference.metrics import (
    COMET_MODEL,
    LABELS,
    METRICS,
    TESTS,
    compare_systems,
    expect_bleu_tokenizer,
    expect_metrics,
    line_scores,
    make_metrics,
    score_translations,
    scores_by_length,
)
from ..inference.parallel_translation import new_file
from ..inference.translation import translate_n_best
from .parser import CommandParser, expect_needed
from .processes import Processes, join_processes
from .table import table
from .translation_job import SEED, report_limit

MODEL = "--model in place of --predictions"  # in errors


@dataclass
class EvaluateArguments:
    target: list[str] = HfArg(
        help="File of references. Several files are several references for each line."
    )
    model: list[str] | None = HfArg(
        default=None, help="Model that translates --source. Several models are an ensemble."
    )
    source: str | None = HfArg(
        default=None, help="File to translate. COMET and --plot_by_length always need it."
    )
    predictions: list[str] | None = HfArg(
        default=None, help="Files of existing translations, one for each system."
    )
    metrics: list[str] = HfArg(
        default_factory=lambda: list(METRICS),
        help=f"Some of {', '.join(LABELS)}. Default: {', '.join(METRICS)}.",
    )
    paired: str | None = HfArg(
        default=None,
        help="Test how each system differs from the first: bootstrap, or ar for approximate "
        "randomization.",
    )
    format: str = HfArg(default="json", help="json or table.")
    plot_by_length: str | None = HfArg(
        default=None, help="Draw the scores by source length: .png, .svg or .pdf."
    )
    line_scores: str | None = HfArg(
        default=None, help="File for the scores of each line, as a table with tabs."
    )
    num_beams: int | None = HfArg(default=None, help="Beam size. Default: the model's own.")
    batch_size: int = HfArg(default=32, help="Lines decoded together.")
    tokenize: str | None = HfArg(default=None, help="sacreBLEU's tokenizer. Default: 13a.")
    lowercase: bool = HfArg(default=False, help="Ignore case in BLEU and chrF.")
    comet_model: str = HfArg(default=COMET_MODEL, help="COMET's model: a Hub name or a .ckpt file.")

    def __post_init__(self) -> None:
        translates = self.predictions is None
        if translates == (self.model is None) or (translates and self.source is None):
            raise ValueError("expected either --predictions, or --model and --source")
        expect_metrics(self.metrics, has_sources=self.source is not None)
        expect_needed(self, self._needs())
        systems = self.predictions or []
        for name in systems:
            if systems.count(name) > 1:
                raise ValueError(f"predictions={name!r}: expected each file once")
        if self.paired is not None and self.paired not in TESTS:
            raise ValueError(f"paired={self.paired!r}: expected one of {', '.join(TESTS)}")
        if self.paired is not None and len(systems) < 2:
            raise ValueError(f"paired={self.paired!r}: expected several files in --predictions")
        expect_bleu_tokenizer(self.tokenize)
        if self.format not in ("json", "table"):
            raise ValueError(f"format={self.format!r}: expected json or table")
        inputs = {"source": self.source, "target": self.target, "predictions": systems}
        expect_output(self.line_scores, "line_scores", **inputs)
        if self.plot_by_length is not None:
            from ..plotting import picture_paths  # matplotlib is slow to import

            picture_paths(self.plot_by_length)

    def _needs(self) -> dict[str, tuple[bool, str]]:
        """The options that others need; see `expect_needed`."""
        translates, has_bleu = self.predictions is None, "bleu" in self.metrics
        return {
            "num_beams": (translates, MODEL),
            "batch_size": (translates, MODEL),
            "tokenize": (has_bleu, "bleu in --metrics"),
            "lowercase": (has_bleu or "chrf" in self.metrics, "bleu or chrf in --metrics"),
            "comet_model": ("comet" in self.metrics, "comet in --metrics"),
            "plot_by_length": (self.source is not None, "--source"),
        }


def main() -> None:
    parser = CommandParser(
        (EvaluateArguments, LoadingArguments),
        description=__doc__,
        usage="%(prog)s (--model FOLDER --source FILE | --predictions FILE ...) --target FILE "
        "[options]",
    )
    arguments, loading = parser.parse_args_into_dataclasses()
    if arguments.predictions is not None:
        expect_no_loading(parser)
    sources, references, systems = read(arguments)
    metrics = make_metrics(
        arguments.metrics,
        tokenize=arguments.tokenize,
        lowercase=arguments.lowercase,
        sources=sources,
        comet_model=arguments.comet_model,
    )
    processes = join_processes(use_cpu=loading.device == "cpu")
    if not systems:
        name = " ".join(arguments.model or ())
        systems[name] = translate_all(sources or [], arguments, loading, processes)
    processes.destroy_process_group()
    if processes.is_main_process:
        report(arguments, metrics, sources, references, systems)


def expect_no_loading(parser: CommandParser) -> None:
    """Raise a ValueError about the first option of `LoadingArguments` that is given."""
    given, _ = parser.parse_known_args()  # `LoadingArguments` sets a device by itself
    for name in LoadingArguments.__dataclass_fields__:
        value = getattr(given, name)
        if value != parser.get_default(name):
            raise ValueError(f"{name}={value!r}: expected {MODEL}")


def translate_all(
    sources: list[str],
    arguments: EvaluateArguments,
    loading: LoadingArguments,
    processes: Processes,
) -> list[str]:
    """The translations, made by all processes together. Reports how many are cut."""
    model, tokenizer = loading.load(arguments.model or ())
    options: dict[str, Any] = {}
    if arguments.num_beams is not None:
        options["num_beams"] = arguments.num_beams
    torch.manual_seed(SEED)  # for a model that was saved with do_sample
    found = translate_n_best(
        sources,
        model,
        tokenizer,
        None,
        batch_size=arguments.batch_size,
        show_progress=processes.is_main_process and sys.stderr.isatty(),
        together=processes.num_processes > 1,
        **options,
    )
    best = [hypotheses[0] for hypotheses in found]
    if processes.is_main_process:
        report_limit(len(best), sum(not hypothesis.is_complete for hypothesis in best))
    return [hypothesis.text for hypothesis in best]


def report(
    arguments: EvaluateArguments,
    metrics: dict[str, Metric],
    sources: list[str] | None,
    references: list[list[str]],
    systems: dict[str, list[str]],
) -> None:
    """Print the scores of each system, write those of each line, and draw those by source
    length."""
    if arguments.paired is not None:
        scores = compare_systems(systems, *references, metrics=metrics, test=arguments.paired)
    else:
        scores = {
            name: score_translations(predictions, *references, metrics=metrics)
            for name, predictions in systems.items()
        }
    if arguments.format == "table":
        print(score_table(scores, list(metrics)))
    else:
        print(json.dumps(scores if len(scores) > 1 else next(iter(scores.values()))))
    if arguments.line_scores is not None:
        write_line_scores(arguments.line_scores, metrics, references, systems)
    if arguments.plot_by_length is not None and sources is not None:
        from ..plotting import plot_by_length, save

        ranges, values = scores_by_length(systems, *references, metrics=metrics, sources=sources)
        labelled = {LABELS[name]: lines for name, lines in values.items()}
        save(plot_by_length(ranges, labelled), arguments.plot_by_length)


def write_line_scores(
    file: str,
    metrics: dict[str, Metric],
    references: list[list[str]],
    systems: dict[str, list[str]],
) -> None:
    """Write a table with a row for each line and, after a row of names, a column for each metric of
    each system."""
    columns: dict[str, list[float]] = {}
    for system, predictions in systems.items():
        scores = line_scores(predictions, *references, metrics=metrics)
        of = f" {system}" if len(systems) > 1 else ""
        columns |= {f"{name}{of}": lines for name, lines in scores.items()}
    rows = ([f"{score:.2f}" for score in row] for row in zip(*columns.values(), strict=True))
    with new_file(file) as output:
        for row in (columns, *rows):
            output.write(("\t".join(row) + "\n").encode())


def read(
    arguments: EvaluateArguments,
) -> tuple[list[str] | None, list[list[str]], dict[str, list[str]]]:
    """The sources, if any, the references, and the existing translations by the name of their file.

    Raises:
        ValueError: A file is empty, or two have different numbers of lines.
    """
    sources = None if arguments.source is None else list(read_file(arguments.source))
    references = [list(read_file(path)) for path in arguments.target]
    systems = {path: list(read_file(path)) for path in arguments.predictions or ()}
    first = arguments.target[0]
    others = [*zip(arguments.target, references, strict=True), *systems.items()]
    if sources is not None:
        others.insert(0, (str(arguments.source), sources))
    for path, lines in others:
        if not lines:
            raise ValueError(f"{path}: expected at least one line")
        if len(lines) != len(references[0]):
            raise ValueError(
                f"{path} has {len(lines)} lines and {first} {len(references[0])}: expected the "
                "same number"
            )
    return sources, references, systems


def score_table(scores: Mapping[str, Mapping[str, Any]], metrics: list[str]) -> str:
    """A table with a row for each system and a column for each metric, then the signatures."""

    def cell(of_system: Mapping[str, Any], name: str) -> str:
        notes = []
        if f"{name}_ci" in of_system:
            notes.append(f"±{of_system[f'{name}_ci']:.2f}")
        if f"{name}_p" in of_system:
            notes.append(f"p={of_system[f'{name}_p']:.4f}")
        return " ".join([f"{of_system[name]:.2f}", *notes])

    rows = [[system, *(cell(found, name) for name in metrics)] for system, found in scores.items()]
    lines = [table(["system", *metrics], rows)]
    signatures = next(iter(scores.values()))
    lines += [
        f"{name}: {signatures[f'{name}_signature']}"
        for name in metrics
        if f"{name}_signature" in signatures
    ]
    return "\n".join(lines)
