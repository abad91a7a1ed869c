"""The cache of a generation holds what transformers' does, and copies less."""

import inspect
import warnings

import pytest
import torch
from conftest import OFFLOADS_IN_ORDER, ragged, random_ids, seq2seq, small_config, watch
from transformers import BartModel, GenerationMixin
from transformers import logging as transformers_logging
from transformers.cache_utils import DynamicLayer
from transformers.testing_utils import CaptureLogger

from vanilla_transformer import VanillaTransformerForCausalLM
from vanilla_transformer.model.cache import (
    CACHE_NAME,
    GrowingLayer,
    SourceLayer,
    generation_cache,
)
from vanilla_transformer.model.generation import VanillaTransformerGenerationMixin


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "use_cache": False},
        {"num_beams": 3, "cache_implementation": "static"},
        pytest.param({"num_beams": 3, "cache_implementation": "offloaded"}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_generation_is_the_same_as_with_transformers_caches(monkeypatch, options):
    if options.get("cache_implementation") == "offloaded" and not torch.cuda.is_available():
        pytest.skip("transformers offloads caches from a GPU, and there is none")
    if options.get("cache_implementation") == "offloaded" and not OFFLOADS_IN_ORDER:
        pytest.skip("this transformers reads back what it has not finished offloading")
    device = "cuda" if options.get("cache_implementation") == "offloaded" else "cpu"
    model = seq2seq().eval().to(device)
    source, mask = (tensor.to(device) for tensor in ragged(9, 2, 5))
    wanted = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12}

    def generate():
        torch.manual_seed(0)
        return model.generate(source, attention_mask=mask, **options, **wanted)

    ours = generate()
    monkeypatch.setattr(VanillaTransformerGenerationMixin, "_use_fast_cache", lambda *_: None)
    theirs = generate()
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores)


CACHE_NAMES = ("cache", "past_key_values")


def causal_lm():
    torch.manual_seed(0)
    return VanillaTransformerForCausalLM(small_config())


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("make", [seq2seq, causal_lm])
def test_a_cache_can_be_passed_under_either_name(make, name):
    model, ids = make().eval(), random_ids(2, 6)
    target = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    source = {"input_ids": random_ids(2, 4)} if model.config.is_encoder_decoder else {}
    first = model(**source, **{target: ids[:, :4]}, use_cache=True)
    cache = getattr(first, CACHE_NAME)
    later = model(**source, **{target: ids[:, 4:], name: cache})
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(later.logits, model(**source, **{target: ids}).logits[:, 4:])
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "eos_token_id": None}
    said = model.generate(**source, **options)
    options[name] = getattr(said, CACHE_NAME)
    more = model.generate(**source, **{target: said.sequences}, **options)
    assert getattr(more, CACHE_NAME) is options[name]
    at_once = model.generate(**source, **options | {name: None, "max_new_tokens": 6})
    assert torch.equal(more.sequences, at_once.sequences)


def test_a_text_can_be_scored_in_parts_that_share_a_cache():
    """With labels, a language model returns a cache if it is asked for one."""
    model, ids = causal_lm().eval(), random_ids(2, 9)
    cache, losses = None, []
    for part in (ids[:, :5], ids[:, 5:]):
        outputs = model(part, labels=part, cache=cache, use_cache=True)
        cache = getattr(outputs, CACHE_NAME)
        losses.append(outputs.loss)
    log_probs = model(ids).logits.log_softmax(-1)[:, :-1]
    scores = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    expected = [scores[:, :4].mean(), scores[:, 5:].mean()]  # each part predicts all but its first
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert getattr(model(ids, labels=ids), CACHE_NAME) is None


def test_the_older_name_is_deprecated_if_transformers_deprecates_it():
    model, ids = seq2seq(), random_ids(1, 3)
    cache = generation_cache(model.config, 1, 4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(input_ids=ids, decoder_input_ids=ids, past_key_values=cache)
    messages = [str(warning.message) for warning in warned]
    assert messages == (
        ["`past_key_values` is deprecated since transformers 5.24: use `cache`"]
        if CACHE_NAME == "cache"
        else []
    )


def test_a_cache_under_both_names_is_refused():
    model = seq2seq()
    caches = dict.fromkeys(CACHE_NAMES, generation_cache(model.config, 1, 4))
    with pytest.raises(ValueError, match="cache and past_key_values are the same: expected one"):
        model(input_ids=random_ids(1, 3), decoder_input_ids=random_ids(1, 3), **caches)
    with pytest.raises(ValueError, match="cache and past_key_values are the same: expected one"):
        model.generate(random_ids(1, 3), **caches)


@pytest.mark.parametrize("make", [seq2seq, causal_lm])
def test_the_cache_argument_has_the_same_name_as_in_bart(make):
    for part in (model := make(), model.get_decoder(), model.get_decoder().layers[0].self_attn):
        ours = inspect.signature(part.forward).parameters.keys() & set(CACHE_NAMES)
        assert ours == inspect.signature(BartModel.forward).parameters.keys() & set(CACHE_NAMES)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_uses_no_deprecated_name(options):
    model = seq2seq().eval()
    transformers_logging.set_verbosity_warning()
    transformers_logging.warning_once.cache_clear()
    with CaptureLogger(transformers_logging.get_logger()) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(random_ids(2, 5), max_new_tokens=4, return_dict_in_generate=True, **options)
    assert "deprecated" not in captured.out


def test_beams_share_the_cached_source_until_the_cache_is_returned(monkeypatch):
    model = seq2seq().eval()
    source, mask = ragged(9, 5)
    kept, update = [], SourceLayer.update

    def spy(self, keys, values, *args, **kwargs):
        kept.append(len(keys))
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(SourceLayer, "update", spy)
    outputs = model.generate(
        source, attention_mask=mask, num_beams=4, max_new_tokens=6, return_dict_in_generate=True
    )
    assert kept == [2] * model.config.decoder_layers
    cache = outputs.past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert {len(layer.keys) for layer in part.layers} == {8}
    assert {type(layer) for layer in cache.self_attention_cache.layers} == {GrowingLayer}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_returned_cache_can_be_reordered(num_beams):
    source, mask = ragged(9, 5)
    options = {"num_beams": num_beams, "max_new_tokens": 4, "return_dict_in_generate": True}
    outputs = seq2seq().eval().generate(source, attention_mask=mask, **options)
    cache = getattr(outputs, CACHE_NAME)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    cache.reorder_cache(torch.arange(2 * num_beams).flip(0))
    for layer, (keys, values) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys, keys.flip(0))
        assert torch.equal(layer.values, values.flip(0))


