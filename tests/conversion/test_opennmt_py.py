"""OpenNMT-py's checkpoints, and those of the same model with other versions."""

import re
import shutil
import sys
from argparse import Namespace
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from conftest import Payload
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from conversion.reference import (
    checkpoint_folder,
    expect_reference,
    expect_to_train_on,
    load_reference,
    log_probabilities,
    log_probability_difference,
)
from vanilla_transformer import conversion
from vanilla_transformer.conversion import ConversionOptions, opennmt_py
from vanilla_transformer.conversion.weights import separated

NAME = "model_step_500.pt"
EMBEDDING = "encoder.embeddings.make_embedding.emb_luts.0.weight"
ATTENTION = "encoder.transformer.0.self_attn"
FEED_FORWARD = "decoder.transformer_layers.1.feed_forward"


@pytest.fixture
def checkpoint():
    """The checkpoint "a", which a test can change."""
    path = checkpoint_folder("opennmt_py/a") / NAME
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


@pytest.fixture
def converted_again(checkpoint, tmp_path):
    """The changed checkpoint, converted."""

    def convert(**options):
        torch.save(checkpoint, tmp_path / NAME, **options)
        return conversion.convert(tmp_path / NAME, tmp_path / "converted")

    return convert


def load(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()


def expect_the_same(folder, tolerance=2e-6):
    assert log_probability_difference(load(folder), load_reference("opennmt_py/a")[0]) < tolerance


@pytest.mark.parametrize("variant", ["a", "tied"])
def test_a_converted_model_gives_the_same_as_opennmt_py(converted, variant):
    expect_reference(converted(f"opennmt_py/{variant}"), f"opennmt_py/{variant}")


def test_beam_search_finds_what_opennmt_py_found(converted):
    folder = converted("opennmt_py/tied")
    _, notes = load_reference("opennmt_py/tied")
    batch = AutoTokenizer.from_pretrained(folder)(
        notes["source_texts"], padding=True, return_tensors="pt"
    )
    output = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(**batch, num_beams=4)
    texts = AutoTokenizer.from_pretrained(folder).batch_decode(output, skip_special_tokens=True)
    assert texts == notes["beam_4"]["default"]["texts"]


def test_a_pipeline_translates(converted):
    translate = pipeline("translation", model=str(converted("opennmt_py/tied")))
    assert translate("maus drei neun")[0]["translation_text"] == "nine three mouse"


# ---------------------------------------------------------------- Other versions


class Held:
    """An object of another library, with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.fixture
def torchtext(monkeypatch):
    """`make(full_name, **attributes)`: an object that is pickled as one of this class."""

    def make(full_name, **attributes):
        module, _, name = full_name.rpartition(".")
        kind = type(name, (Held,), {"__module__": module})
        parts = module.split(".")
        for package in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package, ModuleType(package)))
        holder = sys.modules[module]
        monkeypatch.setattr(holder, name, getattr(holder, name, kind), raising=False)
        return getattr(holder, name)(**attributes)

    return make


def before_version_3(checkpoint, make, nest):
    opt, vocab = checkpoint["opt"], checkpoint["vocab"]
    newer = ("add_qkvbias", "add_ffnbias", "norm_eps", "position_encoding_type", "num_kv")
    for name in (*newer, "num_experts", "num_experts_per_tok"):
        delattr(opt, name)
    opt.rnn_size = opt.hidden_size
    generator = checkpoint["generator"]
    checkpoint["generator"] = {f"0.{name}": tensor for name, tensor in generator.items()}
    checkpoint["vocab"] = {
        side: nest(side, make("torchtext.data.field.Field", vocab=_vocab(make, vocab[side])))
        for side in ("src", "tgt")
    }
    checkpoint["vocab"]["indices"] = make("torchtext.data.field.Field", use_vocab=False)


def _vocab(make, tokens):
    numbers = {token: number for number, token in enumerate(tokens)}
    return make("torchtext.vocab.Vocab", itos=tokens, stoi=numbers, vectors=None)


@pytest.mark.parametrize("is_zip", [True, False])
def test_versions_1_and_2_store_their_vocabularies_in_objects(
    checkpoint, converted_again, torchtext, is_zip
):
    def nest(side, field):
        field.tokenize = "split"
        name = "onmt.inputters.text_dataset.TextMultiField"
        return torchtext(name, fields=[(side, field)])

    before_version_3(checkpoint, torchtext, nest)
    folder = converted_again(_use_new_zipfile_serialization=is_zip)
    expect_the_same(folder)
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.length_penalty, generation.max_new_tokens) == (0.0, 100)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("maus drei neun")["input_ids"] == [11, 20, 14]
    assert tokenizer("  maus\u00a0drei  neun ")["input_ids"] == [11, 20, 14]


def test_fields_can_be_in_a_list(checkpoint, converted_again, torchtext):
    before_version_3(checkpoint, torchtext, lambda side, field: [(side, field)])
    expect_the_same(converted_again())


def test_vocabularies_can_be_in_a_list(checkpoint, converted_again, torchtext):
    vocab = checkpoint["vocab"]
    before_version_3(checkpoint, torchtext, lambda side, field: None)
    checkpoint["vocab"] = [(side, _vocab(torchtext, vocab[side])) for side in ("src", "tgt")]
    expect_the_same(converted_again())


def test_word_features_are_refused(checkpoint, converted_again, torchtext):
    def nest(side, field):
        return [(side, field), (f"{side}_feat_0", field)]

    before_version_3(checkpoint, torchtext, nest)
    with pytest.raises(ValueError, match="src, src_feat_0, expected words without features"):
        converted_again()


def test_an_empty_vocabulary_is_refused(checkpoint, converted_again):
    checkpoint["vocab"]["tgt"] = []
    with pytest.raises(ValueError, match=r"vocab\['tgt'\]: expected a list of tokens"):
        converted_again()


def test_weights_can_be_in_a_separate_file(checkpoint, converted_again, tmp_path):
    generator = {f"generator.{name}": each for name, each in checkpoint.pop("generator").items()}
    weights = {**checkpoint.pop("model"), **generator}
    with pytest.raises(FileNotFoundError, match=r"weights in model_step_500\.safetensors"):
        converted_again()
    save_file(weights, tmp_path / "model_step_500.safetensors")
    expect_the_same(converted_again())
    (tmp_path / "model_step_500.safetensors").write_bytes(b"\x10")
    shutil.rmtree(tmp_path / "converted")
    with pytest.raises(ValueError, match="expected a complete safetensors file"):
        converted_again()


def test_the_last_checkpoint_of_a_folder_is_used(checkpoint, converted_again, tmp_path):
    (tmp_path / "model_step_1000.pt").touch()
    torch.save(checkpoint, tmp_path / "model_step_2000.pt")
    expect_the_same(conversion.convert(tmp_path, tmp_path / "converted"))


def test_every_bias_is_read(checkpoint, converted_again):
    """Biases that cancel each other out, so that each must be read."""
    model = checkpoint["model"]
    torch.manual_seed(0)
    for name in [name for name in model if name.endswith("linear_values.weight")]:
        prefix = name.removesuffix("linear_values.weight")
        bias = model[f"{prefix}linear_values.bias"] = torch.randn(32)
        model[f"{prefix}final_linear.bias"] = -model[f"{prefix}final_linear.weight"] @ bias
        model[f"{prefix}linear_keys.bias"] = torch.randn(32)  # adds the same to all scores
    for name in [name for name in model if name.endswith("w_1.weight")]:
        prefix = name.removesuffix("w_1.weight")
        column = torch.randn(32, 1)
        model[name] = torch.cat([model[name], torch.zeros(1, 32)])
        model[f"{prefix}w_1.bias"] = torch.cat([torch.zeros(48), torch.ones(1)])
        model[f"{prefix}w_2.weight"] = torch.cat([model[f"{prefix}w_2.weight"], column], 1)
        model[f"{prefix}w_2.bias"] = -column[:, 0]
    folder = converted_again()
    expect_the_same(folder, 1e-5)
    config = load(folder).config
    assert (config.attention_bias, config.decoder_ffn_dim) == (True, 49)


def test_a_missing_option_is_reported(checkpoint, converted_again):
    del checkpoint["opt"].heads
    with pytest.raises(ValueError, match=r"a checkpoint of opennmt_py, but KeyError\('heads'"):
        converted_again()


def test_an_option_without_a_value_is_reported(checkpoint, converted_again):
    checkpoint["opt"].dropout = []
    with pytest.raises(ValueError, match=r"a checkpoint of opennmt_py, but IndexError\("):
        converted_again()


def test_a_name_without_a_tensor_is_reported(checkpoint, converted_again):
    checkpoint["model"]["encoder.layer_norm.bias"] = None
    with pytest.raises(ValueError, match=r"a checkpoint of opennmt_py, but RuntimeError\("):
        converted_again()


def test_a_checkpoint_without_a_projection_is_reported(checkpoint, converted_again):
    checkpoint["generator"] = None
    with pytest.raises(ValueError, match="expected a checkpoint of opennmt_py, but AttributeError"):
        converted_again()


def test_queries_can_have_a_bias(checkpoint, converted_again):
    bias = checkpoint["model"][f"{ATTENTION}.linear_query.bias"] = torch.arange(32.0)
    attention = load(converted_again()).model.encoder.layers[0].self_attn
    assert torch.equal(attention.q_proj.bias, bias.double())
    assert not attention.k_proj.bias.any()


def test_a_model_of_before_version_1_is_converted(checkpoint, converted_again):
    """Its layer norm uses the unbiased deviation, and the file has the mask of later words."""
    model = checkpoint["model"]
    for name in [name for name in model if name.endswith("layer_norm_2.weight")]:
        mask = torch.ones(1, 50, 50, dtype=torch.uint8).triu(1)
        model[name.replace("layer_norm_2.weight", "mask")] = mask
    for name in [name for name in model if "layer_norm" in name]:
        is_weight = name.endswith("weight")
        old = name.removesuffix("weight" if is_weight else "bias") + ("a_2" if is_weight else "b_2")
        model[old] = model.pop(name) * ((32 / 31) ** 0.5 if is_weight else 1)
    expect_the_same(converted_again(), 1e-5)


def test_sines_can_come_before_cosines(checkpoint, converted_again, converted):
    """The same model with different frequencies, and its channels in the order of this table."""
    order, model = separated(32), checkpoint["model"]
    for name, tensor in list(model.items()):
        if re.search(r"(emb_luts\.0|linear_(query|keys|values)|w_1)\.weight$", name):
            model[name] = tensor[:, order]
        elif re.search(r"(final_linear|w_2)\.weight$|layer_norm", name):
            model[name] = tensor[order]
    checkpoint["generator"]["weight"] = checkpoint["generator"]["weight"][:, order]
    frequencies = torch.exp(torch.arange(16.0) * -torch.tensor(10000.0).log() / 15)
    angles = torch.arange(5000.0)[:, None] * frequencies
    for stack in ("encoder", "decoder"):
        table = torch.cat([angles.sin(), angles.cos()], 1)[:, None]
        model[f"{stack}.embeddings.make_embedding.pe.pe"] = table
    again = load(converted_again())
    assert again.config.sinusoid_frequencies == "tensor2tensor"
    expected = load(converted("opennmt_py/a"))
    for stack in (expected.model.encoder, expected.model.decoder):
        stack.embed_positions = again.model.encoder.embed_positions
    tensors, _ = load_reference("opennmt_py/a")
    torch.testing.assert_close(
        log_probabilities(again, tensors), log_probabilities(expected, tensors)
    )


def test_other_positions_are_refused(checkpoint, converted_again):
    name = "decoder.embeddings.make_embedding.pe.pe"
    checkpoint["model"][name] += 0.1
    with pytest.raises(ValueError, match=f"{name}' is no table of sinusoids"):
        converted_again()


@torch.no_grad()
def test_a_model_without_positions_does_not_scale_its_embeddings(checkpoint, converted_again):
    checkpoint["opt"].position_encoding = False
    for stack in ("encoder", "decoder"):
        del checkpoint["model"][f"{stack}.embeddings.make_embedding.pe.pe"]
    encoder = load(converted_again()).model.encoder
    ids = torch.tensor([[5, 6, 7, 8]])
    embedded = encoder.embed(ids, None, None, None)
    assert torch.equal(embedded[0], checkpoint["model"][EMBEDDING][ids[0]].double())


# ---------------------------------------------------------------- Text


def test_codes_next_to_a_checkpoint_split_its_text(checkpoint, converted_again, tmp_path):
    words = [word for side in ("src", "tgt") for word in checkpoint["vocab"][side][4:]]
    lines = ["#version: 0.2"]
    for word in words:
        symbols = [*word[:-1], f"{word[-1]}</w>"]
        lines += [f"{''.join(symbols[:i])} {symbols[i]}" for i in range(1, len(symbols))]
    (tmp_path / "codes").write_text("\n".join(lines) + "\n")
    checkpoint["opt"].transforms = ["bpe", "filtertoolong"]
    checkpoint["opt"].src_subword_model = "elsewhere/codes"
    folder = converted_again()
    expect_the_same(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    assert tokenizer("maus drei neun")["input_ids"] == [11, 20, 14]
    unknown = tokenizer("mausm")["input_ids"]
    assert len(unknown) > 1
    assert min(unknown) >= 24
    rows = model.model.encoder.embed_tokens.weight[unknown]
    assert (rows == model.model.encoder.embed_tokens.weight[0]).all()


@pytest.mark.parametrize("given", ["source_codes", "target_codes"])
def test_codes_of_the_other_side_are_still_found(tmp_path, given):
    for name in ("src", "tgt", "own"):
        (tmp_path / name).write_text("#version: 0.2\n")
    opt = {"transforms": ["bpe"], "src_subword_model": "x/src", "tgt_subword_model": "x/tgt"}
    options = ConversionOptions(**{given: str(tmp_path / "own")})
    found = opennmt_py._with_codes(opt, options, tmp_path / "model.pt").given()
    beside = {"source_codes": str(tmp_path / "src"), "target_codes": str(tmp_path / "tgt")}
    assert found == beside | options.given()


@pytest.mark.parametrize("given", [True, False])
def test_a_check_splits_with_the_codes_of_the_conversion(
    checkpoint, converted_again, tmp_path, monkeypatch, given
):
    """Also if the checkpoint names files that are not there."""
    checkpoint["opt"].transforms = ["bpe"]
    checkpoint["opt"].src_subword_model = "elsewhere/codes"
    converted_again()
    modules = ("inputters", "inputters.inputter", "model_builder", "transforms", "utils.parse")
    onmt = {name: MagicMock() for name in ("onmt", *(f"onmt.{each}" for each in modules))}
    onmt["onmt.utils.parse"].ArgumentParser.ckpt_model_opts = lambda opt: opt
    for name, module in onmt.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *arguments: None)
    (tmp_path / "own").write_text("#version: 0.2\n")
    options = ConversionOptions(source_codes=str(tmp_path / "own") if given else None)
    opennmt_py.load_toolkit(tmp_path / NAME, options)
    transforms = onmt["onmt.transforms"]
    transforms.get_transforms_cls.assert_called_once_with(["bpe"] if given else [])
    assert transforms.make_transforms.call_args[0][0].src_subword_model == options.source_codes


def test_before_version_3_5_words_are_split_at_all_white_space(checkpoint, converted_again):
    del checkpoint["opt"].num_experts, checkpoint["opt"].num_experts_per_tok
    tokenizer = AutoTokenizer.from_pretrained(converted_again())
    one, other = checkpoint["vocab"]["src"][4:6]
    assert tokenizer(f" {one} \t {other}\u00a0{one} ")["input_ids"] == [4, 5, 4]


def test_since_version_3_5_words_are_split_at_spaces(converted):
    """Its words are those of `line.strip().split(" ")`, and empty ones are unknown."""
    tokenizer = AutoTokenizer.from_pretrained(converted("opennmt_py/a"))
    assert tokenizer("\u00a0maus  drei\t ")["input_ids"] == [11, 0, 20]
    assert tokenizer("maus\u00a0drei neun")["input_ids"] == [0, 14]


def test_preprocessing_that_is_not_converted_is_in_the_model_card(checkpoint, converted_again):
    checkpoint["opt"].transforms = ["onmt_tokenize", "filtertoolong"]
    checkpoint["opt"].src_subword_vocab = "words.txt"
    card = (converted_again() / "README.md").read_text()
    assert "text goes through OpenNMT-py's onmt_tokenize first" in card
    assert "subwords are not restricted by OpenNMT-py's src_subword_vocab" in card


# ---------------------------------------------------------------- Training


def test_training_continues(converted):
    tensors, _ = load_reference("opennmt_py/a")
    model = AutoModelForSeq2SeqLM.from_pretrained(converted("opennmt_py/a"))
    labels = tensors["target_ids"].masked_fill(tensors["target_ids"] == 1, -100)
    source = tensors["source_ids"]
    batch = {"input_ids": source, "attention_mask": (source != 1).long(), "labels": labels}
    gold = tensors["log_probs"].gather(2, tensors["target_ids"][..., None])[..., 0]
    expected = -gold[labels != -100].mean()
    assert model.config.label_smoothing == 0
    expect_to_train_on(model, batch, expected)


# ---------------------------------------------------------------- Refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_task", "lm"),
        ("encoder_type", "rnn"),
        ("decoder_type", "transformer_lm"),
        ("self_attn_type", "average"),
        ("max_relative_positions", -1),
        ("relative_positions_buckets", 32),
        ("copy_attn", True),
        ("pos_ffn_activation_fn", "gated-gelu"),
        ("layer_norm", "rms"),
        ("parallel_residual", True),
        ("num_kv", 2),
        ("num_experts", 8),
        ("n_src_feats", 1),
        ("lora_layers", ["linear_query"]),
        ("quant_layers", ["w_1"]),
        ("sliding_window", 16),
        ("generator_function", "sparsemax"),
    ],
)
def test_other_models_are_refused(checkpoint, converted_again, name, value):
    setattr(checkpoint["opt"], name, value)
    with pytest.raises(ValueError, match=rf"{NAME}: {name}={re.escape(repr(value))}, expected "):
        converted_again()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.update(extra=torch.zeros(1)), "does not know: extra$"),
        (
            lambda model: model.pop(f"{ATTENTION}.linear_keys.weight"),
            "linear_keys.weight' of shape",
        ),
        (
            lambda model: model.update({f"{FEED_FORWARD}.w_2.weight": torch.zeros(32, 47)}),
            r"w_2.weight' has shape \(32, 47\), expected \(32, 48\)",
        ),
        (lambda model: model.update({EMBEDDING: torch.zeros(25, 32)}), r"expected \(24, any\)"),
    ],
)
def test_tensors_that_do_not_fit_are_reported(checkpoint, converted_again, change, message):
    change(checkpoint["model"])
    with pytest.raises(ValueError, match=message):
        converted_again()


def test_missing_special_tokens_are_refused(checkpoint, converted_again):
    checkpoint["vocab"]["decoder_start_token"] = "__en__"
    with pytest.raises(ValueError, match="expected a token '__en__' in the vocabulary"):
        converted_again()


def test_a_truncated_file_is_refused(tmp_path, checkpoint):
    torch.save(checkpoint, tmp_path / NAME)
    data = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="expected a complete torch checkpoint"):
        opennmt_py.read(tmp_path / NAME, conversion.ConversionOptions())


def test_code_in_a_checkpoint_is_not_executed(checkpoint, converted_again, tmp_path, mark):
    checkpoint["optim"] = Payload(mark)
    with pytest.raises(ValueError, match=r"mkdir.* none of them is executed"):
        converted_again()
