"""Fine-tuning with `train`: our own checkpoint and stock models of transformers, each small and
random: what an encoder and a decoder read, and what is saved for translation."""

import json
import re

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    DataCollatorForSeq2Seq,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LEDConfig,
    LEDForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    pipeline,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.analysis.attention import attention_maps
from vanilla_transformer.data.parallel_text import DataArguments
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.inference.alignment import add_alignments
from vanilla_transformer.inference.decoding import expect_valid_options, set_output_limit
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.scoring import score_pairs
from vanilla_transformer.inference.translation import Hypothesis, encode_prefixes
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.languages import set_languages, start_in_target_language
from vanilla_transformer.training.preparation import (
    expect_embeddings,
    expect_texts_to_fit,
    make_model,
    prepare,
)
from vanilla_transformer.training.speeds import measurement_key
from vanilla_transformer.training.trainer import make_trainer

SOURCES, TARGETS = ["the lake is deep", "a lake"] * 4, ["le lac est profond", "un lac"] * 4
SIDES = {"source": SOURCES, "target": TARGETS}
LETTERS = sorted(set("".join(SOURCES + TARGETS)) - {" "})
WIDTH = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
WIDTH |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def unigrams(*special):
    return [*((token, 0.0) for token in special), *((piece, -2.0) for piece in ["▁", *LETTERS])]


def ours(folder):
    tokenizer = train_tokenizer(SOURCES + TARGETS, 300, show_progress=False)
    config = VanillaTransformerConfig(vocab_size=len(tokenizer), **WIDTH)
    return save(folder, VanillaTransformerForConditionalGeneration(config), tokenizer)


def mbart(folder):
    tokenizer = MBartTokenizer(vocab=unigrams("<s>", "<pad>", "</s>", "<unk>"))
    config = MBartConfig(vocab_size=len(tokenizer), **WIDTH)
    return save(folder, MBartForConditionalGeneration(config), tokenizer)


def nllb(folder):
    pieces = [piece for piece, _ in unigrams("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer = NllbTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]
    )
    config = M2M100Config(vocab_size=len(tokenizer), **WIDTH)
    return save(folder, M2M100ForConditionalGeneration(config), tokenizer)


def mbart50(folder):
    tokenizer = MBart50Tokenizer(vocab=unigrams("<s>", "<pad>", "</s>", "<unk>"))
    config = MBartConfig(vocab_size=len(tokenizer), decoder_start_token_id=2, **WIDTH)
    return save(folder, MBartForConditionalGeneration(config), tokenizer)


def t5(folder):
    tokenizer = T5Tokenizer(vocab=unigrams("<pad>", "</s>", "<unk>"))
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return save(folder, T5ForConditionalGeneration(config), tokenizer)


def marian(folder):
    pieces = set().union(*(sentencepiece(folder, *side) for side in SIDES.items()))
    vocab = ["</s>", "<unk>", *sorted(pieces), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(vocab)}))
    tokenizer = MarianTokenizer(
        str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json")
    )
    pad = len(vocab) - 1
    config = MarianConfig(
        vocab_size=len(vocab), pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0,
        forced_eos_token_id=0, **WIDTH,
    )  # fmt: skip
    return save(folder, MarianMTModel(config), tokenizer)


