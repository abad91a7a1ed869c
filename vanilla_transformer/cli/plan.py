r"""Estimate the time and memory of a training on this machine, and print the options it chooses.

    vanilla-transformer plan --preset base --train_source train.en --train_target train.de
    vanilla-transformer plan --config multi30k_tiny --speeds outputs/speeds.json
    vanilla-transformer plan --config wmt14_en_de_base --speeds gpu/speeds.json \
        --hardware "NVIDIA H200"

Takes the options of `train`, and its own. The command trains for a few updates, discards them, and
extrapolates. Evaluation and checkpoints are not included. With --speeds, it keeps the measurement
in a file, and measures each model, batch, device, number of processes and kind of text (tokens of a
target, and of its source) only once. --hardware plans for another device, from the nearest
measurement of the same layers, precision and options in such a file;
`python -m scripts.benchmarks.gpu` writes one.
"""

import copy
import logging
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg
from transformers.utils import logging as transformers_logging

from ..data.data_options import DataArguments
from ..training.arguments import ModelArguments, TranslationTrainingArguments
from ..training.callbacks import CurvesCallback
from ..training.distributed import end_training, run_on_main_process
from ..training.parsing import parse_arguments
from ..training.preparation import Preparation, prepare
from ..training.speeds import (
    BRIDGED,
    find_speed,
    measurement_key,
    nearest_speed,
    read_speeds,
    write_speeds,
)
from ..training.trainer import make_trainer
from .train_options import make_parser, names

# The number of pairs for which a recipe is made.
RECIPES = {"multi30k_tiny": 29_000, "iwslt14_de_en": 160_000, "wmt14_en_de_base": 4_500_000}
WARMUP = 3  # updates that are not measured


@dataclass
class PlanArguments:
    """How to measure.

    Raises:
        ValueError: `measured_steps` is not positive, `speeds` can't be read, or `hardware` has no
            `speeds` with it.
    """

    measured_steps: int = HfArg(default=20, help="Updates to measure.")
    speeds: str | None = HfArg(
        default=None, help="JSON file that keeps measurements. Default: measure each time."
    )
    hardware: str | None = HfArg(
        default=None, help="Device of a measurement in --speeds to plan for. Default: this one."
    )

    def __post_init__(self) -> None:
        if self.measured_steps < 1:
            raise ValueError(f"measured_steps={self.measured_steps}: expected a positive number")
        rows = read_speeds(self.speeds)
        if self.hardware is None:
            return
        known = sorted({row["device"] for row in rows})
        if self.hardware not in known:
            raise ValueError(
                f"hardware={self.hardware!r}: expected a device that speeds={self.speeds} has "
                f"measured: {', '.join(known) or 'none'}"
            )


class Stopwatch(TrainerCallback):
    """The time of each update."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the time, when the device has finished."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())


def main() -> None:
    plan_args, model_args, data_args, training_args = parse_arguments(
        (PlanArguments, ModelArguments, DataArguments, TranslationTrainingArguments),
        make_parser=partial(
            make_parser,
            description=__doc__,
            usage="%(prog)s [--config RECIPE] [options]",
            own_groups={"measurement": names(PlanArguments)},
        ),
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if training_args.process_index == 0:
        logging.getLogger("vanilla_transformer.training.defaults").setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    prepared = prepare(model_args, data_args, training_args)
    if prepared.target_tokens is None:
        raise ValueError("streaming=True: expected false, as a stream's size is unknown")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_quiet_trainer(prepared, training_args, folder)
        batches = len(trainer.get_train_dataloader())
        updates = math.ceil(batches / training_args.gradient_accumulation_steps)  # in an epoch
        tokens = prepared.target_tokens / updates / training_args.world_size
        speeds = []
        for r_drop_alpha, share in phases(training_args, updates):
            trainer.args.r_drop_alpha, trainer.args.r_drop_start = r_drop_alpha, 0
            speeds.append((speed_of(trainer, plan_args, tokens), share))
    end_training(trainer)
    if training_args.process_index == 0:
        key = device_key(prepared.model, training_args, prepared.splits["train"], plan_args)
        print(report(prepared, training_args, key, speeds, updates))


def phases(args: TranslationTrainingArguments, updates_per_epoch: int) -> list[tuple[float, float]]:
    """R-Drop's weight in each part of a training, and the part's share of the updates."""
    updates = total_updates(args, updates_per_epoch)
    before = min(args.r_drop_start, updates)
    if not before:
        return [(args.r_drop_alpha, 1.0)]
    parts = [(0.0, before / updates), (args.r_drop_alpha, 1.0 - before / updates)]
    return [(r_drop_alpha, share) for r_drop_alpha, share in parts if share]


def total_updates(args: TranslationTrainingArguments, updates_per_epoch: int) -> int:
    """The updates of a training, rounded up."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil((args.num_train_epochs or 0.0) * updates_per_epoch)


def device_key(
    model: PreTrainedModel, args: TranslationTrainingArguments, text: Any, plan_args: PlanArguments
) -> dict[str, Any]:
    """The key of a speed, with the device to plan for."""
    key = measurement_key(model, args, text)
    return key if plan_args.hardware is None else {**key, "device": plan_args.hardware}


