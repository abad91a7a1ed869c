"""Lines in, lines out: order, blank lines, batches by length, bounded reading."""

import pytest

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.text import read_lines
from vanilla_transformer.translation import BATCHES_PER_WINDOW, translate

LINES = ["a house", "", "the lake is deep the lake is deep", "see", "  \t ", "ein Haus am See"]
NASTY = ["😀 🏳️‍🌈", "שלום עולם", "a\x00b\x07\x1b[0m", "</s><pad>", "a " * 5000, "\u2028"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def alone(model, tokenizer):
    def generate(line):
        inputs = tokenizer(line, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=6)[0]
        return tokenizer.decode(ids, skip_special_tokens=True)

    return [generate(line) if line.strip() else "" for line in LINES]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_order_is_kept_and_blank_lines_stay_blank(model, tokenizer, alone, batch_size):
    results = translate(LINES, model, tokenizer, batch_size=batch_size, max_new_tokens=6)
    assert list(results) == alone


def test_batches_hold_lines_of_similar_length(model, tokenizer, monkeypatch):
    lengths = []
    generate = type(model).generate

    def spy(self, input_ids, **kwargs):
        lengths.append(kwargs["attention_mask"].sum(-1).tolist())
        return generate(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "generate", spy)
    lines = ["see " * n for n in (1, 9, 5, 5, 1, 9)]
    list(translate(lines, model, tokenizer, batch_size=2, max_new_tokens=2))
    assert [max(row) for row in lengths] == sorted((max(row) for row in lengths), reverse=True)
    assert all(max(row) - min(row) <= 2 for row in lengths)


def test_lines_are_read_a_window_at_a_time(model, tokenizer):
    read = []
    source = (read.append(n) or "see" for n in range(10**9))
    translations = translate(source, model, tokenizer, batch_size=1, max_new_tokens=1)
    next(translations)
    assert len(read) == BATCHES_PER_WINDOW


@pytest.mark.parametrize("line", NASTY, ids=lambda line: ascii(line)[:12])
def test_any_text_is_taken(model, tokenizer, line):
    (translation,) = translate([line], model, tokenizer, max_new_tokens=3)
    assert isinstance(translation, str)


def test_generation_options_reach_the_model(model, tokenizer):
    with pytest.raises(ValueError, match="no_such_option"):
        list(translate(["see"], model, tokenizer, no_such_option=1))


def test_a_batch_size_that_cannot_be_is_named(model, tokenizer):
    with pytest.raises(ValueError, match="batch_size=0: expected a positive integer"):
        list(translate(["see"], model, tokenizer, batch_size=0))


def test_training_mode_does_not_disturb(model, tokenizer, alone):
    model.train()
    assert list(translate(LINES, model, tokenizer, max_new_tokens=6)) == alone


def test_lines_end_at_newlines_only():
    content = [b"\xef\xbb\xbfone\r\n", b"tw\ro\xe2\x80\xa8\n", b"\n", b"last"]
    assert list(read_lines(content, "f")) == ["one", "tw\ro\u2028", "", "last"]


def test_a_line_that_is_not_utf8_is_named():
    with pytest.raises(ValueError, match=r"in\.txt, line 2: not UTF-8"):
        list(read_lines([b"fine\n", b"\xff\n"], "in.txt"))
