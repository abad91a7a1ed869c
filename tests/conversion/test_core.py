"""What the converters share."""

import io
import json

import pytest
import torch
from conftest import small_config
from huggingface_hub import metadata_load

from conversion.models import embeddings, random_model, split_state
from conversion.reference import checkpoint_folder
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.conversion import ConversionOptions, core, fairseq, read
from vanilla_transformer.conversion.saving import ARCHITECTURE, read_record, restore, save
from vanilla_transformer.conversion.text import side_tokenizer
from vanilla_transformer.conversion.weights import (
    PROJECTION,
    PROJECTION_BIAS,
    SHARED,
    SOURCE,
    TARGET,
    add_rows,
    interleave_halves,
    interleaved,
    separated,
    tie,
)
from vanilla_transformer.data.vocabularies import Specials
from vanilla_transformer.model.loss import SUPPRESSED


def test_interleaving_and_separating_are_inverse():
    order, back = interleaved(8), separated(8)
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert order[back].tolist() == back[order].tolist() == list(range(8))


def test_a_matrix_with_two_names_is_only_permuted_once():
    matrix = torch.arange(8.0).view(1, 8)
    weights = {TARGET: matrix, PROJECTION: matrix}
    interleave_halves(weights)
    assert weights[TARGET].tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("projection_is_source", [False, True])
def test_two_of_three_matrices_can_be_tied(tmp_path, tokenizer, projection_is_source):
    """Such as source and target embedding, with a separate projection."""
    model = random_model(tie_word_embeddings=False)
    weights = split_state(model)
    source, target, projection = embeddings(model)
    matrices = (source, target, source) if projection_is_source else (source, source, projection)
    tied, fields = tie(*matrices)
    assert fields["tie_word_embeddings"] is False
    save(core.Conversion(model.config, weights | tied, tokenizer), tmp_path)
    saved = core.read_transformers_weights(tmp_path)
    for name, matrix in zip((SOURCE, TARGET, PROJECTION), matrices, strict=True):
        assert torch.equal(saved[name], matrix)


def test_equal_matrices_are_tied():
    source, target, projection = torch.randn(3, 5, 4)
    longer = torch.randn(7, 4)
    found = {
        "all": tie(source, source.clone(), source.clone()),
        "of the target": tie(source, target, target.clone()),
        "of a longer target": tie(source, longer, longer.clone()),
        "none": tie(source, target, projection),
        "none, with a longer target": tie(source, longer, longer + 1),
    }
    fields = ("tie_word_embeddings", "vocab_size", "decoder_vocab_size")
    assert {
        name: (*map(tied.get, fields), *weights) for name, (weights, tied) in found.items()
    } == {
        "all": (True, 5, None, SHARED),
        "of the target": (True, 5, 5, SOURCE, TARGET),
        "of a longer target": (True, 5, 7, SOURCE, TARGET),
        "none": (False, 5, None, SOURCE, TARGET, PROJECTION),
        "none, with a longer target": (False, 5, 7, SOURCE, TARGET, PROJECTION),
    }


@pytest.mark.parametrize(
    ("languages", "named"),
    [
        (["de", "eng"], {"language": ["de", "eng"]}),
        (["pt_BR", "en"], {"language": ["pt", "en"], "language_bcp47": ["pt-BR", "en"]}),
        (["src", "tgt"], {}),
        (["source", "en"], {}),
        (["de", None], {}),
        ([], {}),
    ],
)
def test_the_card_names_two_languages_or_none(model, tokenizer, tmp_path, languages, named):
    weights = split_state(model)
    save(core.Conversion(model.config, weights, tokenizer, languages=languages), tmp_path)
    header = metadata_load(tmp_path / "README.md")
    assert {name: header[name] for name in header if name.startswith("language")} == named


def test_files_of_one_name_are_kept_if_they_are_equal(model, tokenizer, tmp_path):
    """Such as a dictionary for both sides, in a folder of each."""
    files = [tmp_path / side / "dict.txt" for side in core.SIDES]
    for file in files:
        file.parent.mkdir()
        file.write_text("a 1\n")
    conversion = core.Conversion(model.config, split_state(model), tokenizer, files=files)
    folder = save(conversion, tmp_path / "converted")
    assert (folder / "original/dict.txt").read_text() == "a 1\n"


