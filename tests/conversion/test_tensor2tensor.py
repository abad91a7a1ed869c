"""tensor2tensor's checkpoints, and TensorFlow's files read without TensorFlow."""

import json
import os
import pickle
import struct

import pytest
import torch
from conftest import Payload
from transformers import AutoConfig, AutoTokenizer, pipeline

from conversion.models import (
    embeddings,
    expect_same,
    expect_training_to_go_on,
    random_model,
    split_state,
    to_halves,
)
from conversion.reference import CHECKPOINTS, expect_reference, load_reference
from vanilla_transformer.conversion import (
    ConversionOptions,
    convert,
    find_format,
    tensor2tensor,
)
from vanilla_transformer.conversion.check import Converted, largest_difference, of_targets
from vanilla_transformer.conversion.tensor2tensor_program import short
from vanilla_transformer.conversion.tensorflow_checkpoint import (
    DTYPES,
    MAGIC,
    TensorFlowCheckpoint,
    _masked_crc32c,
)

# ---------------------------------------------------------------- a writer for TensorFlow's format


def varint(number):
    data = b""
    while number > 127:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


def field(number, value):
    """A field of a protocol buffer: an integer, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(entries):
    """A block of a table; each key is stored without the prefix it shares with the one before."""
    data, last = b"", b""
    for key, value in entries:
        shared = next(
            (i for i, (a, b) in enumerate(zip(key, last, strict=False)) if a != b),
            min(len(key), len(last)),
        )
        data += varint(shared) + varint(len(key) - shared) + varint(len(value))
        data, last = data + key[shared:] + value, key
    return data + struct.pack("<II", 0, 1)


def save_tensors(prefix, tensors, shards=2):
    """A TensorFlow checkpoint, with every tensor in one of `shards` files."""
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    data = [b""] * shards
    entries = [(b"", field(1, shards))]
    for position, (name, tensor) in enumerate(sorted(tensors.items())):
        shard, raw = position % shards, tensor.contiguous().numpy().tobytes()
        shape = b"".join(field(2, field(1, size)) for size in tensor.shape)
        entry = field(1, numbers[tensor.dtype]) + field(2, shape)
        entry += field(3, shard) + field(4, len(data[shard])) + field(5, len(raw))
        entries.append((name.encode(), entry))
        data[shard] += raw
    table, handles = b"", []
    for start in range(0, len(entries), 20):  # several blocks, as in a large model
        chunk = entries[start : start + 20]
        handles.append((chunk[-1][0], place(table, block(chunk))))
        table += sealed(block(chunk))
    meta = place(table, block([]))
    table += sealed(block([]))
    index = place(table, block(handles))
    table += sealed(block(handles))
    table += (meta + index).ljust(40, b"\0") + MAGIC
    prefix.with_name(f"{prefix.name}.index").write_bytes(table)
    for shard, raw in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{shards:05}").write_bytes(raw)


def place(table, content):
    return varint(len(table)) + varint(len(content))


def sealed(content):
    return content + b"\0" + struct.pack("<I", _masked_crc32c(content + b"\0"))


# ---------------------------------------------------------------- models of ours in tensor2tensor's


def variables_of(model, names="1.15", shards=3, space=0):
    """tensor2tensor's variables, under the names of a version."""
    learned = model.config.position_encoding == "learned"
    halve = (lambda weights: weights) if learned else to_halves
    ours = halve(split_state(model))
    d, variables = model.config.d_model, {}
    for stack in ("encoder", "decoder"):
        for layer in range(getattr(model.config, f"{stack}_layers")):
            at = f"model.{stack}.layers.{layer}."
            to = f"{PREFIXES[names]}body/{stack}/layer_{layer}/"
            variables |= layer_variables(model, ours, stack, at, to, names)
        for part in ("weight", "bias"):
            if f"model.{stack}.layer_norm.{part}" in ours:
                to = f"transformer/body/{stack}/layer_prepostprocess/layer_norm/layer_norm_"
                scale = "scale" if part == "weight" else part
                variables[to + scale] = ours[f"model.{stack}.layer_norm.{part}"]
        if learned:
            side = {"encoder": "inputs", "decoder": "targets"}[stack]
            table = ours[f"model.{stack}.embed_positions.weight"]
            variables[f"transformer/body/{side}_positional_embedding"] = table
    matrices = embeddings(model)
    kinds = ["shared"] * 3 if model.config.tie_word_embeddings else KINDS
    for kind, matrix in zip(kinds, matrices, strict=True):
        matrix = halve({"lm_head.weight": matrix})["lm_head.weight"]
        scope = f"{PREFIXES[names]}symbol_modality_{len(matrix)}_{d}/{kind}/weights_"
        for number, shard in enumerate(matrix.tensor_split(shards)):
            variables[f"{scope}{number}"] = shard
    spaces = torch.arange(32.0 * d).view(32, d).sin()
    variables[f"{PREFIXES[names]}body/target_space_embedding/kernel"] = spaces
    variables["global_step"] = torch.tensor(7)
    averages = torch.zeros(32, d)
    averages[space] = 1.0
    variables["training/transformer/body/target_space_embedding/kernel/Adam"] = averages
    variables["training/beta1_power"] = torch.tensor(0.9)
    constant = spaces[space]
    return variables, constant if learned else interleave(constant)


