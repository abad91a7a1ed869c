r"""Translate monolingual text with a reverse model, as sources for training.

    vanilla-transformer back-translate --model outputs/de_en --source mono.de --output synthetic.en
    torchrun --nproc_per_node 8 -m vanilla_transformer back-translate --model outputs/de_en \
        --source mono.de --output synthetic.en

The output has a line for each line of the source. Both files are a corpus, which `train` mixes with
others (`--train_source train.en synthetic.en --train_target train.de mono.de`). By default,
translations are sampled, which works better than beam search except on small corpora (Edunov et
al., 2018, https://arxiv.org/abs/1808.09381). `--method beam --noise` is that paper's noised beam. A
tag tells a model which sources are synthetic (Caswell et al., 2019,
https://arxiv.org/abs/1906.06442): `train --corpus_tags "" "<BT>"` adds it.

Any number of processes share the work. Run the same command again to resume. See docs/data.md.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.hf_argparser import HfArg

from ..data.noise import DROP, MASK, MASK_TOKEN, REACH, add_noise
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import (
    LINES_PER_CHUNK,
    expect_files,
    fingerprint,
    transform_file,
)
from ..inference.translation import translate_n_best
from .parser import CommandParser
from .processes import join_processes, sum_over_processes
from .translation_job import one_line, report_limit

# The options of each method, with their defaults.
METHODS: dict[str, dict[str, float]] = {
    "sampling": {"temperature": 1.0},
    "top_k": {"top_k": 10, "temperature": 1.0},
    "beam": {"num_beams": 5},
    "greedy": {},
}
# Samples are from all tokens, or the `top_k` best, and ignore the model's saved options.
ALL_TOKENS: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0,
    **dict.fromkeys(("top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")),
}  # fmt: skip


@dataclass
class BackTranslateArguments:
    """What to translate, and how.

    Raises:
        ValueError: An option is out of range, not among its choices, or does not belong to the
            method; also as `expect_files`.
        FileNotFoundError: As `expect_files`.
    """

    model: str = HfArg(help="Folder or Hub name of a model from the target language to the source.")
    source: str = HfArg(help="Monolingual text in the target language.")
    output: str = HfArg(help="File for the synthetic sources.")
    method: str = HfArg(default="sampling", help=f"One of {', '.join(METHODS)}.")
    num_beams: int | None = HfArg(default=None, help="Beam size of the method beam. Default: 5.")
    top_k: int | None = HfArg(
        default=None, help="Tokens to choose from with the method top_k. Default: 10."
    )
    temperature: float | None = HfArg(
        default=None, help="Temperature of sampling and top_k; below 1 is safer. Default: 1.0."
    )
    noise: bool = HfArg(
        default=False,
        help=f"Drop words with probability {DROP}, replace words with {MASK_TOKEN} with "
        f"probability {MASK}, and shuffle them by at most {REACH} places. `train` then needs "
        f"--user_tokens '{MASK_TOKEN}'.",
    )
    batch_size: int = HfArg(default=32, help="Lines decoded together.")
    lines_per_chunk: int = HfArg(
        default=LINES_PER_CHUNK, help="Maximum number of lines that an interruption loses."
    )
    seed: int = HfArg(default=0, help="Seed of sampling and noise.")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}: expected one of {', '.join(METHODS)}")
        defaults = METHODS[self.method]
        for name in ("num_beams", "top_k", "temperature"):
            if (value := getattr(self, name)) is None:
                setattr(self, name, defaults.get(name))
            elif name not in defaults:
                users = " or ".join(method for method, names in METHODS.items() if name in names)
                raise ValueError(f"{name}={value} with method={self.method!r}: expected {users}")
        for name in ("num_beams", "top_k", "batch_size", "lines_per_chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive integer")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: expected a positive number")
        expect_files(self.source, self.output)

    def generate_options(self) -> dict[str, Any]:
        """Arguments of `model.generate`."""
        own = {name: getattr(self, name) for name in METHODS[self.method]}
        if "temperature" in own:
            return {"do_sample": True, "num_beams": 1, **ALL_TOKENS, **own}
        return {"do_sample": False, "num_beams": 1, **own}


def main() -> None:
    parser = CommandParser(
        (BackTranslateArguments, LoadingArguments),
        description=__doc__,
        usage="%(prog)s --model FOLDER --source FILE --output FILE [options]",
    )
    arguments, loading = parser.parse_args_into_dataclasses()
    state = join_processes(use_cpu=loading.device == "cpu")
    model, tokenizer = loading.load(arguments.model)
    options = {**arguments.generate_options(), "batch_size": arguments.batch_size}

    counts = [0, 0]

    def work(lines: list[str], first: int = 0) -> Iterator[str]:
        torch.manual_seed(arguments.seed + first)  # the same in any process
        found = translate_n_best(lines, model, tokenizer, None, first=first, **options)
        for number, (hypothesis,) in enumerate(found, first):
            counts[0] += 1
            counts[1] += not hypothesis.is_complete
            line = one_line(hypothesis.text)
            if arguments.noise:
                line = add_noise(line, random.Random(f"{arguments.seed} {number}"))
            yield line

    list(work([]))  # raises errors before it touches the output
    transform_file(
        work,
        arguments.source,
        arguments.output,
        settings={**_settings(arguments), **fingerprint(model, tokenizer)},
        process_index=state.process_index,
        num_processes=state.num_processes,
        wait_for_everyone=state.wait_for_everyone,
        lines_per_chunk=arguments.lines_per_chunk,
        show_progress=state.is_main_process and sys.stderr.isatty(),
    )
    totals = sum_over_processes(counts, state)
    if state.is_main_process:
        report_limit(*totals)
    state.destroy_process_group()


def _settings(arguments: BackTranslateArguments) -> dict[str, Any]:
    """The settings, besides the model, that affect the output."""
    without = ("model", "source", "output", "lines_per_chunk")
    return {name: value for name, value in asdict(arguments).items() if name not in without}
