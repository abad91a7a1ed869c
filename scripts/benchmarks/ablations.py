"""Repeat the ablations of the paper's Table 3 in miniature, on the built-in phrases.

python -m scripts.benchmarks.ablations --output_dir outputs/ablations

Each row changes one setting of a model with 2+2 layers, d_model 128 and 4 heads. It is trained with
the recipe `phrases` and the paper's schedule. The table shows exact match and loss on held-out
phrases, mean and standard deviation over the seeds. Finished runs are kept in results.json, so that
an interrupted command can be repeated. The table is written to ablations.md.
"""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import HfArgumentParser, PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging

from scripts.reports import Results, markdown, spread
from vanilla_transformer.data.parallel_text import (
    DataArguments,
    load_parallel_dataset,
    tokenize_dataset,
)
from vanilla_transformer.training.arguments import (
    ModelArguments,
    TranslationTrainingArguments,
    parse_arguments,
)
from vanilla_transformer.training.defaults import TextSize, choose_open_options
from vanilla_transformer.training.trainer import (
    load_averaged_checkpoints,
    make_model,
    make_tokenizer,
    make_trainer,
)

RECIPE = Path(__file__).parents[2] / "vanilla_transformer/recipes/phrases.yaml"
LIKE_THE_PAPER = "encoder_layers=2,decoder_layers=2,dropout=0.1,label_smoothing=0.1"
HEADS = "encoder_attention_heads={0},decoder_attention_heads={0},head_dim={1}"

# What each row changes in the base configuration.
ROWS = {
    "base: h = 4, d_k = d_v = 32": "",
    "h = 1, d_k = d_v = 128": HEADS.format(1, 128),
    "h = 2, d_k = d_v = 64": HEADS.format(2, 64),
    "h = 8, d_k = d_v = 16": HEADS.format(8, 16),
    "d_k = 4": "head_dim=4,value_head_dim=32",
    "no dropout": "dropout=0.0",
    "no label smoothing": "label_smoothing=0.0",
    "learned positions": "position_encoding=learned",
    "embeddings not scaled": "scale_embedding=false",
    "embeddings not tied": "tie_word_embeddings=false",
    "pre-norm": "norm_position=pre",
    "last 5 checkpoints averaged": "",
}
SETTINGS = ("steps", "train_size", "test_size")  # the same for all runs


@dataclass
class AblationArguments:
    output_dir: str = field(metadata={"help": "Folder for results.json and ablations.md."})
    steps: int = field(default=800, metadata={"help": "Updates per run."})
    seeds: list[int] = field(
        default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds; one run per row and seed."}
    )
    train_size: int = field(default=160_000, metadata={"help": "Phrases to train on."})
    test_size: int = field(default=1000, metadata={"help": "Phrases to test on."})
    rows: list[str] | None = field(
        default=None, metadata={"help": "Only rows with one of these texts in their name."}
    )

    def __post_init__(self) -> None:
        for name in SETTINGS:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a positive number")
        for part in self.rows or ():
            if not any(part in row for row in ROWS):
                raise ValueError(f"--rows {part!r}: in none of {', '.join(ROWS)}")


def main() -> None:
    (arguments,) = HfArgumentParser(AblationArguments).parse_args_into_dataclasses()
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
        "config_overrides": ",".join(filter(None, (LIKE_THE_PAPER, ROWS[row]))),
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
    load_averaged_checkpoints(trainer)
    scores = trainer.evaluate(splits["test"], metric_key_prefix="test")
    return {
        "parameters": model.num_parameters(),
        "exact_match": scores["test_exact_match"],
        "loss": scores["test_loss"],
    }


def to_markdown(rows: dict[str, list[dict]]) -> str:
    """A table with a row per ablation."""
    table = []
    for row, runs in rows.items():
        exact_match, loss = ([run[name] for run in runs] for name in ("exact_match", "loss"))
        parameters = f"{runs[0]['parameters']:,}"
        table.append([row, parameters, spread(exact_match, 1), spread(loss, 4)])
    return markdown(["", "parameters", "exact match, %", "loss, nats per token"], table)


if __name__ == "__main__":
    main()
