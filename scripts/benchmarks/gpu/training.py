"""Tokens per second, MFU and peak memory of training, against other libraries.

A step is forward, backward and fused AdamW in bfloat16 autocast with label smoothing 0.1, over
batches of random sentences with the lengths of WMT. Packed batches leave out padding.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.benchmarks.gpu import varlen
from scripts.benchmarks.gpu.cells import Cell, Worker, describe
from scripts.benchmarks.gpu.goals import best, goal, is_ours, is_peer
from scripts.benchmarks.gpu.plan import Plan
from scripts.benchmarks.gpu.timing import begin, median_seconds, peak_flops, peak_gib
from scripts.benchmarks.peers import PEERS, SMOOTHING, Size
from scripts.benchmarks.speed import training, training_batch
from vanilla_transformer.data.token_batches import TokenBudgetSampler
from vanilla_transformer.model.loss import fused_linear_cross_entropy
from vanilla_transformer.training.compilation import compile_layers

SOURCE_MEAN, TARGET_MEAN = 27, 28  # tokens per sentence
SPREAD, RATIO_SPREAD = 0.6, 0.2  # standard deviations of logarithms
LONGEST = 256
TEXT = 1_000_000  # sentences, from which batches are drawn
SEARCH = 100.0  # seconds to find the largest batch
LOSS, ATTENTION = "loss alone:", "attention alone:"
LENGTHS = (13, 26, 62, 128, 256)  # of sentences, to measure attention alone


@dataclass(frozen=True)
class Contender:
    """A model, and how to train it.

    Args:
        peer: A key of `PEERS`.
        attention: Its `attn_implementation`, if not the default.
        compiled: "layers" or "model" if these are compiled.
        fused_loss: Whether our model computes its loss without logits.
    """

    peer: str = "vanilla_transformer"
    attention: str | None = None
    compiled: str | None = None
    fused_loss: bool = True


EAGER = {
    "ours, padded": Contender(),
    "marian": Contender("marian"),
    "bart": Contender("bart"),
    "torch.nn.Transformer": Contender("torch"),
    "ours, packed, varlen_attn": Contender(attention=varlen.NAME),
    "ours, packed, flash": Contender(attention="flash_attention_2"),
    "ours, without the fused loss": Contender(fused_loss=False),
}
LAYERS_COMPILED = {
    "ours, layers compiled": Contender(compiled="layers"),
    "ours, packed, varlen_attn, layers compiled": Contender(
        attention=varlen.NAME, compiled="layers"
    ),
    "marian, layers compiled": Contender("marian", compiled="layers"),
    "ours, packed, flex": Contender(attention="flex_attention"),  # which is always compiled
}
COMPILED = {
    "ours, compiled": Contender(compiled="model"),
    "marian, compiled": Contender("marian", compiled="model"),
}
LARGEST = ("ours, padded", "marian", "torch.nn.Transformer", "ours, packed, varlen_attn")
LABELS = ("size", "batch", "what")
COLUMNS = {
    "tokens_per_second": "{:,.0f}",
    "mfu": "{:.1%}",
    "peak_gib": "{:.2f}",
    "seconds": "{:.4f}",
    "first_seconds": "{:.1f}",
    "tokens": "{:,}",
    "padding": "{:.1%}",
    "loss": "{:.3f}",
}
NOTES = """\
tokens_per_second counts source and target tokens without padding; in rows of a loss, its rows; in
those of attention, the tokens of one side.
MFU is FLOPs of the model over those of the GPU in dense bfloat16. seconds is a median over passes
through all batches, first_seconds the first pass, with compilation and plans for new shapes, and
tokens the budget of a batch on each side. first_seconds depends on the order of the rows: they
share a process, which keeps cuDNN's plans. "largest" doubles the budget as long as memory and time
last."""


def cells(plan: Plan, worker: Worker) -> list[Cell]:
    """The most important first, as there may not be time for all."""

    def steps_of(contenders: dict[str, Contender]) -> list[Cell]:
        return [
            Cell(
                {"size": size, "batch": plan.tokens, "what": name},
                measure_steps,
                (plan, size, contender),
            )
            for size in plan.sizes
            for name, contender in contenders.items()
        ]

    found = steps_of(EAGER)
    for size in plan.sizes:
        for name in LOSSES:
            labels = {"size": size, "batch": plan.tokens, "what": f"{LOSS} {name}"}
            found.append(Cell(labels, measure_loss, (plan, size, name)))
    found += steps_of(LAYERS_COMPILED)
    for size in plan.sizes:
        for name in LARGEST:
            labels = {"size": size, "batch": "largest", "what": name}
            arguments = plan, size, EAGER[name]
            found.append(Cell(labels, measure_largest, arguments, SEARCH, gets_end=True))
    found += steps_of(COMPILED)
    for size, length, kernel in product(plan.sizes, LENGTHS, KERNELS):
        what = f"{ATTENTION} {length} tokens, {kernel}"
        labels = {"size": size, "batch": plan.tokens, "what": what}
        found.append(Cell(labels, measure_attention, (plan, size, length, kernel)))
    return found


# ---------------------------------------------------------------- Data


def wmt_lengths(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of `count` sources and targets: log-normal with the means and spreads above, at least
    2 and at most `LONGEST`. They resemble WMT 2014 English to German in 37,000 byte pairs; nothing
    was fitted."""
    random = np.random.default_rng(seed)
    sources = random.lognormal(np.log(SOURCE_MEAN) - SPREAD**2 / 2, SPREAD, count)
    ratio = np.log(TARGET_MEAN / SOURCE_MEAN) - RATIO_SPREAD**2 / 2
    targets = sources * random.lognormal(ratio, RATIO_SPREAD, count)
    sides = (np.clip(side.round().astype(int), 2, LONGEST) for side in (sources, targets))
    return next(sides), next(sides)