def m2m100(folder):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *sentencepiece(folder, "both", SOURCES + TARGETS)]
    (folder / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
    files = str(folder / "vocab.json"), str(folder / "both.spm")
    languages = [*M2M100Tokenizer(*files).lang_token_to_id]
    tokenizer = M2M100Tokenizer(*files, additional_special_tokens=languages)
    size = max(tokenizer.lang_token_to_id.values()) + 1  # `len(tokenizer)` does not count them
    config = M2M100Config(vocab_size=size, **WIDTH)
    return save(folder, M2M100ForConditionalGeneration(config), tokenizer)


def bert2bert(folder):
    """Its encoder and decoder have their own configurations, without the special tokens."""
    tokenizer = train_tokenizer(SOURCES + TARGETS, 300, show_progress=False)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_attention_heads": 2}
    shape |= {"num_hidden_layers": 1, "intermediate_size": 16}
    parts = BertConfig(**shape), BertConfig(**shape, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id = tokenizer.bos_token_id
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return save(folder, EncoderDecoderModel(config), tokenizer)


def sentencepiece(folder, name, texts):
    """Train a SentencePiece model, name.spm, and return its pieces."""
    module = pytest.importorskip("sentencepiece", reason="these tokenizers need it")
    folder.mkdir(exist_ok=True)
    module.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / name), vocab_size=24,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / f"{name}.model").rename(folder / f"{name}.spm")
    model = module.SentencePieceProcessor(str(folder / f"{name}.spm"))
    return [model.id_to_piece(number) for number in range(3, model.vocab_size())]


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepared(folder, model, **data):
    for name, texts in (("source", SOURCES), ("target", TARGETS)):
        (folder / f"train.{name}").write_text("".join(f"{text}\n" for text in texts))
    files = {f"train_{name}": str(folder / f"train.{name}") for name in ("source", "target")}
    arguments = TranslationTrainingArguments(
        str(folder / "out"), max_steps=1, use_cpu=True, report_to="none"
    )
    return prepare(
        ModelArguments(model_name_or_path=str(model)), DataArguments(**files, **data), arguments
    )


def trained(folder, model, **data):
    """A trainer after one step, which saved a checkpoint, and what was prepared for it."""
    ready = prepared(folder, model, **data)
    arguments = TranslationTrainingArguments(
        str(folder / "out"), max_steps=1, save_steps=1, use_cpu=True, report_to="none"
    )
    trainer = make_trainer(ready.model, ready.tokenizer, arguments, ready.splits)
    trainer.train()
    return trainer, ready


def batch_of(ready):
    collate = DataCollatorForSeq2Seq(ready.tokenizer, model=ready.model)
    row = ready.splits["train"][1]
    batch = collate([{"input_ids": row["input_ids"], "labels": row["labels"]}])
    tokens = ready.tokenizer.convert_ids_to_tokens
    return {
        name: tokens(ids[0].tolist()) for name, ids in batch.items() if name != "attention_mask"
    }


def test_a_target_prefix_has_neither_eos_nor_language_token(tmp_path):
    ready = prepared(tmp_path, mbart(tmp_path / "mbart"), source_lang="en_XX", target_lang="fr_XX")
    (ids,) = encode_prefixes(["un lac"], ready.model, ready.tokenizer, {"max_new_tokens": 20})
    assert ready.tokenizer.decode(ids) == "un lac"


@pytest.mark.parametrize("make", [t5, mbart50])
def test_a_plan_uses_the_size_of_a_stock_model(make, tmp_path):
    languages = {"source_lang": "en_XX", "target_lang": "fr_XX"}
    ready = prepared(tmp_path, make(tmp_path / "stock"), **languages)
    arguments = TranslationTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    key = measurement_key(ready.model, arguments, ready.splits["train"])
    expected = f"{ready.model.config.model_type}, {ready.model.num_parameters():,} parameters"
    assert (key["shape"], key["vocabulary"]) == (expected, len(ready.tokenizer))


def test_mbart_marks_languages_at_the_end_and_starts_with_the_targets(tmp_path):
    model = mbart(tmp_path / "mbart")
    ready = prepared(tmp_path, model, source_lang="en_XX", target_lang="fr_XX")
    batch = batch_of(ready)
    assert batch["input_ids"][-2:] == ["</s>", "en_XX"]
    assert batch["labels"][-2:] == ["</s>", "fr_XX"]
    assert batch["decoder_input_ids"] == ["fr_XX", *batch["labels"][:-1]]
    french = ready.tokenizer.convert_tokens_to_ids("fr_XX")
    assert ready.model.generation_config.decoder_start_token_id == french


def test_mbart50_marks_languages_at_the_start_and_forces_the_targets(tmp_path):
    model = mbart50(tmp_path / "mbart50")
    ready = prepared(tmp_path, model, source_lang="fr_XX", target_lang="de_DE")
    batch = batch_of(ready)
    assert (batch["input_ids"][0], batch["input_ids"][-1]) == ("fr_XX", "</s>")
    assert (batch["labels"][0], batch["labels"][-1]) == ("de_DE", "</s>")
    german = ready.tokenizer.convert_tokens_to_ids("de_DE")
    assert ready.model.generation_config.forced_bos_token_id == german


