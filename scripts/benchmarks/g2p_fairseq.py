"""Grapheme to phoneme with fairseq: the baseline of SIGMORPHON 2020, shared task 1.

python -m scripts.benchmarks.g2p_fairseq --data FOLDER --languages fre --output_dir outputs/fairseq

FOLDER is the same as for `scripts.benchmarks.g2p`. The settings are those of the task's own
Transformer: words as characters, separate vocabularies, 4+4 layers, 4 heads, pre-norm, label
smoothing 0.1, Adam with an inverse square root schedule of peak 1e-3 and 1,000 warm-up updates, at
most 5,000 updates, beam 5, and the checkpoint with the lowest word error rate on the development
set. The task also chose the best of several widths, dropouts and batches for each language:
`--d_model`, `--dropout` and `--batch_size` set one of them. Finished runs are kept in results.json,
and a run resumes from its last checkpoint; the table is g2p_fairseq.md. Minutes do not include time
before an interruption. fairseq must be installed: a checkout of it on PYTHONPATH has a package
`scripts` that hides this one. The package does not depend on fairseq.
"""

import re
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from transformers.hf_argparser import HfArg

from scripts.benchmarks.g2p import DEV, SharedTaskArguments, to_markdown
from scripts.benchmarks.sigmorphon import WORDS, error_rates, read
from scripts.checks.toolkit_training import options, run
from scripts.commands import cpu_seconds
from scripts.reports import Results, read_options, write_lines
from vanilla_transformer.data.text_files import read_file

SPLITS = {"train": "train", "dev": "valid", "test": "test"}  # ours, and fairseq's
BINARY, SOURCE, TARGET = "binary", "word", "phones"


@dataclass
class FairseqArguments(SharedTaskArguments):
    seeds: list[int] = HfArg(default_factory=lambda: [1], help="Seeds.")
    d_model: int = HfArg(default=128, help="128 or 256; d_ff is four times as much.")
    dropout: float = HfArg(default=0.3, help="0.1, 0.2 or 0.3.")
    batch_size: int = HfArg(default=256, help="Words: 256, 512 or 1024.")
    max_steps: int = HfArg(default=5000, help="Updates.")
    save_epochs: int = HfArg(default=20, help="Epochs between two checkpoints.")


def main() -> None:
    arguments = read_options(FairseqArguments, __doc__)
    settings = ("data", "d_model", "dropout", "batch_size", "max_steps", "save_epochs")
    results = Results(arguments, *settings)
    for seed, language in product(arguments.seeds, arguments.languages):
        model = results.folder / f"{language}-{seed}"
        results.run(language, seed, partial(train_and_score, language, seed, model, arguments))
    runs = {row: results.of(row, arguments.seeds) for row in arguments.languages}
    print(results.write("g2p_fairseq", to_markdown(runs, {row: [] for row in runs})))


def train_and_score(
    language: str, seed: int, folder: Path, arguments: FairseqArguments
) -> dict[str, float]:
    """The error rates of one training."""
    before = cpu_seconds()
    if not (folder / "checkpoint_last.pt").exists():  # otherwise fairseq resumes from it
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        preprocess(language, folder, arguments.data)
    train(seed, folder, arguments)
    minutes = (cpu_seconds() - before) / 60
    phones = {
        split: [phones for _, phones in read(arguments.data, language, split)]
        for split in ("dev", "test")
    }
    dev = {
        path: error_rates(generate(path, "valid", folder), phones["dev"])[WORDS]
        for path in sorted(folder.glob("checkpoint[0-9]*.pt"))
    }
    best = min(dev, key=dev.__getitem__)
    scores = error_rates(generate(best, "test", folder), phones["test"])
    return {DEV: dev[best], **scores, "cpu_minutes": minutes}


def preprocess(language: str, folder: Path, data: str) -> None:
    """Write both sides of each split, and preprocess them with fairseq."""
    for split in SPLITS:
        words, phones = zip(*read(data, language, split), strict=True)
        for name, lines in ((SOURCE, map(" ".join, words)), (TARGET, phones)):
            write_lines(folder / f"{split}.{name}", lines)
    run("fairseq_cli.preprocess:cli_main", *options({
        "source-lang": SOURCE, "target-lang": TARGET, "destdir": folder / BINARY,
        **{f"{theirs}pref": folder / ours for ours, theirs in SPLITS.items()},
    }))  # fmt: skip


def train(seed: int, folder: Path, arguments: FairseqArguments) -> None:
    """Train, and save a checkpoint every few epochs."""
    sizes = {
        f"{stack}-{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (
            ("layers", 4), ("attention-heads", 4), ("embed-dim", arguments.d_model),
            ("ffn-embed-dim", 4 * arguments.d_model), ("normalize-before", True),
        )
    }  # fmt: skip
    dropouts = ("dropout", "attention-dropout", "activation-dropout")
    run("fairseq_cli.train:cli_main", folder / BINARY, *options({
        "arch": "transformer", **sizes, **dict.fromkeys(dropouts, arguments.dropout),
        "share-decoder-input-output-embed": True,
        "criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1,
        "optimizer": "adam", "clip-norm": 1.0, "lr": 1e-3, "lr-scheduler": "inverse_sqrt",
        "warmup-updates": 1000, "warmup-init-lr": 1e-7, "batch-size": arguments.batch_size,
        "max-update": arguments.max_steps, "save-dir": folder, "seed": seed, "cpu": True,
        "save-interval": arguments.save_epochs, "validate-interval": arguments.save_epochs,
        "no-progress-bar": True, "num-workers": 0,
    }))  # fmt: skip


def generate(checkpoint: Path, split: str, folder: Path) -> list[str]:
    """The phones that a checkpoint predicts for each word of a split, in order."""
    run("fairseq_cli.generate:cli_main", folder / BINARY, *options({
        "path": checkpoint, "gen-subset": split, "beam": 5, "batch-size": 150, "cpu": True,
        "results-path": folder, "num-workers": 0,
        "required-batch-size-multiple": 1,  # with 8, the default, it can leave words out
        "scoring": "chrf",  # bleu needs a C++ extension
    }))  # fmt: skip
    rows = [line.split("\t") for line in read_file(folder / f"generate-{split}.txt")]
    found = {int(row[0][2:]): row[2] for row in rows if re.fullmatch(r"H-\d+", row[0])}
    return [found[number] for number in sorted(found)]


if __name__ == "__main__":
    main()
