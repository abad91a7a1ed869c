"""Measure whole programs: start-up, training and translation.

python -m scripts.benchmarks.programs --data FOLDER --output_dir outputs/programs

start measures the import of `vanilla_transformer`, and loading a base model, relative to Marian.
train measures the shares of forward, backward, data and so on in the wall time of
`vanilla-transformer train`, with the Multi30k recipe. translate measures the speed on the test set
relative to a plain loop of `generate()` over MarianMTModel, with the same weights and batch size.
FOLDER contains Multi30k. Writes programs.json.
"""

import functools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.hf_argparser import HfArg

from scripts.benchmarks.peers import PEERS, SIZES, as_marian
from scripts.benchmarks.turns import settle, speeds, take_turns, timed
from scripts.reports import expect_known, read_options, write
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import train as train_command
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.training import preparation

PROGRAMS = ("start", "train", "translate")
RECIPE = Path(__file__).parents[2] / "vanilla_transformer/recipes/multi30k_tiny.yaml"
OURS = "vanilla_transformer"
IMPORTS = {
    OURS: "import vanilla_transformer",
    "Auto classes": "from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer",
    "Marian": "from transformers import AutoTokenizer, MarianMTModel",
}
# The parts of `vanilla-transformer train` to time: owner, attribute, name in the results.
PARTS = (
    (VanillaTransformerForConditionalGeneration, "forward", "forward"),
    (Accelerator, "backward", "backward"),
    (Accelerator, "clip_grad_norm_", "optimizer"),
    (AcceleratedOptimizer, "step", "optimizer"),
    (AcceleratedOptimizer, "zero_grad", "optimizer"),
    (preparation, "load_parallel_dataset", "data"),
    (preparation, "make_tokenizer", "tokenizer"),
    (preparation, "tokenize_dataset", "data"),
    (Trainer, "log", "logging"),
    (Trainer, "_save_checkpoint", "saving"),
    (Trainer, "save_model", "saving"),
    (train_command, "evaluate", "evaluation"),
)


@dataclass
class ProgramArguments:
    data: str = HfArg(help="Folder with train, val and test_2016_flickr, .en and .de.")
    output_dir: str = HfArg(help="Folder for programs.json and the trained model.")
    programs: list[str] = field(default_factory=lambda: list(PROGRAMS))
    model: str | None = HfArg(default=None, help="Model for translate; default: the trained one.")
    max_steps: int = HfArg(default=300, help="Training steps.")
    batch_size: int = HfArg(default=32, help="Lines per batch in translate.")
    num_beams: int = HfArg(default=5, help="Beams in translate.")
    rounds: int = HfArg(default=3, help="Runs of each side, of which the median is reported.")
    threads: int = HfArg(default=1, help="CPU threads of torch.")

    def __post_init__(self) -> None:
        expect_known("programs", self.programs, PROGRAMS)
        if not Path(self.data, "test_2016_flickr.en").is_file():
            raise FileNotFoundError(f"--data {self.data}: expected a folder with Multi30k's files")


def main() -> None:
    arguments = read_options(ProgramArguments, __doc__)
    settle(arguments.threads)
    run = {"start": start, "train": train, "translate": translate_test_set}
    results = {program: run[program](arguments) for program in arguments.programs}
    write(arguments.output_dir, "programs", results)


# ---------------------------------------------------------------- start


def start(arguments: ProgramArguments) -> dict[str, float]:
    """Our time relative to others."""

    def process(statement: str) -> None:
        subprocess.run([sys.executable, "-c", statement], check=True)

    imports = {
        name: functools.partial(timed, functools.partial(process, statement))
        for name, statement in IMPORTS.items()
    }
    importing = speeds(take_turns(imports, arguments.rounds, "Marian"), OURS)
    with tempfile.TemporaryDirectory() as folder:
        loads = {}
        for name in (OURS, "marian"):
            PEERS[name](SIZES["base"]).save_pretrained(Path(folder, name))
            load = functools.partial(AutoModelForSeq2SeqLM.from_pretrained, Path(folder, name))
            loads[name] = functools.partial(timed, load)
        loading = speeds(take_turns(loads, arguments.rounds, "marian"), OURS)
    return {
        "import, Auto classes = 1": importing["Auto classes"],
        "import, Marian = 1": importing["Marian"],
        "base from its checkpoint, Marian = 1": loading["marian"],
    }


