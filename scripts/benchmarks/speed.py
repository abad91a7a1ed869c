"""Compare the speed of our model with the same architecture in other libraries.

python -m scripts.benchmarks.speed --output_dir outputs/benchmark
python -m scripts.benchmarks.speed --quick
python -m scripts.benchmarks.speed --peers vanilla_transformer --against ../older_checkout

There are five workloads. T1 is a training step in float32, T2 the same under bfloat16 autocast,
both with label smoothing 0.1 and AdamW over batches of similar lengths. G1 is greedy search and G2
beam search (4 beams) for 32 sources of mixed lengths, 32 tokens each. G3 is greedy search for one
source. Results are real target tokens per second, relative to Marian.

Each model has its own process. The processes take turns in rounds, in a different order each time.
Memory layout alone can make one process up to 20% faster than another one of the same model, so
each is started several times. The result is the median over all rounds of all starts.

`torch.nn.Transformer` has no cache, so it only trains. CTranslate2, if installed, only decodes.
`--against` adds the package of another checkout as the peer `before`, and a second table with the
speed of this checkout relative to it. Writes benchmark.json, benchmark.md and benchmark.png.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.hf_argparser import HfArg

from scripts.benchmarks import ctranslate2_engine as compiled
from scripts.benchmarks.peers import BOS, EOS, PAD, PEERS, SIZES, Size, training_loss
from scripts.benchmarks.turns import Runner, speeds, take_turns
from scripts.reports import expect_known, markdown, read_options, write
from vanilla_transformer.training.defaults import has_bfloat16_products

REFERENCE = "marian"
OURS = "vanilla_transformer"
BEFORE = "before"
BEST = ", best setting"  # suffix of a peer's name
WORKLOADS = ("T1", "T2", "G1", "G2", "G3")
HAS_BFLOAT16 = has_bfloat16_products()
DEFAULT_WORKLOADS = [name for name in WORKLOADS if HAS_BFLOAT16 or name != "T2"]
# The fastest settings that the README recommends for CPUs, by size and workload.
INT8 = {"int8": True}
BFLOAT16 = {"dtype": torch.bfloat16} if HAS_BFLOAT16 else {}
COMPILED: dict[str, Any] = {"compiled": {}}  # with options of torch.compile
FROZEN = {"compiled": {"freezing": True, "cpp_wrapper": True}}
BEST_SETTING: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "T1": {"precision": "medium"},
        "G1": BFLOAT16 or FROZEN,
        "G2": BFLOAT16,
        "G3": COMPILED,
    },
    "base": {
        "T1": {"precision": "medium"},
        "G1": BFLOAT16 or INT8,
        "G2": BFLOAT16 or INT8,
        "G3": INT8,
    },
}
NEW_TOKENS, SOURCES, BEAMS = 32, 32, 4
ALL_PEERS = (*PEERS, *compiled.COMPUTE_TYPES)


@dataclass
class BenchmarkArguments:
    output_dir: str | None = HfArg(default=None, help="Folder for the three files.")
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    workloads: list[str] = HfArg(
        default_factory=DEFAULT_WORKLOADS.copy,
        help="Default: all, except T2 on CPUs without bfloat16 instructions.",
    )
    peers: list[str] = field(
        default_factory=lambda: list(ALL_PEERS if compiled.INSTALLED else PEERS)
    )
    against: str | None = HfArg(
        default=None, help="Another checkout of this package, to compare with."
    )
    starts: int = HfArg(default=3, help="How often to start the process of each model.")
    rounds: int = HfArg(default=3, help="Runs of each process after a warm-up.")
    threads: int = HfArg(default=1, help="CPU threads of torch.")
    tokens: int = HfArg(default=2000, help="Target tokens per training batch.")
    quick: bool = HfArg(default=False, help="Only the tiny size, with little work.")
    seed: int = 0

    def __post_init__(self) -> None:
        expect_known("sizes", self.sizes, SIZES)
        expect_known("workloads", self.workloads, WORKLOADS)
        expect_known("peers", self.peers, ALL_PEERS)
        for name in ("starts", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a positive number")
        if self.against is not None and not Path(self.against, "vanilla_transformer").is_dir():
            raise ValueError(
                f"--against {self.against}: expected a folder with vanilla_transformer"
            )
        self.peers = list(dict.fromkeys([*self.peers, OURS, REFERENCE, OURS + BEST]))
        if self.against is not None:
            self.peers += [BEFORE, BEFORE + BEST]
        if self.quick:
            self.sizes, self.starts, self.rounds, self.tokens = ["tiny"], 1, 2, 250


def main() -> None:
    arguments = read_options(BenchmarkArguments, __doc__)
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for start in range(arguments.starts):
        runners = {name: make_runner(arguments, name) for name in arguments.peers}
        for size, workload in product(arguments.sizes, arguments.workloads):
            title = f"{workload} {size}, start {start + 1} of {arguments.starts}"
            found = race(arguments, runners, size, workload, title)
            for name, times in found.items():
                seconds.setdefault((size, workload), {}).setdefault(name, []).extend(times)
        for runner in runners.values():
            runner.stop()
    results = [
        {"size": size, "workload": workload, "ratios": speeds(times, REFERENCE), "seconds": times}
        for (size, workload), times in seconds.items()
    ]
    table = to_markdown(results)
    if arguments.against is not None:
        table += "\n\n" + to_markdown([versus_before(result) for result in results], "before = 1")
    write(arguments.output_dir, "benchmark", results, table)
    if arguments.output_dir is not None:
        draw(results, Path(arguments.output_dir, "benchmark.png"))


def make_runner(arguments: BenchmarkArguments, name: str) -> Runner:
    checkout = arguments.against if name.startswith(BEFORE) else None
    return Runner(arguments.threads, arguments.seed, checkout)


def race(
    arguments: BenchmarkArguments, runners: dict[str, Runner], size: str, workload: str, title: str
) -> dict[str, list[float]]:
    """The seconds of each model in each round."""
    cannot = ["torch"] if workload[0] == "G" else compiled.COMPUTE_TYPES
    able = {name: runner for name, runner in runners.items() if name not in cannot}
    preparations = [
        runner.prepare(prepare, arguments, name, size, workload) for name, runner in able.items()
    ]
    for preparation in preparations:
        preparation.result()
    runs = {name: runner.run for name, runner in able.items()}
    return take_turns(runs, arguments.rounds, REFERENCE, title)


def prepare(
    arguments: BenchmarkArguments, name: str, size: str, workload: str
) -> Callable[[], None]:
    """A function that runs the workload once, with a new model."""
    shape, beams = SIZES[size], BEAMS if workload == "G2" else 1
    ids = sources(shape, 1 if workload == "G3" else SOURCES, arguments.seed)
    if name in compiled.COMPUTE_TYPES:
        compute_type = compiled.COMPUTE_TYPES[name]
        translator = compiled.make_translator(shape, compute_type, arguments.threads)
        return compiled.generation(translator, ids, beams, NEW_TOKENS)
    setting = BEST_SETTING[size].get(workload, {}) if name.endswith(BEST) else {}
    if arguments.quick and "compiled" in setting:  # compiling takes a minute
        setting = {}
    peer = name.removesuffix(BEST)
    model = with_setting(PEERS[OURS if peer == BEFORE else peer](shape), setting)
    if workload[0] == "T":
        batches = training_batches(shape, arguments.tokens, arguments.seed)
        work = training(model, batches, autocast=workload == "T2")
    else:
        work = generation(model, ids, beams)

    def run() -> None:
        with matmul_precision(setting.get("precision")):
            work()

    return run


def with_setting(model: torch.nn.Module, setting: dict[str, Any]) -> torch.nn.Module:
    """The model in another dtype, quantized to 8 bits, or compiled for sources of one length."""
    if "int8" in setting:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    if "compiled" in setting:
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward, options=setting["compiled"])
    return model.to(setting.get("dtype"))


@contextmanager
def matmul_precision(precision: str | None) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def draw_lengths(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sentence lengths: mean 27, standard deviation 15, 4 to 100."""
    return (27 + 15 * torch.randn(count, generator=generator)).round().long().clamp(4, 100)