def test_nothing_is_copied_while_beams_share_their_source():
    layer = SourceLayer(rows_per_source=2)
    keys, values = layer.update(*torch.randn(2, 1, 2, 5, 3))
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.keys is keys
    assert layer.values is values


@torch.no_grad()
def test_a_growing_layer_holds_the_same_as_transformers_layer():
    torch.manual_seed(0)
    ours, theirs = GrowingLayer([], 12), DynamicLayer()
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
    """Each tensor reachable through attributes and items of a value, as an exporter finds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for part in value for tensor in tensors_in(part)]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_cache_holds_no_tensors_except_keys_and_values(num_beams):
    # Exporters make each tensor an output: a mask next to the source's keys broke every graph.
    seen = []

    def look(args, kwargs, output):
        cache = getattr(output, CACHE_NAME)
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            for layer in part.layers:
                kept = [id(layer.keys), id(layer.values)]
                seen.append([id(tensor) for tensor in tensors_in(layer)] == kept)

    model = seq2seq().eval()
    watch(model.model.decoder, look)
    source, mask = ragged(9, 2, 5)
    model.generate(source, attention_mask=mask, max_new_tokens=4, num_beams=num_beams)
    assert seen
    assert all(seen)


@torch.no_grad()
def test_a_growing_layer_rarely_copies():
    layer, rooms, last = GrowingLayer([], 300), [], None
    for _ in range(500):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        storage = layer.keys.untyped_storage()
        if storage.data_ptr() != last:
            rooms.append(storage.nbytes() // (2 * layer.keys.element_size()))
        last = storage.data_ptr()
    assert layer.keys.shape[2] == 500
    assert rooms == [2, 6, 14, 30, 62, 126, 300, 602]


@torch.no_grad()
def test_layers_of_different_dtypes_can_be_reordered():
    spare = []
    for dtype in (torch.float32, torch.bfloat16):
        layer, states = GrowingLayer(spare, 4), torch.randn(2, 1, 1, 2, dtype=dtype)
        layer.update(states, states)
        layer.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(layer.keys, states.flip(0))


@torch.no_grad()
def test_all_layers_reorder_beams_through_one_spare_buffer():
    spare = []
    layers = [GrowingLayer(spare, 40) for _ in range(3)]
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
def test_generated_tokens_can_be_trained_on(options):
    model = seq2seq()
    ids = random_ids(2, 5)
    generated = model.eval().generate(ids, max_new_tokens=4, **options)
    model.train()(input_ids=generated, labels=generated).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_steps_after_a_generation_can_be_trained_on():
    """Step by step or all at once, the gradients are the same."""
    model, ids, targets = seq2seq().eval(), random_ids(2, 5), random_ids(2, 3)
    gradients = []
    for width in (1, 3):
        options = {"max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True}
        cache = getattr(model.generate(ids, **options), CACHE_NAME)
        steps = [
            model(input_ids=ids, decoder_input_ids=part, cache=cache, use_cache=True).logits
            for part in targets.split(width, dim=1)
        ]
        model.zero_grad()
        torch.cat(steps, dim=1).square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one_by_one, at_once in zip(*gradients, strict=True):
        torch.testing.assert_close(one_by_one, at_once)


class QuantizedParameter(torch.nn.Parameter):
    """Libraries store quantized matrices in a tensor type of their own."""


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_uses_inference_mode_if_it_returns_only_tokens(num_beams):
    model = seq2seq().eval()
    modes = []
    watch(model.model.decoder, lambda *seen: modes.append(torch.is_inference_mode_enabled()))

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
    del model.forward
    query = model.get_decoder().layers[0].self_attn.q_proj
    query.weight = QuantizedParameter(query.weight.detach())
    assert modes_of() == {False}


def test_a_step_gets_the_inputs_that_transformers_would_prepare(monkeypatch):
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


def test_inputs_on_a_different_device_are_prepared_by_transformers(monkeypatch):
    def theirs(self, input_ids, **kwargs):
        return "theirs"

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", theirs)
    model = seq2seq().eval()
    cache = generation_cache(model.config, 1, 4)
    here = torch.ones(2, 3, dtype=torch.long)
    assert model.prepare_inputs_for_generation(here.to("meta"), 1, cache) == "theirs"
    ours = model.prepare_inputs_for_generation(here, 1, cache)
    assert ours["decoder_input_ids"].shape == (2, 1)
