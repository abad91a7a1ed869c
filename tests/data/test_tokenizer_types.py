"""Tokenizers other than the default: unigrams, characters, words; two vocabularies; user tokens."""

import unicodedata
from weakref import WeakSet

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from vanilla_transformer.data.tokenization import TOKENIZER_TYPES, UNICODE_FORMS, train_tokenizer
from vanilla_transformer.data.tokenizer_options import (
    TokenizerArguments,
    import_bpe_codes,
    log_coverage,
    warn_of_split_tokens,
)

TEXTS = [
    "The dog <num> runs through the green grass.",
    "Der Hund rennt durch das grüne Gras.",
    "Zwei Hunde , 2016 !",
    "中文 也 可以",
] * 3
SMILES = ["C C ( = O ) O c 1 c c c c c 1", "[nH] Br Cl", "N # C [C@@H]"] * 2
TRICKY = [
    "", " ", "  two ", "<num>", " <num>", "<num> <num>", "a<num>b", "a <num> b ", "<2fr> hallo",
    "</s> <pad> <unk>", "<0x41>", "emoji 😀", "▁ \t\n", "the<2fr>",
]  # fmt: skip


def trained(texts=TEXTS, size=400, **options):
    return train_tokenizer(texts, size, show_progress=False, **options)


def reloaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("user_tokens", [[], ["<2fr>", "<num>"]])
@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_a_saved_tokenizer_encodes_any_text_losslessly(kind, user_tokens, tmp_path):
    tokenizer = reloaded(trained(tokenizer_type=kind, user_tokens=user_tokens), tmp_path)
    for text in TEXTS + TRICKY:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert not set(ids[:-1]) & set(tokenizer.all_special_ids), "a text spells a special token"


@pytest.mark.parametrize("texts", [TEXTS, SMILES])
def test_known_words_are_encoded_losslessly(texts, tmp_path):
    tokenizer = reloaded(trained(texts, tokenizer_type="word"), tmp_path)
    for text in texts:
        assert pieces(tokenizer, text) == [*text.split(), "</s>"]
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert pieces(tokenizer, "xyz </s> <pad>")[0] == "<unk>"
    assert not {0, 2} & set(tokenizer("a </s> <pad> b")["input_ids"][:-1])


