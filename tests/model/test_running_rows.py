"""Rows that have ended are not computed, and the results stay the same."""

import pytest
import torch
from conftest import SMALL, random_ids, small_config, watch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model import generation
from vanilla_transformer.model.cache import CACHE_NAME
from vanilla_transformer.model.running_rows import RunningRows

SEARCHES = {
    "greedy": {},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "sampling from few": {"do_sample": True, "top_k": 9, "repetition_penalty": 1.2},
    "beams": {"num_beams": 4},
    "beams that stop early": {"num_beams": 4, "early_stopping": True},
    "beams that never stop early": {"num_beams": 4, "early_stopping": "never"},
    "gnmt": {"num_beams": 3, "length_penalty_type": "gnmt", "early_stopping": "never"},
    "all beams": {"num_beams": 4, "num_return_sequences": 4},
    "beams over all tokens": {"num_beams": 3, "no_repeat_ngram_size": 2},
    "two": {"num_beams": 2, "min_new_tokens": 3},
}
CONFIGS = {
    "pre-norm": {"norm_position": "pre"},
    "learned positions": {"position_encoding": "learned"},
    "two vocabularies": {"decoder_vocab_size": SMALL["vocab_size"] + 7},
}


def make_model(**changes):
    """Its weights are so large that its targets differ."""
    torch.manual_seed(1)
    config = small_config(tie_word_embeddings=False, **changes)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    for name, weights in model.named_parameters():
        if weights.ndim == 2:
            torch.nn.init.normal_(weights, std=0.2 if "embed_tokens" in name else 0.3)
    return model


@pytest.fixture
def rows_computed():
    """The number of rows in each step of `search`."""
    return []


def search(model, rows_computed=None, sources=24, **options):
    ids = random_ids(sources, 7)
    mask = torch.ones_like(ids)
    for row in range(sources):
        mask[row, row % 6 + 1 :] = 0
    if rows_computed is None:
        rows_computed = []
    ids, limit = ids.masked_fill(mask == 0, 1), {"max_new_tokens": 16, "pad_token_id": 1}
    greedy = model.generate(ids, attention_mask=mask, eos_token_id=None, num_beams=1, **limit)
    ends = greedy[: sources // 2, 4].unique().tolist()  # half of the rows end at the latest there
    layer = model.model.decoder.layers[0]
    watch(layer, lambda args, kwargs, output: rows_computed.append(len(args[0])))
    torch.manual_seed(1)
    rows_computed.clear()
    found = model.generate(ids, attention_mask=mask, **{"eos_token_id": ends, **limit, **options})
    del layer.forward
    return found


def search_whole_batches(monkeypatch, model, **options):
    with monkeypatch.context() as patch:
        patch.setattr(generation, "running_rows", lambda *args: None)
        return search(model, **options)


def expect_the_same(monkeypatch, rows_computed, model, **options):
    found = search(model, rows_computed, **options)
    assert rows_computed[-1] < rows_computed[0]
    assert found.tolist() == search_whole_batches(monkeypatch, model, **options).tolist()


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_searches_find_the_same(monkeypatch, rows_computed, options):
    expect_the_same(monkeypatch, rows_computed, make_model(), **options)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 4}], ids=["greedy", "beams"])
