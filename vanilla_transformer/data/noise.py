"""Noise for synthetic sources (section 3 of Edunov et al., 2018,
https://arxiv.org/abs/1808.09381)."""

from random import Random

MASK_TOKEN = "<BLANK>"
DROP, MASK, REACH = 0.1, 0.1, 3


def add_noise(text: str, random: Random) -> str:
    """The words of a text, each dropped with probability `DROP`, replaced by `MASK_TOKEN` with
    probability `MASK`, and moved by at most `REACH` places. At least one word remains."""
    words = text.split()
    kept = [word for word in words if random.random() >= DROP] or words[:1]
    masked = [MASK_TOKEN if random.random() < MASK else word for word in kept]
    moved = sorted(enumerate(masked), key=lambda item: item[0] + random.uniform(0, REACH + 1))
    return " ".join(word for _, word in moved)