KINDS = ["input_emb", "target_emb", "softmax"]
PREFIXES = {
    "1.15": "transformer/parallel_0_5/transformer/transformer/",
    "2017": "body/model/parallel_0/",
    "3d": "transformer/",
}


def interleave(vector):
    return vector.view(2, -1).T.flatten()


def layer_variables(model, ours, stack, at, to, names):
    sublayers = {"self_attn": "self_attention", "encoder_attn": "encdec_attention"}
    if stack == "encoder":
        del sublayers["encoder_attn"]
    when = "layer_prepostprocess" if model.config.norm_position == "pre" else "layer_postprocess"
    heads = getattr(model.config, f"{stack}_attention_heads")
    variables = {}
    for number, (name, theirs) in enumerate({**sublayers, "ffn": "ffn"}.items()):
        for part, their_part in (("weight", "scale"), ("bias", "bias")):
            scope = f"layer_norm{f'_{number}' * bool(number)}"
            norm = scope if names == "2017" else f"{theirs}/{when}/layer_norm"
            variables[f"{to}{norm}/layer_norm_{their_part}"] = ours[f"{at}{name}_layer_norm.{part}"]
        if name == "ffn":
            continue
        weights = {p: ours[f"{at}{name}.{p}_proj.weight"].T for p in ("q", "k", "v", "out")}
        if names == "1.15":
            for part, weight in weights.items():
                part = part.replace("out", "output_transform")
                variables[f"{to}{theirs}/multihead_attention/{part}/kernel"] = weight
        elif names == "3d":  # tensor2tensor does not scale these queries
            weights["q"] = weights["q"] * model.config.head_dim**-0.5
            for part, weight in weights.items():
                d = len(weight)
                shape = (heads, -1, d) if part == "out" else (d, heads, weight.shape[1] // heads)
                part = part.replace("out", "o")
                variables[f"{to}{theirs}/multihead_attention/{part}"] = weight.reshape(shape)
        else:
            scope = theirs if name == "encoder_attn" else f"{stack}_self_attention"
            fused = ["q", "kv"] if name == "encoder_attn" else ["qkv"]
            for parts in (*fused, ("out",)):
                transform = "output" if parts == ("out",) else parts
                kernel = torch.cat([weights[part] for part in parts], 1)
                bias = torch.cat([ours[f"{at}{name}.{part}_proj.bias"] for part in parts])
                variables[f"{to}{scope}/{transform}_transform_single/kernel"] = kernel[None, None]
                variables[f"{to}{scope}/{transform}_transform_single/bias"] = bias
    again = to.removesuffix("/") + "_1/" if names == "1.15" and stack == "decoder" else to
    for number in (1, 2):
        kernel, bias = (ours[f"{at}ffn.fc{number}.{part}"] for part in ("weight", "bias"))
        scope = f"{to}conv_hidden_relu/conv{number}_single"
        scope = scope if names == "2017" else f"{again}ffn/conv{number}"
        variables[f"{scope}/kernel"] = kernel.T[None, None] if names == "2017" else kernel.T
        variables[f"{scope}/bias"] = bias
    return variables


def hparams_of(model):
    config, pre = model.config, model.config.norm_position == "pre"
    return {
        "num_heads": config.encoder_attention_heads,
        "hidden_size": config.d_model,
        "layer_preprocess_sequence": "n" if pre else "none",
        "layer_postprocess_sequence": "da" if pre else "dan",
        "pos": "emb" if config.position_encoding == "learned" else "timing",
        "norm_epsilon": 1e-6,
        "attention_key_channels": 0,
    }


def save(
    folder, model, variables=None, vocabularies=None, specials=("<pad>_", "<EOS>_"), **hparams
):
    """A folder in tensor2tensor's format."""
    folder.mkdir()
    save_tensors(folder / "model.ckpt-7", variables or variables_of(model)[0])
    (folder / "hparams.json").write_text(json.dumps({**hparams_of(model), **hparams}))
    sizes = {model.config.vocab_size, model.config.target_vocab_size}
    for size in vocabularies or sizes:
        tokens = [*specials, *"\\_u;0123456789w"]
        tokens += [f"w{number}_" for number in range(size - len(tokens))]
        lines = "".join(f"'{token}'\n" for token in tokens)
        (folder / f"vocab.{size}.subwords").write_text(lines)
    return folder


HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
T2T = {**HEADS, "sinusoid_frequencies": "tensor2tensor"}


@pytest.fixture(scope="module")
def small():
    return random_model(**T2T)


# ---------------------------------------------------------------- tests


def test_a_converted_model_gives_the_same_as_tensor2tensor(converted):
    expect_reference(converted("tensor2tensor/v1"), "tensor2tensor/v1")


def test_training_continues_from_tensor2tensors_loss(converted):
    expect_training_to_go_on(converted("tensor2tensor/v1"), "tensor2tensor/v1")


def test_beam_search_mostly_finds_what_tensor2tensor_finds_or_better(converted):
    translate = pipeline("translation", model=str(converted("tensor2tensor/v1")))
    notes = load_reference("tensor2tensor/v1")[1]
    beam = notes["beam_4"]["default"]
    found = [each["translation_text"] for each in translate(notes["source_texts"])]
    scores = [
        score(translate.model, translate.tokenizer, *texts)
        for texts in zip(notes["source_texts"], found, strict=True)
    ]
    as_good = [ours > theirs - 1e-5 for ours, theirs in zip(scores, beam["scores"], strict=True)]
    # tensor2tensor lets any of the 2 * beam_size best candidates end, transformers the best half.
    assert sum(as_good) >= 7


def score(model, tokenizer, source, target):
    """tensor2tensor's score of a translation."""
    batch = tokenizer(source, text_target=target, return_tensors="pt")
    length = batch["labels"].shape[1]
    return -model(**batch).loss.item() * length / ((5 + length) / 6) ** 0.6


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, "1.15"),
        ({"norm_position": "pre"}, "1.15"),
        ({"norm_position": "pre"}, "3d"),
        ({"attention_bias": True}, "2017"),
        ({"position_encoding": "learned", "max_position_embeddings": 40}, "1.15"),
        ({"tie_word_embeddings": False}, "1.15"),
    ],
)
def test_variants_have_the_same_log_probabilities(tmp_path, config, names):
    model = random_model(**T2T, **config)
    variables, constant = variables_of(model, names)
    folder = convert(save(tmp_path / "t2t", model, variables), tmp_path / "ours")
    expect_same(folder, model, start="zero", constant=constant)


