"""Repeat the ablations of the paper's Table 3 in miniature, on the built-in phrases.

python -m scripts.benchmarks.ablations --output_dir outputs/ablations

The base has N = 2 layers, d_model = 128, d_ff = 256 and h = 4 heads of d_k = d_v = 32, dropout and
label smoothing 0.1. Each row changes one setting. It is trained with the recipe `phrases` and the
paper's schedule. The table shows exact match and loss on held-out phrases, mean and standard
deviation over the seeds, and the BLEU that the paper reports for the same change. Below the table
are the rank correlation of the two, and whether each claim of the paper holds for every seed.
Finished runs are kept in results.json, so that an interrupted command can be repeated. The tables
are written to ablations.md.
"""

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pandas import DataFrame
from tqdm.auto import tqdm
from transformers import PrinterCallback, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging as transformers_logging

from scripts.reports import Results, markdown, read_options, spread
from vanilla_transformer.data.parallel_text import (
    DataArguments,
    load_parallel_dataset,
    tokenize_dataset,
)
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.defaults import TextSize, choose_open_options
from vanilla_transformer.training.parsing import parse_arguments
from vanilla_transformer.training.preparation import make_model, make_tokenizer
from vanilla_transformer.training.trainer import load_averaged_checkpoints, make_trainer

RECIPE = Path(__file__).parents[2] / "vanilla_transformer/recipes/phrases.yaml"
LIKE_THE_PAPER = "encoder_layers=2,decoder_layers=2,dropout=0.1,label_smoothing=0.1"
HEADS = "encoder_attention_heads={0},decoder_attention_heads={0},head_dim={1}"
LAYERS = "encoder_layers={0},decoder_layers={0}"
FFN = "encoder_ffn_dim={0},decoder_ffn_dim={0}"


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        changes: Its changes to the base configuration, as `--config_overrides`.
        paper: The BLEU of the paper's Table 3 for the same change relative to its own base, which
            has N = 6, d_model = 512, d_ff = 2048, h = 8; None if the paper has no such row.
    """

    changes: str = ""
    paper: float | None = None


ROWS = {
    "base": Row("", 25.8),
    "(A) h = 1, d_k = d_v = 128": Row(HEADS.format(1, 128), 24.9),
    "(A) h = 2, d_k = d_v = 64": Row(HEADS.format(2, 64), 25.5),
    "(A) h = 8, d_k = d_v = 16": Row(HEADS.format(8, 16), 25.8),
    "(A) h = 16, d_k = d_v = 8": Row(HEADS.format(16, 8), 25.4),
    "(B) d_k = 8": Row("head_dim=8,value_head_dim=32", 25.1),
    "(C) N = 1": Row(LAYERS.format(1), 23.7),
    "(C) d_model = 64": Row("d_model=64,head_dim=16", 24.5),
    "(C) d_model = 256": Row("d_model=256,head_dim=64", 26.0),
    "(C) d_ff = 128": Row(FFN.format(128), 25.4),
    "(C) d_ff = 512": Row(FFN.format(512), 26.2),
    "(D) no dropout": Row("dropout=0.0", 24.6),
    "(D) dropout 0.2": Row("dropout=0.2", 25.5),
    "(D) no label smoothing": Row("label_smoothing=0.0", 25.3),
    "(D) label smoothing 0.2": Row("label_smoothing=0.2", 25.7),
    "(E) learned positions": Row("position_encoding=learned", 25.7),
    "embeddings not scaled": Row("scale_embedding=false"),
    "embeddings not tied": Row("tie_word_embeddings=false"),
    "pre-norm": Row("norm_position=pre"),
    "last 5 checkpoints averaged": Row(),
}


class Claim(NamedTuple):
    """A claim of the paper about two rows (section 6.2, label smoothing 5.4, averages 6.1).

    Attributes:
        measure: "exact_match" in place of BLEU, or "loss" in place of perplexity.
    """

    text: str
    better: str
    worse: str
    measure: str = "exact_match"


CLAIMS = (
    Claim("a single head is worse", "base", "(A) h = 1, d_k = d_v = 128"),
    Claim("too many heads are worse", "base", "(A) h = 16, d_k = d_v = 8"),
    Claim("a smaller d_k is worse", "base", "(B) d_k = 8"),
    Claim("more layers are better", "base", "(C) N = 1"),
    Claim("a wider model is better", "base", "(C) d_model = 64"),
    Claim("a wider model is better", "(C) d_model = 256", "base"),
    Claim("a wider FFN is better", "base", "(C) d_ff = 128"),
    Claim("a wider FFN is better", "(C) d_ff = 512", "base"),
    Claim("dropout helps", "base", "(D) no dropout"),
    Claim("label smoothing raises the score", "base", "(D) no label smoothing"),
    Claim("label smoothing raises perplexity", "(D) no label smoothing", "base", "loss"),
    Claim("learned positions are as good", "(E) learned positions", "base"),
    Claim("averaged checkpoints are better", "last 5 checkpoints averaged", "base"),
)
SETTINGS = ("steps", "train_size", "test_size", "options")  # the same for all runs


@dataclass
class AblationArguments:
    output_dir: str = HfArg(help="Folder for results.json and ablations.md.")
    steps: int = HfArg(default=2000, help="Updates per run.")
    seeds: list[int] = HfArg(
        default_factory=lambda: [1, 2, 3], help="Seeds; one run per row and seed."
    )
    train_size: int = HfArg(default=160_000, help="Phrases to train on.")
    test_size: int = HfArg(default=1000, help="Phrases to test on.")
    options: str = HfArg(default="--max_tokens=900", help="More options of `train`, as one string.")
    rows: list[str] | None = HfArg(
        default=None, help="Only rows with one of these texts in their name."
    )

    def __post_init__(self) -> None:
        for name in ("steps", "train_size", "test_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a positive number")
        for part in self.rows or ():
            if not any(part in row for row in ROWS):
                raise ValueError(f"--rows {part!r}: in none of {', '.join(ROWS)}")


def main() -> None:
    arguments = read_options(AblationArguments, __doc__)
    transformers_logging.set_verbosity_error()
    results = Results(arguments, *SETTINGS)
    rows = [
        row for row in ROWS if arguments.rows is None or any(part in row for part in arguments.rows)
    ]
    model_args, data_args, _ = options_of(arguments, rows[0], 0, "unused")
    pairs = load_parallel_dataset(data_args)
    tokenizer = make_tokenizer(model_args, pairs["train"], None)
    splits = tokenize_dataset(pairs, tokenizer, data_args)
    runs = [(row, seed) for seed in arguments.seeds for row in rows]
    for row, seed in tqdm(runs, desc="Training", unit="run"):
        with tempfile.TemporaryDirectory() as scratch:
            options = options_of(arguments, row, seed, scratch)
            results.run(row, seed, partial(run, options, tokenizer, splits))
    table = to_markdown({row: results.of(row, arguments.seeds) for row in rows})
    print(results.write("ablations", table))


def options_of(arguments: AblationArguments, row: str, seed: int, folder: str) -> tuple[Any, ...]:
    """The arguments of `vanilla-transformer train` for this run."""
    flags = {
        "config": RECIPE,
        "output_dir": folder,
        "phrases_train_size": arguments.train_size,
        "phrases_test_size": arguments.test_size,
        "phrases_validation_size": 0,
        "config_overrides": ",".join(filter(None, (LIKE_THE_PAPER, ROWS[row].changes))),
        "lr_scheduler_type": "inverse_sqrt",
        "max_steps": arguments.steps,
        "warmup_steps": arguments.steps // 4,
        "seed": seed,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    if "averaged" in row:
        each = max(1, arguments.steps // 40)
        flags |= {"average_checkpoints": 5, "save_strategy": "steps", "save_steps": each}
        flags |= {"save_total_limit": 5, "save_only_model": True}
    argv = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    argv += arguments.options.split()
    return parse_arguments((ModelArguments, DataArguments, TranslationTrainingArguments), argv)


def run(options: tuple[Any, ...], tokenizer: Any, splits: Any) -> dict[str, float]:
    """Train and test a model."""
    model_args, _, training_args = options
    set_seed(training_args.seed)
    model = make_model(model_args, tokenizer, None)
    choose_open_options(training_args, model.config.d_model, TextSize.of(splits["train"]))
    trainer = make_trainer(model, tokenizer, training_args, splits)
    trainer.remove_callback(PrinterCallback)  # print nothing but the table
    trainer.train()
    trainer.exit_if_interrupted()
    load_averaged_checkpoints(trainer)
    scores = trainer.evaluate(splits["test"], metric_key_prefix="test")
    return {
        "parameters": model.num_parameters(),
        "exact_match": scores["test_exact_match"],
        "loss": scores["test_loss"],
    }


def to_markdown(rows: dict[str, list[dict]]) -> str:
    """A table with a row per ablation, how its order agrees with the paper's, and the claims."""
    table = []
    for row, runs in rows.items():
        exact_match, loss = ([run[name] for run in runs] for name in ("exact_match", "loss"))
        parameters = f"{runs[0]['parameters']:,}"
        cells = [row, parameters, spread(exact_match, 1), spread(loss, 4), ROWS[row].paper]
        table.append(cells)
    header = ["", "parameters", "exact match, %", "loss, nats per token", "the paper's BLEU"]
    return "\n\n".join(filter(None, (markdown(header, table), agreement(rows), claims(rows))))


