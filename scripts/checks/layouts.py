"""Check that training on several processes gives the same model as training on one.

python -m scripts.checks.layouts --output_dir outputs/layouts
python -m scripts.checks.layouts --layouts "1 process" "2, FSDP2" --every_pair

Each layout launches `train` with the same seed on the same sentence pairs in each update; 1 process
accumulates the batches that several processes compute at the same time. Then training resumes from
each layout's checkpoint of half the training: one process and DDP from each other's, FSDP and ZeRO
from their own. The results should differ from those of 1 process only by float32 rounding. Every
final model is loaded here, without distribution. Writes layouts.json and layouts.md. Without GPUs
the processes run on CPUs. ZeRO's layouts need DeepSpeed, and are left out if it is not installed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM
from transformers.hf_argparser import HfArg
from transformers.integrations.deepspeed import is_deepspeed_available
from transformers.utils import logging as transformers_logging

import vanilla_transformer  # noqa: F401  # registers the model
from scripts.reports import expect_known, markdown, read_options, write
from vanilla_transformer.data.phrases import load_phrases

REPOSITORY = Path(__file__).parents[2]


def accelerate(config: str, processes: int) -> tuple[str, ...]:
    """The command that launches a script with accelerate."""
    path = REPOSITORY / "vanilla_transformer/recipes/accelerate" / config
    launcher = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch")
    return (*launcher, "--config_file", str(path), "--num_processes", str(processes))


LAYOUTS = {  # the commands that launch them
    "1 process": (sys.executable,),
    "2, DDP": accelerate("ddp.yaml", 2),
    "4, DDP": accelerate("ddp.yaml", 4),
    "2, FSDP2": accelerate("fsdp2.yaml", 2),
    "2, FSDP2, full state": accelerate("fsdp2_full_state.yaml", 2),
    "2, ZeRO 1": accelerate("deepspeed_zero1.yaml", 2),
    "2, ZeRO 2": accelerate("deepspeed_zero2.yaml", 2),
    "2, ZeRO 3": accelerate("deepspeed_zero3.yaml", 2),
}
ZERO = [layout for layout in LAYOUTS if "ZeRO" in layout]
ALONE = "1 process"
SHAPE = (
    "d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=64,decoder_ffn_dim=64,dropout=0"
)


@dataclass
class LayoutArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    layouts: list[str] = field(
        default_factory=lambda: [
            layout for layout in LAYOUTS if layout not in ZERO or is_deepspeed_available()
        ]
    )
    every_pair: bool = HfArg(
        default=False, help="Resume in every other layout, not only in the next one."
    )
    steps: int = HfArg(default=20, help="Steps of each run.")
    pairs: int = HfArg(default=1000, help="Sentence pairs of `phrases` to train on.")

    def __post_init__(self) -> None:
        expect_known("layouts", self.layouts, LAYOUTS)
        if set(ZERO) & set(self.layouts) and not is_deepspeed_available():
            raise ValueError(f"--layouts {self.layouts}: expected DeepSpeed to be installed")
        if self.steps < 2 or self.pairs < 100:
            raise ValueError(
                f"--steps {self.steps} --pairs {self.pairs}: expected at least 2 and 100"
            )


def main() -> None:
    arguments = read_options(LayoutArguments, __doc__)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        results = Harness(Path(scratch), arguments).results()
    write(arguments.output_dir, "layouts", results, to_markdown(results))


class Harness:
    """The same training run in many layouts."""

    def __init__(self, scratch: Path, arguments: LayoutArguments):
        self.scratch, self.arguments = scratch, arguments
        phrases = load_phrases(arguments.pairs, target_language="de")
        for side in ("source", "target"):
            (scratch / side).write_text("\n".join(phrases[side]) + "\n", encoding="utf-8")

    def results(self) -> list[dict[str, Any]]:
        """For each run, its largest differences from the run on one process."""
        layouts, half = self.arguments.layouts, self.arguments.steps // 2
        alone = [layout for layout in layouts if "DDP" in layout]
        own = [layout for layout in layouts if layout not in (ALONE, *alone)]
        ring = [ALONE, *alone]
        following = zip(ring, [*alone, ALONE], strict=True)
        every = ((one, other) for one in ring for other in ring if one != other)
        resumed = [
            *(every if self.arguments.every_pair else following),
            *((layout, layout) for layout in own),
        ]
        results = []
        expected: dict[str, Any] = {}
        for before, layout in tqdm([*((None, layout) for layout in (*ring, *own)), *resumed]):
            folder = self.scratch / f"{before} to {layout}"
            checkpoint = before and self.scratch / f"None to {before}" / f"checkpoint-{half}"
            held = self.train(layout, folder, checkpoint)
            actual = read_training(folder)
            expected = expected or actual
            result = {"layout": layout, "resumed from": before, "parameters of a process": held}
            results.append({**result, **differences(actual, expected)})
        return results

    def script(self, folder: Path) -> list[str]:
        """The module to launch, and its arguments."""
        steps = self.arguments.steps
        command = [
            "-m", "vanilla_transformer", "train", "--output_dir", folder, "--preset", "tiny",
            "--train_source", self.scratch / "source", "--train_target", self.scratch / "target",
            "--config_overrides", SHAPE, "--vocab_size", 500, "--max_tokens", 250,
            "--batches_per_update", 4, "--max_steps", steps, "--learning_rate", 3e-3,
            "--save_strategy", "steps", "--save_steps", max(1, steps // 2), "--logging_steps", 1,
            "--report_to", "none", "--disable_tqdm", "true",
        ]  # fmt: skip
        return list(map(str, command))

    def train(
        self, layout: str, folder: Path, checkpoint: Path | None = None, *more: str
    ) -> int | None:
        """Train, optionally from a checkpoint and with more options. Return the number of
        parameters that a process has, or None if it has all of them."""
        command = [*LAYOUTS[layout], *self.script(folder), *more]
        if checkpoint is not None:
            command += ["--resume_from_checkpoint", str(checkpoint)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment,
            cwd=REPOSITORY,  # accelerate's configurations have paths relative to it
        )  # fmt: skip
        if process.returncode:
            raise RuntimeError(f"{folder.name} failed:\n{process.stderr}")
        return parameters_held(process.stderr)


def parameters_held(log: str) -> int | None:
    """The number of parameters in the log of a process, or None."""
    held = re.search(r"This process holds ([\d,]+) of the parameters", log)
    return held and int(held[1].replace(",", ""))


def read_training(folder: Path) -> dict[str, Any]:
    """The loss of each step, and the final weights."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return {
        "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "weights": dict(model.named_parameters()),
    }


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest differences of the loss in any step, and of any weight. NaN if one is NaN, unlike
    with `max`."""
    losses, weights = expected["losses"], expected["weights"]
    assert actual["losses"].keys() == losses.keys(), "a step is missing"
    assert actual["weights"].keys() == weights.keys(), "a weight is missing"
    of_losses = [actual["losses"][step] - losses[step] for step in losses]
    of_weights = [(actual["weights"][name] - weights[name]).abs().max().item() for name in weights]
    return {"loss": float(np.abs(of_losses).max()), "weights": float(np.max(of_weights))}


def to_markdown(results: list[dict[str, Any]]) -> str:
    """A table with a row per run."""
    rows = []
    for result in results:
        held = result["parameters of a process"]
        rows.append(
            [result["layout"], result["resumed from"], f"{held:,}" if held else "all"]
            + [f"{result[name]:.1e}" for name in ("loss", "weights")]
        )
    header = ["processes, layout", "resumed from", "parameters in each", "loss", "weights"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