@cache
def batches_of_lengths(tokens: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of the sources and targets of `count` batches, spread evenly from short sentences to
    long ones. A budget of `tokens` on each side is filled from a text so large, a quarter of WMT's
    or a thousand batches, that sentences of the same length come together."""
    source, target = wmt_lengths(min(TEXT, 1000 * tokens // SOURCE_MEAN), seed=0)
    batches = list(TokenBudgetSampler(source, target, tokens, shuffle=False))
    places = np.linspace(0, len(batches) - 1, count + 2).round().astype(int)[1:-1]
    return [(source[batches[place]], target[batches[place]]) for place in places]


def wmt_batches(size: Size, tokens: int, count: int, device: str) -> list[dict[str, torch.Tensor]]:
    """Random ids for `batches_of_lengths`."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for sides in batches_of_lengths(tokens, count):
        batch = training_batch(*map(torch.from_numpy, sides), size.vocab_size, generator)
        made.append({name: ids.to(device) for name, ids in batch.items()})
    return made


def training_flops(size: Size, source: torch.Tensor, target: torch.Tensor) -> float:
    """Floating-point operations of forward and backward over sentences of these lengths, (rows,).

    As in appendix B of Chowdhery et al. (2022), https://arxiv.org/abs/2204.02311: 6 for each
    parameter of a matrix and token, where a token of the source passes through the encoder and the
    cross-attention's keys and values, one of the target through the rest; and 12 * d_model for each
    pair of positions in each attention, masked ones included. Embedding lookups are free, and
    recomputation and padding do not count."""
    d, ffn = size.d_model, 2 * size.d_model * size.ffn_dim
    source, target = source.double(), target.double()
    per_source = size.layers * (4 * d**2 + ffn + 2 * d**2)
    per_target = size.layers * (4 * d**2 + 2 * d**2 + ffn) + d * size.vocab_size
    pairs = (source**2 + target**2 + source * target).sum() * size.layers
    return float(6 * (per_source * source.sum() + per_target * target.sum()) + 12 * d * pairs)


# ---------------------------------------------------------------- Steps


def make_model(plan: Plan, size: str, contender: Contender) -> nn.Module:
    with torch.device(plan.device):
        model = PEERS[contender.peer](plan.sizes[size])
    if contender.attention is not None:
        varlen.register()
        model.set_attn_implementation(contender.attention)
    if contender.compiled == "layers":
        compile_layers(model)
    elif contender.compiled == "model":
        model.forward = torch.compile(model.forward, dynamic=True)
    return model


def measure_steps(plan: Plan, size: str, contender: Contender) -> dict[str, Any]:
    begin(plan)
    model = make_model(plan, size, contender)
    return steps(plan, size, contender, model, plan.tokens, plan.batches)


def measure_largest(plan: Plan, size: str, contender: Contender, end: float) -> dict[str, Any]:
    """The figures of the largest budget, in powers of two, at which training fits in memory.
    Budgets that would probably not be finished when `time.monotonic()` is `end` are not tried."""
    begin(plan)
    once = replace(plan, runs=1, seconds=0.0)
    model = make_model(plan, size, contender)
    figures: dict[str, Any] = {}
    last = 0.0
    for doubling in range(1, plan.doublings + 1):
        begun = time.monotonic()
        if begun + 2.5 * last > end:  # the next one takes twice as long
            return {**figures, "stopped": "no time for a larger one"}
        try:
            figures = steps(once, size, contender, model, plan.tokens * 2**doubling, 1)
        except Exception as error:  # out of memory, or too large for a kernel
            if not figures:
                raise
            return {**figures, "stopped": describe(error)}
        last = time.monotonic() - begun
    return figures


def steps(
    plan: Plan, size: str, contender: Contender, model: nn.Module, tokens: int, count: int
) -> dict[str, Any]:
    batches: list[dict[str, Any]] = [*wmt_batches(plan.sizes[size], tokens, count, plan.device)]
    source = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).cpu()
    target = torch.cat([(batch["labels"] != -100).sum(1) for batch in batches]).cpu()
    padded = sum(batch[name].numel() for batch in batches for name in ("input_ids", "labels"))
    if not contender.fused_loss:
        batches = [{**batch, "skip_logits": False} for batch in batches]
    run = training(model, batches, autocast=True, fused=True)
    times = median_seconds(run, plan)
    real, peak = int(source.sum() + target.sum()), peak_flops()
    flops = training_flops(plan.sizes[size], source, target) / times["seconds"]
    return {
        "tokens_per_second": real / times["seconds"],
        "mfu": None if peak is None else flops / peak,
        "flops_per_second": flops,
        "peak_gib": peak_gib(plan),
        **times,
        "tokens": tokens,
        "padding": 1 - real / padded,
    }