def test_nllb_marks_languages_at_the_start_and_forces_the_targets(tmp_path):
    model = nllb(tmp_path / "nllb")
    ready = prepared(tmp_path, model, source_lang="eng_Latn", target_lang="fra_Latn")
    batch = batch_of(ready)
    assert (batch["input_ids"][0], batch["input_ids"][-1]) == ("eng_Latn", "</s>")
    assert (batch["labels"][0], batch["labels"][-1]) == ("fra_Latn", "</s>")
    assert ready.model.config.decoder_start_token_id == ready.tokenizer.eos_token_id
    french = ready.tokenizer.convert_tokens_to_ids("fra_Latn")
    assert ready.model.generation_config.forced_bos_token_id == french
    ids = ready.model.generate(torch.tensor([[5, 6, 2]]), max_new_tokens=3)
    assert ids[0, 1] == french


def test_m2m100_marks_languages_at_the_start_and_forces_the_targets(tmp_path):
    # Its tokenizer has no target language at first, and cannot encode a target without one.
    ready = prepared(tmp_path, m2m100(tmp_path / "m2m"), source_lang="en", target_lang="fr")
    batch = batch_of(ready)
    assert (batch["input_ids"][0], batch["input_ids"][-1]) == ("__en__", "</s>")
    assert (batch["labels"][0], batch["labels"][-1]) == ("__fr__", "</s>")
    french = ready.tokenizer.get_lang_id("fr")
    assert ready.model.generation_config.forced_bos_token_id == french


def test_an_adapter_is_refused_before_the_text_is_read(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "blank.csv").touch()
    model = ModelArguments(model_name_or_path=str(tmp_path))
    data = DataArguments(train_file=str(tmp_path / "blank.csv"))
    with pytest.raises(ValueError, match="holds an adapter: expected a whole model"):
        prepare(model, data, TranslationTrainingArguments(output_dir=str(tmp_path)))


@pytest.mark.parametrize("option", ["model_name_or_path", "tokenizer_name"])
def test_a_folder_without_a_tokenizer_is_refused_before_the_text_is_read(option, tmp_path):
    T5Config().save_pretrained(tmp_path)
    (tmp_path / "blank.csv").touch()
    data = DataArguments(train_file=str(tmp_path / "blank.csv"))
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path}: expected a tokenizer"):
        prepare(ModelArguments(**{option: str(tmp_path)}), data, arguments)


@pytest.mark.parametrize("option", ["model_name_or_path", "tokenizer_name"])
def test_a_file_in_place_of_a_folder_is_refused_before_the_text_is_read(option, tmp_path):
    (tmp_path / "blank.csv").touch()
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    data = DataArguments(train_file=str(tmp_path / "blank.csv"))
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"^{file}: expected a .* with a .*config.json"):
        prepare(ModelArguments(**{option: str(file)}), data, arguments)


def test_overrides_are_fields_of_the_fine_tuned_models_configuration(tmp_path):
    folder, tokenizer = t5(tmp_path / "t5"), AutoTokenizer.from_pretrained(tmp_path / "t5")
    options = {"model_name_or_path": str(folder), "config_overrides": "dropout_rate=0.25"}
    assert make_model(ModelArguments(**options), tokenizer, None).config.dropout_rate == 0.25
    options["config_overrides"] = "dropout=0.25"
    with pytest.raises(ValueError, match="config_overrides has 'dropout': no field of T5Config"):
        make_model(ModelArguments(**options), tokenizer, None)