def padded(
    lengths: torch.Tensor, vocab_size: int, padding: int, generator: torch.Generator
) -> torch.Tensor:
    """(batch, longest) random token ids, padded to these lengths."""
    shape = (len(lengths), int(lengths.max()))
    ids = torch.randint(EOS + 1, vocab_size, shape, generator=generator)
    return ids.masked_fill(torch.arange(shape[1]) >= lengths[:, None], padding)


def training_batches(size: Size, tokens: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Three batches of sentences of similar length: short, medium and long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = draw_lengths(10000, generator).sort().values
    batches = []
    for quantile in (0.25, 0.5, 0.75):
        start = int(quantile * len(lengths))
        rows = max(1, tokens // int(lengths[start]))
        target = lengths[start : start + rows]
        source = (target + torch.randint(-3, 4, target.shape, generator=generator)).clamp(min=4)
        batches.append(training_batch(source, target, size.vocab_size, generator))
    return batches


def training_batch(
    source: torch.Tensor, target: torch.Tensor, vocab_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random pairs of these lengths, (batch,) each."""
    ids = padded(source, vocab_size, PAD, generator)
    labels = padded(target, vocab_size, -100, generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def training(
    model: torch.nn.Module,
    batches: list[dict[str, torch.Tensor]],
    autocast: bool,
    fused: bool | None = None,
) -> Callable[[], None]:
    """A function that trains on each batch once. `fused` is an option of AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    device = batches[0]["input_ids"].device.type

    def run() -> None:
        for batch in batches:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                loss = training_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def sources(size: Size, count: int, seed: int) -> torch.Tensor:
    """(count, longest) padded ids of sentences of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    return padded(draw_lengths(count, generator), size.vocab_size, PAD, generator)


def generation(
    model: torch.nn.Module, ids: torch.Tensor, beams: int, new_tokens: int = NEW_TOKENS
) -> Callable[[], None]:
    """A function that decodes `new_tokens` tokens for each row of padded ids."""
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    model.eval().generation_config.eos_token_id = None  # all sentences have the same length

    def run() -> None:
        output = model.generate(
            **inputs, num_beams=beams, do_sample=False, max_new_tokens=new_tokens
        )
        assert output.shape == (len(ids), new_tokens + 1)
        assert (output[:, 0] == BOS).all()

    return run


def versus_before(result: dict) -> dict:
    """The result with the speed of this checkout relative to the other one, setting by setting."""
    ratios = result["ratios"]
    settings = ("", BEST)
    return {
        **result,
        "ratios": {OURS + best: ratios[OURS + best] / ratios[BEFORE + best] for best in settings},
    }


def to_markdown(results: list[dict], corner: str = "") -> str:
    """A table with a row per model and a column per workload and size."""
    columns = [f"{result['workload']} {result['size']}" for result in results]
    names = dict.fromkeys(name for result in results for name in result["ratios"])
    rows = []
    for name in names:
        ratios = (result["ratios"].get(name) for result in results)
        rows.append([name, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return markdown([corner, *columns], rows)


def draw(results: list[dict], path: Path) -> None:
    """A chart with a group of bars per workload and size."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for result in results for name in result["ratios"]))
    figure, axes = plt.subplots(figsize=(1.5 + 1.2 * len(results), 4))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [result["ratios"].get(name, 0) for result in results]
        axes.bar(
            [place + index * width for place in range(len(results))], heights, width, label=name
        )
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(results))],
        [f"{result['workload']}\n{result['size']}" for result in results],
    )
    axes.set_ylabel(f"speed, {REFERENCE} = 1")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