@pytest.mark.parametrize("tied", [True, False])
def test_two_vocabularies_keep_separate_matrices(tmp_path, tied):
    model = random_model(**T2T, decoder_vocab_size=46, tie_word_embeddings=tied)
    variables, constant = variables_of(model)
    folder = save(tmp_path / "t2t", model, variables)
    options = ConversionOptions(
        source_vocabulary=str(folder / "vocab.50.subwords"),
        target_vocabulary=str(folder / "vocab.46.subwords"),
    )
    ours = convert(folder, tmp_path / "ours", options=options)
    expect_same(ours, model, start="zero", constant=constant)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    ids = tokenizer("w32", text_target="w1")
    assert (ids["input_ids"], ids["labels"]) == ([49, 1], [18, 1])


def test_tokenizer_and_configuration_name_the_same_tokens(tmp_path, small):
    """Otherwise training changes the configuration, and the trained model cannot form an ensemble
    with the converted one."""
    folder = convert(save(tmp_path / "t2t", small, variables_of(small)[0]), tmp_path / "ours")
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name)


def test_many_shards_are_joined_by_number(tmp_path, small):
    variables, constant = variables_of(small, shards=16)
    folder = convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")
    expect_same(folder, small, start="zero", constant=constant)


def test_the_target_space_follows_from_the_optimizer_state(tmp_path, small):
    variables, constant = variables_of(small, space=8)
    folder = convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")
    expect_same(folder, small, start="zero", constant=constant)


