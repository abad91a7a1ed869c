"""Break a training in many ways, go on with it, and count what is lost.

python scripts/faults.py --output_dir outputs/faults
python scripts/faults.py --faults kill --times 20

A small model is trained to the end once, undisturbed. Then the same training is broken and goes on,
each time in a new process. A fault is survived if the end is, bit for bit, that of the undisturbed
training. Writes faults.json and faults.md.

kill: SIGKILL at random instants, in steps, evaluations and while checkpoints are written.
terminate, interrupt: SIGTERM and SIGINT likewise, which must end in a checkpoint and an exit code.
truncated, flipped, missing: a file of the newest checkpoint, between two processes.
full: files can't grow beyond some bytes, as on a full disk. removed: the output folder disappears.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.arguments import TranslationTrainingArguments
from vanilla_transformer.checkpoints import ASIDE, checkpoints_in
from vanilla_transformer.phrases import load_phrases
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import exit_if_interrupted, find_checkpoint, make_trainer

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
# Exit codes. Before training has begun, signals do as they always do.
ENDS = {
    "kill": {-signal.SIGKILL},
    "terminate": {128 + signal.SIGTERM, -signal.SIGTERM},
    "interrupt": {128 + signal.SIGINT, 1},
}
DAMAGES = ("truncated", "flipped", "missing")
FAULTS = (*SIGNALS, *DAMAGES, "full", "removed")
FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "config.json", "tokenizer.json",
)  # fmt: skip
PHASES = ("setting up", "steps", "evaluation", "checkpoint")


@dataclass
class FaultArguments:
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the two files."})
    faults: list[str] = field(default_factory=lambda: list(FAULTS))
    times: int = field(default=100, metadata={"help": "Of SIGKILL; of each other fault a fifth."})
    steps: int = field(default=60, metadata={"help": "Of the training."})
    seed: int = field(default=0, metadata={"help": "Of the instants."})

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault not in FAULTS:
                raise ValueError(f"--faults {fault}: expected of {', '.join(FAULTS)}")
        if self.times < 1 or self.steps < 10:
            raise ValueError(
                f"--times {self.times} --steps {self.steps}: expected at least 1 and 10"
            )


def main() -> None:
    (arguments,) = HfArgumentParser(FaultArguments).parse_args_into_dataclasses()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)  # a process with more threads can't be copied
    with tempfile.TemporaryDirectory() as scratch:
        harness = Harness(Path(scratch), arguments)
        results = {fault: harness.break_by(fault) for fault in arguments.faults}
    table = to_markdown(results)
    print(table)
    if arguments.output_dir is not None:
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "faults.json").write_text(json.dumps(results, indent=1))
        (folder / "faults.md").write_text(table)


class PhaseCallback(TrainerCallback):
    """Says what the training is doing. Between steps it evaluates, or writes a checkpoint."""

    def __init__(self, phase: Any):
        self.phase = phase

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase.value = PHASES.index("steps")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.eval_steps == 0:
            self.phase.value = PHASES.index("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase.value = PHASES.index("checkpoint")


class Harness:
    """One training, again and again."""

    def __init__(self, scratch: Path, arguments: FaultArguments):
        self.scratch, self.arguments = scratch, arguments
        self.random = random.Random(arguments.seed)
        self.phase = multiprocessing.Value("i", 0)
        pairs = load_phrases(200, target_language="de")
        texts = [*pairs["source"], *pairs["target"]]
        self.tokenizer = train_tokenizer(texts, 400, show_progress=False)
        self.data = pairs.map(
            lambda pair: self.tokenizer(pair["source"], text_target=pair["target"]),
            remove_columns=pairs.column_names,
        )
        undisturbed = scratch / "undisturbed"
        began = time.monotonic()
        assert self.go_on(undisturbed) == 0, "the undisturbed training failed"
        self.duration = time.monotonic() - began
        self.expected = load_file(undisturbed / "model.safetensors")

    def go_on(self, folder: Path, fault: str | None = None) -> int:
        """Let the training begin or go on until its end, or until the fault; the exit code."""
        limit = 50_000 if fault == "full" else resource.RLIM_INFINITY
        self.phase.value = PHASES.index("setting up")
        process = multiprocessing.get_context("fork").Process(
            target=self.train, args=(folder, limit)
        )
        process.start()
        if fault in SIGNALS or fault == "removed":
            process.join(self.random.uniform(0.1, 0.7) * self.duration)
        if fault in SIGNALS and process.is_alive():
            os.kill(process.pid, SIGNALS[fault])
        if fault == "removed":
            shutil.rmtree(folder, ignore_errors=True)
        process.join()
        return process.exitcode

    def train(self, folder: Path, limit: int) -> None:
        """What a process does."""
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        arguments = TranslationTrainingArguments(
            output_dir=str(folder), resume_from_checkpoint="auto", max_steps=self.arguments.steps,
            max_tokens=128, learning_rate=1e-3, eval_strategy="steps", eval_steps=10,
            save_strategy="steps", save_steps=10, save_total_limit=2, per_device_eval_batch_size=50,
            report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        checkpoint = find_checkpoint(arguments)
        set_seed(1)
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(self.tokenizer))
        model = VanillaTransformerForConditionalGeneration(config)
        splits = {"train": self.data, "validation": self.data.take(50)}
        trainer = make_trainer(model, self.tokenizer, arguments, splits)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(PhaseCallback(self.phase))
        trainer.train(resume_from_checkpoint=checkpoint)
        exit_if_interrupted(trainer)
        trainer.save_model()

    def break_by(self, fault: str) -> dict[str, Any]:
        """How often the training was broken, how often it ended well nevertheless, and in which
        phases signals came."""
        times = self.arguments.times if fault == "kill" else max(1, self.arguments.times // 5)
        result: dict[str, Any] = {"tried": 0, "survived": 0, "phases": Counter()}
        with tqdm(total=times, desc=fault) as progress:
            while result["tried"] < times:
                folder = Path(tempfile.mkdtemp(dir=self.scratch))
                tried, in_order = self.break_one(fault, folder, result)
                ended = in_order and self.go_on(folder) == 0 and self.ends_as_expected(folder)
                result["tried"] += tried
                result["survived"] += tried * ended
                progress.update(tried)
                shutil.rmtree(folder)
        return {**result, "lost": result["tried"] - result["survived"]}

    def break_one(self, fault: str, folder: Path, result: dict[str, Any]) -> tuple[int, bool]:
        """Break one training, with signals until it ends: how often, and whether the process ended
        as it should."""
        if fault in SIGNALS:
            codes = []
            while (code := self.go_on(folder, fault)) != 0:
                codes.append(code)
                result["phases"][PHASES[self.phase.value]] += 1
            return len(codes), set(codes) <= ENDS[fault]
        while self.go_on(folder, "terminate") == 0 or not checkpoints_in(folder):
            shutil.rmtree(folder)
        if fault in DAMAGES:
            newest = list(checkpoints_in(folder).values())[-1]
            spoil(fault, newest / self.random.choice(FILES))
            return 1, True
        before = len(checkpoints_in(folder))
        code = self.go_on(folder, fault)
        if fault == "full":
            return 1, code != 0 and len(checkpoints_in(folder)) == before
        return 1, True

    def ends_as_expected(self, folder: Path) -> bool:
        """Whether the weights are those of the undisturbed training, and nothing is left over."""
        weights = load_file(folder / "model.safetensors")
        same = all(torch.equal(weights[name], self.expected[name]) for name in self.expected)
        return same and not list((folder / ASIDE).iterdir())


def spoil(kind: str, path: Path) -> None:
    """Damage a file."""
    content = path.read_bytes()
    middle = len(content) // 2
    if kind == "truncated":
        path.write_bytes(content[:middle])
    elif kind == "flipped":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()


def to_markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table."""
    header = ["fault", "tried", "survived", "lost", *(f"in {phase}" for phase in PHASES)]
    rows = [header, ["---"] * len(header)]
    for fault, result in results.items():
        counts = [result["tried"], result["survived"], result["lost"]]
        phases = [result["phases"].get(phase, 0) for phase in PHASES]
        rows.append([fault, *map(str, counts), *(map(str, phases) if any(phases) else [""] * 4)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    main()
