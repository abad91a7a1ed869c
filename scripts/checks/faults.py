"""Interrupt a training run in many ways, resume it, and count the runs that are not recovered.

python -m scripts.checks.faults --output_dir outputs/faults
python -m scripts.checks.faults --faults kill --times 20

A small model is trained once without faults. Then the same run is interrupted and resumed, each
time in new processes. It survives a fault if its final weights equal those of the run without
faults, bit for bit. Writes faults.json and faults.md.

kill: SIGKILL at random times, during steps, evaluations and the writing of checkpoints.
terminate, interrupt: the same with SIGTERM and SIGINT, which must save a checkpoint and set an exit
code.
truncated, flipped, missing: damage to a file of the newest checkpoint, before the run resumes.
full: files cannot grow beyond a few bytes, as on a full disk.
removed: the output folder disappears.
nan: the loss of a step is NaN, which must stop training.
poisoned: the same with permission to skip a step; training must finish with finite weights.
worker: SIGKILL for the process that loads the data.
rank_killed: SIGKILL for one of two processes that train together.
rank_stalled: SIGSTOP for one of them; the other must stop after a timeout.
"""

import math
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

import datasets
import psutil
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging as transformers_logging

from scripts.reports import expect_known, markdown, read_options, write
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.phrases import load_phrases
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.checkpoints import STAGING_DIR, checkpoints_by_step
from vanilla_transformer.training.resumption import find_checkpoint
from vanilla_transformer.training.trainer import make_trainer

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
# Expected exit codes. Until training starts, signals have their default effect.
EXIT_CODES = {
    "kill": {-signal.SIGKILL},
    "terminate": {128 + signal.SIGTERM, -signal.SIGTERM},
    "interrupt": {128 + signal.SIGINT, 1},
}
DAMAGES = ("truncated", "flipped", "missing")
OF_ONE_OF_TWO = {"rank_killed": signal.SIGKILL, "rank_stalled": signal.SIGSTOP}
FAULTS = (*SIGNALS, *DAMAGES, "full", "removed", "nan", "poisoned", "worker", *OF_ONE_OF_TWO)
TIMEOUT = 20  # seconds for which a process waits for another
FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "config.json", "tokenizer.json",
)  # fmt: skip
PHASES = ("setting up", "steps", "evaluation", "checkpoint")


@dataclass
class FaultArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the two files.")
    faults: list[str] = field(default_factory=lambda: list(FAULTS))
    times: int = HfArg(
        default=100, help="Number of SIGKILLs; one fifth of it for each other fault."
    )
    steps: int = HfArg(default=60, help="Training steps.")
    seed: int = HfArg(default=0, help="Seed of the random times.")

    def __post_init__(self) -> None:
        expect_known("faults", self.faults, FAULTS)
        if self.times < 1 or self.steps < 10:
            raise ValueError(
                f"--times {self.times} --steps {self.steps}: expected at least 1 and 10"
            )


def main() -> None:
    arguments = read_options(FaultArguments, __doc__)
    transformers_logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # a process with more threads cannot be forked
    with tempfile.TemporaryDirectory() as scratch:
        harness = Harness(Path(scratch), arguments)
        results = {fault: harness.break_by(fault) for fault in arguments.faults}
    write(arguments.output_dir, "faults", results, to_markdown(results))


