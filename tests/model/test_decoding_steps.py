"""Steps that only run the decoder, and logits in pieces or of the most likely tokens only: the
search finds the same."""

from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import pytest
import torch
from conftest import SMALL, random_ids, small_config
from torch import nn

from scripts.benchmarks.operations import on_gpu
from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.model import decoding_steps
from vanilla_transformer.model.cache import CACHE_NAME
from vanilla_transformer.model.decoding_steps import (
    COUNTS_TOKENS_BY_SCORES,
    BestTokens,
    project,
    topk,
)

SEARCHES = {
    "beams": {"num_beams": 3},
    "all beams": {"num_beams": 4, "num_return_sequences": 4},
    "several ends": {"num_beams": 3, "eos_token_id": [2, 5, 7, 9, 11]},
    "no end": {"num_beams": 3, "eos_token_id": None},
    "gnmt": {"num_beams": 3, "length_penalty_type": "gnmt", "early_stopping": "never"},
    "as many as tokens": {"num_beams": SMALL["vocab_size"]},
    "without a cache": {"num_beams": 3, "use_cache": False},
    "static cache": {"num_beams": 3, "cache_implementation": "static"},
}


@pytest.fixture(params=[VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM])
def model(request):
    torch.manual_seed(0)
    return request.param(small_config()).eval()


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def in_pieces(request, monkeypatch):
    """As for a large matrix: the logits come in pieces of seven tokens."""
    if request.param:
        monkeypatch.setattr(decoding_steps, "LARGE", 0)
        monkeypatch.setattr(decoding_steps, "PIECE", 7 * SMALL["d_model"] * 4)
    return request.param


@pytest.fixture
def uses(monkeypatch):
    """How often beam search looked at the best tokens only."""
    calls = []
    logits = BestTokens.logits
    monkeypatch.setattr(BestTokens, "logits", lambda *args: (calls.append(1), logits(*args))[1])
    return calls


def search(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 7, **options})


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_beam_search_only_needs_the_best_tokens(model, options, in_pieces, uses):
    ids = random_ids(3, 6)
    found = search(model, ids, **options)
    assert bool(uses) == COUNTS_TOKENS_BY_SCORES
    uses.clear()
    scored = {"return_dict_in_generate": True, "output_scores": True}  # of all tokens
    expected = search(model, ids, **options, **scored).sequences
    assert not uses
    assert found.tolist() == expected.tolist()


def test_source_and_target_vocabulary_can_have_different_sizes(in_pieces):
    torch.manual_seed(0)
    config = small_config(decoder_vocab_size=61)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    scored = {"return_dict_in_generate": True, "output_scores": True}
    found = search(model, random_ids(3, 6), num_beams=3)
    assert (
        found.tolist() == search(model, random_ids(3, 6), num_beams=3, **scored).sequences.tolist()
    )
    assert found.max() >= SMALL["vocab_size"]