def test_the_word_unk_in_a_text_does_not_change_the_ids_of_tokens():
    """The trainer of `tokenizers` would leave a gap, and give its last word the id of <BT>."""
    texts = ["a </s> b <unk> c", "a b d"]
    tokenizer = train_tokenizer(texts, tokenizer_type="word", user_tokens=["<BT>"])
    assert tokenizer.convert_tokens_to_ids(["<unk>", "<BT>"]) == [3, len(tokenizer) - 1]
    for text in ("a b c d", "<BT> a b"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_types_differ_in_their_pieces():
    text = "Der Hund"
    cut = {kind: pieces(trained(tokenizer_type=kind), text)[:-1] for kind in TOKENIZER_TYPES}
    assert cut["char"] == list(text)
    assert cut["word"] == ["Der", "Hund"]
    for kind in ("bpe", "unigram"):
        assert "".join(cut[kind]) == f" {text}"
        assert len(cut[kind]) < len(text)


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_vocab_size_limits_all_ids_together(kind):
    texts = [*TEXTS, "".join(map(chr, range(0x4E00, 0x4F00)))]
    size = 20 if kind == "word" else 280
    tokenizer = trained(texts, size, tokenizer_type=kind, user_tokens=["<a>", "<b>"])
    assert size - 5 < len(tokenizer) <= size
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_user_tokens_are_never_split(kind, tmp_path):
    tokenizer = reloaded(
        trained(tokenizer_type=kind, user_tokens=["<2fr>", "{name}"], lowercase=True), tmp_path
    )
    tags = tokenizer.convert_tokens_to_ids(["<2fr>", "{name}"])
    for text in ("<2fr> der {name} .", "der{name}.<2fr>", "<2FR> {NAME}"):
        found = [number for number in tokenizer(text)["input_ids"] if number in tags]
        assert sorted(found) == sorted(tags), text


def test_text_that_starts_with_a_tag_has_no_piece_for_a_space_before_it():
    assert pieces(trained(user_tokens=["<2fr>"]), "<2fr> Der")[0] == "<2fr>"


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_text_can_consist_of_user_tokens_only(kind):
    tokenizer = trained(["<a>", "<b><a>"], tokenizer_type=kind, user_tokens=["<a>", "<b>"])
    assert pieces(tokenizer, "<b><a>") == ["<b>", "<a>", "</s>"]


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_case_and_unicode_form_are_saved(kind, tmp_path):
    options = {"lowercase": True, "unicode_normalization": "nfkc"}
    tokenizer = reloaded(trained(tokenizer_type=kind, **options), tmp_path)
    assert tokenizer("ＤＥＲ Hund")["input_ids"] == tokenizer("der hund")["input_ids"]
    assert tokenizer.decode(tokenizer("Der HUND")["input_ids"][:-1]) == "der hund"


@pytest.mark.parametrize("form", ["nfc", "nfd"])
def test_lower_case_handles_the_final_sigma_of_greek_words(form):
    tokenizer = trained(tokenizer_type="char", lowercase=True, unicode_normalization=form)
    text = "Ὁ ΣΟΦῸΣ ΠΑΎΛΟΣ, ΣΑΣ! Σ ΣΑ İI ẞ"
    expected = unicodedata.normalize(form.upper(), text).lower()
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == expected


def test_without_a_unicode_form_text_is_unchanged():
    tokenizer = trained(unicode_normalization="none")
    ids = tokenizer("u\u0308 Ａ")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "u\u0308 Ａ"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_type": "morphemes"}, "tokenizer_type='morphemes': expected one of bpe,"),
        ({"unicode_normalization": "utf8"}, "unicode_normalization='utf8': expected one of nfc,"),
        ({"user_tokens": ["<a>", ""]}, "user_tokens has '': expected a token"),
        ({"user_tokens": ["a b"]}, "user_tokens has 'a b'"),
        ({"user_tokens": ["</s>"]}, "user_tokens has '</s>'"),
        ({"user_tokens": ["<a>", "<a>"]}, "'<a>' twice"),
        ({"target_tokenizer_type": "word"}, "expected separate_vocabularies with it"),
        ({"target_unicode_normalization": "nfc"}, "expected separate_vocabularies with it"),
        ({"target_unicode_normalization": "utf8"}, "normalization='utf8': expected one of nfc,"),
        ({"target_vocab_size": 300}, "target_vocab_size=300: expected separate_vocabularies"),
        ({"vocab_size": 2**31}, r"vocab_size=2147483648: expected less than 2\^31"),
        ({"target_vocab_size": 2**31}, r"target_vocab_size=2147483648: expected less than 2\^31"),
    ],
)
def test_invalid_options_are_reported_before_any_text_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        TokenizerArguments(**options)


# Two vocabularies


def pairs():
    return Dataset.from_dict({"source": ["abc <t>", "cab"], "target": ["a: b", "b a:"]})


def two(**options):
    return TokenizerArguments(
        tokenizer_type="char", separate_vocabularies=True, target_tokenizer_type="word", **options
    ).train(pairs())


def test_each_side_has_a_vocabulary_of_its_own_from_a_saved_folder_too(tmp_path):
    tokenizer = two()
    for one in (tokenizer, reloaded(tokenizer, tmp_path)):
        encoded = one(["cab"], text_target=["b a:"])
        assert one.convert_ids_to_tokens(encoded["input_ids"][0]) == ["c", "a", "b", "</s>"]
        assert one.decode(encoded["labels"][0], skip_special_tokens=True) == "b a:"
        assert one.target_vocab_size == 4 + 2


def test_each_side_can_have_its_own_size():
    texts = Dataset.from_dict({"source": ["abc"], "target": ["one two two three three"]})
    for size in (6, 7):
        arguments = TokenizerArguments(
            tokenizer_type="word", separate_vocabularies=True, target_vocab_size=size
        )
        tokenizer = arguments.train(texts)
        assert (len(tokenizer), tokenizer.target_vocab_size) == (4 + 1, size)


def test_both_sides_are_lower_cased():
    texts = Dataset.from_dict({"source": ["ABC"], "target": ["ÉA"]})
    arguments = TokenizerArguments(
        tokenizer_type="char", lowercase=True, separate_vocabularies=True
    )
    encoded = arguments.train(texts)("ABC", text_target="ÉA")
    assert encoded == arguments.train(texts)("abc", text_target="éa")


