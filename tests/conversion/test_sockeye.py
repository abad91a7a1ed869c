"""Models of Sockeye 3."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import Payload
from transformers import AutoTokenizer, GenerationConfig, pipeline

from conversion.models import (
    embeddings,
    expect_same,
    expect_training_to_go_on,
    random_model,
    split_state,
    to_halves,
)
from conversion.reference import CHECKPOINTS, expect_reference, load_reference
from vanilla_transformer.conversion import ConversionOptions, convert, sockeye

SPECIALS = ["<pad>", "<unk>", "<s>", "</s>"]
VARIANTS = {
    "post": {"activation_function": "silu", "decoder_vocab_size": 46},
    "pre": {"norm_position": "pre", "decoder_vocab_size": 46, "activation_function": "gelu"},
    "one matrix": {"norm_position": "pre"},
    "pre in the decoder": {"decoder_norm_position": "pre"},
    "untied": {"tie_word_embeddings": False, "decoder_vocab_size": 46},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 30},
}


def interleaved(keys, values, heads):
    """Keys and values interleaved, head by head, as Sockeye saves them."""
    parts = [each.view(heads, -1, each.shape[1]) for each in (keys, values)]
    return torch.cat(parts, dim=1).reshape(-1, keys.shape[1])


def params_of(model):
    """A state dict of Sockeye's."""
    learned = model.config.position_encoding == "learned"
    ours = split_state(model) if learned else to_halves(split_state(model))
    matrices = dict(zip("abc", embeddings(model), strict=True))
    source, target, projection = (
        matrices
        if learned
        else {n: to_halves({"lm_head.weight": m})["lm_head.weight"] for n, m in matrices.items()}
    ).values()
    params = {
        "embedding_source.embedding.weight": source,
        "embedding_target.embedding.weight": target,
        "output_layer.weight": projection,
        "output_layer.bias": ours.pop("lm_head.bias"),
    }
    names = {
        "encoder": {"self_attention": "self_attn"},
        "decoder": {"autoregr_layer": "self_attn", "enc_attention": "encoder_attn"},
    }
    for stack, attention in names.items():
        pre = model.config.has_pre_norm(stack)
        heads = getattr(model.config, f"{stack}_attention_heads")
        for layer in range(getattr(model.config, f"{stack}_layers")):
            at, to = f"model.{stack}.layers.{layer}.", f"{stack}.layers.{layer}."
            for theirs, name in attention.items():
                q, k, v, out = (ours[f"{at}{name}.{p}_proj.weight"] for p in ("q", "k", "v", "out"))
                kv = interleaved(k, v, heads)
                if name == "encoder_attn":
                    params |= {f"{to}{theirs}.ff_q.weight": q, f"{to}{theirs}.ff_kv.weight": kv}
                else:
                    params[f"{to}{theirs}.ff_in.weight"] = torch.cat([q, kv])
                params[f"{to}{theirs}.ff_out.weight"] = out
            for theirs, name in {**attention, "ff": "ffn"}.items():
                for part in ("weight", "bias"):
                    norm = f"{to}{'pre' if pre else 'post'}_{theirs}.layer_norm.{part}"
                    params[norm] = ours[f"{at}{name}_layer_norm.{part}"]
            for part in ("weight", "bias"):
                params[f"{to}ff.ff1.{part}"] = ours[f"{at}ffn.fc1.{part}"]
                params[f"{to}ff.ff2.{part}"] = ours[f"{at}ffn.fc2.{part}"]
        if pre:
            for part in ("weight", "bias"):
                norm = ours[f"model.{stack}.layer_norm.{part}"]
                params[f"{stack}.final_process.layer_norm.{part}"] = norm
        table = ours.get(f"model.{stack}.embed_positions.weight")
        if table is None:
            d = model.config.d_model
            angles = torch.arange(21)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
            table = torch.cat([angles.sin(), angles.cos()], 1)
        params[f"{stack}.pos_embedding.weight"] = table
    return params