def speed_of(trainer: Seq2SeqTrainer, plan_args: PlanArguments, tokens: float) -> dict[str, Any]:
    """The measurement in --speeds, or a new one, which is added there. `tokens` is the number of
    target tokens in an update on one device. The main process decides for all: the others may see
    another file, or read it while it is written."""
    rows = run_on_main_process(lambda: read_speeds(plan_args.speeds))
    key = device_key(trainer.model, trainer.args, trainer.train_dataset, plan_args)
    if plan_args.hardware is not None:
        if nearest := nearest_speed(rows, key, trainer.model):
            return nearest
        heads = "{}+{} heads".format(*key["heads"])
        sys.exit(
            f"vanilla-transformer plan: {plan_args.speeds} has no measurement of {key['device']} "
            f"with {', '.join([key['shape'], heads, *key['options']])} in {key['precision']}, "
            f"{key['layer_weights']:,} weights in the layers"
        )
    if found := run_on_main_process(lambda: find_speed(rows, key)):
        return found
    seconds = measure(trainer, plan_args.measured_steps)
    gib = max(gather_object([peak_gib()]))
    speed = {**key, "target_tokens_per_second": tokens / seconds, "gib": gib}
    if plan_args.speeds is not None and trainer.args.process_index == 0:
        # another process may have added to the file meanwhile
        write_speeds(plan_args.speeds, [*read_speeds(plan_args.speeds), speed])
    return speed


def mean_speed(speeds: list[tuple[dict[str, Any], float]]) -> tuple[float, float]:
    """The target tokens per second in the complete training, and the peak memory in GiB, from the
    measurements of its phases and their shares."""
    seconds = sum(share / speed["target_tokens_per_second"] for speed, share in speeds)
    return 1 / seconds, max(speed["gib"] for speed, _ in speeds)


def make_quiet_trainer(
    prepared: Preparation, args: TranslationTrainingArguments, folder: str
) -> Seq2SeqTrainer:
    """A trainer that saves and prints nothing."""
    args = copy.copy(args)
    quiet: dict[str, Any] = {
        "output_dir": folder, "eval_strategy": "no", "early_stopping_patience": None,
        "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
        "push_to_hub": False, "eval_on_start": False,
    }  # fmt: skip
    for name, value in quiet.items():
        setattr(args, name, value)
    trainer = make_trainer(prepared.model, prepared.tokenizer, args, prepared.splits)
    trainer.remove_callback(CurvesCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(trainer: Seq2SeqTrainer, steps: int) -> float:
    """The seconds that an update takes, measured by training for a few."""
    stopwatch = Stopwatch()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.args.max_steps = steps + WARMUP
    trainer.add_callback(stopwatch)
    trainer.train()
    trainer.remove_callback(stopwatch)
    return (stopwatch.times[-1] - stopwatch.times[WARMUP]) / steps


def peak_gib() -> float:
    """The peak memory of the GPU or, without one, of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:  # on Windows
        import psutil  # installed with accelerate

        return psutil.Process().memory_info().peak_wset / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def report(
    prepared: Preparation,
    args: TranslationTrainingArguments,
    key: dict[str, Any],
    speeds: list[tuple[dict[str, Any], float]],
    updates_per_epoch: int,
) -> str:
    """The plan as a Markdown table."""
    size = prepared.size
    assert size is not None
    assert prepared.target_tokens is not None
    updates = total_updates(args, updates_per_epoch)
    epochs = updates / updates_per_epoch
    tokens = epochs * prepared.target_tokens
    speed, memory = mean_speed(speeds)
    minutes = tokens / (speed * args.world_size) / 60
    nearest = min(RECIPES, key=lambda name: abs(math.log(RECIPES[name] / size.pairs)))
    rows = {
        "model": f"{key['shape']}, {prepared.model.num_parameters():,} weights",
        "text": f"{size.pairs:,} pairs, {size.target_tokens:,} target tokens",
        "hardware": f"{args.world_size} x {key['device']}, {key['precision']}",
        "updates": f"{updates:,}",
        "epochs": f"{epochs:.1f}, {in_millions(tokens)} target tokens",
        "speed": f"{speed:,.0f} target tokens per second and device",
        "duration": f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:.2f} hours",
        "memory": f"{memory:.1f} GiB per device",
        **measured_with([speed for speed, _ in speeds], key),
        "recipe for a text of this size": nearest,
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def in_millions(number: float) -> str:
    """A number of tokens, in millions if it is at least a million."""
    return f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:,.1f} million"


def measured_with(speeds: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, str]:
    """A row that describes the measurement if it differs from the request."""
    found = dict.fromkeys(filter(None, (differences(speed, key) for speed in speeds)))
    return {"measured with": "; ".join(found)} if found else {}


def differences(speed: dict[str, Any], key: dict[str, Any]) -> str:
    """How a measurement differs from the key, and what an older file does not record."""
    unit = {"batch": " tokens" if key["batch"] > 0 else " pairs"}
    found = [
        f"{name} {abs(speed[name]):,}{unit.get(name, '')}"
        for name in BRIDGED
        if speed.get(name, key[name]) != key[name]
    ]
    found += [f"{name} not recorded" for name in key if name not in speed]
    return ", ".join(found)