def test_moses_languages_are_those_of_the_model():
    folder = checkpoint_folder("marian/post")
    assert read(folder).languages == ()
    assert read(folder, ConversionOptions(moses=["de", "en"])).languages == ["de", "en"]


@pytest.mark.parametrize("shape", [(2, 4), (3,)])
def test_a_tensor_of_a_different_shape_is_reported(shape):
    tensors = core.Tensors({"a": torch.zeros(2, 3)}, "file.pt")
    with pytest.raises(ValueError, match=r"file.pt: tensor 'a' has shape \(2, 3\), expected \("):
        tensors.take("a", *shape)


def test_a_missing_tensor_is_reported():
    tensors = core.Tensors({}, "file.pt")
    with pytest.raises(ValueError, match=r"file.pt: expected a tensor 'a' of shape \(2, any\)"):
        tensors.take("a", 2, None)


def test_unused_tensors_are_reported():
    tensors = core.Tensors({name: torch.zeros(1) for name in ("a", "b", "version")}, "file.pt")
    tensors.take("a")
    with pytest.raises(ValueError, match=r"file.pt: tensors .* does not know: b$"):
        tensors.expect_all_taken(["vers.*"])


def test_views_and_transposed_matrices_are_saved_with_their_values(tmp_path, tokenizer):
    model = random_model()
    whole = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    weights, start = {}, 0
    for name, tensor in model.state_dict().items():
        view = whole[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
        weights[name] = tensor.T.contiguous().T if name.endswith("fc1.weight") else view
    for name in model.all_tied_weights_keys:
        del weights[name]
    save(core.Conversion(model.config, dict(weights), tokenizer), tmp_path)
    saved = core.read_transformers_weights(tmp_path)
    assert {*saved} == {*weights}
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("option", "value"), [("heads", 2), ("like", "transformers")])
def test_an_option_that_the_format_does_not_use_is_reported(option, value):
    options = ConversionOptions(**{option: value})
    message = f"{option}={value!r} has no effect on a checkpoint of fairseq: expected source_voc"
    with pytest.raises(ValueError, match=message):
        options.expect_only(fairseq.READS, fairseq.NAME)


def test_added_tokens_do_not_change_the_training_loss():
    config = small_config(dropout=0.0, label_smoothing=0.2, vocab_size=48)
    model = VanillaTransformerForConditionalGeneration(config)
    weights = model.state_dict()
    for name in model.all_tied_weights_keys:
        del weights[name]
    add_rows(weights, "target", 1)
    add_rows(weights, "source", 5, copy_of=3)
    config = small_config(dropout=0.0, label_smoothing=0.2, vocab_size=54, lm_head_bias=True)
    larger = VanillaTransformerForConditionalGeneration(config)
    assert not larger.load_state_dict(weights, strict=False).unexpected_keys
    batch = {"input_ids": torch.randint(3, 48, (2, 5)), "labels": torch.randint(3, 48, (2, 4))}
    torch.testing.assert_close(larger.train()(**batch).loss, model.train()(**batch).loss)