def test_the_prefix_of_the_files_can_be_given(tmp_path, small):
    prefix = save(tmp_path / "t2t", small) / "model.ckpt-7"
    assert find_format(prefix).NAME == "tensor2tensor"
    assert convert(prefix, tmp_path / "ours").is_dir()


def test_a_target_space_can_be_given(tmp_path, small):
    variables, constant = variables_of(small, space=8)
    variables = {name: each for name, each in variables.items() if "Adam" not in name}
    folder = save(tmp_path / "t2t", small, variables)
    ours = convert(folder, tmp_path / "ours", options=ConversionOptions(target_space_id=8))
    expect_same(ours, small, start="zero", constant=constant)


def test_a_guessed_target_space_is_reported(tmp_path, small, caplog):
    variables, _ = variables_of(small)
    convert(save(tmp_path / "known", small, variables), tmp_path / "one")
    assert "is a guess" not in caplog.text
    variables = {name: each for name, each in variables.items() if "Adam" not in name}
    convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")
    assert "target_space_id=0 is a guess, as Adam's variables are not there" in caplog.text


def test_an_unknown_target_space_is_reported(tmp_path, small):
    options = ConversionOptions(target_space_id=32)
    with pytest.raises(ValueError, match="target_space_id=32: expected 0 to 31"):
        convert(save(tmp_path / "t2t", small), tmp_path / "ours", options=options)


def test_keys_wider_than_the_model_are_kept(tmp_path):
    model = random_model(**T2T, head_dim=10, value_head_dim=7)
    variables, constant = variables_of(model)
    widths = {"attention_key_channels": 40, "attention_value_channels": 28}
    folder = save(tmp_path / "t2t", model, variables, **widths)
    expect_same(convert(folder, tmp_path / "ours"), model, start="zero", constant=constant)


def test_a_checkpoint_without_hparams_requires_the_option_heads(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    (folder / "hparams.json").unlink()
    with pytest.raises(ValueError, match=r"no hparams.json .* expected --heads"):
        convert(folder, tmp_path / "ours")
    ours = convert(folder, tmp_path / "ours", options=ConversionOptions(heads=4))
    expect_same(ours, small, start="zero", constant=variables_of(small)[1])


def test_heads_that_contradict_the_hparams_are_reported(tmp_path, small):
    folder, options = save(tmp_path / "t2t", small), ConversionOptions(heads=8)
    with pytest.raises(ValueError, match=r"heads=8: expected 4, as hparams.json has it"):
        convert(folder, tmp_path / "ours", options=options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("self_attention_type", "dot_product_relative"),
        ("ffn_layer", "local_moe"),
        ("pos", "none"),
        ("norm_type", "batch"),
        ("layer_postprocess_sequence", "dnan"),
        ("prepend_mode", "prepend_inputs_full_attention"),
        ("unidirectional_encoder", True),
        ("weight_dtype", "bfloat16"),
    ],
)
def test_unsupported_hparams_are_refused_by_name(tmp_path, small, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}.*: expected "):
        convert(save(tmp_path / "t2t", small, **{name: value}), tmp_path / "ours")


