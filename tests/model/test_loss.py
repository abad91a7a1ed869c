"""The loss and its gradients equal those of torch's cross-entropy, without all logits in memory."""

from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import random_ids, seq2seq, slow, small_config
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model import loss as loss_module
from vanilla_transformer.model.loss import FusedLinearCrossEntropy, fused_linear_cross_entropy
from vanilla_transformer.model.modeling_vanilla_transformer import label_smoothed_cross_entropy
from vanilla_transformer.model.validation import expect_labels

CLASSES = [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]


# ---------------------------------------------------------------- given logits


def of_logits(states, projection, *rest):
    """The loss of materialized logits, as a function of states."""
    return label_smoothed_cross_entropy(projection(states), *rest)


def projected_cross_entropy(states, projection, *rest):
    """The loss without materialized logits."""
    return fused_linear_cross_entropy(states, projection.weight, *rest)


LOSSES = pytest.mark.parametrize("loss", [of_logits, projected_cross_entropy])


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_token_with_logit_minus_infinity_has_the_same_loss_as_in_torch(eps):
    # The mean of a row with -inf is -inf, and 0 * inf is NaN.
    logits, labels = torch.randn(2, 3, 11), torch.tensor([[1, 2, -100], [10, 4, 0]])
    logits[:, :, 7] = -torch.inf
    ours = label_smoothed_cross_entropy(logits, labels, eps)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=eps)
    torch.testing.assert_close(ours, expected)
    assert ours.isfinite() == (eps == 0)


@LOSSES
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_nan_in_a_row_without_a_label_affects_no_gradient(loss, eps):
    torch.manual_seed(0)
    projection, labels = nn.Linear(8, 50, bias=False), torch.tensor([[3, -100, 4]])
    states = torch.randn(1, 3, 8)
    results = []
    for value in (0.0, torch.nan):
        inputs = states.clone()
        inputs[0, 1] = value
        inputs.requires_grad_()
        total = loss(inputs, projection, labels, eps)
        results.append((total, *torch.autograd.grad(total, (inputs, projection.weight))))
    expected, found = results
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    if loss is projected_cross_entropy:  # the caller computes the product with that row
        torch.testing.assert_close(found[2], expected[2])


