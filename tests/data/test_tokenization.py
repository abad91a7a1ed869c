"""The shared vocabulary: its ids, its pieces, lossless encoding of any text, and loading without
code."""

import logging
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import in_new_process
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer.data.tokenization import train_tokenizer

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"

SENTENCES = [
    "The dog runs through the green grass.",
    "Der Hund rennt durch das grüne Gras.",
    "Two dogs (a black one and a white one) run in 2016, or 2017?",
    "Zwei Hunde (ein schwarzer und ein weißer) rennen in 2016, oder 2017?",
    "The child doesn't see the dog -- the dog sees the child!",
    "Das Kind sieht den Hund nicht -- der Hund sieht das Kind!",
]

NASTY = [
    "",
    " ",
    "  ",
    " leading, trailing  and   inner spaces  ",
    "tab\tnewline\nreturn\r\n\r",
    "\t\t  word\n\n  word",
    "no-break\u00a0space, ideographic\u3000space, line\u2028and\u2029paragraph, \x0b\x0c\x1c\x85",
    "▁ ▁▁the▁dog ▁",
    "Ġthe Ċdog",
    "</s>",
    "the</s>dog <pad> <s><unk>",
    "</s></s> </s",
    "<0x41>",
    "the<0x0A><0xFF> <0x00>dog",
    "\0",
    "the\0dog\0",
    "\x01\x07\x1b[0m\x7f",
    "\u0301",
    " \u0301the",
    "é\u0301\u0302",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️",
    "שלום \u202eעולם\u202c مرحبا می\u200cخواهم",
    "中文也可以。日本語、한국어",
    "\ue000\U000f0000\U0010fffd",
    "\ufffe\uffff\U0001ffff\u0378\U000e0fff",
    "\ufeffthe\ufffd",
    "a" * 5000,
    " " * 5000 + "the",
]


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(SENTENCES * 3, 400, show_progress=False)


@pytest.fixture(scope="module")
def folder(trained: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    trained.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["trained", "reloaded", "unpickled"])
def tokenizer(request, trained, folder) -> PreTrainedTokenizerFast:
    if request.param == "reloaded":
        return AutoTokenizer.from_pretrained(folder)
    return pickle.loads(pickle.dumps(trained)) if request.param == "unpickled" else trained


def assert_lossless(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert not set(ids[:-1]) & set(tokenizer.all_special_ids)
    # Use the backend's NFC: the Unicode version of `unicodedata` depends on the Python version.
    nfc = tokenizer.backend_tokenizer.normalizer.normalize_str(text)[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == nfc


# Any text


@pytest.mark.parametrize("text", NASTY)
def test_difficult_text_is_encoded_losslessly(tokenizer, text):
    assert_lossless(tokenizer, text)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@given(text=st.text())
def test_any_text_is_encoded_losslessly(trained, text):
    assert_lossless(trained, text)


@given(parts=st.lists(st.sampled_from([*NASTY[:-2], *SENTENCES, "<", ">", "0x4", "1", "/s"])))
def test_concatenated_difficult_texts_are_encoded_losslessly(trained, parts):
    assert_lossless(trained, "".join(parts))


def test_every_character_between_letters_is_encoded_losslessly(trained):
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, sys.maxunicode + 1, 101)]
    characters = [chr(code) for code in codes]
    texts = [f"a{'a'.join(characters[i : i + 64])}a" for i in range(0, len(characters), 64)]
    normalize = trained.backend_tokenizer.normalizer.normalize_str
    ids = trained(texts)["input_ids"]
    assert trained.unk_token_id not in {token for row in ids for token in row}
    decoded = trained.batch_decode(ids, skip_special_tokens=True)
    assert decoded == [normalize(text)[1:] for text in texts]


def test_text_is_normalized_to_nfc(trained):
    assert trained("Bu\u0308cher")["input_ids"] == trained("B\u00fccher")["input_ids"]


def test_batches_encode_like_single_texts(tokenizer):
    assert tokenizer(NASTY)["input_ids"] == [tokenizer(text)["input_ids"] for text in NASTY]


