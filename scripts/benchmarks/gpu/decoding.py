"""Sentences per second of greedy and beam search in bfloat16, against other libraries.

Random models don't end a sentence, so all sentences have the same length.
"""

from itertools import product
from typing import Any

import torch

from scripts.benchmarks import ctranslate2_engine as compiled_engine
from scripts.benchmarks.gpu.cells import Cell, Worker
from scripts.benchmarks.gpu.goals import best, goal, is_ours
from scripts.benchmarks.gpu.plan import Plan
from scripts.benchmarks.gpu.timing import begin, median_seconds, peak_gib, reset_peak
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.speed import BEAMS, generation, sources

SEARCHES = {f"beam {BEAMS}": BEAMS, "greedy": 1}
PEER = "marian"
MODELS = {"ours": "vanilla_transformer", PEER: PEER}
# Fields of the generation config. On a GPU with a static cache, transformers compiles the steps of
# greedy search, but not those of beam search.
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static, compiled": {"cache_implementation": "static"},
}
ENGINE = "ctranslate2"
LABELS = ("size", "search", "batch", "what", "cache")
COLUMNS = {
    "sentences_per_second": "{:,.1f}",
    "seconds": "{:.4f}",
    "first_seconds": "{:.1f}",
    "peak_gib": "{:.2f}",
}
NOTES = """\
Each sentence gets the same number of new tokens (new_tokens in the JSON). first_seconds is the
first run, with compilation and plans for new shapes. It depends on the order of the rows: they
share a process, which keeps cuDNN's plans."""


def cells(plan: Plan, worker: Worker) -> list[Cell]:
    """The most important first, as there may not be time for all."""
    settings = list(product(SEARCHES, plan.sentences, plan.sizes))
    found = []
    for cache in CACHES:
        for setting, what in product(settings, MODELS):
            if cache == "static, compiled" and SEARCHES[setting[0]] > 1:
                continue
            found.append(_cell(plan, setting, what, cache, measure_model))
        if cache == "dynamic":
            found += [_cell(plan, setting, ENGINE, "its own", measure_engine)
                      for setting in settings]  # fmt: skip
    return found


def _cell(plan: Plan, setting: tuple[str, int, str], what: str, cache: str, measure: Any) -> Cell:
    search, count, size = setting
    labels = {"size": size, "search": search, "batch": count, "what": what, "cache": cache}
    return Cell(labels, measure, (plan, *setting, what, cache))


def measure_model(
    plan: Plan, search: str, count: int, size: str, what: str, cache: str
) -> dict[str, Any]:
    begin(plan)
    with torch.device(plan.device):
        model = PEERS[MODELS[what]](plan.sizes[size]).to(torch.bfloat16)
    for name, value in CACHES[cache].items():
        setattr(model.generation_config, name, value)
    ids = sources(plan.sizes[size], count, seed=0).to(plan.device)
    reset_peak(plan)  # drop the peak from weights in float32
    figures = _figures(plan, generation(model, ids, SEARCHES[search], plan.new_tokens), count)
    return {**figures, "peak_gib": peak_gib(plan)}


def measure_engine(
    plan: Plan, search: str, count: int, size: str, what: str, cache: str
) -> dict[str, Any]:
    begin(plan)
    compute_type = "float32" if plan.is_dry else "bfloat16"
    shape = plan.sizes[size]
    translator = compiled_engine.make_translator(shape, compute_type, 1, plan.device)
    ids = sources(shape, count, seed=0)
    run = compiled_engine.generation(translator, ids, SEARCHES[search], plan.new_tokens)
    return _figures(plan, run, count)


def _figures(plan: Plan, run: Any, count: int) -> dict[str, Any]:
    times = median_seconds(run, plan)
    found = {"sentences_per_second": count / times["seconds"], "new_tokens": plan.new_tokens}
    return {**found, **times}


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beam search at 1.5 times the speed of Marian, each with its best cache."""
    found = []
    settings = dict.fromkeys((row["size"], row["search"], row["batch"]) for row in rows)
    for size, search, batch in settings:
        if SEARCHES[search] == 1:
            continue
        of_setting = [
            row
            for row in rows
            if (row["size"], row["search"], row["batch"]) == (size, search, batch)
        ]
        rates = [
            best(of_setting, "sentences_per_second", among)
            for among in (is_ours, lambda row: row["what"] == PEER)
        ]
        name = f"{size}: speed of {search}, batch {batch}, Marian = 1"
        found.append(goal(name, *rates, wanted=1.5))
    return found
