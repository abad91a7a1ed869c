"""The ONNX graphs compute what the model computes, for any batch and length."""

import onnx
import onnxruntime
import pytest
import torch
from conftest import ragged, random_ids, seq2seq

from export.onnx_folder import saved_model
from vanilla_transformer.export import export
from vanilla_transformer.export.onnx_graphs import DECODER, ENCODER, DecoderGraph, round_to_int8
from vanilla_transformer.inference.engines import load

OTHERS = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre", "activation_function": "gelu"},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 64},
    "two vocabularies": {"decoder_vocab_size": 41, "lm_head_bias": True, "attention_bias": True},
    "untied": {"tie_word_embeddings": False, "scale_embedding": False},
    "tensor2tensor": {"sinusoid_frequencies": "tensor2tensor", "position_offset": 2},
    "norms": {"embedding_layer_norm": True, "final_layer_norm": "decoder", "layer_norm_eps": 1e-3},
}


def session(path):
    return onnxruntime.InferenceSession(path)


def names(folder):
    decoder = session(folder / DECODER)
    return (
        {put.name: put.shape for put in puts}
        for puts in (decoder.get_inputs(), decoder.get_outputs())
    )


def logits_of(folder, ids, mask, targets, cached):
    """Logits of the targets in two calls of the decoder: first `cached` tokens, then the rest."""
    encoder, decoder = session(folder / ENCODER), session(folder / DECODER)
    mask = mask.numpy()
    states = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask})[0]
    shapes, present = names(folder)
    past = {
        name: torch.zeros(len(ids), shape[1], 0, shape[3]).numpy()
        for name, shape in shapes.items()
        if name.startswith("past")
    }
    logits = []
    for part in (targets[:, :cached], targets[:, cached:]):
        given = {"input_ids": part.numpy(), "encoder_hidden_states": states}
        outputs = decoder.run(None, {**given, "encoder_attention_mask": mask, **past})
        logits.append(torch.tensor(outputs[0]))
        for name, value in zip(list(present)[1:], outputs[1:], strict=True):
            if value.shape[2]:
                past[name.replace("present", "past_key_values")] = value
    return torch.cat(logits, 1)


def expect_equal(model, folder, tolerance=1e-5):
    for lengths, padding, targets, cached in (
        ((1,), "right", 2, 1),
        ((6, 2, 4), "right", 5, 3),
        ((3, 7), "left", 4, 1),
    ):
        ids, mask = ragged(*lengths, padding_side=padding)
        target_ids = torch.randint(3, 41, (len(lengths), targets))
        with torch.no_grad():
            expected = model(ids, mask, target_ids).logits
        found = logits_of(folder, ids, mask, target_ids, cached)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max())


def test_graphs_equal_the_model_for_every_batch_length_and_cache(onnx_folder):
    model, _, folder = onnx_folder
    expect_equal(model, folder)


def test_names_are_those_of_transformers_js(onnx_folder):
    _, _, folder = onnx_folder
    inputs, outputs = names(folder)
    cache = [
        f"{n}.{stack}.{kind}"
        for n in range(2)
        for stack in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    given = ["input_ids", "encoder_hidden_states", "encoder_attention_mask"]
    assert list(inputs) == [*given, *(f"past_key_values.{name}" for name in cache)]
    assert list(outputs) == ["logits", *(f"present.{name}" for name in cache)]
    # transformers.js sets a dimension of this name, and every other one starts at 0.
    assert inputs["past_key_values.0.decoder.key"] == [
        "batch_size",
        4,
        "past_decoder_sequence_length",
        8,
    ]
    assert inputs["past_key_values.1.encoder.value"] == [
        "batch_size",
        4,
        "past_encoder_sequence_length",
        5,
    ]


def test_a_file_contains_the_shared_matrix_once_and_no_local_paths(onnx_folder):
    model, place, folder = onnx_folder
    content = (folder / DECODER).read_bytes()
    shape = [model.config.d_model, model.config.vocab_size]
    weights = onnx.load_from_string(content).graph.initializer
    assert [list(each.dims) for each in weights if set(each.dims) == set(shape)] == [shape]
    assert b".py" not in content
    assert str(place) not in (folder / "config.json").read_text()


def test_untied_matrices_stay_untied_if_the_configuration_says_tied():
    """transformers loads both, with a warning; the graph used the projection as embedding."""
    model, ids = seq2seq(), random_ids(2, 3)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    expected = model.get_decoder().embed_tokens(ids)
    assert torch.equal(DecoderGraph(model)._embed(ids), expected)


def test_the_folder_refers_to_no_code_that_it_lacks(onnx_folder):
    _, _, folder = onnx_folder
    assert not list(folder.glob("*.py"))
    assert "auto_map" not in (folder / "config.json").read_text()


def test_int8_is_smaller_and_close(onnx_folder, tmp_path):
    model, _, folder = onnx_folder
    for name in (ENCODER, DECODER):
        round_to_int8(folder / name, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 0.8 * (folder / name).stat().st_size
    expect_equal(model, tmp_path, tolerance=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_every_configuration_equals_its_model(config, tmp_path):
    model = saved_model(tmp_path / "model", **config)
    expect_equal(model, export(tmp_path / "model", tmp_path / "onnx", "onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.1), ("float16", 0.01)])
def test_quantizations_translate(quantization, tolerance, tmp_path):
    model = saved_model(tmp_path / "model")
    engine = load(export(tmp_path / "model", tmp_path / "onnx", "onnx", quantization))
    ids, mask = ragged(6, 3)
    targets = ids[:, :4]
    with torch.no_grad():
        expected = model(ids, mask, targets).logits
        found = engine(ids, mask, targets).logits.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max())
    assert len(engine.generate(input_ids=ids, attention_mask=mask, num_beams=2)) == 2
