"""What is done faster gives the same numbers."""

from functools import partial

import pytest
import torch
from conftest import SMALL, random_ids, small_config
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model import attention as shortcuts
from vanilla_transformer.model import cache as decoding_cache
from vanilla_transformer.model.attention import (
    Dropout,
    fused_attention,
    unfused_attention,
)
from vanilla_transformer.model.generation import VanillaTransformerGenerationMixin
from vanilla_transformer.model.modeling_vanilla_transformer import (
    VanillaTransformerLayer,
    scaled_dot_product_attention,
)


def seq2seq(**options):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config(**options))


def ragged(*lengths, padding_side="right"):
    """(rows, longest) token ids and their mask."""
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    if padding_side == "left":
        mask = mask.flip(1)
    return random_ids(len(lengths), longest) * mask, mask


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_drops_and_scales(p, dtype):
    torch.manual_seed(0)
    ones = torch.ones(501, 999, dtype=dtype, requires_grad=True)
    dropped = Dropout(p)(ones)
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
    kept = Dropout(0.5)(torch.ones(1000, 1000)) != 0
    for shift in (1, 2, 3, 4, 1000):
        both = (kept.flatten()[:-shift] & kept.flatten()[shift:]).double().mean()
        assert both.item() == pytest.approx(0.25, abs=0.002)


def test_dropout_at_the_ends():
    ones = torch.ones(3, 5)
    assert torch.equal(Dropout(0.0)(ones), ones)
    assert torch.equal(Dropout(0.5).eval()(ones), ones)
    assert not Dropout(1.0)(ones).any()
    assert Dropout(0.5)(torch.ones(0, 4)).shape == (0, 4)


def test_dropout_follows_the_seed():
    ones = torch.ones(7, 9)
    torch.manual_seed(3)
    first = Dropout(0.5)(ones)
    second = Dropout(0.5)(ones)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.5)(ones), first)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- attention in half precision


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_unfused_attention_is_the_fused_one(causal, masked):
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
    for attend in (shortcuts.sdpa_attention_forward, unfused):
        output, weights = attend(module, *states, mask, scaling=0.5)
        assert weights is None
        results.append((output, *torch.autograd.grad(output.square().sum(), states)))
    torch.testing.assert_close(results[1], results[0])


def test_training_in_half_precision_does_without_the_fused_one():
    query = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    asked = shortcuts.sdpa_attention_forward

    def chosen(query, options=None, attend=asked):
        choice = shortcuts.fastest(attend, len, query, query, None, options or {})
        return choice.func if isinstance(choice, partial) else choice

    assert chosen(query) is unfused_attention
    assert chosen(query, {"use_cache": True}) is unfused_attention
    assert chosen(query.detach()) is fused_attention
    assert chosen(query.float()) is fused_attention
    torch.set_float32_matmul_precision("medium")
    assert chosen(query.float()) is unfused_attention
    assert chosen(query.float().detach()) is fused_attention
    torch.set_float32_matmul_precision("highest")
    assert chosen(query, {"is_causal": False}) is asked
    assert chosen(query, attend=max) is max
    assert chosen(query.repeat(1, 1, 256, 1)) is asked


def test_no_attention_of_a_training_step_in_half_precision_is_fused(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("fused attention")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    model = seq2seq().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=random_ids(2, 4), labels=random_ids(2, 3)).loss.backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_is_transformers(causal, queries, masked):
    torch.manual_seed(0)
    module = nn.Module()
    module.is_causal = causal
    query, key, value = torch.randn(2, 3, queries, 4), *torch.randn(2, 2, 3, 5, 4)
    mask = torch.rand(2, 1, 1, 5) < 0.6 if masked else None
    ours, _ = fused_attention(module, query, key, value, mask, scaling=0.5)
    theirs, _ = shortcuts.sdpa_attention_forward(module, query, key, value, mask, scaling=0.5)
    assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- masks of padding


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_of_padding_is_a_vector_for_each_sentence(attention, with_gradients):
    config = small_config(attn_implementation=attention)
    _, mask = ragged(7, 4)
    states = torch.zeros(2, 7, 24)
    with torch.set_grad_enabled(with_gradients):
        vector = shortcuts.padding_mask(config, states, mask, states)
    assert vector.shape == (2, 1, 1, 7)
    seen = vector if vector.dtype == torch.bool else vector == 0
    assert torch.equal(seen[:, 0, 0], mask.bool())


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_a_mask_of_four_dimensions_is_the_callers(added, with_gradients, narrow):
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
    assert shortcuts.padding_mask(config, states, torch.ones(2, 7), states) is None


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_a_generation_makes_the_mask_of_its_source_once(monkeypatch, options):
    calls, make = [], decoding_cache.padding_mask
    spy = lambda *args: calls.append(args) or make(*args)  # noqa: E731
    monkeypatch.setattr(decoding_cache, "padding_mask", spy)
    source, mask = ragged(9, 2, 5)
    seq2seq().eval().generate(source, attention_mask=mask, max_new_tokens=6, **options)
    assert len(calls) == 1


