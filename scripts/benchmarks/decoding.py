r"""What each way to decode gains on a test set: one table, with paired bootstrap tests.

    python -m scripts.benchmarks.decoding --model outputs/a outputs/b --source test.en \
        --target test.de --reverse_model outputs/reverse --output_dir outputs/decoding

The first model decodes all rows but the ensemble's, which has all models. The p-values compare each
row with the first one, greedy search, by sacreBLEU's paired bootstrap. Writes decoding.json and
decoding.md, and the translations of each row to NAME.txt. The same command again decodes only the
rows that are missing.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from scripts.reports import markdown, write
from vanilla_transformer.cli.parser import CommandParser
from vanilla_transformer.data.text_files import expect_parallel, read_file
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.reranking import (
    get_utility,
    rerank_by_reverse_model,
    rerank_by_utility,
)
from vanilla_transformer.inference.translation import Hypothesis, translate, translate_n_best


@dataclass
class DecodingArguments:
    model: list[str] = field(metadata={"help": "Folders of models with the same vocabulary."})
    source: str = field(metadata={"help": "File of source sentences."})
    target: str = field(metadata={"help": "File of their references."})
    output_dir: str = field(metadata={"help": "Folder for table and translations."})
    reverse_model: str | None = field(
        default=None, metadata={"help": "Model from the target to the source."}
    )
    num_beams: int = field(default=5, metadata={"help": "Beam size."})
    candidates: int = field(default=32, metadata={"help": "Samples, and beams, to choose from."})
    epsilon_cutoff: float = field(default=0.02, metadata={"help": "Of sampling."})
    utility: str = field(default="chrf", metadata={"help": "Utility of minimum Bayes risk."})
    reverse_weight: float = field(default=1.0, metadata={"help": "Weight of the reverse model."})
    length_weight: float = field(default=0.0, metadata={"help": "Reward of each token."})
    tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer."})
    max_lines: int | None = field(default=None, metadata={"help": "Lines of the test set to use."})
    batch_size: int = field(default=32, metadata={"help": "Lines decoded together."})
    seed: int = field(default=42, metadata={"help": "Seed of the samples."})

    def __post_init__(self) -> None:
        for name in ("num_beams", "candidates"):
            if getattr(self, name) < 2:
                raise ValueError(f"--{name} {getattr(self, name)}: expected at least 2")
        get_utility(self.utility)
        expect_parallel(self.source, self.target)


def main() -> None:
    parser = CommandParser((DecodingArguments, LoadingArguments), description=__doc__)
    arguments, loading = parser.parse_args_into_dataclasses()
    lines, references = (
        list(read_file(path))[: arguments.max_lines]
        for path in (arguments.source, arguments.target)
    )
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    expect_same_settings(folder / "settings.json", {**asdict(arguments), **asdict(loading)})
    systems, seconds = {}, {}
    for name, decode in rows(arguments, loading).items():
        path = folder / f"{name}.txt"
        seconds[name] = None
        if not path.exists():
            started = time.monotonic()
            found = decode(lines)
            seconds[name] = time.monotonic() - started
            path.write_text("".join(f"{' '.join(text.splitlines())}\n" for text in found))
        systems[name] = list(read_file(path))
        if len(systems[name]) != len(lines):
            raise ValueError(f"{path} has {len(systems[name])} lines: expected {len(lines)}")
    results = compare(systems, seconds, references, arguments.tokenize)
    content = {"arguments": asdict(arguments), **results}
    write(folder, "decoding", content, to_markdown(results["rows"]))


def expect_same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Keep the settings of the rows, or raise a ValueError if there are other ones."""
    settings = {name: value for name, value in settings.items() if name != "output_dir"}
    if path.exists() and (before := json.loads(path.read_text())) != settings:
        names = [name for name in settings if before.get(name) != settings[name]]
        name = names[0]
        raise ValueError(
            f"--{name} {settings[name]}: expected {before.get(name)} as in {path}, or another "
            "--output_dir"
        )
    path.write_text(json.dumps(settings, indent=1))