def test_a_record_is_utf_8_in_any_locale(tmp_path, tokenizer, monkeypatch):
    """As where Python opens a text as ASCII by default."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    record = {"format": "fairseq", "words": ["größe", "日本"]}
    model = random_model()
    conversion = core.Conversion(model.config, split_state(model), tokenizer, record=record)
    conversion.weights |= tie(*embeddings(model))[0]
    save(conversion, tmp_path)
    config = {name: getattr(model.config, name) for name in ARCHITECTURE}
    assert read_record(tmp_path) == {**record, "config": config, "sources": {}}
    assert "größe" in (tmp_path / "original/conversion.json").read_text(encoding="utf-8")


def test_a_model_with_another_architecture_is_not_converted_back(tmp_path, tokenizer):
    """Its options would be written as they were, with which it computes something else."""
    model = random_model()
    weights = split_state(model) | tie(*embeddings(model))[0]
    sources = {"encoder.embed_tokens.weight": [SHARED]}
    conversion = core.Conversion(
        model.config, weights, tokenizer, record={"format": "fairseq"}, sources=sources
    )
    save(conversion, tmp_path)
    assert restore(tmp_path, halves=False)
    config = VanillaTransformerConfig.from_pretrained(tmp_path)
    config.activation_function = "gelu"
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activation_function='gelu': expected 'relu', as when"):
        restore(tmp_path, halves=False)


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_trained_bias_without_a_counterpart_is_reported_when_converting_back(
    change, tmp_path, caplog
):
    config = small_config(lm_head_bias=True)
    model = VanillaTransformerForConditionalGeneration(config)
    model.lm_head.bias.data.zero_()[-1] = SUPPRESSED
    model.lm_head.bias.data[3] = change
    model.save_pretrained(tmp_path)
    (tmp_path / "original").mkdir()
    record = {"format": "fairseq", "sources": {"encoder.embed_tokens.weight": [SHARED]}}
    (tmp_path / "original/conversion.json").write_text(json.dumps(record))
    restore(tmp_path, halves=False)
    said = "training has changed the biases of the output by up to 0.5" in caplog.text
    assert said == (change > 0)


@pytest.mark.parametrize("trained", [None, "<unk>", "a piece"])
def test_pieces_that_are_no_longer_unknown_are_reported_when_converting_back(
    trained, tmp_path, caplog
):
    model = VanillaTransformerForConditionalGeneration(small_config())
    rows = model.model.shared.weight.data
    kept, unk = len(rows) - 2, 3
    rows[kept:] = rows[unk]
    if trained is not None:
        rows[unk if trained == "<unk>" else -1] += 0.5
    model.save_pretrained(tmp_path)
    (tmp_path / "original").mkdir()
    record = {"format": "fsmt", "sources": {"encoder.embed_tokens.weight": [f"{SHARED}[:{kept}]"]}}
    (tmp_path / "original/conversion.json").write_text(json.dumps(record))
    restore(tmp_path, halves=False)
    assert ("pieces that are <unk> in this fsmt" in caplog.text) == (trained is not None)


def test_only_tensors_without_a_counterpart_are_reported_when_converting_back(tmp_path, caplog):
    config = small_config(lm_head_bias=True, position_encoding="learned")
    model = VanillaTransformerForConditionalGeneration(config)
    model.lm_head.bias.data.fill_(3.0)
    model.save_pretrained(tmp_path)
    (tmp_path / "original").mkdir()
    sources = {
        "final_logits_bias": [f"{PROJECTION_BIAS}[:48]"],
        "encoder.positions": ["model.encoder.embed_positions.weight[:40]"],
    }
    record = {"format": "hf_marian", "sources": sources}
    (tmp_path / "original/conversion.json").write_text(json.dumps(record))
    restored = restore(tmp_path, halves=False)
    assert torch.equal(restored["final_logits_bias"], torch.full((48,), 3.0))
    (message,) = caplog.messages
    assert "has no place for model.decoder.embed_positions.weight: if training has" in message


@pytest.mark.parametrize("splits_again", [True, False])
def test_a_tag_in_the_vocabulary_is_one_token(tmp_path, splits_again):
    """Toolkits read it before text that was already split; the codes would split it into unknown
    letters."""
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n< 2\n")
    names = ["<s>", "<pad>", "</s>", "<unk>", "<2de>", "__en__", "ab", "a@@", "c"]
    vocabulary = {name: number for number, name in enumerate(names)}
    size = len(names)
    tokenizer = side_tokenizer(vocabulary, Specials(), tmp_path / "codes", size, splits_again)
    for text, ids in (("<2de> ab ac", [4, 6, 7, 8, 2]), ("ab __en__", [6, 5, 2])):
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert 4 not in tokenizer("a<2de>c")["input_ids"]