def test_a_step_takes_the_inputs_that_transformers_would_prepare(monkeypatch):
    model, prepared = seq2seq().eval(), []

    def both(self, input_ids, **kwargs):
        ours = prepare(self, input_ids, **kwargs)
        theirs = GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)
        prepared.append((ours, theirs))
        return ours

    prepare = VanillaTransformerGenerationMixin.prepare_inputs_for_generation
    monkeypatch.setattr(VanillaTransformerGenerationMixin, "prepare_inputs_for_generation", both)
    source, mask = ragged(9, 2, 5)
    start = torch.tensor([[1, 5], [1, 6], [0, 1]])
    for options in (
        {},
        {"decoder_attention_mask": (start > 0).long()},
        {"output_attentions": True},
    ):
        model.generate(
            source, attention_mask=mask, decoder_input_ids=start, max_new_tokens=3, **options
        )
    assert len(prepared) == 9
    for ours, theirs in prepared:
        ours = {name: value for name, value in ours.items() if value is not None}
        theirs = {name: value for name, value in theirs.items() if value is not None}
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours.pop("decoder_input_ids"), theirs.pop("decoder_input_ids"))
        for name in ours:
            assert ours[name] is theirs[name] or torch.equal(ours[name], theirs[name])


def test_inputs_on_another_device_than_the_model_are_left_to_transformers(monkeypatch):
    def theirs(self, input_ids, **kwargs):
        return "theirs"

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", theirs)
    model = seq2seq().eval()
    cache = decoding_cache.new_cache(model.config)
    cache.cross_attention_cache.layers = [DynamicLayer()]
    decoding_cache.copy_less(cache, 4)
    here = torch.ones(2, 3, dtype=torch.long)
    assert model.prepare_inputs_for_generation(here.to("meta"), 1, cache) == "theirs"
    ours = model.prepare_inputs_for_generation(here, 1, cache)
    assert ours["decoder_input_ids"].shape == (2, 1)


# ---------------------------------------------------------------- beams that share a source


def test_no_source_at_all_is_an_error_of_its_own():
    states, none = torch.zeros(3, 4, 24), torch.zeros(0, 5, 24)
    with pytest.raises(ValueError, match="3 targets for 0 sources"):
        shortcuts.fold_beams(states, none)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_several_targets_for_a_source_are_as_with_the_source_repeated(attention):
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


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "use_cache": False},
        {"num_beams": 3, "cache_implementation": "static"},
        {"num_beams": 3, "cache_implementation": "offloaded"},
    ],
    ids=str,
)
def test_generation_is_as_with_transformers_own_caches(monkeypatch, options):
    if options.get("cache_implementation") == "offloaded" and not torch.cuda.is_available():
        pytest.skip("transformers offloads caches from a GPU, and there is none")
    model = seq2seq().eval()
    source, mask = ragged(9, 2, 5)
    wanted = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12}

    def generate():
        torch.manual_seed(0)
        return model.generate(source, attention_mask=mask, **options, **wanted)

    ours = generate()
    monkeypatch.delattr(VanillaTransformerGenerationMixin, "_expand_inputs_for_generation")
    monkeypatch.delattr(VanillaTransformerGenerationMixin, "_prepare_cache_for_generation")
    theirs = generate()
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores)