def test_each_side_can_have_its_own_unicode_form(tmp_path):
    """Korean to phones: syllables become letters, and phones do not change."""
    pairs = Dataset.from_dict({"source": ["한국", "말"], "target": ["ç ɐ n", "é"]})
    tokenizer = TokenizerArguments(
        tokenizer_type="char", separate_vocabularies=True, target_tokenizer_type="word",
        unicode_normalization="jamo", target_unicode_normalization="nfd",
    ).train(pairs)  # fmt: skip
    for one in (tokenizer, reloaded(tokenizer, tmp_path)):
        encoded = one("한", text_target="ç é")
        assert one.convert_ids_to_tokens(encoded["input_ids"]) == [
            "\u1112",
            "\u1161",
            "\u11ab",
            "</s>",
        ]
        assert len(encoded["labels"]) == 3
        decoded = one.decode(encoded["labels"], skip_special_tokens=True)
        assert decoded == unicodedata.normalize("NFD", "ç é")


@pytest.mark.parametrize(
    "text", ["값 각가", "e\u0301tude", "й が क़", "\u1112\u1161\u11ab", "ᄀ a ᅡ", ""]
)
def test_jamo_is_nfc_with_the_letters_of_hangul(text):
    """As Python's own Unicode data has them: NFD of each syllable, NFC of all else."""
    composed = unicodedata.normalize("NFC", text)
    expected = "".join(
        unicodedata.normalize("NFD", character) if "가" <= character <= "힣" else character
        for character in composed
    )
    assert UNICODE_FORMS["jamo"]().normalize_str(text) == expected


def test_user_tokens_are_in_both_vocabularies():
    tokenizer = two(user_tokens=["<t>"])
    encoded = tokenizer("a<t>b", text_target="a: <t>")
    assert len(encoded["input_ids"]) == 4
    assert tokenizer.decode(encoded["labels"], skip_special_tokens=True) == "a: <t>"


def test_coverage_leaves_out_unknown_words_and_the_bytes_of_characters(caplog):
    """Of 4 words and 2 EOS tokens, one is unknown; of 5 letters and 2 EOS tokens, one becomes 3
    bytes."""
    caplog.set_level("INFO")
    tokenizer = TokenizerArguments(
        tokenizer_type="word", separate_vocabularies=True, target_tokenizer_type="char",
    ).train(Dataset.from_dict({"source": ["a b"], "target": ["ab"]}))  # fmt: skip
    encoded = tokenizer(["a b", "a c"], text_target=["ab中", "ab"])
    columns = {name: encoded[name] for name in ("input_ids", "labels")}
    log_coverage(Dataset.from_dict(columns), tokenizer)
    assert caplog.messages[-2:] == [
        "Source: 6 tokens in the vocabulary, 3.0 in a sentence, coverage 83.333%",  # 5 of 6
        "Target: 263 tokens in the vocabulary, 4.5 in a sentence, coverage 66.667%",  # 6 of 9
    ]


# Vocabularies of other tools


@pytest.fixture
def codes(tmp_path):
    """Two merges in the format of subword-nmt: "lo", and "low" at the end of a word."""
    file = tmp_path / "codes"
    file.write_text("#version: 0.2\nl o\nlo w</w>\n")
    return file


