"""Train a small model with another toolkit, convert it, and compare the two.

    python -m scripts.checks.toolkits --toolkit joeynmt --data ../shared/data/multi30k

The toolkit must be importable; see docs/conversion/README.md. It trains on Multi30k, German to
English. Then the converted model must give the same log-probabilities, translations, token ids and
training losses. Both translate the same batches in turn, to measure speed. Writes TOOLKIT.json, and
the table of all toolkits so far, to the output folder.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.hf_argparser import HfArg
from transformers.utils import logging as transformers_logging

from scripts.checks.toolkit_imports import MODULES, import_toolkit
from scripts.checks.toolkit_training import HEADS, SOURCE, TARGET, TRAININGS, prepare, train
from scripts.reports import expect_known, markdown, read_options, save
from vanilla_transformer import conversion
from vanilla_transformer.conversion.check import (
    Converted,
    equal_ids,
    largest_difference,
    of_targets,
)
from vanilla_transformer.conversion.positions import FREQUENCIES, LAYOUTS, sinusoids
from vanilla_transformer.conversion.tensor2tensor import Tensor2TensorToolkit
from vanilla_transformer.conversion.toolkit import Toolkit
from vanilla_transformer.model.output_length import LENGTH_PENALTIES

BATCH, BEAMS, LONGEST = 32, 5, 50
TEXTS, STEPS, LEARNING_RATE = 10_000, 20, 0.02
UNUSUAL = (
    "", " ", "Ein 👩🏽‍🚀 Hund 🐕 läuft.", "Привет, Welt! 你好 세계", "  zwei   Leerzeichen ",
    "ﬁnden Ǆ ½ Å", "naïve café\u0301 coöperate", "123 45,6 – 7.8 €", "x" * 200,
    "\u200bunsichtbar\u00a0fest", "@@ a@@ b",
)  # fmt: skip
# Toolkits that are programs, which this process can't train.
PROGRAMS = ("marian",)
# Toolkits that do not compute in float64: Sockeye and tensor2tensor have no such dtype, and FSMT
# has a mask in float32.
SINGLE = ("sockeye", "fsmt", "tensor2tensor", *PROGRAMS)
# Checkpoints without the number of attention heads.
STATE_DICTS = ("torch_nn", "annotated_transformer")
HEADER = (
    "format", "difference, float32", "float64", "greedy", "beam 5", "worse", "same ids",
    "unusual texts", "first loss", "20 steps", "speed, greedy", "speed, beam 5",
)  # fmt: skip


@dataclass
class ToolkitArguments:
    toolkit: str = HfArg(help=f"One of {', '.join(TRAININGS)}.")
    data: str = HfArg(help="Folder with Multi30k: train.de, train.en, val.de, ...")
    output_dir: str = HfArg(default="outputs/toolkits", help="Folder for models and results.")
    train_steps: int = HfArg(default=400, help="Updates of the toolkit's training.")
    lines: int = HfArg(default=200, help="Lines of the test set to translate.")

    def __post_init__(self) -> None:
        expect_known("toolkit", [self.toolkit], list(TRAININGS))


def log_probability_difference(
    toolkit: Toolkit,
    ours: Converted,
    batches: list[list[list[int]]],
    targets: list[list[list[int]]],
) -> float:
    """The largest difference, over all positions and all tokens that the toolkit reports."""
    pairs = zip(batches, targets, strict=True)
    found = [largest_difference(toolkit, ours, sources, rows) for sources, rows in pairs]
    return float(np.max(found))  # unlike `max`, it keeps NaN


def double(toolkit: Toolkit) -> None:
    """Make the toolkit compute in double precision. Tables of sinusoids in single precision are
    computed again."""
    for module in toolkit.module.modules():
        for tensors in (module._buffers, module._parameters):
            for name, table in list(tensors.items()):
                exact = None if table is None else exact_sinusoids(table.detach())
                if exact is not None:
                    tensors[name] = torch.nn.Parameter(exact, requires_grad=False)
    toolkit.module.double()


def exact_sinusoids(table: Tensor) -> Tensor | None:
    """The same table in double precision; None if it is not sinusoids. The first two rows are
    ignored, as fairseq has one for padding."""
    if table.dim() < 2 or table.shape[-1] % 2 or table.numel() < 64 * table.shape[-1]:
        return None
    rows = table.reshape(-1, table.shape[-1])
    for kind in product(FREQUENCIES, LAYOUTS):
        exact = sinusoids(len(rows), rows.shape[1], *kind)
        if torch.allclose(exact[2:64], rows[2:64].double(), atol=1e-4):
            return exact.reshape(table.shape)
    return None


def scores(toolkit: Toolkit, ours: Converted, sources: Any, targets: Any) -> list[float]:
    """The score that the toolkit's own search maximizes: log-probability over length penalty."""
    options = ours.module.generation_config
    a, b = LENGTH_PENALTIES[getattr(options, "length_penalty_type", None) or "power"]
    alpha = 1.0 if options.length_penalty is None else options.length_penalty
    rows = of_targets(toolkit.log_probs(toolkit.known(sources), targets), targets)
    return [
        row.sum().item() / ((a + len(target)) / b) ** alpha
        for row, target in zip(rows, targets, strict=True)
    ]


