"""Dropout (section 5.4): where it is, and that the one with fewer random bits acts like torch's."""

import pytest
import torch
from conftest import random_ids, seq2seq

from vanilla_transformer.model.dropout import dropout

any_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_drops_and_scales(p, dtype):
    torch.manual_seed(0)
    ones = torch.ones(501, 999, dtype=dtype, requires_grad=True)
    dropped = dropout(ones, p, True)
    kept = dropped != 0
    share = kept.double().mean().item()
    assert share == pytest.approx(1 - p, abs=4 * (p * (1 - p) / ones.numel()) ** 0.5)
    torch.testing.assert_close(
        dropped[kept],
        torch.full_like(dropped[kept], 1 / (1 - p)),
        rtol=2e-2 if dtype == torch.bfloat16 else 2e-5,
        atol=0,
    )
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped)


def test_dropout_of_neighbours_is_independent():
    torch.manual_seed(0)
    kept = dropout(torch.ones(1000, 1000), 0.5, True) != 0
    for shift in (1, 2, 3, 4, 1000):
        both = (kept.flatten()[:-shift] & kept.flatten()[shift:]).double().mean()
        assert both.item() == pytest.approx(0.25, abs=0.002)


def test_dropout_with_rates_of_0_and_1_and_without_rows():
    ones = torch.ones(3, 5)
    assert torch.equal(dropout(ones, 0.0, True), ones)
    assert torch.equal(dropout(ones, 0.5, False), ones)
    assert not dropout(ones, 1.0, True).any()
    assert dropout(torch.ones(0, 4), 0.5, True).shape == (0, 4)


def test_dropout_follows_the_seed():
    ones = torch.ones(7, 9)
    torch.manual_seed(3)
    first = dropout(ones, 0.5, True)
    second = dropout(ones, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(dropout(ones, 0.5, True), first)
    assert not torch.equal(first, second)


def assert_half_dropped(dropped, whole):
    """Each number is 0 or twice what it was, about as often."""
    kept = (dropped - 2 * whole).abs() < dropped.abs()
    torch.testing.assert_close(dropped, 2 * whole * kept, atol=1e-4, rtol=1e-4)
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.15)


@any_attention
def test_dropout_is_on_embedding_plus_position_and_on_each_sub_layers_output(attention):
    """In post-norm: LayerNorm(x + Dropout(Sublayer(x)))."""
    model, inputs, outputs = seq2seq(dropout=0.5, attn_implementation=attention), {}, {}

    def keep(module, args, output):
        inputs[module] = args[0]
        outputs[module] = output[0] if isinstance(output, tuple) else output

    for part in (model.get_encoder(), model.get_decoder()):
        for module in part.layers.modules():
            module.register_forward_hook(keep)
    source, target = random_ids(3, 9), random_ids(3, 8, seed=1)
    model.train()(source, decoder_input_ids=target)
    for part, ids in ((model.get_encoder(), source), (model.get_decoder(), target)):
        whole = part.eval().embed(ids, None, None, None)
        assert_half_dropped(inputs[part.layers[0]], whole)
        for layer in part.layers:
            names = [
                name for name, _ in layer.named_children() if hasattr(layer, f"{name}_layer_norm")
            ]
            assert len(names) == (2 if part is model.get_encoder() else 3)
            for name in names:
                sublayer, norm = getattr(layer, name), getattr(layer, f"{name}_layer_norm")
                assert_half_dropped(inputs[norm] - inputs[sublayer], outputs[sublayer])


@any_attention
@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_every_dropout_acts_in_training_alone(field, attention):
    source, labels = random_ids(3, 9), random_ids(3, 8, seed=1)
    options = {"dropout": 0.0, "label_smoothing": 0.0, "attn_implementation": attention}
    without, model = seq2seq(**options), seq2seq(**{**options, field: 0.5})
    expected = without.eval()(source, labels=labels).loss.item()
    assert model.eval()(source, labels=labels).loss.item() == pytest.approx(expected)
    assert without.train()(source, labels=labels).loss.item() == pytest.approx(expected)
    losses = [model.train()(source, labels=labels).loss.item() for _ in range(2)]
    assert len({expected, *losses}) == 3


@any_attention
@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_every_dropout_is_a_module_of_torch_that_can_be_switched(field, attention):
    """On in evaluation, as for Monte Carlo dropout; off in training, as TRL's trainers do."""
    source, labels = random_ids(3, 9), random_ids(3, 8, seed=1)
    rates = {"dropout": 0.0, field: 0.5}
    model = seq2seq(**rates, label_smoothing=0.0, attn_implementation=attention).eval()
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    expected = model(source, labels=labels).loss.item()
    for module in dropouts:
        module.train()
    losses = [model(source, labels=labels).loss.item() for _ in range(2)]
    assert len({expected, *losses}) == 3
    for module in dropouts:
        module.p = 0
    assert model.train()(source, labels=labels).loss.item() == pytest.approx(expected)