# ---------------------------------------------------------------- projected logits


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows_at_a_time", [1, 5, 256])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_the_projected_loss_and_its_gradients_are_torchs(
    monkeypatch, label_smoothing, rows_at_a_time, weight
):
    monkeypatch.setattr(loss_module, "_rows_at_a_time", lambda *_: (rows_at_a_time, 3))
    torch.manual_seed(0)
    states = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    projection = nn.Linear(8, 50, bias=False, dtype=torch.float64)
    labels = torch.randint(50, (3, 7))
    labels[1, 2:] = -100
    ours = projected_cross_entropy(states, projection, labels, label_smoothing, 10)
    torchs = F.cross_entropy(
        projection(states).flatten(0, 1),
        labels.flatten(),
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    torch.testing.assert_close(ours, torchs / 10)
    wanted = (states, projection.weight)
    torch.testing.assert_close(
        torch.autograd.grad(weight * ours, wanted, retain_graph=True),
        torch.autograd.grad(weight * torchs / 10, wanted),
    )
    torch.autograd.grad(ours, wanted)  # the same graph once more


def test_a_batch_without_labels_has_no_loss_and_no_gradient():
    states = torch.randn(2, 3, 8, requires_grad=True)
    labels = torch.full((2, 3), -100)
    loss = projected_cross_entropy(states, nn.Linear(8, 50, bias=False), labels)
    loss.backward()
    assert loss == 0
    assert not states.grad.any()


@LOSSES
def test_with_a_single_label_the_loss_is_that_of_its_token(loss):
    projection, labels = nn.Linear(8, 50, bias=False), torch.tensor([[-100, 7, -100]])
    states = torch.randn(1, 3, 8)
    expected = F.cross_entropy(projection(states[:, 1]), labels[:, 1])
    torch.testing.assert_close(loss(states, projection, labels), expected)


def test_a_batch_of_no_rows_has_no_loss():
    projection, labels = nn.Linear(8, 50, bias=False), torch.zeros(0, 3, dtype=torch.long)
    assert projected_cross_entropy(torch.randn(0, 3, 8), projection, labels) == 0


@pytest.mark.parametrize("view", [np.s_[:, :1], np.s_[:1, ::2]], ids=["column", "every other"])
def test_labels_that_are_a_view_are_made_contiguous(monkeypatch, view):
    # The GPU kernel expects them to be contiguous in memory.
    seen, softmax = [], loss_module._softmax_less_label
    labels = torch.randint(50, (6, 9))[view]

    def spy(scores, labels, *rest):
        seen.extend(labels[:, 0].as_strided((len(labels),), (1,)).tolist())
        return softmax(scores, labels, *rest)

    monkeypatch.setattr(loss_module, "_softmax_less_label", spy)
    states = torch.randn(*labels.shape, 8, requires_grad=True)
    projected_cross_entropy(states, nn.Linear(8, 50, bias=False), labels)
    assert seen == labels.flatten().tolist()


@LOSSES
def test_labels_can_be_32_bit(loss):
    states, projection, labels = torch.randn(2, 3, 8), nn.Linear(8, 50, bias=False), IDS[:, :3]
    labels = labels.repeat(2, 1)
    expected = loss(states, projection, labels)
    torch.testing.assert_close(loss(states, projection, labels.int()), expected)


def test_second_derivatives_work_with_eager_and_are_refused_otherwise():
    """A gradient penalty needs them: there the gradient must not be a constant."""
    gradients = []
    for name in ("eager", "sdpa"):
        model = seq2seq(dropout=0.0, attn_implementation=name).train()
        loss = model(input_ids=IDS, labels=IDS).loss
        gradients.append(partial(torch.autograd.grad, loss, model.lm_head.weight))
    of_equations, fused = gradients
    (gradient,) = of_equations(create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"no second derivatives; expected .*=\"eager\""):
        fused(create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_projected_loss_in_half_precision_is_close(dtype):
    torch.manual_seed(0)
    states, projection = torch.randn(4, 9, 32), nn.Linear(32, 300, bias=False)
    labels = torch.randint(300, (4, 9))
    results = []
    for enabled in (False, True):
        inputs = states.clone().requires_grad_()
        projection.zero_grad()
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = projected_cross_entropy(inputs, projection, labels, 0.1)
        loss.backward()
        results.append((loss.detach(), inputs.grad, projection.weight.grad.clone()))
    (loss, *gradients), (narrow_loss, *narrow_gradients) = results
    assert not torch.equal(narrow_loss, loss)
    torch.testing.assert_close(narrow_loss, loss, rtol=1e-3, atol=0)
    for gradient, narrow in zip(gradients, narrow_gradients, strict=True):
        assert narrow.dtype == torch.float32
        assert (narrow - gradient).norm() < 2e-2 * gradient.norm()


def test_autocast_keeps_float64():
    torch.manual_seed(0)
    states, projection = torch.randn(4, 9, 32).double(), nn.Linear(32, 300, bias=False).double()
    labels = torch.randint(300, (4, 9))
    expected = projected_cross_entropy(states, projection, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(projected_cross_entropy(states, projection, labels), expected)


def test_a_label_outside_the_vocabulary_is_reported():
    for label in (50, -1):
        labels = torch.tensor([[3, -100, label]])
        with pytest.raises(IndexError, match=f"label {label} is out of range: expected 0 <= label"):
            expect_labels(labels, torch.randn(1, 3, 8), 50)
        with pytest.raises(IndexError, match=f"label {label} is out of range: expected 0 <= label"):
            seq2seq()(input_ids=IDS, labels=labels)


@pytest.mark.parametrize("training", [True, False])
def test_as_many_labels_in_a_different_shape_are_refused(training):
    inputs = {"input_ids": random_ids(2, 4), "decoder_input_ids": random_ids(2, 3)}
    with pytest.raises(
        ValueError, match=r"labels of shape \(3, 2\) for predictions of shape \(2, 3\)"
    ):
        seq2seq().train(training)(**inputs, labels=random_ids(3, 2))


@pytest.mark.parametrize(
    "hook", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_the_projection_are_called(hook):
    torch.manual_seed(0)
    model = seq2seq(dropout=0.0).train()
    inputs = {"input_ids": random_ids(2, 6), "labels": random_ids(2, 5)}
    expected = model(**inputs).loss
    calls = []
    getattr(model.lm_head, f"register_{hook}")(lambda *_: calls.append(1))
    loss = model(**inputs).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["states", "projection", "both", "no_grad"])
def test_a_gradient_that_is_not_required_is_not_computed(monkeypatch, frozen, dtype):
    # A frozen head, as under LoRA, cost a matrix of its size and half of the products.
    torch.manual_seed(0)
    states, projection = torch.randn(2, 5, 8, dtype=dtype), nn.Linear(8, 50, bias=False).to(dtype)
    labels = torch.randint(50, (2, 5))
    expected = projected_cross_entropy(states, projection, labels, 0.1)
    states.requires_grad_(frozen == "projection")
    projection.requires_grad_(frozen == "states")
    made, products = [], []
    for name, calls in (("zeros_like", made), ("mm", products)):
        before = getattr(torch, name)
        spy = lambda *args, b=before, c=calls, **kw: c.append(args) or b(*args, **kw)  # noqa: E731
        monkeypatch.setattr(torch, name, spy)
    with torch.set_grad_enabled(frozen != "no_grad"):
        loss = projected_cross_entropy(states, projection, labels, 0.1)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (frozen in ("states", "projection"))
    assert len(made) == (frozen == "states")
    extra = {"states": dtype != torch.float32, "projection": 1}.get(frozen, 0)
    assert len(products) == 1 + extra
    if loss.requires_grad:
        loss.backward()
        wanted = projection.weight if frozen == "states" else states
        assert wanted.grad.any()


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def test_off_the_cpu_a_larger_vocabulary_needs_no_more_kernels():
    """Slices of 256 tokens, as in bfloat16 on a CPU, would be thousands of kernels in each step of
    a GPU. ("meta" represents any device that is not a CPU.)"""
    counts = []
    for vocab_size in (1000, 30_000):
        options = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        states, matrix = torch.empty(500, 8, **options), torch.empty(vocab_size, 8, **options)
        labels = torch.empty(500, dtype=torch.long, device="meta")
        rest = (labels, 0.1, torch.bfloat16, 500, True, True)
        with Operations() as operations:
            FusedLinearCrossEntropy.apply(states, matrix, *rest).backward()
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_softmax_does_not_overwrite_its_input(monkeypatch):
    # torch guarantees nothing for an output that shares memory with the input.
    softmax, shared = torch.softmax, []

    def spy(scores, *args, out=None, **kwargs):
        shared.append(out is not None and out.data_ptr() == scores.data_ptr())
        return softmax(scores, *args, out=out, **kwargs)

    monkeypatch.setattr(torch, "softmax", spy)
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(1, 4, 8, dtype=dtype, requires_grad=True)
        projected_cross_entropy(states, nn.Linear(8, 50, bias=False, dtype=dtype), IDS)
    assert shared
    assert not any(shared)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel can be built")
def test_torch_computes_the_loss_if_triton_cannot_build_the_kernel(caplog):
    loss_module._gpu_kernel.cache_clear()
    assert loss_module._gpu_kernel(torch.device("cuda")) is None
    assert loss_module._gpu_kernel(torch.device("cuda")) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "The loss is computed more slowly: Triton can't build its kernel: " in record.message


# ---------------------------------------------------------------- what a training step returns

IDS = torch.tensor([[5, 6, 7, 8]])


def plainly(model):
    return model


def under_autocast(model):
    def step(**inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs)

    return step


def by_accelerate(model):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_model_that_accelerate_unwraps_is_that_from_before(cls):
    """It removes all decorators of `forward`, its own and ours."""
    model = cls(small_config()).eval()
    ids = random_ids(2, 5)
    inputs = {"input_ids": ids, "labels": ids, "return_dict": True}
    expected = model(**inputs).loss
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    assert unwrapped(**inputs).loss == expected


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("way", [plainly, under_autocast, by_accelerate, *slow(compiled)])
def test_a_training_step_returns_the_same_with_and_without_wrappers(cls, way):
    # Logits too, also under a wrapper of accelerate's, which copies outputs.
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1}
    model = cls(small_config(dropout=0.0, label_smoothing=0.0, **sizes))
    inputs = {"input_ids": random_ids(2, 5), "labels": random_ids(2, 5)}
    expected = model.eval()(**inputs)
    step = way(model.train())
    near = {"rtol": 0.05, "atol": 0.05} if way in (under_autocast, by_accelerate) else {}
    outputs = step(**inputs)
    assert outputs.logits is None
    assert outputs.get("logits") is None
    assert "logits" not in outputs
    assert outputs[0] is outputs.loss
    torch.testing.assert_close(outputs.loss, expected.loss, **near)
    outputs = step(**inputs, skip_logits=False)
    assert outputs[1] is outputs.logits
    torch.testing.assert_close(outputs.logits.float(), expected.logits, **near)
    torch.testing.assert_close(outputs.loss, expected.loss, **near)
    assert outputs.logits.requires_grad


@pytest.mark.parametrize("cls", CLASSES)
def test_logits_can_be_skipped_in_evaluation(cls):
    model, inputs = cls(small_config()).eval(), {"input_ids": IDS, "labels": IDS}
    skipped = model(**inputs, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, model(**inputs).loss)
    assert model(input_ids=IDS, skip_logits=True, **target(model)).logits is not None


def target(model):
    return {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