def agreement(rows: dict[str, list[dict]]) -> str:
    """Spearman's rank correlation of exact match with the paper's BLEU, in a sentence."""
    found = [
        (statistics.mean(run["exact_match"] for run in runs), ROWS[row].paper)
        for row, runs in rows.items()
        if ROWS[row].paper is not None
    ]
    if len(found) < 3:
        return ""
    correlation = DataFrame(found).corr(method="spearman").iloc[0, 1]
    return (
        f"Rank correlation of exact match with the paper's BLEU, {len(found)} rows: "
        f"{correlation:.2f} (Spearman)."
    )


def claims(rows: dict[str, list[dict]]) -> str:
    """A table of the paper's claims: the lead of the better row for each seed."""
    table = []
    for claim in CLAIMS:
        better, worse = (
            {run["seed"]: run[claim.measure] for run in rows.get(row, ())}
            for row in (claim.better, claim.worse)
        )
        sign, digits = (1, 1) if claim.measure == "exact_match" else (-1, 4)
        ahead = [sign * (better[seed] - worse[seed]) for seed in sorted(better.keys() & worse)]
        if ahead:
            verdict = {len(ahead): "yes", 0: "no"}.get(sum(each > 0 for each in ahead), "unclear")
            by_seed = ", ".join(f"{each:+.{digits}f}" for each in ahead)
            table.append([claim.text, claim.better, claim.worse, by_seed, verdict])
    header = ["the paper", "better", "worse", "difference in each seed", "confirmed"]
    return markdown(header, table) if table else ""


if __name__ == "__main__":
    main()