# Ids


def test_special_tokens_come_first_then_bytes(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    names = (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    assert names == ("<pad>", "<s>", "</s>", "<unk>")
    assert tokenizer.all_special_ids == [1, 2, 3, 0]
    bytes_ = tokenizer.convert_ids_to_tokens(range(4, 260))
    assert bytes_ == [f"<0x{byte:02X}>" for byte in range(256)]


def test_a_character_outside_the_vocabulary_becomes_its_bytes(trained):
    assert trained.tokenize("☃") == [" ", "<0xE2>", "<0x98>", "<0x83>"]


def test_sources_targets_and_pairs_end_with_eos(tokenizer):
    the, dog = (tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("the", "dog"))
    assert tokenizer("the")["input_ids"] == [*the, 2]
    assert tokenizer(text_target="the")["input_ids"] == [*the, 2]
    assert tokenizer(text_target=["the", "dog"])["input_ids"] == [[*the, 2], [*dog, 2]]
    assert tokenizer("the", text_target="dog")["labels"] == [*dog, 2]
    assert tokenizer("the", "dog")["input_ids"] == [*the, 2, *dog, 2]


def test_truncation_keeps_eos(tokenizer):
    ids = tokenizer(SENTENCES[0])["input_ids"]
    assert tokenizer(SENTENCES[0], truncation=True, max_length=3)["input_ids"] == [*ids[:2], 2]


def test_padding_is_on_the_right_and_the_model_only_gets_ids_and_mask(tokenizer):
    batch = tokenizer(["the", "the the"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0][-1] == tokenizer.pad_token_id
    assert batch["attention_mask"] == [[1, 1, 0], [1, 1, 1]]


# Pieces


def test_pieces_never_mix_words_digits_punctuation_and_spaces(trained):
    kinds = re.compile(r" ?[^\W\d_]+| ?[^\w\s]+|\d|\s")
    pieces = [
        piece for piece, id_ in trained.get_vocab().items() if id_ >= 260 and len(piece.strip()) > 1
    ]
    assert {" Hund", " dog", " --"} <= set(pieces)
    assert [piece for piece in pieces if not kinds.fullmatch(piece)] == []


def test_a_word_has_the_same_pieces_at_any_position(trained):
    assert trained.tokenize("dog dog") == [" dog", " dog"]


def test_names_with_underscores_are_words():
    """As in SCAN's actions: a sequence has one token for each action."""
    tokenizer = train_tokenizer(["I_JUMP I_TURN_LEFT"] * 4, 300, show_progress=False)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("I_TURN_LEFT I_JUMP")["input_ids"])
    assert pieces == [" I_TURN_LEFT", " I_JUMP", "</s>"]


def test_each_digit_is_a_token(trained):
    assert trained.tokenize("2016") == [" ", "2", "0", "1", "6"]


def test_a_pair_of_pieces_merges_from_min_frequency_on():
    assert "ab" in train_tokenizer(["a,ab"], 300, min_frequency=1).get_vocab()
    assert "ab" not in train_tokenizer(["a,ab"], 300, min_frequency=2).get_vocab()


# Saving


def test_the_saved_folder_needs_no_code_of_ours(folder, tmp_path):
    text = "Der Hund </s> ▁ <0x41> ☃"
    code = f"""
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
ids = tokenizer({text!r})["input_ids"]
print(json.dumps([ids, tokenizer.decode(ids, skip_special_tokens=True), tokenizer.is_fast]))
"""
    ids, decoded, is_fast = in_new_process(code, False, tmp_path)
    assert ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert decoded == text
    assert is_fast
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_length_is_unlimited_by_default(trained, folder, tmp_path):
    assert AutoTokenizer.from_pretrained(folder).model_max_length > 10**20
    limited = train_tokenizer(SENTENCES, 300, model_max_length=5, show_progress=False)
    limited.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(reloaded(SENTENCES[0], truncation=True)["input_ids"]) == 5


# Training


def test_training_twice_gives_the_same_tokenizer(trained):
    again = train_tokenizer(SENTENCES * 3, 400, show_progress=False)
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_the_vocabulary_has_the_requested_size(trained):
    assert len(trained) == 400


def test_a_small_corpus_gives_a_smaller_vocabulary_and_a_warning(caplog):
    with caplog.at_level(logging.INFO, "vanilla_transformer"):
        tokenizer = train_tokenizer(["ab ab"], 8000, show_progress=False)
    assert len(tokenizer) == 260 + len({"a", "b", " ", " a", " ab"})
    assert "265 tokens of 8000" in caplog.text


def test_texts_are_read_once_one_by_one():
    def texts() -> Iterator[str]:
        yield from SENTENCES

    from_list = train_tokenizer(SENTENCES, 300, show_progress=False)
    from_iterator = train_tokenizer(texts(), 300, show_progress=False)
    assert from_iterator.get_vocab() == from_list.get_vocab()


def test_an_alphabet_larger_than_the_vocabulary_leaves_room_for_merges():
    rare = [chr(0x4E00 + i) for i in range(3000)]
    tokenizer = train_tokenizer([*rare, *SENTENCES * 5], 400, show_progress=False)
    assert len(tokenizer) == 400
    assert tokenizer.tokenize("Hund") == [" Hund"]
    assert_lossless(tokenizer, "".join(rare))


@pytest.mark.parametrize("size", [0, 261])
def test_too_small_a_vocabulary_is_refused_before_the_texts_are_read(size):
    def texts() -> Iterator[str]:
        raise AssertionError("read")
        yield

    with pytest.raises(
        ValueError, match=rf"vocab_size={size}: expected at least 262, for 4 special tokens"
    ):
        train_tokenizer(texts(), size)


@pytest.mark.parametrize("texts", ["one string", b"bytes"])
def test_a_single_string_is_not_a_corpus(texts):
    with pytest.raises(TypeError, match="iterable of strings, got a single string"):
        train_tokenizer(texts)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["nested"]])
