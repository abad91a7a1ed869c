"""transformers' `MarianMTModel`: one vocabulary or two, tied or not, and back."""

import io
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    pipeline,
)

from vanilla_transformer import conversion
from vanilla_transformer.conversion import ConversionOptions, hf_marian
from vanilla_transformer.conversion.check import check
from vanilla_transformer.export import export
from vanilla_transformer.serving.languages import languages_of_card

sentencepiece = pytest.importorskip("sentencepiece")

SENTENCES = {
    "source": ["the cat sleeps in the house", "a dog runs", "the house is red", "cats and dogs"],
    "target": ["die Katze schläft im Haus", "ein Hund rennt", "das Haus ist rot", "Hunde, Katzen"],
}
TEXTS = ["the cat runs", "  a  red dog", "", "cats 😀 unknown", ">>de<< the house"]
SIZES = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
    "activation_function": "swish",
    "scale_embedding": True,
}


def save_sentencepiece(folder, side):
    """A separate model for each side: {piece: id}."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES[side] * 50), model_writer=model, vocab_size=40,
        hard_vocab_limit=False, minloglevel=2, bos_id=-1, eos_id=0, unk_id=1,
    )  # fmt: skip
    (folder / f"{side}.spm").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return {pieces.id_to_piece(number): number for number in range(2, len(pieces))}


def save_tokenizer(folder, separate):
    """The vocabulary of OPUS-MT: the pieces of both models, or one vocabulary for each, in a
    different order. Each lacks a piece."""
    source, target = (sorted(save_sentencepiece(folder, side))[1:] for side in SENTENCES)
    sides = [source, target] if separate else [sorted({*source, *target})]
    size = max(map(len, sides)) + 4
    for file, pieces in zip(("vocab.json", "target_vocab.json"), sides, strict=False):
        # The padding has the same id on both sides; unused tokens fill up the smaller vocabulary.
        unused = [f"unused{number}" for number in range(size - len(pieces) - 4)]
        more = ["more"] * (file == "target_vocab.json")
        tokens = ["</s>", "<unk>", ">>de<<", *pieces, *unused, "<pad>", *more]
        (folder / file).write_text(json.dumps(dict(zip(tokens, range(len(tokens)), strict=True))))
    special = {"separate_vocabs": True, "target_vocab_file": "target_vocab.json"}
    settings = {"tokenizer_class": "MarianTokenizer", **(special if separate else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size


def save_marian(folder, separate=False, tied=True, dtype=torch.float32, **options):
    """The folder of a random model with biases, norms and a final_logits_bias that all differ."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    size = save_tokenizer(folder, separate)
    config = MarianConfig(
        vocab_size=size, decoder_vocab_size=size + separate, pad_token_id=size - 1,
        decoder_start_token_id=size - 1, tie_word_embeddings=tied,
        share_encoder_decoder_embeddings=not separate, **{**SIZES, **options},
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" not in name:
                weight.normal_(std=0.3)
        model.final_logits_bias.normal_()
    model.generation_config.update(num_beams=3, max_length=40, bad_words_ids=[[size - 1]])
    model.to(dtype).save_pretrained(folder)
    return folder


def random_batch(config, rows=3, length=7):
    ids = torch.randint(2, config.vocab_size - 4, (2, rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": ids[0], "attention_mask": mask, "labels": ids[1]}


@pytest.fixture(scope="module", params=[False, True], ids=["shared", "separate"])
def folders(request, tmp_path_factory):
    """A model with one vocabulary, or two, and the converted model."""
    folder = tmp_path_factory.mktemp("hf_marian")
    theirs = save_marian(folder / "theirs", separate=request.param)
    return theirs, conversion.convert(theirs, folder / "ours")


def expect_equal_log_probabilities(theirs, ours):
    theirs = MarianMTModel.from_pretrained(theirs, dtype="float64").eval()
    ours = AutoModelForSeq2SeqLM.from_pretrained(ours, dtype="float64").eval()
    batch = random_batch(theirs.config)
    with torch.no_grad():
        expected = theirs(**batch).logits.log_softmax(-1)
        found = ours(**batch).logits.log_softmax(-1)[..., : expected.shape[-1]]
    # transformers' table of sinusoids is in float32.
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_log_probabilities_equal_those_of_transformers(folders):
    expect_equal_log_probabilities(*folders)


@pytest.mark.parametrize("separate", [False, True])
def test_untied_matrices_are_converted(tmp_path, separate):
    theirs = save_marian(tmp_path / "theirs", separate, tied=False, activation_function="gelu")
    ours = conversion.convert(theirs, tmp_path / "ours")
    expect_equal_log_probabilities(theirs, ours)
    assert not AutoModelForSeq2SeqLM.from_pretrained(ours).config.tie_word_embeddings


def test_unscaled_embeddings_and_float16_are_converted(tmp_path):
    theirs = save_marian(tmp_path / "theirs", scale_embedding=False, dtype=torch.float16)
    ours = conversion.convert(theirs, tmp_path / "ours")
    expect_equal_log_probabilities(theirs, ours)
    assert AutoModelForSeq2SeqLM.from_pretrained(ours).dtype == torch.float16


def test_texts_are_encoded_and_ids_decoded_the_same(folders):
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    assert isinstance(theirs, MarianTokenizer)
    size = MarianConfig.from_pretrained(folders[0]).vocab_size
    found = ours(TEXTS, text_target=SENTENCES["target"])
    expected = theirs(TEXTS, text_target=SENTENCES["target"])
    # Pieces that only a SentencePiece model knows have their own ids here, with <unk>'s embedding.
    known = [[id if id < size else theirs.unk_token_id for id in row] for row in found.input_ids]
    assert known == expected["input_ids"]
    assert found["labels"] == expected["labels"]
    texts = ours.batch_decode(found["labels"], skip_special_tokens=True)
    assert texts == theirs.batch_decode(expected["labels"], skip_special_tokens=True)
    assert ours.pad_token_id == theirs.pad_token_id


def test_pieces_that_only_sentencepiece_knows_have_the_unknown_embedding(folders):
    theirs, ours = folders
    model, tokenizer = (cls.from_pretrained(ours) for cls in (AutoModelForSeq2SeqLM, AutoTokenizer))
    size = AutoModelForSeq2SeqLM.from_pretrained(theirs).config.vocab_size
    embeddings = model.get_encoder().embed_tokens.weight
    assert len(embeddings) > size
    assert (embeddings[size:] == embeddings[tokenizer.unk_token_id]).all()


def test_generation_gives_the_same(folders):
    texts = [text for text in TEXTS if text]
    outputs = []
    theirs = MarianConfig.from_pretrained(folders[0])
    # MarianMTModel of transformers 5.17 supports beams only if both vocabularies have the same
    # size.
    search = {} if theirs.decoder_vocab_size == theirs.vocab_size else {"num_beams": 1}
    for folder in folders:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
        batch = AutoTokenizer.from_pretrained(folders[0])(texts, padding=True, return_tensors="pt")
        outputs.append(model.generate(**batch, **search))
        pad = model.config.pad_token_id
        settings = model.generation_config
        assert (settings.num_beams, settings.max_length) == (3, 40)
        assert settings.forced_eos_token_id == 0
        assert settings.bad_words_ids == [[pad]]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_the_pipeline_translates(folders):
    translate = pipeline("translation", model=str(folders[1]))
    assert isinstance(translate("the cat runs", max_length=10)[0]["translation_text"], str)


def test_it_is_converted_back_bit_for_bit(folders, tmp_path):
    theirs, ours = folders
    back = conversion.convert_back(ours, tmp_path / "back")
    files = {file.name for file in theirs.iterdir()}
    assert {file.name for file in back.iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert (back / name).read_bytes() == (theirs / name).read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    expect_equal_log_probabilities(back, ours)


def test_an_export_with_two_vocabularies_is_converted_back_with_the_code_of_its_tokenizer(tmp_path):
    ours = conversion.convert(save_marian(tmp_path / "theirs", separate=True), tmp_path / "ours")
    exported = export(ours, tmp_path / "exported", "marian")
    again = conversion.convert(exported, tmp_path / "again")
    back = conversion.convert_back(again, tmp_path / "back")
    files = {file.name for file in back.iterdir()}
    assert files == {file.name for file in exported.iterdir()} - {"README.md"}
    for name in files - {"model.safetensors"}:
        assert (back / name).read_bytes() == (exported / name).read_bytes()


def test_training_continues_from_the_same_loss(folders, tmp_path):
    theirs, ours = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders)
    batch = random_batch(theirs.config)
    batch["labels"] = batch["labels"].clamp(max=theirs.config.vocab_size - 5)
    ours.config.dropout = 0.0
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = ours.eval()(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(theirs.eval()(**batch).loss.item(), abs=1e-4)
    assert losses[-1] < losses[0]
    ours.save_pretrained(folders[1].parent / "trained")


# ---------------------------------------------------------------- Older files


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("samples", [False, True])
def test_sampling_options_are_only_kept_with_do_sample(tmp_path, samples):
    theirs = save_marian(tmp_path / "theirs")
    edit_json(theirs / "generation_config.json", do_sample=samples, top_p=0.9, min_p=0.1)
    ours = conversion.convert(theirs, tmp_path / "ours")
    settings = AutoModelForSeq2SeqLM.from_pretrained(ours).generation_config
    assert (settings.top_p, settings.min_p) == ((0.9, 0.1) if samples else (None, None))


def test_its_card_names_the_languages_of_the_tokenizer(tmp_path):
    theirs = save_marian(tmp_path / "theirs")
    assert languages_of_card(conversion.convert(theirs, tmp_path / "1") / "README.md") is None
    edit_json(theirs / "tokenizer_config.json", source_lang="de", target_lang="en")
    ours = conversion.convert(theirs, tmp_path / "2")
    assert languages_of_card(ours / "README.md") == ("de", "en")


def test_a_pickle_can_have_all_names_of_the_shared_matrix(tmp_path):
    theirs = save_marian(tmp_path / "theirs")
    model = MarianMTModel.from_pretrained(theirs)
    torch.save(model.state_dict(), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").unlink()
    ours = conversion.convert(theirs, tmp_path / "ours")
    expect_equal_log_probabilities(theirs, ours)
    back = conversion.convert_back(ours, tmp_path / "back")
    with safe_open(back / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())


def sinusoids(frequencies, length=9, d_model=24):
    divisor = d_model - 2 * (frequencies == "tensor2tensor")
    exponents = torch.arange(0, d_model, 2, dtype=torch.double) / divisor
    angles = torch.arange(length)[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=1).half()


@pytest.mark.parametrize("frequencies", ["paper", "tensor2tensor"])
def test_sinusoids_are_recognized_from_a_table_of_positions(tmp_path, frequencies):
    theirs = save_marian(tmp_path / "theirs")

    def add_tables(weights):
        for stack in ("encoder", "decoder"):
            name = f"model.{stack}.embed_positions.weight"
            weights[name] = sinusoids(frequencies)

    edit_weights(theirs, add_tables)
    assert hf_marian.read(theirs, ConversionOptions()).config.sinusoid_frequencies == frequencies


def test_generation_settings_in_the_configuration_are_used(tmp_path):
    theirs = save_marian(tmp_path / "theirs")
    (theirs / "generation_config.json").unlink()
    edit_json(theirs / "config.json", num_beams=6, max_length=512, bad_words_ids=[[3]])
    generation = hf_marian.read(theirs, ConversionOptions()).generation
    assert generation["num_beams"] == 6
    assert generation["max_length"] == 512
    assert generation["bad_words_ids"] == [[3]]


# ---------------------------------------------------------------- What is refused


def test_a_check_names_a_line_that_is_longer_than_the_table_of_positions(tmp_path):
    theirs = save_marian(tmp_path / "theirs", max_position_embeddings=8)
    ours = conversion.convert(theirs, tmp_path / "ours")
    (tmp_path / "lines.en").write_text("cats\n" + "the cat runs " * 9)
    with pytest.raises(ValueError, match=r"line 2 has \d+ tokens: expected at most 8"):
        check(theirs, ours, tmp_path / "lines.en", hf_marian)


def rename(weights, old, new):
    weights[new] = weights.pop(old)


FC = "model.encoder.layers.0.fc1.weight"
REFUSED_WEIGHTS = {
    r"does not know: model\.adapter": lambda weights: rename(
        weights, "model.decoder.layers.0.fc1.bias", "model.adapter.bias"
    ) or weights.update({"model.decoder.layers.0.fc1.bias": torch.zeros(36)}),
    r"expected a tensor 'model.encoder.layers.0.fc1.weight'": lambda weights: weights.pop(FC),
    r"fc1.weight' has shape \(40, 23\), expected \(40, 24\)": lambda weights: weights.update(
        {FC: weights[FC][:, :23].contiguous()}
    ),
    "embed_positions.weight: expected sinusoids": lambda weights: weights.update(
        {"model.encoder.embed_positions.weight": torch.ones(5, 24)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_WEIGHTS)
def test_unsupported_weights_are_reported(tmp_path, message):
    theirs = save_marian(tmp_path / "theirs")
    edit_weights(theirs, REFUSED_WEIGHTS[message])
    with pytest.raises(ValueError, match=message):
        conversion.convert(theirs, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("option", ["normalize_before", "add_final_layer_norm"])
def test_options_that_the_current_model_ignores_are_reported(tmp_path, option):
    theirs = save_marian(tmp_path / "theirs")
    edit_json(theirs / "config.json", **{option: True})
    with pytest.raises(ValueError, match=f"{option}=True: expected false"):
        conversion.convert(theirs, tmp_path / "ours")


def test_a_vocabulary_of_a_different_model_is_reported(tmp_path):
    theirs = save_marian(tmp_path / "theirs")
    vocab = json.loads((theirs / "vocab.json").read_text())
    (theirs / "vocab.json").write_text(json.dumps({**vocab, "one": len(vocab)}))
    with pytest.raises(
        ValueError, match=f"vocab.json: {len(vocab) + 1} tokens: expected {len(vocab)}"
    ):
        conversion.convert(theirs, tmp_path / "ours")


def test_a_truncated_file_is_reported(tmp_path):
    theirs = save_marian(tmp_path / "theirs")
    file = theirs / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a complete"):
        conversion.convert(theirs, tmp_path / "ours")