def cut(ids: list[int], end: int) -> list[int]:
    """The ids up to the end token or a common limit, as some searches force an end there."""
    ids = ids[: ids.index(end) + 1] if end in ids else ids
    return ids[: LONGEST - 2]


def in_turn(
    number: int, ours: Callable[[], list[list[int]]], theirs: Callable[[], list[list[int]]]
) -> tuple[list[list[list[int]]], list[float]]:
    """The results of both, and their seconds. Which is first alternates with the number."""
    results, seconds = [[], []], [0.0, 0.0]
    for index in (0, 1) if number % 2 else (1, 0):
        start = time.perf_counter()
        results[index] = (ours, theirs)[index]()
        seconds[index] = time.perf_counter() - start
    return results, seconds


def compare_translations(
    toolkit: Toolkit, ours: Converted, texts: list[list[str]], num_beams: int
) -> dict[str, Any]:
    """Equal translations, those of ours to which the toolkit gives a lower score, and speed. The
    seconds of both are for reading a line and the search, and ours also for writing the
    translation."""
    end = ours.module.config.eos_token_id

    def translate(lines: list[str]) -> list[list[int]]:
        found = ours.translate(ours.tokenizer(lines)["input_ids"], num_beams, LONGEST)
        ours.tokenizer.batch_decode(found, skip_special_tokens=True)
        return found

    def let_translate(lines: list[str]) -> list[list[int]]:
        return toolkit.translate([toolkit.encode(line) for line in lines], num_beams, LONGEST)

    different: list[tuple[list[int], ...]] = []
    targets, ratios = [], []
    for number, lines in enumerate(texts):
        results, seconds = in_turn(number, partial(translate, lines), partial(let_translate, lines))
        found, expected = ([cut(ids, end) for ids in rows] for rows in results)
        sources = ours.tokenizer(lines)["input_ids"]
        triples = zip(sources, found, expected, strict=True)
        different += [each for each in triples if each[1] != each[2]]
        ratios.append(seconds[1] / seconds[0])
        targets.append(expected)
    worse = 0
    ended = [each for each in different if each[1][-1] == each[2][-1] == end]
    if ended:
        sources, *pair = map(list, zip(*ended, strict=True))
        both = [scores(toolkit, ours, sources, each) for each in pair]
        worse = sum(one < other - 1e-5 for one, other in zip(*both, strict=True))
    lines = sum(map(len, texts))
    return {
        "lines": lines, "equal": lines - len(different), "worse": worse, "targets": targets,
        "speed": statistics.median(ratios),
    }  # fmt: skip


def losses(
    loss: Callable[[], Tensor], parameters: Iterator[torch.nn.Parameter], steps: int
) -> list[float]:
    """The losses of a batch during training on it."""
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def compare_training(
    toolkit: Toolkit, ours: Converted, sources: list[str], texts: list[str], trains: bool
) -> dict[str, Any]:
    """Differences between the toolkit's own loss and ours on the same batch, at the start and over
    steps of both, without dropout. `trains`: this process can train the toolkit's model."""
    batch = ours.tokenizer(sources, text_target=texts)
    inputs, targets = batch["input_ids"], batch["labels"]
    padded = ours.tokenizer.pad({"input_ids": inputs}, return_tensors="pt")
    labels = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, targets)), True, -100)
    config = ours.module.config
    smoothing, config.label_smoothing = config.label_smoothing, 0.0
    found = losses(
        lambda: ours.module(**padded, labels=labels).loss, ours.module.parameters(), STEPS
    )
    config.label_smoothing = smoothing
    their_sources = toolkit.padded(toolkit.known(inputs))
    their_targets = toolkit.padded(targets)
    loss = partial(toolkit.loss, their_sources, their_targets)
    if isinstance(toolkit, Tensor2TensorToolkit):
        expected = toolkit.losses(their_sources, their_targets, STEPS, LEARNING_RATE)
    else:
        expected = losses(loss, toolkit.module.parameters(), STEPS) if trains else [loss().item()]
    differences = [abs(one - other) for one, other in zip(found, expected, strict=False)]
    return {
        "first": differences[0], "largest": float(np.max(differences)) if trains else None,
        "losses": [found[0], found[-1]],
    }  # fmt: skip