# ---------------------------------------------------------------- The loss alone


def liger(states: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(label_smoothing=SMOOTHING)(matrix, states, labels)


def plain(states: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(states, matrix)
    return F.cross_entropy(logits.float(), labels, label_smoothing=SMOOTHING)


def ours(states: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return fused_linear_cross_entropy(states[None], matrix, labels[None], SMOOTHING)


def fused_by_torch(
    states: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.linear_cross_entropy(states, matrix, labels, label_smoothing=SMOOTHING)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "ours": ours,
    "liger": liger,
    "torch, from logits": plain,
    "torch, from logits, compiled": plain,
    "torch, linear_cross_entropy": fused_by_torch,
}


def measure_loss(plan: Plan, size: str, name: str) -> dict[str, Any]:
    """Forward and backward of projection and loss in bfloat16."""
    begin(plan)
    shape = plan.sizes[size]
    options = {"device": plan.device, "dtype": torch.bfloat16, "requires_grad": True}
    states = torch.randn(plan.tokens, shape.d_model, **options)
    matrix = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model, **options))
    nn.init.normal_(matrix, std=shape.d_model**-0.5)
    labels = torch.randint(shape.vocab_size, (plan.tokens,), device=plan.device)
    compute = LOSSES[name]
    if name.endswith("compiled"):
        compute = torch.compile(compute)

    def run() -> None:
        states.grad = matrix.grad = None
        compute(states, matrix, labels).backward()

    times = median_seconds(run, plan)
    found = {"tokens_per_second": plan.tokens / times["seconds"], "peak_gib": peak_gib(plan)}
    return {**found, **times, "loss": float(compute(states, matrix, labels))}


# ---------------------------------------------------------------- Attention alone

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def measure_attention(plan: Plan, size: str, length: int, kernel: str) -> dict[str, Any]:
    """Forward and backward of one layer's attention in bfloat16, without padding."""
    begin(plan)
    shape = plan.sizes[size]
    rows, width = max(1, plan.tokens // length), shape.d_model // shape.heads
    options = {"device": plan.device, "dtype": torch.bfloat16, "requires_grad": True}
    heads = [torch.randn(rows, length, shape.heads, width, **options) for _ in range(3)]
    query, key, value = (states.transpose(1, 2) for states in heads)
    gradient = torch.randn_like(query)

    def run() -> None:
        with sdpa_kernel([KERNELS[kernel], SDPBackend.MATH]):  # a CPU does not have all
            output = F.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(output, heads, gradient)

    times = median_seconds(run, plan)
    found = {"tokens_per_second": rows * length / times["seconds"], "peak_gib": peak_gib(plan)}
    return {**found, **times}


# ---------------------------------------------------------------- Goals


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Training at 1.8 times the speed of the best peer, 45% MFU at big, and a fused loss that is
    not slower than Liger's."""
    found = []
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = [row for row in rows if row["size"] == size]
        alone = {row["what"]: row.get("tokens_per_second") for row in of_size if is_loss(row)}
        steps = [row for row in of_size if not is_part(row)]
        rates = [best(steps, "tokens_per_second", among) for among in (is_ours, is_peer)]
        found.append(goal(f"{size}: speed of training, best peer = 1", *rates, wanted=1.8))
        if size == "big":
            found.append(goal(f"{size}: MFU", best(steps, "mfu", is_ours), 1, wanted=0.45))
        rates = [alone.get(f"{LOSS} {name}") for name in ("ours", "liger")]
        found.append(goal(f"{size}: speed of the fused loss, Liger's = 1", *rates, wanted=1))
    return found


def is_loss(row: dict[str, Any]) -> bool:
    return row["what"].startswith(LOSS)


def is_part(row: dict[str, Any]) -> bool:
    """Whether this row is only a part of a step."""
    return row["what"].startswith((LOSS, ATTENTION))
