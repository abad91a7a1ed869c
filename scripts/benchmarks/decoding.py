r"""Compare ways to decode on a test set, in one table, with tests of significance.

    python -m scripts.benchmarks.decoding --model outputs/a outputs/b --source test.en \
        --target test.de --reverse_model outputs/reverse --output_dir outputs/decoding

Every row is the command `vanilla-transformer translate` with the options of `commands` below;
`--options` adds to all of them. All rows use the first model, except the ensemble, which uses all.
The table, decoding.md, has the scores, the p-values of their differences from beam search by
approximate randomization, and the CPU time as a multiple of beam search's. The translations of a
row are in NAME.txt. Finished rows are kept in results.json, so that an interrupted command can be
repeated, also with more rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.hf_argparser import HfArg

from scripts.commands import cpu_seconds, run
from scripts.reports import Results, markdown, read_options
from vanilla_transformer.data.text_files import expect_parallel, read_file
from vanilla_transformer.inference.metrics import compare_systems, make_metrics
from vanilla_transformer.inference.reranking import get_utility

METRICS = ("bleu", "chrf")


@dataclass
class DecodingArguments:
    model: list[str] = HfArg(help="Folders of models with the same vocabulary.")
    source: str = HfArg(help="File of source sentences.")
    target: str = HfArg(help="File of their references.")
    output_dir: str = HfArg(help="Folder for translations, results.json and table.")
    reverse_model: str | None = HfArg(default=None, help="Model from the target to the source.")
    num_beams: int = HfArg(default=5, help="Beam size.")
    candidates: int = HfArg(default=32, help="Samples, and beams, to choose from.")
    epsilon_cutoff: float = HfArg(default=0.02, help="Of sampling.")
    utilities: list[str] = HfArg(
        default_factory=lambda: ["chrf", "bleu"], help="Utilities of minimum Bayes risk."
    )
    reverse_weight: float = HfArg(default=1.0, help="Weight of the reverse model.")
    length_weight: float = HfArg(default=0.0, help="Reward of each token.")
    tokenize: str = HfArg(default="13a", help="sacreBLEU's tokenizer.")
    seed: int = HfArg(default=42, help="Seed of the samples.")
    options: str = HfArg(default="", help="More options of `translate`, as one string.")
    rows: list[str] | None = HfArg(
        default=None, help="Only beam search, and rows with one of these texts in their name."
    )

    def __post_init__(self) -> None:
        for name in ("num_beams", "candidates"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 2")
        for utility in self.utilities:
            get_utility(utility)
        expect_parallel(self.source, self.target)
        commands(self)


def main() -> None:
    arguments = read_options(DecodingArguments, __doc__)
    names = (
        "model", "source", "reverse_model", "num_beams", "candidates", "epsilon_cutoff",
        "reverse_weight", "length_weight", "options", "seed",  # files have no seed in their names
    )  # fmt: skip
    results = Results(arguments, *names)
    rows = commands(arguments)
    for row, flags in rows.items():
        output = results.folder / f"{row}.txt"
        results.run(row, arguments.seed, partial(translate, [*flags, f"--output={output}"]))
    minutes = {row: results.of(row, [arguments.seed])[0]["cpu_minutes"] for row in rows}
    systems = {row: list(read_file(results.folder / f"{row}.txt")) for row in rows}
    scores = compare_systems(
        systems,
        list(read_file(arguments.target)),
        metrics=make_metrics(METRICS, tokenize=arguments.tokenize),
        test="ar",
    )
    print(results.write("decoding", to_markdown(scores, minutes)))


def commands(arguments: DecodingArguments) -> dict[str, list[str]]:
    """The options of `translate` for each row. The others are compared with the first.

    Raises:
        ValueError: A text of `--rows` is not in the name of any row.
    """
    beams, number = arguments.num_beams, arguments.candidates
    one, every = ([f"--source={arguments.source}", "--model", *models] for models in (
        arguments.model[:1], arguments.model
    ))  # fmt: skip
    samples = [
        f"--candidates={number}", "--num_beams=1", "--do_sample", "--top_k=0",
        f"--epsilon_cutoff={arguments.epsilon_cutoff}", f"--seed={arguments.seed}",
    ]  # fmt: skip
    rows = {
        f"beam_{beams}": [*one, f"--num_beams={beams}"],
        "greedy": [*one, "--num_beams=1"],
    }
    if len(arguments.model) > 1:
        rows[f"ensemble_{len(arguments.model)}_beam_{beams}"] = [*every, f"--num_beams={beams}"]
    for utility in arguments.utilities:
        mbr = [*one, f"--mbr={utility}"]
        rows[f"mbr_{utility}_{number}_samples"] = [*mbr, *samples]
        rows[f"mbr_{utility}_beam_{number}"] = [*mbr, f"--num_beams={number}"]
    if arguments.reverse_model is not None:
        rows[f"reverse_model_beam_{number}"] = [
            *one, f"--num_beams={number}", f"--reverse_model={arguments.reverse_model}",
            f"--reverse_weight={arguments.reverse_weight}",
            f"--length_weight={arguments.length_weight}",
        ]  # fmt: skip
    for part in arguments.rows or ():
        if not any(part in row for row in rows):
            raise ValueError(f"rows={part!r}: in none of {', '.join(rows)}")
    return {
        row: [*flags, *arguments.options.split()]
        for number, (row, flags) in enumerate(rows.items())
        if number == 0 or arguments.rows is None or any(part in row for part in arguments.rows)
    }


def translate(flags: list[str]) -> dict[str, float]:
    """Run the command in a new process."""
    before = cpu_seconds()
    run("translate", flags)
    return {"cpu_minutes": (cpu_seconds() - before) / 60}


def to_markdown(scores: Mapping[str, Mapping[str, Any]], minutes: Mapping[str, float]) -> str:
    """A row for each system, with p-values of its differences from the first."""
    first = next(iter(minutes.values()))
    table = []
    for row, of_row in scores.items():
        cells = [row.replace("_", " ")]
        for name in METRICS:
            p = of_row.get(f"{name}_p")
            cells += [f"{of_row[name]:.2f}", None if p is None else f"{p:.2g}"]
        table.append([*cells, f"{minutes[row] / first:.1f}"])
    return markdown(["decoding", "BLEU", "p", "chrF", "p", "time"], table)


if __name__ == "__main__":
    main()
