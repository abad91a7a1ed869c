"""transformers' FSMT: random small models, made on the spot."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
)

from vanilla_transformer.conversion import convert, convert_back, find_format, read
from vanilla_transformer.conversion.check import Converted, largest_difference
from vanilla_transformer.conversion.core import ConversionOptions
from vanilla_transformer.conversion.fsmt import load_toolkit
from vanilla_transformer.serving.languages import languages_of_card

pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")

WORDS = {
    "source": ["<s>", "<pad>", "</s>", "<unk>", "l", "o", "w", "lo", "low</w>", "e", "r</w>"],
    "target": ["<s>", "<pad>", "</s>", "<unk>", "n", "ew</w>", "e", "w</w>", "t", "o</w>", "a</w>"],
}
MERGES = "l o 10\nlo w</w> 9\ne w</w> 8\n"


@pytest.fixture
def saved(tmp_path):
    """A folder as `save_pretrained` leaves it, with vocabularies, and its model."""

    def save(name="fsmt", tie=False, change=lambda model: None, size=11, **fields):
        torch.manual_seed(0)
        config = FSMTConfig(
            langs=["en", "de"],
            src_vocab_size=size,
            tgt_vocab_size=size,
            d_model=16,
            encoder_layers=2,
            decoder_layers=3,
            encoder_ffn_dim=20,
            decoder_ffn_dim=28,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            max_position_embeddings=40,
            tie_word_embeddings=tie,
            **fields,
        )
        model = FSMTForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name_, parameter in model.named_parameters():
                if "embed_positions" not in name_:
                    parameter.normal_(std=0.3)
        change(model)
        folder = tmp_path / name
        model.save_pretrained(folder)
        for side, short in (("source", "src"), ("target", "tgt")):
            vocab = {word: number for number, word in enumerate(WORDS[side])}
            (folder / f"vocab-{short}.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text(MERGES)
        return folder, model

    return save


def folder_with_languages(folder):
    """FSMT's own tokenizer needs them."""
    FSMTTokenizer.from_pretrained(folder, langs=["en", "de"]).save_pretrained(folder)
    return folder


def untie(model):
    model.model.decoder.output_projection.weight = torch.nn.Parameter(torch.randn(11, 16))


def share_target(model):
    decoder = model.model.decoder
    decoder.output_projection.weight = torch.nn.Parameter(decoder.embed_tokens.weight.clone())


SHARING = {
    "three matrices": {"change": untie},
    "target and projection": {"change": share_target},
    "one matrix": {"tie": True},
}


def inputs():
    source = torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 1, 1]])
    target = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
    # With a cache, FSMT masks nothing: a target token attends to later ones.
    return {
        "input_ids": source,
        "attention_mask": source.ne(1).long(),
        "decoder_input_ids": target,
        "use_cache": False,
    }


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("fields", [{}, {"scale_embedding": False, "activation_function": "gelu"}])
def test_logits_are_equal_and_it_is_converted_back(saved, tmp_path, sharing, fields):
    folder, theirs = saved(**SHARING[sharing], **fields)
    output = convert(folder, tmp_path / "converted")
    ours = AutoModelForSeq2SeqLM.from_pretrained(output).eval()
    with torch.no_grad():
        expected, found = (model(**inputs()).logits.log_softmax(-1) for model in (theirs, ours))
    assert (expected - found[..., :11]).abs().max() < 1e-5
    assert (found[..., 11:] < -1000).all()  # tokens that are only needed for pieces of text
    assert languages_of_card(output / "README.md") == ("en", "de")
    back = convert_back(output, tmp_path / "back", "fsmt")
    one, other = (load_file(each / "model.safetensors") for each in (folder, back))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = FSMTForConditionalGeneration.from_pretrained(back).eval()
    assert torch.equal(again(**inputs()).logits.log_softmax(-1), expected)
    files = {file.name for file in folder.iterdir()}
    assert files == {file.name for file in back.iterdir()}