def test_a_text_that_is_not_a_string_is_reported(text):
    with pytest.raises(TypeError, match=f"text 2 is not a string but {type(text).__name__}"):
        train_tokenizer(["fine", text], show_progress=False)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_an_empty_corpus_is_refused(texts):
    with pytest.raises(ValueError, match="there is no text to train a tokenizer on"):
        train_tokenizer(texts, show_progress=False)


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="needs the Multi30k text in ../shared/data")
def test_multi30k_has_about_one_piece_per_word():
    def texts(stem: str) -> list[str]:
        return (MULTI30K / stem).read_text("utf-8").split("\n")[:-1]

    tokenizer = train_tokenizer(texts("train.en") + texts("train.de"), 8000, show_progress=False)
    assert len(tokenizer) == 8000
    for language, most in (("en", 1.22), ("de", 1.36)):
        held_out = texts(f"val.{language}")
        pieces = sum(len(ids) - 1 for ids in tokenizer(held_out)["input_ids"])
        assert pieces / sum(len(text.split()) for text in held_out) < most


def test_the_same_text_gives_the_same_tokenizer_in_each_process(tmp_path):
    """If more equally rare characters occur than fit, the choice between them is deterministic."""
    texts = [chr(0x4E00 + n) * 2 + " " + "common " * 3 for n in range(400)]
    code = (
        "import json\n"
        "from vanilla_transformer.data.tokenization import train_tokenizer\n"
        f"print(json.dumps(train_tokenizer({texts}, 400, show_progress=False).get_vocab()))\n"
    )
    vocabulary = train_tokenizer(texts, 400, show_progress=False).get_vocab()
    assert in_new_process(code, True, tmp_path) == vocabulary
    kept = [token for token in vocabulary if "\u4e00" <= token <= "\u5000"]
    assert min(kept) == "\u4e00"
    assert max(kept) == chr(0x4E00 + len(kept) - 1)