def test_a_different_model_is_refused_by_name(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    (folder / "flags.txt").write_text("--problem=x\n--model=universal_transformer\n")
    with pytest.raises(ValueError, match="model=universal_transformer: expected transformer"):
        convert(folder, tmp_path / "ours")


def test_a_language_model_is_refused(tmp_path, small):
    variables = {n: v for n, v in variables_of(small)[0].items() if "encoder/" not in n}
    with pytest.raises(ValueError, match="found 0 layers of an encoder and 3 of a decoder"):
        convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")


def test_an_unknown_variable_is_reported(tmp_path, small):
    name = "transformer/body/encoder/layer_0/self_attention/multihead_attention/gates"
    variables = variables_of(small)[0] | {name: torch.zeros(3)}
    with pytest.raises(ValueError, match=f"does not know: {name}"):
        convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")


def test_a_missing_variable_is_reported(tmp_path, small):
    variables = variables_of(small)[0]
    gone = [
        name for name in variables if "decoder/layer_1/self_attention" in name and "/v/" in name
    ]
    del variables[gone[0]]
    with pytest.raises(ValueError, match=r"tensor 'decoder.1.self_attention.v.kernel'"):
        convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")


def test_a_wrong_shape_is_reported(tmp_path, small):
    variables = variables_of(small)[0]
    name = next(n for n in variables if n.endswith("encoder/layer_1/ffn/conv2/kernel"))
    variables[name] = torch.zeros(39, 24)
    with pytest.raises(ValueError, match=r"encoder.1.ffn.conv2.kernel'.*\(39, 24\).*\(40, 24\)"):
        convert(save(tmp_path / "t2t", small, variables), tmp_path / "ours")


def test_a_subword_unk_does_not_make_a_vocabulary_of_whole_tokens(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    subwords = ["<pad>", "<EOS>", "UNK", "UN_", *"UNKabc_\\u;0123456789"]
    subwords += [f"w{n}" for n in range(50 - len(subwords))]
    file = folder / "vocab.50.subwords"
    file.write_text("".join(f"'{subword}'\n" for subword in subwords))
    tokenizer = AutoTokenizer.from_pretrained(convert(folder, tmp_path / "ours"))
    assert tokenizer("UNK abc")["input_ids"] == [2, 10, 7, 8, 9, 10, 1]


def test_a_vocabulary_of_tokens_splits_at_white_space(tmp_path, small):
    """Like that of translate_ende_wmt_bpe32k, the paper's data, whose text has byte-pair codes."""
    folder = save(tmp_path / "t2t", small)
    (folder / "vocab.50.subwords").unlink()
    tokens = ["<pad>", "<EOS>", "ha@@", "us", "'s'", "_", "", *(f"w{n}" for n in range(42)), "UNK"]
    (folder / "vocab.bpe.50").write_text("".join(f"{token}\n" for token in tokens))
    tokenizer = AutoTokenizer.from_pretrained(convert(folder, tmp_path / "ours"))
    assert tokenizer("ha@@ us\t 's' _ Haus w41")["input_ids"] == [2, 3, 4, 5, 49, 48, 1]
    assert tokenizer.decode([2, 3, 49, 1], skip_special_tokens=True) == "ha@@ us UNK"


def test_a_vocabulary_that_does_not_match_is_refused(tmp_path, small):
    folder = save(tmp_path / "t2t", small, vocabularies=[51])
    with pytest.raises(ValueError, match=r"source vocabulary has 51 tokens, .*shared of 50 rows"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize("specials", [("<pad>_", "<EOS>_"), ("<pad>", "<EOS>")])
def test_special_tokens_can_have_either_spelling(tmp_path, small, specials):
    folder = convert(save(tmp_path / "t2t", small, specials=specials), tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["w1", "w1 w2"], padding=True)["input_ids"]
    assert batch == [[18, 1, 0], [18, 19, 1]]


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path, small):
    folder = save(tmp_path / "t2t", small, specials=("a_", "b_"))
    with pytest.raises(
        ValueError, match=r"starts with \('a', 'b'\): expected \('<pad>', '<EOS>'\)"
    ):
        convert(folder, tmp_path / "ours")


def test_a_missing_vocabulary_is_reported(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    (folder / "vocab.50.subwords").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected vocab\.\*\.subwords"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00002", ".data-00001-of-00002"])
def test_a_truncated_file_is_refused(tmp_path, small, suffix):
    folder = save(tmp_path / "t2t", small)
    file = folder / f"model.ckpt-7{suffix}"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"model.ckpt-7{suffix}.* truncated"):
        TensorFlowCheckpoint(folder / "model.ckpt-7")


