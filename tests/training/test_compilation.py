"""Layers that are compiled for training learn the same; nothing else changes."""

import copy

import pytest
import torch
from conftest import random_ids, seq2seq, slow, small_trainer
from transformers import MarianConfig, MarianMTModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vanilla_transformer.training.compilation import compile_layers


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's, which is raised
        yield


def counting(graphs):
    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return backend


def learn(model, rows, length):
    ids, labels = random_ids(rows, length), random_ids(rows, length + 2, seed=1)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return output.loss.detach(), gradients


@pytest.mark.parametrize("attention", ["sdpa", *slow("eager")])
def test_compiled_layers_learn_the_same_from_batches_of_any_shape(attention):
    plain = seq2seq(dropout=0.0, attn_implementation=attention).train()
    model, graphs = copy.deepcopy(plain), []
    compile_layers(model, backend=counting(graphs))
    for rows, length in ((3, 7), (5, 9), (4, 12)):
        torch.testing.assert_close(learn(model, rows, length), learn(plain, rows, length))
    assert len(graphs) == 2  # encoder and decoder, each for all layers and batches


def test_parts_that_are_not_layers_are_not_compiled():
    model, graphs = seq2seq(dropout=0.0), []
    names = list(model.state_dict())
    compile_layers(model, backend=counting(graphs))
    assert list(model.state_dict()) == names
    model.eval().generate(random_ids(2, 5), max_new_tokens=3)
    assert graphs == []
    output = model.train()(random_ids(2, 5), labels=random_ids(2, 4))
    assert graphs
    assert output.logits is None  # computed without logits


def test_a_copy_of_a_compiled_model_learns_with_its_own_weights():
    model = seq2seq(dropout=0.0).train()
    compile_layers(model, backend="eager")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert learn(copied, 3, 7)[0] != learn(model, 3, 7)[0]
    assert any(gradient.any() for gradient in learn(model, 3, 7)[1].values())


def test_layers_of_other_models_are_compiled_too():
    config = MarianConfig(
        vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        dropout=0.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    plain = MarianMTModel(config).train()
    model, graphs = copy.deepcopy(plain), []
    compile_layers(model, backend=counting(graphs))
    torch.testing.assert_close(learn(model, 3, 7), learn(plain, 3, 7))
    assert graphs


def test_a_model_without_recognized_layers_is_not_compiled():
    assert compile_layers(seq2seq(), backend="eager")
    assert not compile_layers(torch.nn.Transformer(16, 2, 1, 1, 16), backend="eager")


def test_torch_compile_compiles_the_layers_of_a_trainer(tmp_path, tokenizer):
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    trainer = small_trainer(tmp_path, tokenizer, **options)
    layers = [m for m in trainer.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers
    assert all("forward" in vars(layer) for layer in layers)
    trainer.train()
    assert trainer.model_wrapped is trainer.model  # and not the model as a whole