def test_a_source_is_kept_once_for_its_beams_until_the_cache_is_handed_out(monkeypatch):
    model = seq2seq().eval()
    source, mask = ragged(9, 5)
    kept, update = [], decoding_cache.SourceLayer.update

    def spy(self, keys, values, *args, **kwargs):
        kept.append(len(keys))
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(decoding_cache.SourceLayer, "update", spy)
    outputs = model.generate(
        source, attention_mask=mask, num_beams=4, max_new_tokens=6, return_dict_in_generate=True
    )
    assert kept == [2] * model.config.decoder_layers
    cache = outputs.past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert {len(layer.keys) for layer in part.layers} == {8}


def test_a_growing_layer_holds_what_transformers_does():
    torch.manual_seed(0)
    ours, theirs = decoding_cache.GrowingLayer([], 12), DynamicLayer()
    for step, length in enumerate((3, 1, 1, 4, 1, 1, 1, 1, 9)):
        states = torch.randn(2, 4, 2, length, 3)
        for layer in (ours, theirs):
            layer.update(states[0], states[1, ..., :2])
            if step == 3:
                layer.reorder_cache(torch.tensor([1, 1, 0, 3]))
            if step == 5:
                layer.crop(-2)
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()


def tensors_in(value):
    """Each tensor that the attributes and items of a value lead to, as an exporter finds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for part in value for tensor in tensors_in(part)]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_cache_leads_to_no_tensor_but_keys_and_values(num_beams):
    # An exporter makes an output of each: a mask kept beside the source's keys broke every graph.
    seen = []

    def look(module, args, output):
        cache = output.past_key_values
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            for layer in part.layers:
                kept = [id(layer.keys), id(layer.values)]
                seen.append([id(tensor) for tensor in tensors_in(layer)] == kept)

    model = seq2seq().eval()
    model.model.decoder.register_forward_hook(look)
    source, mask = ragged(9, 2, 5)
    model.generate(source, attention_mask=mask, max_new_tokens=4, num_beams=num_beams)
    assert seen
    assert all(seen)


def test_a_growing_layer_copies_seldom():
    layer, storages = decoding_cache.GrowingLayer([], 300), set()
    for _ in range(500):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        storages.add(layer.keys.untyped_storage().data_ptr())
        room = layer.keys.untyped_storage().nbytes() // (2 * layer.keys.element_size())
        assert room <= max(300, 2 * layer.keys.shape[2])
    assert layer.keys.shape[2] == 500
    assert len(storages) < 12


def test_beams_of_all_layers_change_places_through_one_spare_buffer():
    spare = []
    layers = [decoding_cache.GrowingLayer(spare, 40) for _ in range(3)]
    for layer in layers:
        layer.update(torch.zeros(4, 1, 20, 2), torch.zeros(4, 1, 20, 2))
    storages = set()
    for _ in range(5):
        for layer in layers:
            layer.reorder_cache(torch.tensor([1, 0, 0, 3]))
            layer.update(torch.zeros(4, 1, 1, 2), torch.zeros(4, 1, 1, 2))
            storages |= {
                states.untyped_storage().data_ptr() for states in (layer.keys, layer.values)
            }
    assert len(storages) == 7


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_what_was_generated_may_be_trained_on(options):
    model = seq2seq()
    ids = random_ids(2, 5)
    generated = model.eval().generate(ids, max_new_tokens=4, **options)
    model.train()(input_ids=generated, labels=generated).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_leaves_autograd_out_where_only_tokens_are_left(num_beams):
    model = seq2seq().eval()
    modes = []
    model.model.decoder.register_forward_pre_hook(
        lambda module, inputs: modes.append(torch.is_inference_mode_enabled())
    )

    def modes_of(**options):
        modes.clear()
        model.generate(random_ids(2, 5), max_new_tokens=2, num_beams=num_beams, **options)
        return set(modes)

    assert modes_of() == {True}
    assert modes_of(return_dict_in_generate=True) == {False}
    assert modes_of(use_cache=False) == {False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert modes_of() == {False}
    model.forward = model.forward  # as compilers and accelerate do
    assert modes_of() == {False}


def test_a_constant_is_kept_unless_an_exporter_looks_on():
    made = []

    def make(size):
        made.append(size)
        return torch.zeros(size)

    assert shortcuts.made_once(make, torch.ones(1), 3) is shortcuts.made_once(
        make, torch.ones(1), 3
    )
    assert made == [3]
    with torch._subclasses.FakeTensorMode():
        shortcuts.made_once(make, torch.ones(1), 3)
    assert made == [3, 3]


# ---------------------------------------------------------------- sentences of similar length


@pytest.fixture
def sizes(monkeypatch):
    """Rows and columns that layers and attention of a batch see."""
    seen = {"layers": [], "attention": []}
    attend, layer = shortcuts.fused_attention, VanillaTransformerLayer.forward

    def attend_seen(module, query, *args, **kwargs):
        seen["attention"].append((query.shape[0], query.shape[2]))
        return attend(module, query, *args, **kwargs)

    def layer_seen(self, states, *args, **kwargs):
        seen["layers"].append(tuple(states.shape[:2]))
        return layer(self, states, *args, **kwargs)

    monkeypatch.setattr(shortcuts, "fused_attention", attend_seen)
    monkeypatch.setattr(VanillaTransformerLayer, "forward", layer_seen)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_takes_no_part_in_encoding(side, attention):
    encoder = seq2seq(attn_implementation=attention).eval().get_encoder()
    ids, mask = ragged(17, 2, 9, 16, 1, 3, 8, padding_side=side)
    with torch.no_grad():
        alone = encoder(ids, mask).last_hidden_state
    together = encoder(ids, mask).last_hidden_state  # with gradients to come
    real = mask.bool()
    torch.testing.assert_close(alone[real], together[real])
    assert alone.shape == together.shape
    assert not alone[~real].any()


def test_only_attention_sees_padding_and_little_of_it(sizes):
    encoder = seq2seq().eval().get_encoder()
    ids, mask = ragged(17, 2, 9, 16, 1, 3, 8)
    with torch.no_grad():
        encoder(ids, mask)
    assert set(sizes["layers"]) == {(1, int(mask.sum()))}
    groups = len(sizes["attention"]) // SMALL["encoder_layers"]
    assert sizes["attention"][:groups] == [(2, 17), (2, 9), (2, 3), (1, 1)]


def test_keys_of_a_source_are_made_of_its_tokens(monkeypatch):
    model = seq2seq().eval()
    ids, mask = ragged(17, 2, 9, 3)
    made = []
    projection = model.get_decoder().layers[0].encoder_attn.k_proj
    projection.register_forward_hook(lambda module, args, output: made.append(output.shape[:2]))
    padded = model.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=5)
    assert made == [(1, int(mask.sum()))]
    monkeypatch.setattr(decoding_cache, "is_padded", lambda *_: False)
    plain = model.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=5)
    assert made[1] == ids.shape
    assert padded.tolist() == plain.tolist()


@pytest.mark.parametrize("lengths", [(9, 0, 2), (9, 8, 0), (0, 0)], ids=str)
def test_a_row_of_padding_alone_is_zero_and_disturbs_no_other(lengths):
    encoder = seq2seq().eval().get_encoder()
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    ids = random_ids(len(lengths), 9)
    with torch.no_grad():
        grouped = encoder(ids, mask).last_hidden_state
    together = encoder(ids, mask).last_hidden_state
    torch.testing.assert_close(grouped[mask.bool()], together[mask.bool()])
    if lengths != (9, 8, 0):  # which has too little padding to be taken apart
        assert not grouped[torch.tensor(lengths) == 0].any()


def test_states_of_each_layer_come_from_one_batch():
    encoder = seq2seq(attn_implementation="eager").eval().get_encoder()
    ids, mask = ragged(17, 2, 3)
    with torch.no_grad():
        outputs = encoder(ids, mask, output_hidden_states=True, output_attentions=True)
    assert {states.shape[:2] for states in outputs.hidden_states} == {ids.shape}
    assert {weights.shape for weights in outputs.attentions} == {outputs.attentions[0].shape}
    assert len(outputs.attentions) == encoder.config.encoder_layers