# ---------------------------------------------------------------- train


def train(arguments: ProgramArguments) -> dict[str, float]:
    """The fractions of time in the steps, and in all parts of the program."""
    data, folder = Path(arguments.data), Path(arguments.output_dir, "model")
    flags: dict[str, Any] = {
        "--config": RECIPE,
        "--output_dir": folder,
        "--train_source": data / "train.en",
        "--train_target": data / "train.de",
        "--validation_source": data / "val.en",
        "--validation_target": data / "val.de",
        "--max_steps": arguments.max_steps,
        "--eval_strategy": "no",
        "--save_strategy": "steps",
        "--save_steps": arguments.max_steps,
        "--average_checkpoints": 1,
        "--disable_tqdm": True,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    seconds: Counter[str] = Counter()
    with mock.patch.object(sys, "argv", ["train", *words]), timing_parts(seconds):
        begin = time.perf_counter()
        train_command.main()
        total = time.perf_counter() - begin
    steps = seconds.pop("steps")
    work = sum(seconds[name] for name in ("forward", "backward", "optimizer"))
    shares = {f"{name}, of all": seconds[name] / total for name in seconds}
    return {"forward, backward, optimizer, of all steps": work / steps, **shares}


@contextmanager
def timing_parts(seconds: Counter[str]) -> Iterator[None]:
    """Add up the time in each of `PARTS`, without nested ones, and in all steps together."""
    with ExitStack() as patches:
        inside: list[str] = []
        for owner, attribute, name in PARTS:
            part = stopwatch(getattr(owner, attribute), name, seconds, inside)
            patches.enter_context(mock.patch.object(owner, attribute, part))
        steps = stopwatch(Trainer.train, "steps", seconds, [])
        patches.enter_context(mock.patch.object(Trainer, "train", steps))
        yield


def stopwatch(function: Callable, name: str, seconds: Counter[str], inside: list[str]) -> Callable:
    @functools.wraps(function)  # Trainer reads the signature of `forward`
    def measured(*args: Any, **kwargs: Any) -> Any:
        outermost = not inside
        inside.append(name)
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inside.pop()
            if outermost:
                seconds[name] += time.perf_counter() - begin

    return measured


# ---------------------------------------------------------------- translate


def translate_test_set(arguments: ProgramArguments) -> dict[str, float]:
    """Our speed relative to a plain loop, and the number of equal translations."""
    folder = arguments.model or Path(arguments.output_dir, "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = Path(arguments.data, "test_2016_flickr.en").read_text(encoding="utf-8")
    lines = text.splitlines()
    marian, found = as_marian(model), {}
    options = {"batch_size": arguments.batch_size, "num_beams": arguments.num_beams}

    def ours() -> None:
        found["ours"] = list(translate(lines, model, tokenizer, **options))

    def plain() -> None:
        found["plain"] = plain_loop(lines, marian, tokenizer, **options)

    sides = {"ours": functools.partial(timed, ours), "plain": functools.partial(timed, plain)}
    speed = speeds(take_turns(sides, arguments.rounds, "plain"), "plain")["ours"]
    same = sum(line == other for line, other in zip(found["ours"], found["plain"], strict=True))
    return {"speed, plain loop over Marian = 1": speed, "same": same}


def plain_loop(
    lines: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    num_beams: int,
) -> list[str]:
    translations = []
    for first in range(0, len(lines), batch_size):
        batch = tokenizer(lines[first : first + batch_size], padding=True, return_tensors="pt")
        limit = batch["input_ids"].shape[1] + 50
        generated = model.generate(**batch, num_beams=num_beams, max_new_tokens=limit)
        translations += tokenizer.batch_decode(generated, skip_special_tokens=True)
    return translations


if __name__ == "__main__":
    main()
