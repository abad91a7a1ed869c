"""Small sequence-to-sequence tasks: each is a training set and a test set of text pairs.

scan       all commands of SCAN's grammar, split at random (Lake and Baroni, 2018,
           https://arxiv.org/abs/1711.00350): "jump twice" to "I_JUMP I_JUMP"
reverse    up to 20 symbols in reverse order
sort       up to 20 symbols in order
g2p_LANG   words to phones (SIGMORPHON 2020, task 1), from a folder
multi30k   captions, English to German, lower-cased and tokenized, from a folder
phrases_LANG   the package's own phrases, from English
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks import sigmorphon
from scripts.reports import write_lines
from vanilla_transformer.data.phrases import load_phrases

Pairs = list[tuple[str, str]]

VERBS = {"walk": ["I_WALK"], "look": ["I_LOOK"], "run": ["I_RUN"], "jump": ["I_JUMP"]}
TURNS = {"left": ["I_TURN_LEFT"], "right": ["I_TURN_RIGHT"]}
SYMBOLS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 20  # symbols


class Task(NamedTuple):
    train: Pairs
    test: Pairs


def write_side(path: Path, pairs: Pairs, side: int) -> Path:
    """Write the sources (0) or the targets (1), a line each."""
    return write_lines(path, (pair[side] for pair in pairs))


def scan_commands() -> Iterator[tuple[str, str]]:
    """All 20,910 commands and their actions (figure 6 and 7 of the paper)."""
    sentences = list(_scan_sentences())
    for command, actions in sentences:
        yield command, " ".join(actions)
    for (first, one), (second, two) in product(sentences, repeat=2):
        yield f"{first} and {second}", " ".join(one + two)
        yield f"{first} after {second}", " ".join(two + one)


def _scan_sentences() -> Iterator[tuple[str, list[str]]]:
    for command, actions in _scan_verbs():
        yield command, actions
        yield f"{command} twice", actions * 2
        yield f"{command} thrice", actions * 3


def _scan_verbs() -> Iterator[tuple[str, list[str]]]:
    yield from VERBS.items()
    for (verb, action), (side, turn) in product([*VERBS.items(), ("turn", [])], TURNS.items()):
        yield f"{verb} {side}", turn + action
        yield f"{verb} opposite {side}", turn * 2 + action
        yield f"{verb} around {side}", (turn + action) * 4


def scan() -> Task:
    """80% of the commands to train on, the rest to test."""
    pairs = list(scan_commands())
    random.Random(0).shuffle(pairs)
    size = len(pairs) * 4 // 5
    return Task(pairs[:size], pairs[size:])


def symbols(transform: Callable[[list[str]], list[str]]) -> Task:
    """20,000 rows of symbols to train on and 1,000 more to test, each transformed."""
    generator = random.Random(0)
    rows = [generator.choices(SYMBOLS, k=generator.randint(1, LONGEST)) for _ in range(25_000)]
    pairs = list(dict.fromkeys((" ".join(row), " ".join(transform(row))) for row in rows))
    return Task(pairs[:20_000], pairs[20_000:21_000])


def phrases(language: str) -> Task:
    """The built-in phrases, from English."""
    sizes = {"train": 160_000, "test": 1000}
    splits = {
        split: load_phrases(size, target_language=language, split=split)
        for split, size in sizes.items()
    }
    return Task(
        *(list(zip(rows["source"], rows["target"], strict=True)) for rows in splits.values())
    )


def g2p(language: str, data: Path) -> Task:
    """Words as characters, and their phones."""

    def spelled(split: str) -> Pairs:
        pairs = sigmorphon.read(data, language, split)
        return [(" ".join(word), phones) for word, phones in pairs]

    return Task(spelled("train"), spelled("test"))


def multi30k(data: Path) -> Task:
    """Captions in English and German."""

    def read(stem: str) -> Pairs:
        sides = [(data / f"{stem}.{side}").read_text(encoding="utf-8") for side in ("en", "de")]
        return list(zip(*(side.splitlines() for side in sides), strict=True))

    return Task(read("train"), read("test_2016_flickr"))
