"""The amount of work of the benchmark."""

from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.peers import BIG, SIZES, Size


@dataclass(frozen=True)
class Plan:
    """How much to measure. By default everything, on a GPU.

    Args:
        tokens: The budget of a training batch, for sources and for targets.
        batches: How many training batches make up a run.
        doublings: How often the budget is doubled at most to find the largest that fits.
        runs: The least number of timed runs.
        seconds: The least total time of timed runs.
        sentences: Sizes of the batches to decode.
        updates: Maximum number of updates of the WMT recipe.
        multi30k_updates: Updates of the Multi30k recipe.
        g2p_updates: Updates of the G2P recipe.
        vocab_size: Vocabulary size of the Multi30k recipe.
        data: A folder with Multi30k.
        g2p_data: A folder with the words of SIGMORPHON 2020.
        limits: The seconds that each part may take.
    """

    device: str = "cuda"
    sizes: dict[str, Size] = field(default_factory=lambda: {"base": SIZES["base"], "big": BIG})
    tokens: int = 25_000
    batches: int = 6
    doublings: int = 6
    runs: int = 3
    seconds: float = 1.0
    sentences: tuple[int, ...] = (1, 32, 256)
    new_tokens: int = 32
    updates: int = 3000
    multi30k_updates: int = 8000
    g2p_updates: int = 3800
    vocab_size: int = 10_000
    data: str | None = None
    g2p_data: str | None = None
    limits: dict[str, float] = field(
        default_factory=lambda: {"tests": 220, "training": 460, "decoding": 290, "recipes": 520}
    )

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"


# The same cells in a minute on a CPU: the figures mean nothing.
DRY_RUN: dict[str, Any] = {
    "device": "cpu",
    "sizes": {"base": Size(32, 64, 2, 1, 100), "big": Size(64, 128, 2, 1, 100)},
    "tokens": 200,
    "batches": 2,
    "doublings": 1,
    "runs": 1,
    "seconds": 0.0,
    "sentences": (2,),
    "new_tokens": 3,
    "updates": 2,
    "multi30k_updates": 2,
    "g2p_updates": 2,
    "vocab_size": 300,
}
