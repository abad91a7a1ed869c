"""Hooks on modules get whole batches, as in any model of transformers."""

import pytest
import torch
from conftest import ragged, random_ids, seq2seq, small_config, watch
from torch.func import functional_call, grad, vmap
from torch.nn.modules.module import register_module_forward_hook
from transformers import LogitsProcessor
from transformers.generation import BaseStreamer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model import packing
from vanilla_transformer.model.cache import CACHE_NAME, update_kv_cache
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerLayer

KINDS = (VanillaTransformerForConditionalGeneration, VanillaTransformerLayer, torch.nn.Linear)
LENGTHS = (8, 3, 2, 4)  # half of the batch is padding
EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture
def model():
    """Its weights are so large that its targets differ."""
    model = seq2seq(dropout=0.3, tie_word_embeddings=False).eval()
    for weights in model.parameters():
        if weights.ndim == 2:
            torch.nn.init.normal_(weights, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@torch.no_grad()
def test_a_hook_changes_each_row_of_a_batch_as_it_changes_the_row_alone(model, kind):
    def mute(module, args, output=None):
        states = (args[0] if output is None else output).clone()
        states[:, 1] = 0
        return states if output is not None else (states, *args[1:])

    getattr(model.get_encoder().layers[0], f"register_{kind}_hook")(mute)
    ids, mask = ragged(*LENGTHS)
    states = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(LENGTHS):
        alone = model.get_encoder()(ids[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(states[row, :length], alone, **EXACT)


@pytest.mark.parametrize(("num_beams", "rows"), [(1, 4), (3, 12)])
def test_a_hook_gets_the_rows_of_all_beams_in_each_step(model, num_beams, rows):
    seen = []
    for layer in model.get_decoder().layers:
        for part in (layer, layer.encoder_attn.k_proj):
            part.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    ids, mask = ragged(*LENGTHS)
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=2, eos_token_id=None)
    ends = greedy[:2, 2].unique().tolist()  # some rows end soon
    seen.clear()
    model.generate(
        ids, attention_mask=mask, eos_token_id=ends, max_new_tokens=6, num_beams=num_beams
    )
    assert len(seen) > len(model.get_decoder().layers)
    assert set(seen) == {rows}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_global_hook_gets_the_same_as_hooks_on_each_module(model, num_beams):
    """Logits of all tokens, which beam search must not overwrite, because a hook can keep them."""
    ids, mask = ragged(*LENGTHS)

    def outputs(register):
        seen = []

        def keep(module, args, output):
            states = getattr(output, "logits", output)
            if isinstance(module, KINDS):
                seen.append((type(module).__name__, states, states.clone()))

        handles = register(keep)
        model.generate(ids, attention_mask=mask, max_new_tokens=3, num_beams=num_beams)
        for handle in handles:
            handle.remove()
        return seen

    found = outputs(lambda keep: [register_module_forward_hook(keep)])
    expected = outputs(lambda keep: [part.register_forward_hook(keep) for part in model.modules()])
    assert len(found) == len(expected)
    for (name, kept, copied), (expected_name, _, states) in zip(found, expected, strict=True):
        assert name == expected_name
        assert torch.equal(kept, copied)
        assert torch.equal(copied, states)


class Streamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self, kept):
        self.kept = kept

    def put(self, value):
        self.kept.append(value)

    def end(self):
        pass


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tensors_kept_during_generation_can_be_trained_on(model, num_beams):
    class Keeper(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.append(scores)
            return scores

    kept = []
    options = {"max_new_tokens": 3, "num_beams": num_beams}
    model.generate(random_ids(2, 5), logits_processor=[Keeper()], **options)
    model.get_encoder().layers[-1].register_forward_hook(lambda *seen: kept.append(seen[-1]))
    model.generate(random_ids(2, 5), **options)
    assert len(kept) == 4
    for states in kept:
        probe = torch.nn.Linear(states.shape[-1], 1)
        probe(states).sum().backward()
        assert probe.weight.grad is not None


def test_streamed_tokens_can_be_trained_on(model):
    kept = []
    model.generate(random_ids(1, 5), max_new_tokens=3, streamer=Streamer(kept))
    embedding = torch.nn.Embedding(len(model.lm_head.weight), 3)
    embedding(torch.cat([tokens.flatten() for tokens in kept])).sum().backward()
    assert embedding.weight.grad.any()


def test_a_backward_hook_gets_gradients_of_whole_batches(model, monkeypatch):
    seen, (ids, mask) = [], ragged(*LENGTHS)
    layer = model.train().get_encoder().layers[0]
    layer.register_full_backward_hook(lambda module, given, grads: seen.append(grads[0].shape))
    monkeypatch.setattr(packing, "keeps_rows_apart", lambda config: True)
    model.get_encoder()(ids, attention_mask=mask).last_hidden_state.sum().backward()
    assert seen == [(*ids.shape, model.config.d_model)]


def test_hooks_of_transformers_that_record_outputs_keep_the_fast_paths(model):
    ids, mask = ragged(*LENGTHS)
    model.get_encoder()(ids, attention_mask=mask, output_hidden_states=True)
    assert model.get_encoder().layers[0]._forward_hooks
    shapes = []
    watch(model.get_encoder().layers[0], lambda *seen: shapes.append(tuple(seen[-1].shape[:2])))
    with torch.no_grad():
        model.get_encoder()(ids, attention_mask=mask)
    assert shapes == [(1, sum(LENGTHS))]


class Convolution(torch.nn.Module):
    """Reads the positions next to each."""

    def __init__(self, d_model):
        super().__init__()
        self.conv = torch.nn.Conv1d(d_model, d_model, 3, padding=1)

    def forward(self, states):
        return self.conv(states.transpose(1, 2)).transpose(1, 2)


class OwnAttention(type(seq2seq().get_encoder().layers[0].self_attn)):
    """The model's attention; a subclass also changes the states of a row."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states.cumsum(1), *args, **kwargs)


def convolve(layer, config):
    layer.ffn = Convolution(config.d_model)


def recur(layer, config):
    layer.ffn = torch.nn.LSTM(config.d_model, config.d_model, batch_first=True)


def attend(layer, config):
    layer.self_attn = OwnAttention(config, config.encoder_attention_heads, 0)


class OwnKeys(type(seq2seq().get_encoder().layers[0].self_attn)):
    def _keys_and_values(self, states):
        return super()._keys_and_values(states.cumsum(1))


def attend_to_own_keys(layer, config):
    layer.self_attn = OwnKeys(config, config.encoder_attention_heads, 0)


def replace_method(layer, config):
    layer.ffn.forward = lambda states: states.cumsum(1)


@pytest.mark.parametrize("change", [convolve, recur, attend, attend_to_own_keys, replace_method])
def test_custom_modules_get_batches_and_not_one_long_row(model, change):
    """Without gradients on a CPU, our own modules get all sentences as one row."""
    change(model.get_encoder().layers[0], model.config)
    model.eval()
    ids, mask = ragged(*LENGTHS)
    ids = ids * mask  # how they see padding
    with torch.no_grad():
        states = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
    expected = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(states[mask.bool()], expected[mask.bool()], **EXACT)


def test_custom_embeddings_get_batches_too(model):
    class OfLanguage(type(model.get_encoder())):
        """Adds the embedding of a source's first token, its language, to all of them."""

        def embed(self, input_ids, *args, **kwargs):
            language = self.embed_tokens(input_ids[:, :1])
            return super().embed(input_ids, *args, **kwargs) + language

    encoder = model.model.encoder = OfLanguage(model.config).eval()
    ids, mask = ragged(*LENGTHS)
    with torch.no_grad():
        states = encoder(ids, attention_mask=mask).last_hidden_state
    expected = encoder(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(states[mask.bool()], expected[mask.bool()], **EXACT)


def test_custom_attention_gets_the_keys_of_all_beams(model):
    """The beams of a source share its keys in the fast cache."""
    attention = type(model.get_decoder().layers[0].encoder_attn)

    class Averaging(attention):
        def forward(self, hidden_states, mask=None, source=None, **kwargs):
            cache = kwargs.pop(CACHE_NAME, None)
            keys_and_values = (cache, self.layer_idx, True, self._keys_and_values, source, kwargs)
            _, value = update_kv_cache(*keys_and_values)
            mean = value.mean(2, keepdim=True).transpose(1, 2).flatten(2)
            return hidden_states + self.out_proj(mean), None

    config = model.eval().config
    model.get_decoder().layers[0].encoder_attn = Averaging(config, 4, 0, is_cross_attention=True)
    ids, mask = ragged(*LENGTHS)
    search = {"attention_mask": mask, "max_new_tokens": 4, "num_beams": 3}
    found = model.generate(ids, **search)
    assert found.tolist() == model.generate(ids, use_cache=False, **search).tolist()


def test_a_custom_module_that_keeps_a_tensor_of_a_generation_can_be_trained(model):
    class Scale(torch.nn.Module):
        table = None

        def forward(self, states):
            if self.table is None:  # as rotary embeddings do
                self.table = torch.linspace(1, 2, states.shape[-1])
            return states * self.table

    layer = model.get_encoder().layers[0]
    layer.ffn = torch.nn.Sequential(layer.ffn, Scale())
    model.eval().generate(random_ids(2, 5), max_new_tokens=3)
    model.train()(input_ids=random_ids(2, 5), labels=random_ids(2, 4)).loss.backward()


def test_a_linear_adapter_keeps_the_fast_paths(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "fc1"]))
    shapes, (ids, mask) = [], ragged(*LENGTHS)
    watch(model.get_encoder().layers[0], lambda *seen: shapes.append(tuple(seen[-1].shape[:2])))
    with torch.no_grad():
        adapted.get_encoder()(ids, attention_mask=mask)
    assert shapes == [(1, sum(LENGTHS))]


def test_adapters_can_differ_from_row_to_row(model):
    peft = pytest.importorskip("peft")
    lora = {"target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **lora)
    mixed = peft.get_peft_model(model, config, adapter_name="first").eval()
    mixed.add_adapter("second", config)
    names, (ids, mask) = ["first", "second", "__base__", "second"], ragged(*LENGTHS)
    options = {"num_beams": 2, "max_new_tokens": 4, "min_new_tokens": 4}
    found = mixed.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **options)
    for row, (name, length) in enumerate(zip(names, LENGTHS, strict=True)):
        alone = mixed.generate(
            input_ids=ids[row : row + 1, :length], adapter_names=[name], **options
        )
        assert found[row].tolist() == alone[0].tolist()


# ---------------------------------------------------------------- Other ways to run a model


def test_a_compiled_model_searches_as_before():
    model, (ids, mask) = seq2seq(encoder_layers=1, decoder_layers=1).eval(), ragged(*LENGTHS)
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 3}
    expected = model.generate(ids, **options)
    model.compile(backend="eager")
    assert model.generate(ids, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("training", [True, False])
def test_torchs_default_device_can_differ_from_the_models(model, training):
    model.train(training)
    (ids, mask), labels, results = ragged(*LENGTHS), random_ids(4, 5), []
    for default in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(default):
            if training:
                results.append(model(input_ids=ids, attention_mask=mask, labels=labels).loss)
            else:
                results.append(model.generate(ids, attention_mask=mask, max_new_tokens=6))
    assert torch.equal(*results)


def test_functional_gradients_are_those_of_autograd():
    model = seq2seq(dropout=0.0).train()
    batch = {"input_ids": random_ids(3, 6), "labels": random_ids(3, 5)}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    found = grad(lambda each: functional_call(model, each, (), batch).loss)(weights)
    model(**batch).loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, **EXACT)


def test_per_sample_gradients_are_those_of_each_pair_alone():
    model = seq2seq(dropout=0.0).train()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    pairs = random_ids(3, 6), random_ids(3, 5)

    def loss(each, ids, labels):
        batch = {"input_ids": ids[None], "labels": labels[None]}
        return functional_call(model, each, (), batch).loss

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *pairs)
    for row, (ids, labels) in enumerate(zip(*pairs, strict=True)):
        for name, gradient in grad(loss)(weights, ids, labels).items():
            torch.testing.assert_close(found[name][row], gradient, **EXACT)


def test_functional_gradients_work_with_dropout():
    model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.5)).train()
    batch = {"input_ids": random_ids(3, 6), "labels": random_ids(3, 5)}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def gradient():
        return grad(lambda each: functional_call(model, each, (), batch).loss)(weights)

    one, another = (gradient()["model.encoder.layers.0.ffn.fc1.weight"] for _ in range(2))
    assert one.isfinite().all()
    assert not torch.equal(one, another)