@pytest.mark.parametrize(
    ("make", "override", "lacking"),
    [
        (t5, "d_ff=24", "decoder.block.0.layer.2.DenseReluDense.wi.weight of shape (24, "),
        (t5, "num_layers=9", "encoder.block."),
        (marian, "encoder_layers=9", "model.encoder.layers."),
    ],
)
def test_overrides_that_need_different_weights_are_refused(tmp_path, make, override, lacking):
    """New layers would start with random weights, and transformers only reports different
    shapes."""
    folder = make(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"model_name_or_path": str(folder), "config_overrides": override}
    with pytest.raises(ValueError, match=re.escape(f"has no {lacking}")):
        make_model(ModelArguments(**options), tokenizer, None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_in_half_precision_is_trained_resumed_and_saved_in_float32(tmp_path, dtype):
    """Half precision would round away small updates, and Adam's epsilon."""
    folder = mbart(tmp_path / "model")
    half = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
    half.save_pretrained(folder)
    trainer, ready = trained(tmp_path, folder, source_lang="en_XX", target_lang="fr_XX")
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out/checkpoint-1")
    assert {weight.dtype for weight in saved.parameters()} == {torch.float32}
    trainer.args.max_steps = 2
    trainer.model = make_model(
        ModelArguments(model_name_or_path=str(folder)),
        ready.tokenizer,
        str(tmp_path / "out/checkpoint-1"),
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
    assert trainer.state.global_step == 2
    assert trainer.model.dtype == torch.float32


def test_marians_positions_which_are_not_saved_may_be_more(tmp_path):
    folder = marian(tmp_path / "model")
    options = {"model_name_or_path": str(folder), "config_overrides": "max_position_embeddings=600"}
    model = make_model(ModelArguments(**options), AutoTokenizer.from_pretrained(folder), None)
    expected = MarianMTModel(model.config).model.encoder.embed_positions.weight
    assert expected.shape[0] == 600
    assert torch.equal(model.model.encoder.embed_positions.weight, expected)


def test_marians_positions_which_are_not_saved_are_unchanged(tmp_path):
    folder = marian(tmp_path / "model")
    before = AutoModelForSeq2SeqLM.from_pretrained(folder).model.encoder.embed_positions.weight
    trainer, _ = trained(tmp_path, folder)
    assert torch.equal(trainer.model.model.encoder.embed_positions.weight, before)
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out/checkpoint-1")
    torch.testing.assert_close(
        dict(trainer.model.named_parameters()), dict(saved.named_parameters())
    )


def test_a_model_without_a_limit_does_not_stop_at_transformers_20_tokens(tmp_path):
    saved = t5(tmp_path / "t5")
    assert AutoModelForSeq2SeqLM.from_pretrained(saved).generation_config.max_length is None
    model, tokenizer = LoadingArguments().load(saved)
    ids = model.generate(torch.tensor([[5, 6]]), suppress_tokens=[tokenizer.eos_token_id])
    assert ids.shape[1] == 1 + 256


def test_a_table_of_positions_limits_texts_and_translations(tmp_path):
    config = BartConfig(
        vocab_size=300, max_position_embeddings=9, forced_eos_token_id=None, **WIDTH
    )
    model = BartForConditionalGeneration(config)
    model.generation_config.max_length = None
    set_output_limit(model)
    assert model.generate(torch.tensor([[5, 6]]), suppress_tokens=[2]).shape[1] == 1 + 9
    rows = [{"input_ids": [4] * 9, "labels": [4]}]
    expect_texts_to_fit(model, {"train": Dataset.from_list(rows)})
    rows.append({"input_ids": [4] * 10, "labels": [4]})
    message = "a source of 10 tokens: expected at most 9"
    with pytest.raises(ValueError, match=message):
        expect_texts_to_fit(model, {"train": Dataset.from_list(rows)})


def test_a_validation_source_beyond_the_table_of_positions_is_cut_for_the_final_scores(
    tmp_path, train_here
):
    """As in training: it ended with an error after its last step."""
    tokenizer = train_tokenizer(SOURCES + TARGETS, 300, show_progress=False)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=9, **WIDTH
    )
    model = VanillaTransformerForConditionalGeneration(config)
    folder = save(tmp_path / "model", model, tokenizer)
    (tmp_path / "source").write_text("the lake\n" + 9 * "the lake is deep " + "\n")
    (tmp_path / "target").write_text("un lac\nun lac\n")
    files = [f"--{split}_{side}={tmp_path / side}" for split in ("train", "validation")
             for side in ("source", "target")]  # fmt: skip
    train_here(
        "--model_name_or_path", folder, *files, "--max_source_length", 9, "--use_cpu",
        "--max_steps", 1, "--report_to", "none", "--output_dir", tmp_path / "out",
    )  # fmt: skip
    assert "exact_match" in (tmp_path / "out/README.md").read_text()


def test_sources_can_be_longer_than_targets_where_the_model_reads_longer_texts_than_it_writes():
    sizes = {"max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 8}
    config = LEDConfig(vocab_size=9, attention_window=4, **sizes, **WIDTH)
    model = LEDForConditionalGeneration(config)
    rows = [{"input_ids": [4] * 16, "labels": [4] * 8}]
    expect_texts_to_fit(model, {"train": Dataset.from_list(rows)})
    rows.append({"input_ids": [4], "labels": [4] * 9})
    with pytest.raises(ValueError, match="a target of 9 tokens: expected at most 8"):
        expect_texts_to_fit(model, {"train": Dataset.from_list(rows)})


def test_a_model_without_a_limit_may_write_longer_texts_than_it_reads(caplog):
    sizes = {"max_encoder_position_embeddings": 8, "max_decoder_position_embeddings": 16}
    model = LEDForConditionalGeneration(
        LEDConfig(vocab_size=9, attention_window=4, **sizes, **WIDTH)
    )
    model.generation_config.max_length = None
    set_output_limit(model)
    assert model.generation_config.max_length == 1 + 16
    assert not caplog.messages


@pytest.mark.parametrize(("name", "most"), [("max_length", 10), ("max_new_tokens", 9)])
def test_a_length_limit_beyond_the_table_of_positions_is_lowered_or_refused(caplog, name, most):
    """A saved limit is lowered, and an explicit one is refused."""
    shape = {"vocab_size": 30, "pad_token_id": 3, "decoder_start_token_id": 3, **WIDTH}
    model = MarianMTModel(MarianConfig(max_position_embeddings=9, eos_token_id=2, **shape)).eval()
    model.generation_config.update(
        **{"max_length": None, name: most + 5}, suppress_tokens=[2, 3], forced_eos_token_id=None
    )
    set_output_limit(model)
    assert f"{name}={most + 5} in the generation config becomes {most}: the table" in caplog.text
    assert model.generate(torch.tensor([[5, 6]])).shape[1] == 10
    expect_valid_options(model, {name: most})
    with pytest.raises(ValueError, match=f"{name}={most + 1}: expected at most {most}"):
        expect_valid_options(model, {name: most + 1})


def test_t5_reads_the_prefix_and_starts_with_padding(tmp_path):
    ready = prepared(tmp_path, t5(tmp_path / "t5"), source_prefix="a place: ")
    batch = batch_of(ready)
    assert ready.pairs["train"][1]["source"] == "a place: a lake"
    assert batch["input_ids"][-1] == batch["labels"][-1] == "</s>"
    assert batch["decoder_input_ids"] == ["<pad>", *batch["labels"][:-1]]


def test_a_corpus_of_t5_can_have_a_prefix_of_several_words(tmp_path, caplog):
    ready = prepared(tmp_path, t5(tmp_path / "t5"), corpus_tags=["a place:"])
    assert ready.pairs["train"][1]["source"] == "a place: a lake"
    assert "user token" not in caplog.text
    with pytest.raises(ValueError, match="corpus_tags has 'a place:': expected one token, or"):
        prepare(
            ModelArguments(),
            DataArguments(dataset_name="phrases", corpus_tags=["a place:"]),
            TranslationTrainingArguments(str(tmp_path / "out")),
        )


def test_a_corpus_can_have_several_tags_that_are_user_tokens(tmp_path):
    tags = ["<2fr>", "<BT>"]
    (tmp_path / "table.tsv").write_text("src\ttgt\na lake\tun lac\nlakes\tlacs\n")
    ready = prepare(
        ModelArguments(preset="tiny", user_tokens=tags, vocab_size=300),
        DataArguments(train_file=str(tmp_path / "table.tsv"), corpus_tags=["<2fr> <BT>"]),
        TranslationTrainingArguments(str(tmp_path / "out"), max_steps=1, use_cpu=True),
    )
    ids = ready.splits["train"][0]["input_ids"]
    read = [token.strip() for token in ready.tokenizer.convert_ids_to_tokens(ids)]
    assert [token for token in read if token in tags] == tags


def test_marian_reads_each_side_with_its_model_and_starts_with_padding(tmp_path):
    ready = prepared(tmp_path, marian(tmp_path / "marian"))
    batch = batch_of(ready)
    assert batch["input_ids"][-1] == batch["labels"][-1] == "</s>"
    assert batch["decoder_input_ids"] == ["<pad>", *batch["labels"][:-1]]
    assert "<unk>" not in batch["input_ids"] + batch["labels"]


def test_the_recipe_fine_tunes_a_marian(tmp_path, train_here):
    model = marian(tmp_path / "marian")
    files = []
    for side, texts in (("source", SOURCES), ("target", TARGETS)):
        (tmp_path / side).write_text("".join(f"{text}\n" for text in texts))
        files += [f"--{split}_{side}={tmp_path / side}" for split in ("train", "validation")]
    torch.backends.cuda.enable_cudnn_sdp(True)
    train_here(
        "--config", "marian", "--model_name_or_path", model, "--output_dir", tmp_path / "tuned",
        "--num_train_epochs", 1, *files,
    )  # fmt: skip
    state = json.loads((tmp_path / "tuned/trainer_state.json").read_text())
    assert state["global_step"] == 1
    assert "eval_bleu" in str(state["log_history"])
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned")
    assert isinstance(tuned, MarianMTModel)
    assert tuned.generation_config.num_beams == 4
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # which would plan each batch shape


OF_MANY_LANGUAGES = [
    (mbart, ("en_XX", "fr_XX")),
    (mbart50, ("en_XX", "fr_XX")),
    (nllb, ("eng_Latn", "fra_Latn")),
    (m2m100, ("en", "fr")),
]


@pytest.mark.parametrize(
    ("make", "languages"), [*OF_MANY_LANGUAGES, (t5, (None, None)), (marian, (None, None))]
)
def test_a_stock_model_scores_its_targets(make, languages, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(make(tmp_path / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    set_languages(tokenizer, *languages)
    inputs = tokenizer(SOURCES[0], text_target=TARGETS[0], return_tensors="pt")
    tokens = inputs["labels"].numel()
    (score,) = score_pairs([(SOURCES[0], TARGETS[0])], model, tokenizer)
    assert score.tokens == tokens
    assert score.log_probability == pytest.approx(-tokens * model(**inputs).loss.item(), rel=1e-4)


@pytest.mark.parametrize(("make", "languages"), OF_MANY_LANGUAGES)
def test_a_model_of_many_languages_is_used_with_those_that_were_saved(
    make, languages, tmp_path, caplog
):
    """Otherwise targets would be read as text in the source's language, or with a KeyError."""
    folder = make(tmp_path / "model")
    model, tokenizer = LoadingArguments(device="cpu").load(folder)
    assert f"{folder} has no target language: it may translate into any" in caplog.text
    pairs = [(SOURCES[0], TARGETS[0])]
    with pytest.raises(ValueError, match="the tokenizer has no target language, expected one"):
        list(score_pairs(pairs, model, tokenizer))
    set_languages(tokenizer, *languages)
    start_in_target_language(model, tokenizer)
    expected = list(score_pairs(pairs, model, tokenizer))
    caplog.clear()
    found = LoadingArguments(device="cpu").load(save(tmp_path / "saved", model, tokenizer))
    assert list(score_pairs(pairs, *found)) == expected
    assert "target language" not in caplog.text


@pytest.mark.parametrize(("make", "languages"), OF_MANY_LANGUAGES)
def test_a_target_language_in_the_generation_config_gives_no_warning(
    make, languages, tmp_path, caplog
):
    """As in mBART's models on the Hub, whose tokenizers have none."""
    folder = make(tmp_path / "model")
    model, tokenizer = LoadingArguments(device="cpu").load(folder)
    set_languages(tokenizer, *languages)
    start_in_target_language(model, tokenizer)
    model.save_pretrained(folder)
    caplog.clear()
    LoadingArguments(device="cpu").load(folder)
    assert "target language" not in caplog.text


@pytest.mark.parametrize(
    ("make", "languages"),
    [
        (mbart, ("en_XX", "fr_XX")),
        (nllb, ("eng_Latn", "fra_Latn")),
        (t5, (None, None)),
        (bert2bert, (None, None)),
    ],
)
def test_a_stock_model_aligns_its_targets(make, languages, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(make(tmp_path / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    set_languages(tokenizer, *languages)
    target = Hypothesis(TARGETS[0], token_ids=tuple(tokenizer(text_target=TARGETS[0])["input_ids"]))
    try:
        ((found,),) = add_alignments(SOURCES[:1], [[target]], model, tokenizer)
    except ValueError as error:
        if make is not t5 or "returns none of its attentions" not in str(error):
            raise
        pytest.skip(str(error))  # transformers 5.17
    assert {place for _, place in found.alignment} == set(range(len(TARGETS[0].split())))
    with pytest.raises(ValueError, match="alignment_layer=1: expected -1 to 0"):
        list(add_alignments(SOURCES[:1], [[target]], model, tokenizer, layer=1))


def test_a_model_that_returns_no_attentions_aligns_nothing(monkeypatch, tmp_path):
    """As T5 in transformers 5.17."""
    model = AutoModelForSeq2SeqLM.from_pretrained(t5(tmp_path / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    forward = model.forward

    def without_attentions(**inputs):
        outputs = forward(**inputs)
        outputs.cross_attentions = ()
        return outputs

    monkeypatch.setattr(model, "forward", without_attentions)
    target = Hypothesis(TARGETS[0], token_ids=tuple(tokenizer(text_target=TARGETS[0])["input_ids"]))
    message = "alignments with T5ForConditionalGeneration: .* returns none of its attentions"
    with pytest.raises(ValueError, match=message):
        list(add_alignments(SOURCES[:1], [[target]], model, tokenizer))


@pytest.mark.parametrize(
    ("make", "languages"),
    [
        (mbart, ("en_XX", "xx_XX")),
        (nllb, ("english", "fra_Latn")),
        (m2m100, ("en", "french")),
        (mbart, (None, None)),
    ],
)
def test_a_language_that_a_tokenizer_lacks_is_reported(make, languages, tmp_path):
    source, target = languages
    with pytest.raises(ValueError, match=r"_lang=.*: expected a language code of"):
        prepared(tmp_path, make(tmp_path / "model"), source_lang=source, target_lang=target)


@pytest.mark.parametrize("make", [mbart, mbart50, nllb])
def test_a_piece_of_words_is_not_a_language(make, tmp_path, monkeypatch):
    """Vocabularies have pieces such as "en" and "fr", which name columns of tables, but are not the
    codes of languages."""
    monkeypatch.setitem(globals(), "LETTERS", [*LETTERS, "en", "fr"])
    folder = make(tmp_path / "model")
    with pytest.raises(ValueError, match="source_lang='en': expected a language code of"):
        prepared(tmp_path, folder, source_lang="en", target_lang="fr")
    with pytest.raises(ValueError, match="src_lang='en', tgt_lang='fr': expected language codes"):
        pipeline("translation_en_to_fr", model=str(folder))("a lake")


def test_a_language_that_was_added_to_a_tokenizer_is_known(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(nllb(tmp_path / "model"))
    tokenizer.add_tokens(["tyv_Cyrl"], special_tokens=True)
    set_languages(tokenizer, "tyv_Cyrl", "fra_Latn")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a lake")["input_ids"])[0] == "tyv_Cyrl"


@pytest.mark.parametrize("make", [ours, nllb, t5])
def test_a_token_without_an_embedding_is_reported_before_training(make, tmp_path):
    """As after `add_tokens` alone. torch's error does not say which, and is fatal on a GPU."""
    folder = make(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["profond", "deep"])
    tokenizer.save_pretrained(folder)
    languages = {"source_lang": "eng_Latn", "target_lang": "fra_Latn"} if make is nllb else {}
    with pytest.raises(ValueError, match=r"train data has the token ' ?deep' with the id .*resize"):
        prepared(tmp_path, folder, **languages)


@pytest.mark.parametrize("make", [ours, t5])
def test_tokens_of_a_model_whose_weights_other_processes_hold_have_embeddings(make, tmp_path):
    """Under ZeRO 3, `from_pretrained` leaves weights without rows."""
    ready = prepared(tmp_path, make(tmp_path / "model"))
    for weight in ready.model.parameters():
        weight.data = torch.empty(0)
    expect_embeddings(ready.model, ready.tokenizer, ready.splits)


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (ours, []),
        (mbart, ["--source_lang", "fr_XX", "--target_lang", "de_DE"]),
        (mbart50, ["--source_lang", "fr_XX", "--target_lang", "de_DE"]),
        (nllb, ["--source_lang", "fra_Latn", "--target_lang", "deu_Latn"]),
        (m2m100, ["--source_lang", "fr", "--target_lang", "de"]),
        (t5, ["--source_prefix", "a place: "]),
        (marian, []),
    ],
)
def test_train_fine_tunes_a_stock_model_and_saves_what_translation_needs(
    make, flags, tmp_path, train_here
):
    """The saved folder by itself encodes a source as in training, and starts with the target
    language."""
    model = make(tmp_path / "model")
    for name, texts in (("source", SOURCES), ("target", TARGETS)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    train_here(
        "--model_name_or_path", model, "--train_source", tmp_path / "source",
        "--train_target", tmp_path / "target", "--output_dir", tmp_path / "out",
        "--max_steps", 1, "--use_cpu", "--report_to", "none", *flags,
    )  # fmt: skip
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    before = AutoModelForSeq2SeqLM.from_pretrained(model)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(tuned.parameters(), before.parameters(), strict=True)
    )
    languages = dict(zip(flags[::2], flags[1::2], strict=True))
    source, target = (languages.get(f"--{side}_lang") for side in ("source", "target"))
    if make is m2m100:
        source, target = f"__{source}__", f"__{target}__"
    ids = tokenizer(SOURCES[0], return_tensors="pt")["input_ids"]
    read = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    assert source in (None, read[0], read[-1])
    limits = {"max_new_tokens": 3, "num_beams": 1}
    generated = tuned.generate(ids, **limits)[0].tolist()
    written = tokenizer.convert_ids_to_tokens(generated)
    start = "<s>" if make is ours else "<pad>"
    assert (target or start) in written[:2]
    translator = pipeline("translation", str(tmp_path / "out"), **limits)
    (result,) = translator(SOURCES[0], return_tensors=True)
    assert result["translation_token_ids"].tolist() == generated
    (result,) = translator(SOURCES[0])
    assert target is None or target not in result["translation_text"]


@pytest.mark.parametrize(
    ("make", "languages"),
    [(nllb, ("eng_Latn", "fra_Latn")), (mbart, ("en_XX", "fr_XX")), (mbart50, ("en_XX", "fr_XX"))],
)
def test_a_pipeline_refuses_languages_that_the_tokenizer_lacks(tmp_path, make, languages):
    # Otherwise it would use the unknown token as the language.
    folder = make(tmp_path / "model")
    source, target = languages
    for known, task in ((True, (source, target)), (False, ("en", target)), (False, (source, "fr"))):
        translator = pipeline("translation_{}_to_{}".format(*task), str(folder), max_new_tokens=3)
        if known:
            assert len(translator(["a lake", ""])) == 2
            continue
        expected = "src_lang={!r}, tgt_lang={!r}: expected language codes of".format(*task)
        with pytest.raises(ValueError, match=expected):
            translator("a lake")


@pytest.mark.parametrize(
    ("make", "languages"), [(mbart, ("en_XX", "fr_XX")), (bert2bert, (None, None))]
)
def test_a_fine_tuned_stock_model_is_resumed(tmp_path, make, languages):
    # Training sets special tokens in the configuration, which the model to fine-tune lacks.
    folder = make(tmp_path / "model")
    _, ready = trained(tmp_path, folder, source_lang=languages[0], target_lang=languages[1])
    wanted = ModelArguments(model_name_or_path=str(folder))
    make_model(wanted, ready.tokenizer, str(tmp_path / "out/checkpoint-1"))


@pytest.mark.parametrize("make", [nllb, mbart, t5])
def test_attention_maps_work_for_any_model_and_a_given_target(tmp_path, make):
    folder = make(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if make is not t5:
        set_languages(
            tokenizer, *(("eng_Latn", "fra_Latn") if make is nllb else ("en_XX", "fr_XX"))
        )
    maps = attention_maps(model, tokenizer, SOURCES[0], TARGETS[0])
    assert len(maps.queries) == len(tokenizer(text_target=TARGETS[0])["input_ids"])
