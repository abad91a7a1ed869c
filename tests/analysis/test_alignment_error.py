"""The alignment error rate, for numbers computed by hand, and for a model's layers."""

from math import isnan

import pytest
from conftest import REPOSITORY, small_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.analysis.alignment_error import (
    GoldAlignment,
    read_gold_alignments,
    score_alignments,
    score_layers,
)
from vanilla_transformer.data.text_files import read_file
from vanilla_transformer.data.vocabularies import Specials, words
from vanilla_transformer.inference import alignment, scoring
from vanilla_transformer.inference.alignment import add_alignments
from vanilla_transformer.inference.translation import Hypothesis

SAMPLE = REPOSITORY / "tests/fixtures/alignments"
SURE, POSSIBLE = (0, 0), (1, 1)
GOLD = GoldAlignment(frozenset([SURE]), frozenset([SURE, POSSIBLE]))


@pytest.mark.parametrize(
    ("links", "error_rate", "precision", "recall"),
    [
        ([SURE], 0, 1, 1),
        ([SURE, POSSIBLE], 0, 1, 1),  # a possible link is not an error
        ([POSSIBLE], 1 / 2, 1, 0),
        ([(0, 1)], 1, 0, 0),
        ([SURE, POSSIBLE, (2, 2)], 1 / 4, 2 / 3, 1),  # 1 - (1 + 2) / (3 + 1)
    ],
)
def test_the_error_rate_equals_one_computed_by_hand(links, error_rate, precision, recall):
    assert score_alignments([links], [GOLD]) == pytest.approx((error_rate, precision, recall))


def test_links_are_counted_over_all_pairs():
    found = [[SURE], [SURE, (5, 5), (6, 6)]]
    assert score_alignments(found, [GOLD, GOLD]).error_rate == pytest.approx(1 - (2 + 2) / (4 + 2))
    assert isnan(score_alignments([[]], [GOLD]).precision)
    with pytest.raises(ValueError, match="zip"):
        score_alignments(found, [GOLD])


def test_a_file_can_have_sure_and_possible_links(tmp_path):
    (tmp_path / "links").write_text("0-0 1p2\n\n")
    assert read_gold_alignments(tmp_path / "links") == [
        GoldAlignment(frozenset([(0, 0)]), frozenset([(0, 0), (1, 2)])),
        GoldAlignment(frozenset(), frozenset()),
    ]


@pytest.mark.parametrize("link", ["1-0", "0-1"])
def test_a_link_to_a_missing_word_is_reported(link, tmp_path):
    (tmp_path / "links").write_text(link)
    with pytest.raises(ValueError, match=f"links, line 1: link {link} between 1 and 1 words"):
        read_gold_alignments(tmp_path / "links", [("one", "eins")])


def test_the_manually_aligned_sample_only_links_existing_words():
    """And most words have a sure link, in an order that differs between the languages."""
    pairs = list(zip(*(list(read_file(SAMPLE / side)) for side in ("en", "de")), strict=True))
    gold = read_gold_alignments(SAMPLE / "links", pairs)
    assert len(gold) == 20
    words = sum(len(target.split()) for _, target in pairs)
    linked = sum(len({target for _, target in row.sure}) for row in gold)
    assert linked > 0.9 * words
    monotone = [[(place, place) for place in range(len(target.split()))] for _, target in pairs]
    assert score_alignments(monotone, gold).error_rate > 0.5


def test_unknown_words_of_a_target_are_counted(monkeypatch):
    # Decoding omits them, which must not change the index of the words after them.
    names = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c"]
    raw = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(names)))
    monkeypatch.setattr(
        alignment,
        "_aligned_places",
        lambda model, inputs, *_: [[*range(inputs["labels"].shape[1])]],
    )
    diagonal = frozenset((place, place) for place in range(4))
    gold = [GoldAlignment(diagonal, diagonal)]
    for text in ("a b c b", "a Quokka b c"):
        for score in score_layers([(text, text)], gold, model, tokenizer):
            assert score == (0, 1, 1)


def test_a_pair_without_tokens_is_reported_with_its_number_in_the_text(monkeypatch):
    monkeypatch.setattr(scoring, "LINES_PER_WINDOW", 1)
    names = ["<pad>", "<s>", "</s>", "<unk>", "a"]
    tokenizer = words({name: i for i, name in enumerate(names)}, Specials(template="$A"))
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(names)))
    pairs = [("a", "a"), ("a", "a"), ("", "a")]
    with pytest.raises(ValueError, match="the source of pair 3 has no token: expected"):
        score_layers(pairs, [GOLD] * 3, model, tokenizer)


def test_each_layer_is_scored_on_the_given_targets(checkpoint, tokenizer):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint).eval()
    pairs = [("a house by the lake", "ein Haus am See"), ("the lake", "der See ist tief")]
    found = [
        [Hypothesis(target, token_ids=tuple(tokenizer(text_target=target)["input_ids"]))]
        for _, target in pairs
    ]
    rows = add_alignments([source for source, _ in pairs], found, model, tokenizer, layer=1)
    links = [frozenset(row[0].alignment) for row in rows]
    scores = score_layers(pairs, [GoldAlignment(row, row) for row in links], model, tokenizer)
    assert scores[1] == (0, 1, 1)
    assert scores[0].error_rate > 0 < scores[2].error_rate
