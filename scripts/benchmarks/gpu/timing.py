"""Time, memory and versions, in the process that measures a cell."""

import os
import platform
import re
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from scripts.benchmarks.gpu.plan import Plan
from scripts.benchmarks.turns import peak_memory, settle, timed

# Dense bfloat16 FLOP/s, from NVIDIA's data sheets; the first whose words are in the GPU's name
# applies, as an RTX A1000 is not an A100.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "GH200": 989.5e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
PACKAGES = ("torch", "transformers", "triton", "accelerate", "flash-attn", "liger-kernel")
PACKAGES += ("ctranslate2", "datasets")
LONGEST = 100  # runs


def begin(plan: Plan) -> None:
    """Prepare the process for a cell."""
    settle(1 if plan.is_dry else os.cpu_count() or 1)
    torch.set_float32_matmul_precision("highest")  # torch's default
    if plan.is_dry:
        torch.compiler.set_stance("force_eager")
        return
    torch.compiler.reset()  # drop code that was compiled for another cell
    # Batches have many shapes, and above this limit they would run uncompiled.
    torch._dynamo.config.recompile_limit = 256
    torch.cuda.init()
    reset_peak(plan)


def reset_peak(plan: Plan) -> None:
    """Make `peak_gib` count from here on."""
    if not plan.is_dry:
        torch.cuda.reset_peak_memory_stats()


def median_seconds(run: Callable[[], object], plan: Plan) -> dict[str, float]:
    """The median time of a run, and that of the first one, in which kernels are compiled."""

    def once() -> None:
        run()
        if not plan.is_dry:
            torch.cuda.synchronize()

    first = timed(once)
    once()
    seconds: list[float] = []
    while len(seconds) < plan.runs or (sum(seconds) < plan.seconds and len(seconds) < LONGEST):
        seconds.append(timed(once))
    return {"seconds": statistics.median(seconds), "first_seconds": first}


def peak_gib(plan: Plan) -> float:
    """The peak memory since `begin`, of the GPU or, in a dry run, of the process."""
    return peak_memory() / 2**10 if plan.is_dry else torch.cuda.max_memory_allocated() / 2**30


def peak_flops() -> float | None:
    """The dense bfloat16 FLOP/s of the GPU; None for an unknown or partitioned one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = (peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name))
    return None if "MIG" in name else next(known, None)


def environment(plan: Plan) -> dict[str, Any]:
    """The device, and the versions of relevant libraries."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["device"] = f"a CPU: {platform.processor() or platform.machine()}"
    if not plan.is_dry:
        found["device"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
        found["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return found
