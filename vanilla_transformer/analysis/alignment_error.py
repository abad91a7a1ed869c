"""How well attention aligns words: its alignment error rate against links made by hand.

The measure is from Och and Ney (2003, https://aclanthology.org/J03-1002): a model must find the
sure links, and may find the possible ones.
"""

import re
from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.text_files import read_file
from ..data.token_batches import expect_tokens
from ..inference.alignment import add_alignments, layers_and_heads
from ..inference.translation import Hypothesis

Links = Iterable[tuple[int, int]]  # a source word and a target word, from 0


class GoldAlignment(NamedTuple):
    """The word alignment of a sentence pair that annotators made.

    Attributes:
        sure: The links that an alignment must have.
        possible: The links that an alignment may have, `sure` included.
    """

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]


class AlignmentScore(NamedTuple):
    """How close alignments are to gold alignments, from 0 to 1; NaN where there are no links to
    count.

    Attributes:
        error_rate: AER, 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) with the links A of the model, the
            sure links S and the possible links P. 0 is best.
        precision: The share of the model's links that are possible.
        recall: The share of the sure links that the model has.
    """

    error_rate: float
    precision: float
    recall: float


def read_gold_alignments(
    path: str | Path, pairs: Sequence[tuple[str, str]] | None = None
) -> list[GoldAlignment]:
    """Read a file with the links of a sentence pair on each line: `0-0` is sure, `1p2` possible.

    Args:
        path: The file.
        pairs: The source and target of each line, whose words are separated by white space.

    Raises:
        ValueError: A link can't be read, the file does not have a line for each pair, a word does
            not exist, or no link is sure.
    """
    lines = list(read_file(path))
    if pairs is not None and len(lines) != len(pairs):
        raise ValueError(f"{path} has {len(lines)} lines: expected {len(pairs)}, one for each pair")
    gold = []
    for number, line in enumerate(lines):
        place = f"{path}, line {number + 1}"
        links = [_parse_link(link, place) for link in line.split()]
        if pairs is not None:
            _expect_words(links, *pairs[number], place)
        sure = frozenset((source, target) for source, target, is_sure in links if is_sure)
        gold.append(GoldAlignment(sure, sure | {(source, target) for source, target, _ in links}))
    if not any(alignment.sure for alignment in gold):
        raise ValueError(f"{path} has no sure link: expected at least one, such as 0-0")
    return gold


def _parse_link(text: str, place: str) -> tuple[int, int, bool]:
    match = re.fullmatch(r"(\d+)([-p])(\d+)", text)
    if match is None:
        raise ValueError(f"{place}: {text!r}: expected a link such as 0-0 (sure) or 1p2 (possible)")
    return int(match[1]), int(match[3]), match[2] == "-"


def _expect_words(
    links: Iterable[tuple[int, int, bool]], source: str, target: str, place: str
) -> None:
    rows, columns = len(source.split()), len(target.split())
    for row, column, _ in links:
        if row >= rows or column >= columns:
            raise ValueError(
                f"{place}: link {row}-{column} between {rows} and {columns} words: expected words "
                "that exist, counted from 0"
            )


def score_alignments(found: Iterable[Links], gold: Iterable[GoldAlignment]) -> AlignmentScore:
    """The score of the alignments of sentence pairs.

    Raises:
        ValueError: The numbers of alignments differ.
    """
    links = sure = links_sure = links_possible = 0
    for pairs, expected in zip(map(set, found), gold, strict=True):
        links += len(pairs)
        sure += len(expected.sure)
        links_sure += len(pairs & expected.sure)
        links_possible += len(pairs & expected.possible)
    return AlignmentScore(
        1 - _share(links_sure + links_possible, links + sure),
        _share(links_possible, links),
        _share(links_sure, sure),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else nan


def score_layers(
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[GoldAlignment],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
) -> list[AlignmentScore]:
    """The score of each decoder layer, averaged over its heads, when the model reads the given
    target.

    Args:
        pairs: Sources and targets.
        gold: The alignment of each pair.
        model: The model.
        tokenizer: Its tokenizer.
        max_tokens: Source tokens, and target tokens, in a batch, including padding.

    Raises:
        ValueError: A source or target has no token. The error counts the pairs from 1.
    """
    sources, targets = zip(*pairs, strict=True)
    source_ids = tokenizer(list(sources))["input_ids"]
    target_ids = tokenizer(text_target=list(targets))["input_ids"]
    expect_tokens(list(map(len, source_ids)), list(map(len, target_ids)))
    found = [
        [Hypothesis(text, token_ids=tuple(ids))]
        for text, ids in zip(targets, target_ids, strict=True)
    ]
    scores = []
    layers, _ = layers_and_heads(model.config, "decoder")
    for layer in range(layers):
        aligned = add_alignments(
            sources, found, model, tokenizer, layer=layer, max_tokens=max_tokens
        )
        scores.append(score_alignments((row[0].alignment for row in aligned), gold))
    return scores
