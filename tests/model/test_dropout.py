"""Dropout with fewer random bits drops and scales like torch's."""

import pytest
import torch

from vanilla_transformer.model.dropout import dropout


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