def test_words_are_split_as_by_its_own_tokenizer(saved, tmp_path):
    output = convert(saved()[0], tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(output)
    low_er = [8, 7, 6, 9, 10, 2]  # "low</w>"; "lo", "w", "e", "r</w>"
    assert tokenizer("low lower")["input_ids"] == low_er
    assert tokenizer("low\u00a0low")["input_ids"] == [8, 8, 2]  # at all white space
    assert tokenizer.decode([4, 5, 2], skip_special_tokens=True) == "new"


TEXTS = [
    "“Good” – it's £5,000.50 (approx.)… isn't it?", "Mr. Smith's e-mail: a@b.de & more", "", " ",
    "Größe\u00a0und\u200b naïve ½ ﬁn", "你好， 世界！ Привет",
    "👩🏽‍🚀 [x] | &amp; 'q'", "and/or well-known",
]  # fmt: skip


def test_plain_text_is_encoded_and_decoded_as_by_its_own_tokenizer(saved, tmp_path):
    """With Moses before and after; words are single characters here, so that none is unknown."""
    characters = sorted(set("".join(TEXTS)) | set("&#;apostquglrsqb1234590\"'-.,%…@"))
    pieces = [piece for one in characters for piece in (one, f"{one}</w>") if not one.isspace()]
    vocab = {piece: number for number, piece in enumerate([*WORDS["source"][:4], *pieces])}
    folder, _ = saved(size=len(vocab))
    for name in ("vocab-src.json", "vocab-tgt.json"):
        (folder / name).write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("")
    theirs = FSMTTokenizer.from_pretrained(folder_with_languages(folder))
    convert(folder, tmp_path / "converted")
    ours = AutoTokenizer.from_pretrained(tmp_path / "converted")
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids == ours.encode(text)
        expected = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=True) == expected
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    ids = ours(text_target=TEXTS)["input_ids"]
    assert ours.batch_decode(ids, skip_special_tokens=True) == [
        theirs.decode(one, skip_special_tokens=True) for one in ids
    ]


def test_moses_can_not_be_given_as_the_model_has_its_own_with_normalization(saved):
    folder, _ = saved()
    with pytest.raises(ValueError, match=r"moses=\['en', 'de'\]: .* its own: .*'normalize': True"):
        read(folder, ConversionOptions(moses=["en", "de"]))


def test_a_check_treats_tokens_that_only_the_converted_model_has_as_unknown(saved, tmp_path):
    folder, theirs = saved()
    ours = Converted(convert(folder, tmp_path / "converted"))
    toolkit = load_toolkit(folder_with_languages(folder), ConversionOptions())
    sources = ours.tokenizer(["low ew"])["input_ids"]
    assert max(sources[0]) >= theirs.config.src_vocab_size
    assert largest_difference(toolkit, ours, sources, [[4, 5, 2]]) < 1e-5


def test_it_generates_the_same_as_fsmt(saved, tmp_path):
    folder, theirs = saved(change=untie)
    ours = AutoModelForSeq2SeqLM.from_pretrained(convert(folder, tmp_path / "converted"))
    source = {name: inputs()[name] for name in ("input_ids", "attention_mask")}
    for options in ({"num_beams": 1}, {"num_beams": 4}):
        expected = theirs.generate(**source, max_length=12, **options)
        assert torch.equal(ours.generate(**source, max_length=12, **options), expected)
    assert ours.generation_config.max_length == 200
    assert ours.generation_config.num_beams == 5


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_option_of_its_search_is_kept(saved, file):
    """Before transformers 4.27, they were in the configuration."""
    folder, _ = saved()
    config = folder / "generation_config.json"
    options = {"min_length": 4, "repetition_penalty": 1.5, "num_beams": 9, "temperature": 0.5}
    if file == "config.json":
        config.unlink()
    written = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(written | options))
    generation = read(folder).generation
    kept = ("min_length", "repetition_penalty", "num_beams", "max_length")
    assert [generation[name] for name in kept] == [4, 1.5, 9, 200]
    assert "temperature" not in generation  # without effect on beams


def test_the_prefix_of_its_pipelines_is_kept(saved):
    folder, _ = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "prefix": "translate: "}))
    assert read(folder).config.prefix == "translate: "


def test_an_unknown_tensor_is_reported(saved):
    folder, _ = saved()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.layers.0.adapter.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert find_format(folder).NAME == "fsmt"
    with pytest.raises(ValueError, match=r"encoder.layers.0.adapter.weight"):
        read(folder)


def test_a_vocabulary_that_does_not_match_is_reported(saved):
    folder, _ = saved()
    (folder / "vocab-tgt.json").write_text('{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}')
    with pytest.raises(ValueError, match=r"vocab-tgt.json: holds 4 tokens, expected 11"):
        read(folder)


def test_a_truncated_file_is_reported(saved):
    folder, _ = saved()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model.safetensors: expected a complete"):
        read(folder)