def config_of(model):
    """The contents of Sockeye's `config` for such a model."""
    config = model.config
    described = {
        "vocab_source_size": config.vocab_size,
        "vocab_target_size": config.target_vocab_size,
        "lhuc": False,
        "dtype": "float32",
    }
    for stack in ("encoder", "decoder"):
        pre = config.has_pre_norm(stack)
        described[f"config_{stack}"] = {
            "act_type": {"silu": "swish1"}.get(
                config.activation_function, config.activation_function
            ),
            "attention_heads": getattr(config, f"{stack}_attention_heads"),
            "feed_forward_num_hidden": getattr(config, f"{stack}_ffn_dim"),
            "model_size": config.d_model,
            "num_layers": getattr(config, f"{stack}_layers"),
            "positional_embedding_type": (
                "learned" if config.position_encoding == "learned" else "fixed"
            ),
            "preprocess_sequence": "n" if pre else "",
            "postprocess_sequence": "dr" if pre else "drn",
        }
    return described


def save(folder, model, params=None, **changes):
    """A folder of Sockeye's; `changes` are of its config, the stacks' by their own names."""
    folder.mkdir()
    torch.save(params or params_of(model), folder / "params.best")
    described = {**config_of(model), **changes}
    text = yaml.safe_dump(described).replace(
        "config_encoder:", "config_encoder: !TransformerConfig"
    )
    (folder / "config").write_text(f"!ModelConfig\n{text}")
    for side, size in (
        ("src", described["vocab_source_size"]),
        ("trg", described["vocab_target_size"]),
    ):
        tokens = SPECIALS + [f"{side}{number}" for number in range(size - 4)]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        (folder / f"vocab.{side}.0.json").write_text(json.dumps(vocabulary))
    return folder


@pytest.fixture(scope="module")
def small():
    return random_model(lm_head_bias=True, **VARIANTS["post"])


def test_a_converted_model_gives_the_same_as_sockeye(converted):
    expect_reference(converted("sockeye/post"), "sockeye/post")


def test_training_continues_from_sockeyes_loss(converted):
    expect_training_to_go_on(converted("sockeye/post"), "sockeye/post")


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_same_log_probabilities(variant, tmp_path):
    model = random_model(lm_head_bias=True, **VARIANTS[variant])
    folder = convert(save(tmp_path / "sockeye", model), tmp_path / "ours")
    expect_same(folder, model)


def test_positions_beyond_a_shorter_table_repeat_its_last_row(tmp_path, small):
    model = random_model(lm_head_bias=True, **VARIANTS["learned"])
    params = params_of(model)
    table = params["decoder.pos_embedding.weight"]
    params["decoder.pos_embedding.weight"] = table[:3].clone()
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[3:] = table[2]
    expect_same(convert(save(tmp_path / "sockeye", model, params), tmp_path / "ours"), model)