def test_bpe_codes_split_text_as_subword_nmt_does(codes, tmp_path):
    texts = Dataset.from_dict({"source": ["low lower <num>"], "target": ["slow"]})
    arguments = TokenizerArguments(bpe_codes=[str(codes)], user_tokens=["<num>"])
    tokenizer = reloaded(arguments.train(texts), tmp_path / "saved")
    text = "slow <num> lower"
    assert pieces(tokenizer, text) == ["s", "low</w>", "<num>", "lo", "w", "e", "r</w>", "</s>"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_vocabulary_of_bpe_codes_has_sorted_characters_before_merges(codes):
    texts = Dataset.from_dict({"source": ["b a"], "target": ["l"]})
    vocabulary = TokenizerArguments(bpe_codes=[str(codes)]).train(texts).get_vocab()
    assert sorted(vocabulary, key=vocabulary.get) == [
        "<pad>", "<s>", "</s>", "<unk>", "a", "b", "l", "a</w>", "b</w>", "l</w>",
        "o", "lo", "w</w>", "low</w>",
    ]  # fmt: skip


def test_the_texts_of_bpe_codes_are_not_kept_in_memory(codes):
    class Text(str):
        """Can be referred to without keeping it, unlike a plain string."""

    def texts():
        for number in range(9):
            alive.add(text := Text(f"low {number}"))
            most.append(len(alive))
            yield text
            del text

    alive, most = WeakSet(), []
    assert "w</w>" in import_bpe_codes(str(codes), texts()).get_vocab()
    assert max(most) <= 2


def test_each_side_can_have_its_own_bpe_codes(codes, tmp_path):
    other = tmp_path / "other"
    other.write_text("#version: 0.2\ns l\n")
    texts = Dataset.from_dict({"source": ["slow"], "target": ["slow"]})
    tokenizer = TokenizerArguments(bpe_codes=[str(codes), str(other)]).train(texts)
    encoded = tokenizer("slow", text_target="slow")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["s", "low</w>", "</s>"]
    target = tokenizer.target_tokenizer
    assert list(map(target.id_to_token, encoded["labels"])) == ["sl", "o", "w</w>", "</s>"]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_sentencepiece_model_keeps_its_pieces_and_ids(model_type, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path / "spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=70, model_type=model_type,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(f"{prefix}.model")
    arguments = TokenizerArguments(sentencepiece_model=[f"{prefix}.model"], user_tokens=["<2fr>"])
    tokenizer = reloaded(arguments.train(pairs()), tmp_path / "saved")
    for text in TEXTS[1:4]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [*original.encode(text), tokenizer.eos_token_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.pad_token_id >= original.vocab_size()
    tag = tokenizer("<2fr>")["input_ids"][-2]
    assert tag in tokenizer("Hund<2fr>Hund")["input_ids"]


def test_a_sentencepiece_model_keeps_its_special_tokens(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path / "spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=70, minloglevel=2,
        hard_vocab_limit=False, pad_id=0, bos_id=1, eos_id=2, unk_id=3, unk_piece="[?]",
    )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(f"{prefix}.model")
    arguments = TokenizerArguments(sentencepiece_model=[f"{prefix}.model"])
    tokenizer = reloaded(arguments.train(pairs()), tmp_path / "saved")
    assert len(tokenizer) == original.vocab_size()
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer("Hund \u0416")["input_ids"] == [*original.encode("Hund \u0416"), 2]


@pytest.mark.parametrize("pad", [-1, 3])
def test_each_side_can_have_its_own_sentencepiece_model_with_the_same_padding(pad, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    files = []
    for size in (60, 70):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / str(size)), pad_id=pad,
            vocab_size=size, model_type="bpe", hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        files.append(str(tmp_path / f"{size}.model"))
    arguments = TokenizerArguments(sentencepiece_model=files)
    if pad == -1:  # SentencePiece's default: padding follows the pieces
        with pytest.raises(ValueError, match=r"<pad> has the id 60 with .* and 70 .*--pad_id=3"):
            arguments.train(pairs())
    else:
        assert arguments.train(pairs()).pad_token_id == pad


def test_control_symbols_of_sentencepiece_are_whole_as_user_tokens(tmp_path, caplog):
    """SentencePiece splits a control symbol that occurs in a text."""
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path / "spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=70, minloglevel=2,
        hard_vocab_limit=False, control_symbols=["<2fr>", "<2es>"],
    )  # fmt: skip
    tags = ["<2fr>", "<2de>"]
    arguments = TokenizerArguments(sentencepiece_model=[f"{prefix}.model"], user_tokens=tags)
    tokenizer = reloaded(arguments.train(pairs()), tmp_path / "saved")
    original = sentencepiece.SentencePieceProcessor(f"{prefix}.model")
    assert original.piece_to_id("<2fr>") in tokenizer("<2fr> Hund")["input_ids"]
    warn_of_split_tokens(tags, tokenizer)
    assert not caplog.records
    warn_of_split_tokens(["<2es>"], tokenizer)
    assert "The tokenizer reads the user token '<2es>' as" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bpe_codes": ["nowhere"]}, "bpe_codes='nowhere': expected a file"),
        ({"sentencepiece_model": ["codes"] * 3}, "expected a file, or one for each side"),
        (
            {"sentencepiece_model": ["codes"], "bpe_codes": ["codes"]},
            "expected no sentencepiece_model",
        ),
        ({"bpe_codes": "codes", "lowercase": True}, "lowercase=True: expected neither"),
        ({"sentencepiece_model": "codes", "lowercase": True}, "lowercase=True: expected neither"),
        (
            {
                "bpe_codes": ["codes"],
                "separate_vocabularies": True,
                "target_tokenizer_type": "word",
            },
            "target_tokenizer_type='word': expected neither",
        ),
    ],
)
def test_invalid_imports_are_reported(options, message, codes, monkeypatch):
    monkeypatch.chdir(codes.parent)
    with pytest.raises(ValueError, match=message):
        TokenizerArguments(**options)