def test_models_of_any_configuration_find_the_same(monkeypatch, rows_computed, options, changes):
    expect_the_same(monkeypatch, rows_computed, make_model(**changes), **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_searches_with_prompts_find_the_same(monkeypatch, rows_computed, options):
    prompt = random_ids(24, 4)
    prompt_mask = torch.ones_like(prompt)
    prompt_mask[::2, :2] = 0  # padding on the left
    prompts = {"decoder_input_ids": prompt, "decoder_attention_mask": prompt_mask}
    expect_the_same(monkeypatch, rows_computed, make_model(), **options, **prompts)


def test_a_step_computes_at_most_a_third_more_rows_than_are_unfinished(rows_computed):
    ends, options = list(range(10)), {"do_sample": True, "temperature": 5.0}
    found = search(make_model(), rows_computed, sources=40, eos_token_id=ends, **options)
    have_ended = torch.isin(found[:, 1:], torch.tensor(ends)).cumsum(1) > 0
    running = [40, *(~have_ended).sum(0).tolist()]
    assert len(set(rows_computed)) > 2
    for computed, needed in zip(rows_computed, running, strict=False):
        assert needed <= computed
        assert computed == 40 or needed > 0.75 * computed or needed == computed


def test_all_samples_of_a_source_run_until_the_last_has_ended(rows_computed):
    search(make_model(), rows_computed, do_sample=True, num_return_sequences=3)
    assert all(rows % 3 == 0 for rows in rows_computed)


def test_each_source_ends_at_its_own_limit(monkeypatch, rows_computed):
    options = {"max_new_tokens": None, "extra_output_tokens": 2, "eos_token_id": None}
    expect_the_same(monkeypatch, rows_computed, make_model(), **options)


# ---------------------------------------------------------------- Where rows are observed


class AfterThree(StoppingCriteria):
    """Ends every second row after three tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.shape[1] > 3) & (torch.arange(len(input_ids)) % 2 == 0)


class LikeTheRowBefore(LogitsProcessor):
    """Prefers what the row before prefers, which may have ended."""

    def __call__(self, input_ids, scores):
        return scores + 0.5 * scores.roll(1, dims=0)


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True},
        {"num_beams": 3, "return_dict_in_generate": True},
        {"num_beams": 3, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        # Without an EOS token, transformers continues rows that have ended.
        {"eos_token_id": None, "stopping_criteria": StoppingCriteriaList([AfterThree()])},
        {"logits_processor": LogitsProcessorList([LikeTheRowBefore()])},
        {"num_beams": 3, "logits_processor": LogitsProcessorList([LikeTheRowBefore()])},
    ],
    ids=[
        "a cache that is returned",
        "of beams",
        "beams by chance",
        "a static cache",
        "no cache",
        "no end",
        "a processor that compares rows",
        "and beams",
    ],
)
def test_whole_batches_are_computed_if_rows_cannot_be_dropped(monkeypatch, rows_computed, options):
    model = make_model()
    found = search(model, rows_computed, **options)
    assert len(set(rows_computed)) == 1
    again = search_whole_batches(monkeypatch, model, **options)
    found, again = (getattr(each, "sequences", each) for each in (found, again))
    assert found.tolist() == again.tolist()


def test_a_cache_passed_by_the_caller_stays_complete(rows_computed):
    model = make_model()
    first = search(model, return_dict_in_generate=True, max_new_tokens=2, eos_token_id=None)
    cache, prompt = first.past_key_values, first.sequences
    search(model, rows_computed, decoder_input_ids=prompt, past_key_values=cache)
    assert len(set(rows_computed)) == 1
    assert all(len(layer.keys) == 24 for layer in cache.self_attention_cache.layers)
    assert all(len(layer.keys) == 24 for layer in cache.cross_attention_cache.layers)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hooks_and_eager_attention_get_whole_batches(rows_computed, attention):
    model = make_model()
    model.set_attn_implementation(attention)
    if attention == "sdpa":
        model.register_forward_hook(lambda *args: None)
    search(model, rows_computed)
    assert len(set(rows_computed)) == 1


def test_custom_stopping_criteria_end_rows_too(monkeypatch, rows_computed):
    model = make_model()
    criteria = StoppingCriteriaList([MaxTimeCriteria(60), AfterThree()])
    expect_the_same(monkeypatch, rows_computed, model, stopping_criteria=criteria)
    assert rows_computed[-1] <= 12


def test_states_of_ended_rows_are_0():
    rows = RunningRows(6, rows_per_source=2)
    states = torch.ones(6, 3)
    assert rows.expand(states) is states
    rows.end(torch.tensor([True, True, True, False, False, False]))
    cache = search(make_model(), sources=3, num_beams=2, return_dict_in_generate=True)
    rows.select(
        {
            CACHE_NAME: getattr(cache, CACHE_NAME),
            "encoder_outputs": (torch.zeros(6, 7, 8),),
            "decoder_input_ids": torch.ones(6, 1),
        }
    )
    assert rows.expand(torch.ones(4, 3)).sum(1).tolist() == [0, 0, 3, 3, 3, 3]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_early_stopping_ends_a_source_whose_hypotheses_are_finished(early_stopping):
    rows = RunningRows(4, rows_per_source=2)
    can_improve, hits = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    finished = torch.tensor([[True, True], [True, False]])
    assert rows.has_unfinished(can_improve, finished, hits, early_stopping)
    assert rows._has_ended.tolist() == [early_stopping is True, False]