def test_predictors_of_length_and_words_are_not_converted(tmp_path, small):
    params = params_of(small) | {"length_ratio.layers.0.weight": torch.zeros(1, 24)}
    expect_same(convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours"), small)


def test_an_output_is_limited_as_by_sockeye_translate_or_less(tmp_path, small):
    """Sockeye stops after ceil((mean + 2 std) * source length) tokens."""
    statistics = {"length_ratio_mean": 2.5, "length_ratio_std": 0.3}
    data = {"data_statistics": statistics}
    folder = convert(save(tmp_path / "sockeye", small, config_data=data), tmp_path / "ours")
    factor = GenerationConfig.from_pretrained(folder).max_length_factor
    assert all(int(factor * n) >= math.ceil(3.1 * n) for n in range(2, 200))
    assert factor < 3.7


def test_a_translation_is_decoded_to_text(converted):
    translate = pipeline("translation", model=str(converted("sockeye/post")), num_beams=1)
    notes = load_reference("sockeye/post")[1]
    found = [each["translation_text"] for each in translate(notes["source_texts"])]
    assert found == notes["greedy"]["texts"]


def test_beam_search_finds_what_sockeye_finds_or_better(converted):
    translate = pipeline("translation", model=str(converted("sockeye/post")), num_beams=4)
    notes = load_reference("sockeye/post")[1]
    beam = notes["beam_4"]["default"]
    found = [each["translation_text"] for each in translate(notes["source_texts"])]
    ours = [
        score(translate.model, translate.tokenizer, *texts)
        for texts in zip(notes["source_texts"], found, strict=True)
    ]
    # Sockeye's scores are positive: the smaller, the better.
    assert all(one < other + 1e-5 for one, other in zip(ours, beam["scores"], strict=True))
    assert sum(one == other for one, other in zip(found, beam["texts"], strict=True)) >= 7


def score(model, tokenizer, source, target):
    """The mean of -log p over the tokens of a translation, which is Sockeye's score."""
    return model(**tokenizer(source, text_target=target, return_tensors="pt")).loss.item()


@pytest.mark.parametrize(
    ("stack", "option", "value"),
    [
        ("config_decoder", "decoder_type", "ssru_transformer"),
        ("config_encoder", "use_lhuc", True),
        ("config_decoder", "use_glu", True),
        ("config_encoder", "act_type", "softplus"),
        ("config_encoder", "preprocess_sequence", "nr"),
        ("config_decoder", "positional_embedding_type", "learned"),
        ("config_decoder", "block_prepended_cross_attention", True),
        ("config_encoder", "attention_heads", 5),
        ("config_decoder", "num_layers", None),
    ],
)
def test_unsupported_options_are_refused_by_name(tmp_path, small, stack, option, value):
    described = config_of(small)[stack] | {option: value}
    folder = save(tmp_path / "sockeye", small, **{stack: described})
    with pytest.raises(ValueError, match=f"{option}=.*{value}"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lhuc", True, "lhuc=True"),
        ("dtype", "int8", "dtype=int8"),
        ("config_embed_source", {"num_factors": 2}, "num_factors=2 of the source: expected 1"),
        ("config_embed_target", {"num_factors": 3}, "num_factors=3 of the target: expected 1"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(tmp_path, small, option, value, message):
    folder = save(tmp_path / "sockeye", small, **{option: value})
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "ours")


def test_an_unknown_tensor_is_reported(tmp_path, small):
    params = params_of(small) | {"encoder.layers.0.lhuc.weight": torch.zeros(24)}
    with pytest.raises(ValueError, match=r"does not know: encoder.layers.0.lhuc.weight"):
        convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours")


def test_a_missing_tensor_is_reported(tmp_path, small):
    params = params_of(small)
    del params["decoder.layers.1.enc_attention.ff_kv.weight"]
    with pytest.raises(ValueError, match=r"decoder.layers.1.enc_attention.ff_kv.weight"):
        convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours")


def test_a_wrong_shape_is_reported(tmp_path, small):
    params = params_of(small) | {"output_layer.bias": torch.zeros(47)}
    with pytest.raises(ValueError, match=r"output_layer.bias.*\(47\), expected \(46\)"):
        convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours")


def test_different_sinusoids_are_refused(tmp_path, small):
    params = params_of(small)
    params["encoder.pos_embedding.weight"] = torch.rand(21, 24)
    with pytest.raises(ValueError, match=r"encoder.pos_embedding.weight: expected the sinusoids"):
        convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours")


def test_mxnet_arrays_are_refused(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    (folder / "params.best").write_bytes((0x112).to_bytes(8, "little") + bytes(64))
    with pytest.raises(ValueError, match="MXNet arrays, of Sockeye 1 or 2"):
        convert(folder, tmp_path / "ours")


def test_quantized_parameters_are_refused(tmp_path, small):
    params = params_of(small)
    params["output_layer.weight"] = params["output_layer.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"output_layer.weight is torch.int8"):
        convert(save(tmp_path / "sockeye", small, params), tmp_path / "ours")


def test_a_truncated_file_is_refused(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    data = (folder / "params.best").read_bytes()
    (folder / "params.best").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"params.best: expected a complete torch checkpoint"):
        convert(folder, tmp_path / "ours")


def test_a_vocabulary_that_does_not_match_is_refused(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    (folder / "vocab.src.0.json").write_text((folder / "vocab.trg.0.json").read_text())
    with pytest.raises(ValueError, match=r"vocab.src.0.json has 46 tokens: expected .* 0 to 49"):
        convert(folder, tmp_path / "ours")


def test_a_missing_configuration_is_reported(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    (folder / "config").unlink()
    options = ConversionOptions(format="sockeye")
    with pytest.raises(FileNotFoundError, match="config: expected the configuration of the model"):
        convert(folder, tmp_path / "ours", options=options)


def test_a_missing_vocabulary_is_reported(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    (folder / "vocab.trg.0.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"trg.0.json: expected .* --target_vocabulary"):
        convert(folder, tmp_path / "ours")


def test_a_payload_among_the_parameters_is_not_executed(tmp_path, small, mark):
    folder = save(tmp_path / "sockeye", small, params_of(small) | {"evil": Payload(mark)})
    with pytest.raises(ValueError, match=r"params.best: holds objects of posix.mkdir"):
        convert(folder, tmp_path / "ours")


def test_a_payload_in_the_config_is_not_executed(tmp_path, small, mark):
    folder = save(tmp_path / "sockeye", small)
    with (folder / "config").open("a") as file:
        file.write(f"extra: !!python/object/apply:os.mkdir [{str(mark)!r}]\n")
    with pytest.raises(ValueError, match="expected the YAML of a Sockeye model"):
        convert(folder, tmp_path / "ours")


def test_codes_split_words_and_missing_pieces_have_the_unknown_embedding(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    vocabulary = json.loads((folder / "vocab.src.0.json").read_text())
    vocabulary["ab@@"] = vocabulary.pop("src0")
    (folder / "vocab.src.0.json").write_text(json.dumps(vocabulary))
    (tmp_path / "codes").write_text("#version: 0.2\na b\nc d</w>\n")
    options = ConversionOptions(source_codes=str(tmp_path / "codes"))
    ours = convert(folder, tmp_path / "ours", options=options)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    ids = tokenizer("abcd")["input_ids"]
    assert (ids[0], ids[1] >= 50, ids[2:]) == (4, True, [3])


def test_a_folder_or_its_parameter_file_is_recognized(tmp_path, small):
    folder = save(tmp_path / "sockeye", small)
    shutil.copy(folder / "params.best", folder / "params.00003")
    assert all(map(sockeye.recognizes, (folder, folder / "params.00003")))
    assert not any(map(sockeye.recognizes, (tmp_path, folder / "config")))


@pytest.mark.parametrize(
    ("file", "checkpoint"), [("", None), ("params.best", None), ("params.00012", 12)]
)
def test_a_check_opens_the_checkpoint_that_was_converted(tmp_path, monkeypatch, file, checkpoint):
    opened = []

    def load_model(folder, checkpoint):
        opened.append((folder, checkpoint))
        return torch.nn.Linear(1, 1), [{}], [{}]

    stubs = {"sockeye": {}, "sockeye.loss": {"CrossEntropyLoss": torch.nn.Identity}}
    for name, content in {**stubs, "sockeye.model": {"load_model": load_model}}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    if file:
        (tmp_path / file).touch()
    sockeye.load_toolkit(tmp_path / file, ConversionOptions())
    assert opened == [(str(tmp_path), checkpoint)]


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="the checkpoints are not there")
def test_dropout_rates_and_versions_are_converted(converted):
    folder = converted("sockeye/post")
    config = json.loads((folder / "config.json").read_text())
    assert (config["dropout"], config["attention_dropout"], config["activation_dropout"]) == (
        0.1,
    ) * 3
    assert "Sockeye 3.1.34" in (folder / "README.md").read_text()
