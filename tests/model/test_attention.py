"""Faster attention gives the numbers of the equation."""

import threading
from functools import partial, wraps

import pytest
import torch
from conftest import SMALL, ragged, random_ids, seq2seq, small_config
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scripts.benchmarks.operations import on_gpu
from vanilla_transformer.model import attention
from vanilla_transformer.model.attention import (
    FastAttention,
    fused_attention,
    sdpa_attention,
    unfused_attention,
)
from vanilla_transformer.model.modeling_vanilla_transformer import (
    VanillaTransformerEncoderLayer,
    padding_mask,
    scaled_dot_product_attention,
)

# ---------------------------------------------------------------- GPU kernels

FLASH, EFFICIENT, MATH, CUDNN = (
    getattr(SDPBackend, name)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
)


@pytest.fixture
def enabled():
    """cuDNN's kernel is enabled, as by default. Commands change that."""
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def has_cudnn(enabled, monkeypatch):
    """Whether cuDNN's kernel is enabled in each call of torch's attention."""
    seen = []

    def attend(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa_attention_forward(*args, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", attend)
    return seen


def attend_on_gpu(queries, mask=None, training=True):
    """What "sdpa" does on a GPU."""
    module = nn.Module().train(training)
    module.is_causal = True
    options = {"scaling": 0.5, "dropout": 0.0}
    return attention.attend_on_gpu(module, queries, queries, queries, mask, **options)[0]


def test_attention_on_a_gpu_avoids_cudnn_which_plans_every_shape(has_cudnn):
    queries = torch.randn(2, 3, 5, 4)
    output = attend_on_gpu(queries)
    expected = F.scaled_dot_product_attention(*[queries] * 3, is_causal=True, scale=0.5)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    with pytest.raises(RuntimeError):
        attend_on_gpu(queries, torch.ones(7, 7, dtype=torch.bool))
    assert has_cudnn == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_threads_do_not_change_each_others_enabled_kernels(enabled, monkeypatch):
    """As in DataParallel or a server: a thread must not restore what a different one has chosen."""
    inside, both, left = (threading.Event() for _ in range(3))

    def attend(*args, **options):
        is_first = not inside.is_set()
        inside.set()
        if is_first:
            both.wait(0.2)
        else:
            both.set()
            left.wait(0.2)
        return sdpa_attention_forward(*args, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", attend)
    queries = torch.randn(2, 3, 5, 8)
    first = threading.Thread(target=lambda: (attend_on_gpu(queries), left.set()))
    first.start()
    inside.wait()
    attend_on_gpu(queries)
    first.join()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_cudnn_stays_enabled_if_it_is_the_callers_only_kernel(has_cudnn):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError):
        attend_on_gpu(torch.randn(2, 3, 5, 4))  # there is no such kernel on a CPU
    with sdpa_kernel(SDPBackend.MATH):
        attend_on_gpu(torch.randn(2, 3, 5, 4))
    assert has_cudnn == [True, False]


@pytest.mark.parametrize(
    ("shape", "training", "allowed", "has_flash"),
    [
        ((2, 3, 128, 8), True, [FLASH, EFFICIENT, MATH], False),
        ((2, 3, 129, 8), True, [FLASH, EFFICIENT, MATH], True),  # longer than a tile
        ((2, 3, 128, 8), False, [FLASH, EFFICIENT, MATH], True),
        ((2, 3, 128, 4), True, [FLASH, EFFICIENT, MATH], True),  # the other kernel can't
        ((2, 3, 128, 8), True, [FLASH, MATH], True),
        ((2, 3, 128, 8), True, [EFFICIENT, MATH], False),
    ],
)
def test_short_sentences_train_without_the_large_tiles_of_flash_attention(
    monkeypatch, shape, training, allowed, has_flash
):
    seen = []

    def attend(*args, **options):
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return sdpa_attention_forward(*args, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", attend)
    queries = torch.randn(shape)
    with sdpa_kernel(allowed):
        output = attend_on_gpu(queries, training=training)
        assert torch.backends.cuda.flash_sdp_enabled() == (FLASH in allowed)
        assert (FLASH in attention.kernels_to_choose_from(not has_flash)) == has_flash
    assert seen == [has_flash]
    expected = F.scaled_dot_product_attention(*[queries] * 3, is_causal=True, scale=0.5)
    torch.testing.assert_close(output.transpose(1, 2), expected)


@pytest.mark.usefixtures("enabled")
def test_a_compiled_attention_on_a_gpu_is_the_same():
    compiled = torch.compile(attend_on_gpu, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 7):
        queries = torch.randn(2, 3, length, 4)
        torch.testing.assert_close(compiled(queries), attend_on_gpu(queries))
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [([FLASH, EFFICIENT, MATH, CUDNN], {FLASH, EFFICIENT, MATH}), ([MATH], {MATH})],
)
def test_a_compiled_attention_uses_what_the_caller_has_enabled(allowed, expected):
    # Except for cuDNN's, but none that the caller has disabled.
    entered = []

    def backend(module, _):
        name = "_sdpa_kernel"  # the operation of a graph that enables kernels
        first = next(n for n in module.graph.nodes if getattr(n.target, "__name__", "") == name)
        entered.extend(str(kernel.args[0]) for kernel in first.args[0])
        return module

    torch.compiler.reset()
    with sdpa_kernel(allowed):
        torch.compile(attend_on_gpu, backend=backend, fullgraph=True)(torch.randn(2, 3, 5, 4))
    assert set(entered) == {kernel.name for kernel in expected}


def test_a_compiled_attention_keeps_cudnn_if_it_is_the_only_kernel():
    with sdpa_kernel(CUDNN):
        assert attention.kernels_to_choose_from(False) == [CUDNN]


# ---------------------------------------------------------------- attention in half precision


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_unfused_attention_equals_fused_attention(causal, masked):
    torch.manual_seed(0)
    module = nn.Module()
    module.is_causal = causal
    states = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = None
    if masked:
        mask = torch.rand(2, 1, 5, 5) < 0.6
        mask[0, :, 2] = False  # a query that sees nothing
    results = []
    unfused = partial(unfused_attention, scaled_dot_product_attention)
    for attend in (sdpa_attention_forward, unfused):
        output, weights = attend(module, *states, mask, scaling=0.5)
        assert weights is None
        results.append((output, *torch.autograd.grad(output.square().sum(), states)))
    torch.testing.assert_close(results[1], results[0])


def test_training_in_half_precision_uses_unfused_attention(monkeypatch):
    called = []
    for name in ("fused_attention", "unfused_attention", "sdpa_attention_forward"):
        spy = lambda *args, name=name, **options: (called.append(name), None)  # noqa: E731
        monkeypatch.setattr(attention, name, spy)
    module = nn.Module()

    def chosen(query, **options):
        called.clear()
        states = (query, query, query, None)
        sdpa_attention(scaled_dot_product_attention, module, *states, scaling=1.0, **options)
        return called[0]

    query = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert chosen(query) == "unfused_attention"
    assert chosen(query, use_cache=True) == "unfused_attention"
    assert chosen(query.detach()) == "fused_attention"
    assert chosen(query.float()) == "fused_attention"
    torch.set_float32_matmul_precision("medium")
    assert chosen(query.float()) == "unfused_attention"
    assert chosen(query.float().detach()) == "fused_attention"
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # the same in torch's newer interface
    assert chosen(query.float()) == "unfused_attention"
    torch.set_float32_matmul_precision("highest")
    assert chosen(query, is_causal=False) == "sdpa_attention_forward"
    assert chosen(query.repeat(1, 1, 256, 1)) == "sdpa_attention_forward"


def test_other_attention_implementations_are_those_of_transformers():
    interface = FastAttention()
    eager = interface.get_interface("eager", scaled_dot_product_attention)
    assert eager is scaled_dot_product_attention
    flex = interface.get_interface("flex_attention", scaled_dot_product_attention)
    assert flex.args == (ALL_ATTENTION_FUNCTIONS["flex_attention"],)
    AttentionInterface.register("mine", max)
    try:
        assert interface.get_interface("mine", scaled_dot_product_attention) is max
    finally:
        del AttentionInterface._global_mapping["mine"]


def test_a_training_step_in_half_precision_uses_no_fused_attention(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("fused attention")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    model = seq2seq().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=random_ids(2, 4), labels=random_ids(2, 3)).loss.backward()
        encoded = model.get_encoder()(random_ids(2, 4), num_items_in_batch=torch.tensor(6))
        encoded.last_hidden_state.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_equals_that_of_transformers(causal, queries, masked):
    torch.manual_seed(0)
    module = nn.Module()
    module.is_causal = causal
    query, key, value = torch.randn(2, 3, queries, 4), *torch.randn(2, 2, 3, 5, 4)
    mask = torch.rand(2, 1, 1, 5) < 0.6 if masked else None
    ours, _ = fused_attention(module, query, key, value, mask, scaling=0.5)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.5)
    assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- padding masks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padding_mask_is_the_same_for_each_query(attention):
    config = small_config(attn_implementation=attention)
    _, mask = ragged(7, 4)
    states = torch.zeros(2, 7, 24)
    found = padding_mask(config, states, mask, states)
    assert found.shape == (2, 1, 1 if attention == "sdpa" else 7, 7)
    seen = found if found.dtype == torch.bool else found == 0
    for query in range(found.shape[2]):
        assert torch.equal(seen[:, 0, query], mask.bool())


@pytest.mark.parametrize("length", [5, 16, 17])
def test_a_padding_mask_on_a_gpu_has_the_form_its_kernels_need(length):
    config, states = small_config(attn_implementation="sdpa"), torch.zeros(2, length, 24)
    is_token = torch.ones(2, length, dtype=torch.bool)
    is_token[1, 3:] = False
    with on_gpu():
        mask = padding_mask(config, states, is_token.long(), states)
    assert mask.shape == (2, 1, 1, length)
    assert torch.equal(mask[:, 0, 0], torch.where(is_token, 0.0, -torch.inf))
    assert all(stride % 16 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_is_masked_on_a_gpu_as_on_a_cpu(dtype, autocast):
    model = seq2seq(attn_implementation="sdpa").eval().to(dtype)
    source, mask = ragged(7, 4)
    batch = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": random_ids(2, 5)}
    narrow = {"dtype": torch.bfloat16, "enabled": autocast}
    with torch.no_grad(), torch.autocast("cpu", **narrow):
        expected = model(**batch).logits
    with torch.no_grad(), on_gpu(), torch.autocast("cuda", **narrow):
        actual = model(**batch).logits
    is_exact = dtype == torch.float64 or (dtype == torch.float32 and not autocast)
    close = {} if is_exact else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(actual, expected, **close)


def test_a_mask_is_cast_to_the_dtype_of_the_heads_on_a_gpu():
    """Quantized layers can compute in a different dtype."""
    heads, module = torch.randn(2, 2, 4, 8, dtype=torch.bfloat16), nn.Module()
    module.is_causal = False
    mask = torch.zeros(2, 1, 1, 4).masked_fill_(torch.arange(4) > 1, -torch.inf)
    options = {"scaling": 1.0, "dropout": 0.0}
    with on_gpu():
        output, _ = sdpa_attention(None, module, heads, heads, heads, mask, **options)
    few = heads[:, :, :2]
    expected = F.scaled_dot_product_attention(heads, few, few, scale=1.0)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_a_4d_mask_is_used_as_it_is(added, with_gradients, narrow):
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    seen[0, :, :, 3:] = False  # as if these were padding
    own = torch.where(seen, 0.0, torch.finfo(torch.float32).min) if added else seen
    encoder, ids = seq2seq().eval().get_encoder(), random_ids(2, 5)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow)
    with torch.set_grad_enabled(with_gradients), autocast:
        states, expected = (encoder(ids, mask)[0] for mask in (own, seen[:, 0, 0].long()))
    torch.testing.assert_close(states[0, :3], expected[0, :3])
    torch.testing.assert_close(states[1], expected[1])


def test_without_padding_there_is_no_mask():
    states = torch.zeros(2, 7, 24)
    config = small_config(attn_implementation="sdpa")
    assert padding_mask(config, states, torch.ones(2, 7), states) is None
    assert padding_mask(config, states, None, states) is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_several_targets_per_source_equal_repeated_sources(attention):
    model = seq2seq(attn_implementation=attention).eval()
    source, mask = ragged(6, 3)
    target = random_ids(6, 5)
    shared = model(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    repeated = model(
        input_ids=source.repeat_interleave(3, 0),
        attention_mask=mask.repeat_interleave(3, 0),
        decoder_input_ids=target,
        output_attentions=attention == "eager",
    )
    torch.testing.assert_close(shared.logits, repeated.logits)
    if attention == "eager":
        again = model(
            input_ids=source,
            attention_mask=mask,
            decoder_input_ids=target,
            output_attentions=True,
        )
        torch.testing.assert_close(again.cross_attentions, repeated.cross_attentions)


# ---------------------------------------------------------------- sentences of similar length


@pytest.fixture
def sizes(monkeypatch):
    """The shapes of the inputs that layers and attention get for a batch."""
    seen = {"layers": [], "attention": []}
    attend, layer = attention.fused_attention, VanillaTransformerEncoderLayer.forward

    def attend_seen(module, query, *args, **kwargs):
        seen["attention"].append((query.shape[0], query.shape[2]))
        return attend(module, query, *args, **kwargs)

    @wraps(layer)  # otherwise it counts as a user's own, which disables the fast path
    def layer_seen(self, states, *args, **kwargs):
        seen["layers"].append(tuple(states.shape[:2]))
        return layer(self, states, *args, **kwargs)

    monkeypatch.setattr(attention, "fused_attention", attend_seen)
    monkeypatch.setattr(VanillaTransformerEncoderLayer, "forward", layer_seen)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_affect_encoding(side, attention):
    encoder = seq2seq(attn_implementation=attention).eval().get_encoder()
    ids, mask = ragged(17, 2, 9, 16, 1, 3, 8, padding_side=side)
    with torch.no_grad():
        alone = encoder(ids, mask).last_hidden_state
    together = encoder(ids, mask).last_hidden_state  # with gradients to come
    real = mask.bool()
    torch.testing.assert_close(alone[real], together[real])
    assert alone.shape == together.shape
    if attention == "sdpa":
        assert not alone[~real].any()


def test_only_attention_processes_padding_and_as_little_as_possible(sizes):
    encoder = seq2seq().eval().get_encoder()
    ids, mask = ragged(17, 2, 9, 16, 1, 3, 8)
    with torch.no_grad():
        encoder(ids, mask)
    assert set(sizes["layers"]) == {(1, int(mask.sum()))}
    groups = len(sizes["attention"]) // SMALL["encoder_layers"]
    assert sizes["attention"][:groups] == [(2, 17), (2, 9), (2, 3), (1, 1)]


@pytest.mark.parametrize("lengths", [(9, 0, 2), (9, 8, 0), (0, 0)], ids=str)
def test_a_row_of_only_padding_is_zero_and_affects_no_other_row(lengths):
    encoder = seq2seq().eval().get_encoder()
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    ids = random_ids(len(lengths), 9)
    with torch.no_grad():
        grouped = encoder(ids, mask).last_hidden_state
    together = encoder(ids, mask).last_hidden_state
    torch.testing.assert_close(grouped[mask.bool()], together[mask.bool()])
    if lengths != (9, 8, 0):  # which has too little padding to be split
        assert not grouped[torch.tensor(lengths) == 0].any()


def test_hidden_states_and_attentions_cover_the_whole_batch():
    encoder = seq2seq(attn_implementation="eager").eval().get_encoder()
    ids, mask = ragged(17, 2, 3)
    with torch.no_grad():
        outputs = encoder(ids, mask, output_hidden_states=True, output_attentions=True)
    assert {states.shape[:2] for states in outputs.hidden_states} == {ids.shape}
    assert {weights.shape for weights in outputs.attentions} == {outputs.attentions[0].shape}
    assert len(outputs.attentions) == encoder.config.encoder_layers
