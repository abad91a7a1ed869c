"""On a GPU the model gives what it gives on a CPU: eagerly, fused, packed, compiled and offloaded.

`python -m pytest -m gpu` runs these tests, and those of other files that need a GPU. float32 is
compared closely, half precision by what it can hold.
"""

from itertools import product

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from conftest import OFFLOADS_IN_ORDER, random_ids, small_config, watch
from torch.nn import functional as F

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model.loss import fused_linear_cross_entropy
from vanilla_transformer.model.modeling_vanilla_transformer import label_smoothed_cross_entropy
from vanilla_transformer.training.compilation import compile_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
GPU = "cuda"
CLASSES = [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]
ATTENTIONS = ["eager", "sdpa", "flex_attention"]
HALVES = [torch.bfloat16, torch.float16]
CLOSE = {"atol": 1e-4, "rtol": 1e-3}
ROUGH = {torch.bfloat16: 4e-2, torch.float16: 1e-2}  # relative to the largest value


@pytest.fixture(autouse=True)
def full_precision_and_compiled_kernels():
    """float32 without TF32. Past torch's limit of graphs, flex attention would run uncompiled."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch._dynamo.config.patch(recompile_limit=256):
        yield
    torch.set_float32_matmul_precision(before)


def build(cls=VanillaTransformerForConditionalGeneration, attention="sdpa", **options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "head_dim": 16, "d_model": 32, **options}
    return cls(small_config(attn_implementation=attention, **options))


def batch_of(cls=VanillaTransformerForConditionalGeneration, rows=6):
    """Padded sources and targets."""
    ids, labels = random_ids(rows, 17), random_ids(rows, 12, seed=1)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, 3 * row + 2 :] = 0
        labels[row, 12 - 2 * row :] = -100
    if cls is VanillaTransformerForCausalLM:
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def on_gpu(inputs):
    return {name: tensor.to(GPU) for name, tensor in inputs.items()}


def learn(model, inputs):
    """The loss and the gradients, on the CPU."""
    loss = model.train()(**inputs).loss
    loss.backward()
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters()}
    return loss.detach().cpu(), gradients


def assert_roughly_equal(actual, expected, dtype):
    assert actual.isfinite().all()
    error = (actual.float().cpu() - expected.float()).abs().max()
    assert error <= ROUGH[dtype] * expected.abs().max()


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_loss_and_gradients_are_those_of_a_cpu(cls, attention):
    expected = learn(build(cls, "eager"), batch_of(cls))
    actual = learn(build(cls, attention).to(GPU), on_gpu(batch_of(cls)))
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_flex_attention_trains_on_packed_rows():
    model = build(attention="flex_attention").to(GPU)
    shapes = []
    layer = model.model.encoder.layers[0]
    watch(layer, lambda args, kwargs, output: shapes.append(tuple(output.shape[:2])))
    inputs = on_gpu(batch_of())
    learn(model, inputs)
    assert shapes == [(1, int(inputs["attention_mask"].sum()))]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_autocast_trains_with_gradients_close_to_those_of_float32(attention, dtype):
    loss, gradients = learn(build(), batch_of())
    model = build(attention=attention).to(GPU)
    with torch.autocast(GPU, dtype=dtype):
        rough_loss, rough_gradients = learn(model, on_gpu(batch_of()))
    assert_roughly_equal(rough_loss, loss, dtype)
    assert {gradient.dtype for gradient in rough_gradients.values()} == {torch.float32}
    flat = [
        torch.cat([grads[name].flatten() for name in gradients])
        for grads in (rough_gradients, gradients)
    ]
    assert flat[0].isfinite().all()
    assert F.cosine_similarity(*flat, dim=0) > 0.99


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_a_few_steps_in_bfloat16_lower_the_loss(attention):
    model, inputs = build(attention=attention, dropout=0.1).to(GPU).train(), on_gpu(batch_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for _ in range(40):
        with torch.autocast(GPU, dtype=torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_gradient_checkpointing_changes_no_gradient():
    expected = learn(build().to(GPU), on_gpu(batch_of()))
    model = build().to(GPU)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(learn(model, on_gpu(batch_of())), expected, **CLOSE)


@pytest.mark.parametrize("what", ["model", "layers"])
def test_a_compiled_model_learns_the_same(what):
    torch.compiler.reset()  # what others have compiled
    expected = learn(build(), batch_of())
    model = build().to(GPU)
    if what == "model":
        model.forward = torch.compile(model.forward, dynamic=True)
    else:
        compile_layers(model.train())
    for rows in (4, 6):
        learn(model, on_gpu(batch_of(rows=rows)))
        model.zero_grad()
    torch.testing.assert_close(learn(model, on_gpu(batch_of())), expected, **CLOSE)


@pytest.mark.parametrize("vocab_size", [40_000, 40_001])  # the kernel loads 8 columns or 1
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_fused_loss_is_that_of_logits(dtype, vocab_size):
    torch.manual_seed(0)
    states, matrix = torch.randn(3, 700, 16), torch.randn(vocab_size, 16) / 4  # several parts
    labels = torch.randint(vocab_size, (3, 700))
    labels[0, 5:90] = -100

    def learn_with(compute, device, dtype):
        given = [value.detach().to(device, dtype).requires_grad_() for value in (states, matrix)]
        loss = compute(*given, labels.to(device))
        loss.backward()
        return loss.detach().cpu(), given[0].grad.cpu(), given[1].grad.cpu()

    expected = learn_with(
        lambda states, matrix, labels: label_smoothed_cross_entropy(
            states @ matrix.t(), labels, 0.1
        ),
        "cpu",
        torch.float32,
    )
    actual = learn_with(
        lambda states, matrix, labels: fused_linear_cross_entropy(states, matrix, labels, 0.1),
        GPU,
        dtype,
    )
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, **CLOSE)
    else:
        for one, other in zip(actual, expected, strict=True):
            assert_roughly_equal(one, other, dtype)


@pytest.mark.parametrize("view", [np.s_[:, :1], np.s_[:1, ::2]], ids=["column", "every other"])
def test_the_fused_loss_takes_labels_that_are_a_view(view):
    # The kernel reads labels next to each other in memory.
    torch.manual_seed(0)
    labels = torch.randint(50, (6, 9), device=GPU)[view]
    states = torch.randn(*labels.shape, 16, device=GPU, requires_grad=True)
    matrix = torch.randn(50, 16, device=GPU, requires_grad=True)
    losses = [
        fused_linear_cross_entropy(states, matrix, labels, 0.1),
        label_smoothed_cross_entropy(states @ matrix.t(), labels, 0.1),
    ]
    actual, expected = (torch.autograd.grad(loss, (states, matrix)) for loss in losses)
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_dropout_leaves_out_its_share_and_keeps_the_mean():
    model = build(dropout=0.25).to(GPU).train()
    ids = torch.randint(4, 50, (64, 64), device=GPU)
    embedded = model.get_encoder().embed(ids, None, None, None)
    kept = model.eval().get_encoder().embed(ids, None, None, None)
    share = (embedded == 0).float().mean().item()
    assert share == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(embedded[embedded != 0], kept[embedded != 0] / 0.75)


# ---------------------------------------------------------------- predictions


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_logits_are_those_of_a_cpu(dtype, attention):
    with torch.no_grad():
        expected = build(attention="eager").eval()(**batch_of()).logits
        model = build(attention=attention).eval().to(GPU, dtype)
        logits = model(**on_gpu(batch_of())).logits
    if dtype == torch.float32:
        torch.testing.assert_close(logits.cpu(), expected, **CLOSE)
    else:
        assert_roughly_equal(logits, expected, dtype)


def test_a_checkpoint_written_on_a_gpu_is_read_on_a_cpu(tmp_path):
    model = build().eval().to(GPU)
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = model(**on_gpu(batch_of())).logits.cpu()
        torch.testing.assert_close(loaded(**batch_of()).logits, logits, **CLOSE)


def test_weights_are_offloaded_to_the_cpu():
    expected, inputs = build().eval(), batch_of()
    model = cpu_offload(build().eval(), GPU)
    with torch.no_grad():
        logits = model(**on_gpu(inputs)).logits.cpu()
        torch.testing.assert_close(logits, expected(**inputs).logits, **CLOSE)
    del inputs["labels"]
    tokens = model.generate(**on_gpu(inputs), num_beams=2, max_new_tokens=6).cpu()
    assert tokens.tolist() == expected.generate(**inputs, num_beams=2, max_new_tokens=6).tolist()


# ---------------------------------------------------------------- generation

SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "n-best": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "GNMT's penalty": {"num_beams": 3, "length_penalty_type": "gnmt", "length_penalty": 0.6},
}
CACHES = {
    "default": {},
    "none": {"use_cache": False},
    "transformers' own": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static, compiled": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
}
in_order = pytest.mark.skipif(
    not OFFLOADS_IN_ORDER,
    reason="this transformers reads back what it has not finished offloading",
)


def generate(model, **options):
    inputs = batch_of(rows=5)
    del inputs["labels"]
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    return model.eval().generate(**inputs, max_new_tokens=10, **options).tolist()


def varied_model(attention="sdpa"):
    """A random model with varied outputs."""
    return build(attention=attention, norm_position="pre", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("attention", "search"),
    [
        *product(["eager", "sdpa"], SEARCHES),
        ("flex_attention", "greedy"),
        ("flex_attention", "beams"),
    ],
)
def test_the_tokens_are_those_of_a_cpu(attention, search):
    expected = generate(varied_model(), **SEARCHES[search])
    assert generate(varied_model(attention).to(GPU), **SEARCHES[search]) == expected


@pytest.mark.parametrize("search", ["greedy", "beams"])
@pytest.mark.parametrize(
    "cache",
    [pytest.param(name, marks=[in_order] if name == "offloaded" else []) for name in CACHES],
)
def test_every_cache_gives_the_same_tokens(cache, search):
    expected = generate(varied_model(), **SEARCHES[search])
    model = varied_model().to(GPU)
    assert generate(model, **SEARCHES[search], **CACHES[cache]) == expected


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_half_precision_generates_with_finite_scores(search, dtype):
    model = varied_model().to(GPU, dtype).eval()
    inputs = on_gpu(batch_of())
    del inputs["labels"]
    outputs = model.generate(
        **inputs,
        **SEARCHES[search],
        max_new_tokens=10,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert all(logits.isfinite().all() for logits in outputs.logits)