def rows(
    arguments: DecodingArguments, loading: LoadingArguments
) -> dict[str, Callable[[list[str]], list[str]]]:
    """What makes the translations of each row from the lines, by the row's name."""
    models = loading.load(arguments.model[0])
    beams, size = arguments.num_beams, {"batch_size": arguments.batch_size}
    progress = {"show_progress": sys.stderr.isatty()}

    def search(*models: Any, **options: Any) -> Callable[[list[str]], list[str]]:
        return lambda lines: list(translate(lines, *models, **options, **size, **progress))

    def candidates(lines: list[str], **options: Any) -> Iterable[list[Hypothesis]]:
        number = arguments.candidates
        few = {"batch_size": max(1, arguments.batch_size * beams // number)}
        return translate_n_best(lines, *models, number, **options, **few, **progress)

    def sampled(lines: list[str]) -> list[str]:
        torch.manual_seed(arguments.seed)
        options = {"do_sample": True, "num_beams": 1, "top_k": 0}
        found = candidates(lines, epsilon_cutoff=arguments.epsilon_cutoff, **options)
        return first(rerank_by_utility(lines, found, arguments.utility))

    def of_beam(lines: list[str]) -> list[str]:
        found = candidates(lines, num_beams=arguments.candidates)
        return first(rerank_by_utility(lines, found, arguments.utility))

    def reversed_(lines: list[str]) -> list[str]:
        weights = {name: getattr(arguments, name) for name in ("reverse_weight", "length_weight")}
        reverse = loading.load(arguments.reverse_model or "")
        found = candidates(lines, num_beams=arguments.candidates)
        return first(rerank_by_reverse_model(lines, found, *models, *reverse, **weights))

    found = {
        "greedy": search(*models, num_beams=1),
        f"beam_{beams}": search(*models, num_beams=beams),
    }
    if len(arguments.model) > 1:
        ensemble = loading.load(arguments.model)
        found[f"ensemble_{len(arguments.model)}_beam_{beams}"] = search(*ensemble, num_beams=beams)
    found[f"mbr_{arguments.utility}_{arguments.candidates}_samples"] = sampled
    found[f"mbr_{arguments.utility}_beam_{arguments.candidates}"] = of_beam
    if arguments.reverse_model is not None:
        found[f"reverse_model_beam_{arguments.candidates}"] = reversed_
    return found


def first(found: Iterable[list[Hypothesis]]) -> list[str]:
    return [hypotheses[0].text for hypotheses in found]


def compare(
    systems: dict[str, list[str]],
    seconds: dict[str, float | None],
    references: list[str],
    tokenize: str,
) -> dict[str, Any]:
    """Scores of each system, and p-values against the first.

    Returns:
        `rows` with `name`, `bleu`, `bleu_p`, `chrf`, `chrf_p` and `seconds`, and `signatures`.
    """
    metrics = {"BLEU": BLEU(tokenize=tokenize), "chrF2": CHRF()}
    test = PairedTest(list(systems.items()), metrics, [references], test_type="bs", n_samples=1000)
    signatures, scores = test()
    columns = [next(value for key, value in scores.items() if key.startswith(n)) for n in metrics]
    table = [
        {
            "name": name, "bleu": bleu.score, "bleu_p": bleu.p_value,
            "chrf": chrf.score, "chrf_p": chrf.p_value, "seconds": seconds[name],
        }
        for name, bleu, chrf in zip(systems, *columns, strict=True)
    ]  # fmt: skip
    return {"rows": table, "signatures": {name: str(s) for name, s in signatures.items()}}


def to_markdown(table: list[dict[str, Any]]) -> str:
    """A row for each system."""

    def cell(value: float | None, digits: int) -> str | None:
        return None if value is None else f"{value:.{digits}f}"

    return markdown(
        ["decoding", "BLEU", "p", "chrF", "p", "seconds"],
        [
            [
                row["name"].replace("_", " "), cell(row["bleu"], 2), cell(row["bleu_p"], 4),
                cell(row["chrf"], 2), cell(row["chrf_p"], 4), cell(row["seconds"], 0),
            ]
            for row in table
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