class NegatedLogits(VanillaTransformerForConditionalGeneration):
    """Negates the logits of its parent class."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


def with_hook(model):
    model.register_forward_hook(lambda module, args, output: output)


def with_another_forward(model):
    model.forward = model.forward


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},
        {"min_new_tokens": 3},
        {"bad_words_ids": [[5]]},
        {"output_logits": True, "return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors_get_the_scores_of_all_tokens(model, options, uses):
    search(model, random_ids(3, 6), num_beams=3, **options)
    assert not uses


@pytest.mark.parametrize("change", [with_hook, with_another_forward])
def test_code_that_changes_logits_gets_those_of_all_tokens(model, change, uses):
    change(model)
    search(model, random_ids(3, 6), num_beams=3)
    assert not uses


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_a_subclass_that_changes_logits_gets_those_of_all_tokens(uses, monkeypatch, is_shared):
    """Also one whose code is saved with it: loading this code registers the class."""
    if is_shared:
        monkeypatch.setattr(NegatedLogits, "_auto_class", "AutoModelForSeq2SeqLM")
    torch.manual_seed(0)
    contrary, ids = NegatedLogits(small_config()).eval(), random_ids(3, 6)
    found = search(contrary, ids, num_beams=3, eos_token_id=None)
    assert not uses
    scored = {"return_dict_in_generate": True, "output_scores": True}
    again = search(contrary, ids, num_beams=3, eos_token_id=None, **scored)
    assert found.tolist() == again.sequences.tolist()
    whole = search(contrary, ids)
    monkeypatch.setattr(decoding_steps, "LARGE", 0)
    assert torch.equal(search(contrary, ids), whole)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_method_that_is_replaced_in_the_class_changes_what_is_found(
    whole_model, monkeypatch, num_beams
):
    ids, kind = random_ids(3, 6), type(whole_model)
    torch.manual_seed(0)  # the weights of whole_model
    original, negated = kind.forward, NegatedLogits(whole_model.config).eval()
    expected = search(negated, ids, num_beams=num_beams)

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.logits = -output.logits
        return output

    monkeypatch.setattr(kind, "forward", forward)
    assert search(whole_model, ids, num_beams=num_beams).tolist() == expected.tolist()


def test_hooks_of_the_projection_get_all_logits_and_can_keep_them(model):
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    search(model, random_ids(3, 6), num_beams=3)
    kept = [logits.clone() for logits in seen]
    assert {logits.shape for logits in seen} == {(9, 1, SMALL["vocab_size"])}  # as without beams
    assert (seen[0] < 0).any()  # not overwritten by exponentials
    torch.testing.assert_close(seen, kept)


def test_threads_can_search_at_the_same_time(model):
    sources = [random_ids(2, 6, seed=seed) for seed in range(8)]
    beams = [2 + seed % 3 for seed in range(8)]
    expected = [
        search(model, ids, num_beams=width).tolist()
        for ids, width in zip(sources, beams, strict=True)
    ]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(search, model, ids, num_beams=width)
            for ids, width in zip(sources, beams, strict=True)
        ]
        found = [job.result().tolist() for job in jobs]
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_probabilities_are_normalized_over_all_tokens(dtype, in_pieces):
    torch.manual_seed(0)
    projection = nn.Linear(24, 50, bias=False, dtype=dtype)
    states = torch.randn(6, 1, 24, dtype=dtype) * 5
    best = BestTokens(VanillaTransformerForConditionalGeneration(small_config()), 8, nn.Identity())
    with torch.no_grad():
        logits, expected = best.logits(states, projection), projection(states)
    wide = expected.to(torch.promote_types(dtype, torch.float32))[:, 0]
    values, tokens = wide.topk(8)
    assert logits[:, 0].tolist() == values.tolist()
    assert wide.gather(1, best.tokens).tolist() == values.tolist()
    torch.testing.assert_close(best(None, logits[:, 0]), wide.log_softmax(-1).gather(1, tokens))


def steps(model, **options):
    """The tokens that a search of seven steps finds, and how many of them call both stacks."""
    stacks, seen = VanillaTransformerModel, []
    whole = stacks.forward

    @wraps(whole)  # or it would count as a change by the user
    def forward(*args, **kwargs):
        seen.append(1)
        return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "forward", forward)
        options = {"max_new_tokens": 7, "eos_token_id": None, **options}
        return model.generate(random_ids(3, 6), **options), len(seen)


@pytest.fixture
def whole_model():
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config()).eval()


@pytest.mark.parametrize("beams", [1, 3])
def test_only_the_decoder_is_called_after_the_first_step(whole_model, beams):
    found, calls = steps(whole_model, num_beams=beams)
    assert calls == 1
    whole_model.set_attn_implementation("eager")
    expected, calls = steps(whole_model, num_beams=beams)
    assert calls == 7
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_the_decoder_is_called_without_the_encoder_on_a_gpu_too(whole_model, beams):
    expected, _ = steps(whole_model, num_beams=beams)
    with on_gpu():
        found, calls = steps(whole_model, num_beams=beams)
    assert calls == 1
    assert found.tolist() == expected.tolist()


def test_a_padded_target_is_decoded_the_same(whole_model):
    prompt = torch.tensor([[1, 5, 6], [0, 1, 5], [0, 0, 1]])
    given = {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()}
    found, calls = steps(whole_model, **given)
    assert calls == 1
    whole_model.set_attn_implementation("eager")
    assert found.tolist() == steps(whole_model, **given)[0].tolist()


def test_inputs_are_checked_with_a_cache_from_the_caller_too(whole_model):
    begun, _ = steps(whole_model, max_new_tokens=3, return_dict_in_generate=True)
    cache = {CACHE_NAME: begun[CACHE_NAME]}
    found, calls = steps(whole_model, decoder_input_ids=begun.sequences, max_new_tokens=4, **cache)
    assert calls == 1
    assert found.tolist() == steps(whole_model)[0].tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_beyond_learned_positions_is_reported(beams):
    config = small_config(position_encoding="learned", max_position_embeddings=6)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with pytest.raises(IndexError, match="position 6 is out of range: expected 0 <= position < 6"):
        steps(model, num_beams=beams, max_new_tokens=9)


def with_hook_of_a_library(model):
    def hook(*args):
        return None

    hook.__module__ = "accelerate.hooks"
    model.model.register_forward_pre_hook(hook)


def with_another_forward_of_both(model):
    stacks = model.model
    stacks.forward = lambda *args, **inputs: type(stacks).forward(stacks, *args, **inputs)


@pytest.mark.parametrize("change", [with_hook_of_a_library, with_another_forward_of_both])
def test_hooks_and_overrides_of_both_stacks_are_called_in_each_step(whole_model, change):
    expected, _ = steps(whole_model)
    change(whole_model)
    found, calls = steps(whole_model)
    assert calls == 7
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_requested_outputs_come_from_both_stacks(whole_model, option):
    asked = {option: True, "return_dict_in_generate": True}
    assert steps(whole_model, **asked)[1] == 7


@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 1, 24), (2, 5, 24)])
def test_logits_in_pieces_equal_those_of_one_product(shape, in_pieces):
    torch.manual_seed(0)
    projection, states = nn.Linear(24, 50, bias=False), torch.randn(shape)
    expected, rows = projection(states), states.flatten(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(project(states, projection), expected)
        assert decoding_steps._pays_in_pieces(projection, rows) == (in_pieces and len(rows) > 1)
    assert project(states, projection).requires_grad


def test_autocast_and_biases_are_handled_by_torch(monkeypatch):
    monkeypatch.setattr(decoding_steps, "LARGE", 0)
    states = torch.randn(3, 1, 24)
    with torch.no_grad():
        biased = nn.Linear(24, 50)
        torch.testing.assert_close(project(states, biased), biased(states))
        plain = nn.Linear(24, 50, bias=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert project(states, plain).dtype == torch.bfloat16


@pytest.mark.parametrize("columns", [1, 7, 8, 24, 63, 64, 72, 800, 1001])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_topk_by_columns_equals_torchs(columns, count):
    torch.manual_seed(0)
    scores, count = torch.randn(5, columns), min(columns, count)
    values, places = scores.topk(count)
    found, where = topk(scores, count)
    assert (found.tolist(), where.tolist()) == (values.tolist(), places.tolist())