def compare(name: str, checkpoint: Path, folder: Path, data: Path, number: int) -> dict[str, Any]:
    """All measurements of a toolkit's checkpoint."""
    codes = checkpoint / "codes"
    options = conversion.ConversionOptions(
        source_codes=str(codes) if codes.is_file() else None,
        heads=HEADS if name in STATE_DICTS else None,
    )
    shutil.rmtree(folder, ignore_errors=True)  # the converter may have changed
    conversion.convert(checkpoint, folder, options=options)
    module = conversion.find_format(checkpoint)
    toolkit, ours = module.load_toolkit(checkpoint, options), Converted(folder)
    lines = (data / f"test_2016_flickr.{SOURCE}").read_text().splitlines()[:number]
    lines.sort(key=len)  # as the toolkits' own programs do
    texts = [lines[start : start + BATCH] for start in range(0, len(lines), BATCH)]
    greedy = compare_translations(toolkit, ours, texts, 1)
    try:
        beam = compare_translations(toolkit, ours, texts, BEAMS)
    except NotImplementedError:
        beam = None
    batches = [ours.tokenizer(each)["input_ids"] for each in texts]
    targets = greedy.pop("targets")
    single = log_probability_difference(toolkit, ours, batches, targets)
    train_lines = (data / f"train.{SOURCE}").read_text().splitlines()[:TEXTS]
    ids = equal_ids(toolkit, ours, train_lines)
    unusual = equal_ids(toolkit, ours, list(UNUSUAL))
    references = (data / f"train.{TARGET}").read_text().splitlines()
    training = compare_training(
        toolkit, ours, train_lines[:BATCH], references[:BATCH], trains=name not in PROGRAMS
    )
    exact = None
    if name not in SINGLE:
        toolkit = module.load_toolkit(checkpoint, options)
        double(toolkit)
        exact = log_probability_difference(toolkit, Converted(folder, "float64"), batches, targets)
    return {
        "format": name, "single": single, "greedy": greedy, "ids": [ids[0], len(train_lines)],
        "double": exact,
        "beam": beam and {key: value for key, value in beam.items() if key != "targets"},
        "unusual": [unusual[0], len(UNUSUAL)], "other": [*ids[1][:5], *unusual[1]],
        "training": training,
    }  # fmt: skip


def row(found: dict[str, Any]) -> tuple[str, ...]:
    greedy, beam, training = found["greedy"], found["beam"], found["training"]
    double, steps = (
        "" if value is None else f"{value:.1e}" for value in (found["double"], training["largest"])
    )
    return (
        found["format"], f"{found['single']:.1e}", double,
        f"{greedy['equal']} of {greedy['lines']}",
        f"{beam['equal']} of {beam['lines']}" if beam else "", str(beam["worse"]) if beam else "",
        "{} of {}".format(*found["ids"]), "{} of {}".format(*found["unusual"]),
        f"{training['first']:.1e}", steps, f"{greedy['speed']:.2f}",
        f"{beam['speed']:.2f}" if beam else "",
    )  # fmt: skip


def main() -> None:
    arguments = read_options(ToolkitArguments, __doc__)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    import_toolkit(MODULES.get(arguments.toolkit, ()))
    output, name = Path(arguments.output_dir), arguments.toolkit
    data = prepare(Path(arguments.data), output / "data")
    checkpoint = output / "models" / name
    train(name, data, checkpoint, arguments.train_steps)
    found = compare(name, checkpoint, output / "converted" / name, data, arguments.lines)
    save(output / "results", name, found)
    files = sorted((output / "results").glob("*.json"))
    print(markdown(HEADER, [row(json.loads(file.read_text())) for file in files]))


if __name__ == "__main__":
    main()
