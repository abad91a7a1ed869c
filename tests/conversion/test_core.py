"""What the converters share."""

import pytest
import torch

from vanilla_transformer.conversion import core


def test_interleaving_and_separating_undo_each_other():
    order, back = core.interleaved(8), core.separated(8)
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert order[back].tolist() == back[order].tolist() == list(range(8))


def test_a_matrix_of_two_names_is_permuted_once():
    matrix = torch.arange(8.0).view(1, 8)
    weights = {core.TARGET: matrix, core.PROJECTION: matrix}
    core.interleave_halves(weights)
    assert weights[core.TARGET].tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("shape", [(2, 4), (3,)])
def test_a_tensor_of_another_shape_is_named(shape):
    tensors = core.Tensors({"a": torch.zeros(2, 3)}, "file.pt")
    with pytest.raises(ValueError, match=r"file.pt: tensor 'a' has shape \(2, 3\), expected \("):
        tensors.take("a", *shape)


def test_a_missing_tensor_is_named():
    tensors = core.Tensors({}, "file.pt")
    with pytest.raises(ValueError, match=r"file.pt: expected a tensor 'a' of shape \(2, any\)"):
        tensors.take("a", 2, None)


def test_tensors_that_nothing_reads_are_named():
    tensors = core.Tensors({name: torch.zeros(1) for name in ("a", "b", "version")}, "file.pt")
    tensors.take("a")
    with pytest.raises(ValueError, match=r"file.pt: tensors .* does not know: b$"):
        tensors.expect_all_taken(["vers.*"])