class PhaseCallback(TrainerCallback):
    """Reports the phase of training; between steps this is evaluation, or saving a checkpoint."""

    def __init__(self, phase: Any):
        self.phase = phase

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase.value = PHASES.index("steps")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.eval_steps == 0:
            self.phase.value = PHASES.index("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase.value = PHASES.index("checkpoint")


class PoisonCallback(TrainerCallback):
    """Makes the loss of one step, and so its gradient, NaN."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            embedding = model.get_encoder().embed_tokens
            self.hook = embedding.register_forward_hook(lambda *args: args[-1] * math.nan)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.hook.remove()


class Harness:
    """Repeats the same training run with different faults."""

    def __init__(self, scratch: Path, arguments: FaultArguments):
        self.scratch, self.arguments = scratch, arguments
        self.random = random.Random(arguments.seed)
        self.log = scratch / "errors.log"
        self.phase = multiprocessing.Value("i", 0)
        pairs = load_phrases(200, target_language="de")
        texts = [*pairs["source"], *pairs["target"]]
        tokenizer = self.tokenizer = train_tokenizer(texts, 400, show_progress=False)
        self.data = pairs.map(
            lambda pair: tokenizer(pair["source"], text_target=pair["target"]),
            remove_columns=pairs.column_names,
        )
        self.expected, self.duration = {}, {}  # by number of processes
        for processes in {len(ranks_for(fault)) for fault in arguments.faults}:
            folder = scratch / f"without-faults-{processes}"
            began = time.monotonic()
            if self.go_on(folder, ranks=range(processes)) != 0:
                raise RuntimeError(f"the run without faults failed: {self.log.read_text()}")
            self.duration[processes] = time.monotonic() - began
            self.expected[processes] = load_file(folder / "model.safetensors")

    def go_on(self, folder: Path, fault: str | None = None, ranks: range = range(1)) -> int:
        """Start or resume training until its end, or until the fault. Return the exit code."""
        self.phase.value = PHASES.index("setting up")
        poisoned = self.random.randint(1, self.arguments.steps)
        fork = multiprocessing.get_context("fork")
        port = get_free_port()
        processes = [
            fork.Process(target=self.train, args=(folder, fault, poisoned, rank, len(ranks), port))
            for rank in ranks
        ]
        for process in processes:
            process.start()
        self.disturb(folder, fault, processes)
        processes[0].join()
        for process in processes[1:]:  # torchrun does the same
            process.kill()
            process.join()
        return processes[0].exitcode

    def disturb(self, folder: Path, fault: str | None, processes: list[Any]) -> None:
        """Apply a fault to the processes from outside, at a random time."""
        if fault not in (*SIGNALS, "removed", "worker", *OF_ONE_OF_TWO):
            return
        processes[0].join(self.random.uniform(0.1, 0.7) * self.duration[len(processes)])
        if fault == "removed" and processes[0].is_alive():
            shutil.rmtree(folder, ignore_errors=True)
        elif fault in SIGNALS:
            send(processes[0], SIGNALS[fault])
        elif fault in OF_ONE_OF_TWO:
            send(processes[1], OF_ONE_OF_TWO[fault])
        while fault == "worker" and processes[0].is_alive():
            for child in psutil.Process(processes[0].pid).children():
                child.kill()
                return
            time.sleep(0.01)

    def train(
        self, folder: Path, fault: str | None, poisoned: int, rank: int, processes: int, port: int
    ) -> None:
        """The training of one process."""
        with self.log.open("w") as log:
            os.dup2(log.fileno(), 2)
        if fault == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        if processes > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes}
            address |= {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({name: str(value) for name, value in address.items()})
        arguments = TranslationTrainingArguments(
            output_dir=str(folder), resume_from_checkpoint="auto", max_steps=self.arguments.steps,
            max_tokens=128, learning_rate=1e-3, eval_strategy="steps", eval_steps=10,
            save_strategy="steps", save_steps=10, save_total_limit=2, per_device_eval_batch_size=10,
            report_to="none", disable_tqdm=True, use_cpu=True, ddp_timeout=TIMEOUT,
            ddp_backend="gloo" if processes > 1 else None,
            dataloader_num_workers=int(fault == "worker"),
            max_skipped_steps=int(fault == "poisoned"),
        )  # fmt: skip
        checkpoint = find_checkpoint(arguments)
        set_seed(1)
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(self.tokenizer))
        model = VanillaTransformerForConditionalGeneration(config)
        splits = {"train": self.data, "validation": self.data.take(50)}
        trainer = make_trainer(model, self.tokenizer, arguments, splits)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(PhaseCallback(self.phase))
        if fault in ("nan", "poisoned"):
            trainer.add_callback(PoisonCallback(poisoned))
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.exit_if_interrupted()
        trainer.save_model()

    def break_by(self, fault: str) -> dict[str, Any]:
        """How often training was interrupted, how often it recovered, and in which phases signals
        arrived."""
        times = self.arguments.times if fault == "kill" else max(1, self.arguments.times // 5)
        result: dict[str, Any] = {"tried": 0, "survived": 0, "phases": Counter(), "losses": []}
        with tqdm(total=times, desc=fault) as progress:
            while result["tried"] < times:
                folder = Path(tempfile.mkdtemp(dir=self.scratch))
                tried, in_order = self.break_one(fault, folder, result)
                ranks = ranks_for(fault)
                # A folder removed late may have the final model, and no checkpoint to resume from.
                if in_order and (fault != "removed" or checkpoints_by_step(folder)):
                    in_order = self.go_on(folder, ranks=ranks) == 0
                ended = in_order and self.ends_as_expected(folder, fault)
                if tried and not ended:
                    result["losses"].append(self.log.read_text()[-2000:])
                result["tried"] += tried
                result["survived"] += tried * ended
                progress.update(tried)
                shutil.rmtree(folder)
        return {**result, "lost": result["tried"] - result["survived"]}

    def break_one(self, fault: str, folder: Path, result: dict[str, Any]) -> tuple[int, bool]:
        """Break one run, with signals until it ends. Return how often, and whether the processes
        ended as expected."""
        if fault in SIGNALS:
            codes = []
            while (code := self.go_on(folder, fault)) != 0:
                codes.append(code)
                result["phases"][PHASES[self.phase.value]] += 1
            return len(codes), set(codes) <= EXIT_CODES[fault]
        if fault in ("nan", "worker", *OF_ONE_OF_TWO):
            # If training ends before the fault, nothing was tried.
            return int(self.go_on(folder, fault, ranks_for(fault)) != 0), True
        if fault == "poisoned":
            return 1, self.go_on(folder, fault) == 0
        # With two checkpoints, one may be damaged; without a complete one, training can't resume.
        while len(checkpoints_by_step(folder)) < 2:
            if self.go_on(folder, "terminate") == 0:  # it was too late
                shutil.rmtree(folder)
        if fault in DAMAGES:
            newest = list(checkpoints_by_step(folder).values())[-1]
            spoil(fault, newest / self.random.choice(FILES))
            return 1, True
        before = len(checkpoints_by_step(folder))
        code = self.go_on(folder, fault)
        if fault == "full":
            return 1, code != 0 and len(checkpoints_by_step(folder)) == before
        # Files that it was about to read may be missing; the model is in its memory.
        return 1, code == 0 or self.go_on(folder) == 0

    def ends_as_expected(self, folder: Path, fault: str) -> bool:
        """Whether the weights equal those without faults, and no temporary files are left."""
        weights = load_file(folder / "model.safetensors")
        expected = self.expected[len(ranks_for(fault))]
        if fault == "poisoned":
            right = all(torch.isfinite(weight).all() for weight in weights.values())
        else:
            right = all(torch.equal(weights[name], expected[name]) for name in expected)
        return right and not list((folder / STAGING_DIR).glob("*"))


def ranks_for(fault: str) -> range:
    """The ranks of the processes of a run."""
    return range(2 if fault in OF_ONE_OF_TWO else 1)


def send(process: Any, number: signal.Signals) -> None:
    """Send a signal to a process if it is alive."""
    if process.is_alive():
        os.kill(process.pid, number)


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
    """A table with a row per fault."""
    counts, rows = ("tried", "survived", "lost"), []
    for fault, result in results.items():
        phases = [result["phases"].get(phase, 0) for phase in PHASES]
        in_phases = phases if any(phases) else [None] * len(PHASES)
        rows.append([fault, *(result[count] for count in counts), *in_phases])
    return markdown(["fault", *counts, *(f"in {phase}" for phase in PHASES)], rows)


if __name__ == "__main__":
    main()