def test_a_missing_shard_is_reported(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    (folder / "model.ckpt-7.data-00001-of-00002").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.ckpt-7.data-00001-of-00002"):
        convert(folder, tmp_path / "ours")


def test_a_damaged_index_is_refused(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    index = folder / "model.ckpt-7.index"
    data = bytearray(index.read_bytes())
    data[50] ^= 1
    index.write_bytes(data)
    with pytest.raises(ValueError, match="the checksum of its block at 0 is wrong"):
        TensorFlowCheckpoint(folder / "model.ckpt-7")


def test_all_tensors_are_read_unchanged(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b/c": torch.randn(2, dtype=torch.float64),
        "b/d": torch.tensor(5),
        "e": torch.empty(0, 3),
        "f": torch.randn(4).half(),
    }
    save_tensors(tmp_path / "model.ckpt", tensors, shards=3)
    found = TensorFlowCheckpoint(tmp_path / "model.ckpt")
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_the_newest_checkpoint_of_a_folder_is_read(tmp_path, small):
    folder = save(tmp_path / "t2t", small)
    save_tensors(folder / "model.ckpt-9", variables_of(small)[0])
    with pytest.raises(ValueError, match=r"model.ckpt-7.index, model.ckpt-9.index: expected one"):
        tensor2tensor.find_index(folder)
    (folder / "checkpoint").write_text('model_checkpoint_path: "/old/place/model.ckpt-9"\n')
    assert tensor2tensor.find_index(folder).name == "model.ckpt-9.index"
    assert tensor2tensor.find_index(folder / "model.ckpt-7").name == "model.ckpt-7.index"


def test_a_payload_in_place_of_the_index_is_not_executed(tmp_path, small, mark):
    folder = save(tmp_path / "t2t", small)
    (folder / "model.ckpt-7.index").write_bytes(pickle.dumps(Payload(mark)))
    assert not tensor2tensor.recognizes(folder)
    options = ConversionOptions(format="tensor2tensor")
    with pytest.raises(ValueError, match="no index of a TensorFlow checkpoint"):
        convert(folder, tmp_path / "ours", options=options)


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="the checkpoints are not there")
def test_the_start_token_is_never_decoded(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted("tensor2tensor/v1"))
    assert tokenizer.decode([87, 2, 1], skip_special_tokens=True) == ""


# ---------------------------------------------------------------- the toolkit itself


def test_a_check_without_tensor2tensor_reports_the_missing_python(tmp_path, small, monkeypatch):
    monkeypatch.delenv("TENSOR2TENSOR_PYTHON", raising=False)
    expected = "No module named 'tensor2tensor' in .*: set TENSOR2TENSOR_PYTHON"
    with pytest.raises(ImportError, match=expected):
        tensor2tensor.load_toolkit(save(tmp_path / "t2t", small), ConversionOptions())


def test_a_check_shows_the_error_of_tensor2tensor(tmp_path, small, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no memory >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("TENSOR2TENSOR_PYTHON", str(program))
    with pytest.raises(RuntimeError, match="tensor2tensor: no memory"):
        tensor2tensor.load_toolkit(save(tmp_path / "t2t", small), ConversionOptions())


def test_a_check_gives_tensor2tensor_the_trained_target_space(tmp_path, small, monkeypatch):
    folder = save(tmp_path / "t2t", small, variables_of(small, space=5)[0])
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/got\necho \'"ready"\'\ncat\n')
    program.chmod(0o755)
    monkeypatch.setenv("TENSOR2TENSOR_PYTHON", str(program))
    for options, space in ((ConversionOptions(), 5), (ConversionOptions(target_space_id=7), 7)):
        tensor2tensor.load_toolkit(folder, options)
        got = json.loads((tmp_path / "got").read_text())
        assert got["target_space_id"] == space
        assert got["unknown"] == [None, None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("transformer/parallel_0_5/transformer/transformer/body/decoder/layer_0_1/ffn/conv1/bias",
         "body/parallel_0/body/decoder/layer_0/ffn/conv1/bias"),
        ("transformer/body/encoder/layer_prepostprocess/layer_norm/layer_norm_bias",
         "body/encoder/layer_prepostprocess/layer_norm/layer_norm_bias"),
        ("transformer/symbol_modality_87_32/shared/weights_1",
         "symbol_modality_87_32/shared/weights_1"),
        ("transformer/body/inputs_positional_embedding", "body/inputs_positional_embedding"),
    ],
)  # fmt: skip
def test_a_variable_has_one_name_in_every_graph(one, other):
    assert short(one) == short(other)
    assert short(f"training/{one}/Adam") != short(one) != short(f"{one}/Adam")


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="the checkpoints are not there")
@pytest.mark.skipif("TENSOR2TENSOR_PYTHON" not in os.environ, reason="no Python has tensor2tensor")
def test_a_check_runs_tensor2tensor(converted):
    ours = Converted(converted("tensor2tensor/v1"))
    _, notes = load_reference("tensor2tensor/v1")
    toolkit = tensor2tensor.load_toolkit(CHECKPOINTS / "tensor2tensor/v1", ConversionOptions())
    sources = ours.tokenizer(notes["source_texts"])["input_ids"]
    assert sources == [toolkit.encode(text) for text in notes["source_texts"]]
    greedy = toolkit.translate(sources, longest=20)
    assert [ours.text(ids) for ids in greedy] == notes["greedy"]["texts"]
    assert largest_difference(toolkit, ours, sources, greedy) < 1e-5
    assert toolkit.translate(sources, longest=3) == [ids[:3] for ids in greedy]
    targets = ours.tokenizer(text_target=notes["target_texts"])["input_ids"]
    loss = toolkit.loss(toolkit.padded(sources), toolkit.padded(targets))
    expected = -torch.cat(of_targets(ours.log_probs(sources, targets), targets)).mean()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
