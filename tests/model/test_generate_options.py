"""`generate()`: every option does the same as for transformers' own models."""

import threading
from itertools import pairwise

import pytest
import torch
from conftest import SMALL, random_ids, small_config
from test_modeling import assert_close, pad
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import BaseStreamer, StoppingCriteria

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)

CLASSES = [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]
START, EOS = 1, 2
STEPS = 10


# Random models with varied outputs. Post-norm and tied ones repeat themselves.
SEEDS = dict(zip(CLASSES, (25, 55), strict=True))


def build(cls, seed=None, **fields):
    torch.manual_seed(SEEDS[cls] if seed is None else seed)
    fields = {"norm_position": "pre", "tie_word_embeddings": False, **fields}
    return cls(small_config(**fields)).eval()


@pytest.fixture(params=CLASSES, ids=["seq2seq", "causal"])
def any_model(request):
    return build(request.param)


@pytest.fixture
def seq2seq():
    return build(CLASSES[0])


@pytest.fixture
def causal():
    return build(CLASSES[1])


@pytest.fixture
def prompts():
    """Three sources for a seq2seq model, or three prompts for a causal one."""
    return random_ids(3, 6)


def is_causal(model):
    return not model.config.is_encoder_decoder


def generate(model, prompts, **options):
    """The tokens, without the prompts that a causal model repeats or the start token."""
    options = {"max_new_tokens": STEPS, **options}
    tokens = model.generate(prompts, **options)
    return tokens[:, prompts.shape[1] if is_causal(model) else 1 :]


def next_logits(model, prompts, tokens):
    """Logits after the prompts and each of the tokens: (batch, 1 + length, vocabulary)."""
    if is_causal(model):
        return model(torch.cat([prompts, tokens], 1)).logits[:, prompts.shape[1] - 1 :]
    start = torch.full((len(tokens), 1), START)
    return model(input_ids=prompts, decoder_input_ids=torch.cat([start, tokens], 1)).logits


def log_probability(model, prompts, tokens):
    logits = next_logits(model, prompts, tokens)[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].sum(-1)


def until_eos(tokens):
    """A row of tokens up to its end-of-sentence."""
    row = tokens.tolist()
    return row[: row.index(EOS) + 1] if EOS in row else row


def test_the_model_has_varied_outputs(any_model, prompts):
    tokens = generate(any_model, prompts)
    assert all(len(set(row.tolist())) >= 4 for row in tokens if EOS not in row)
    assert len({tuple(row.tolist()) for row in tokens}) == 3


# ---------------------------------------------------------------- what does not change the tokens


def own_loop(model, input_ids, **rest):
    return model._sample(input_ids, **rest)


SAME_AS_GREEDY = {
    "static cache": {"cache_implementation": "static"},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "sampling from one": {"do_sample": True, "top_k": 1},
    "sampling without heat": {"do_sample": True, "temperature": 1e-4},
    "sampling from a sliver": {"do_sample": True, "top_p": 1e-6},
    "a loop of one's own": {"custom_generate": own_loop},
}


@pytest.mark.parametrize("options", SAME_AS_GREEDY.values(), ids=SAME_AS_GREEDY)
def test_the_tokens_are_those_of_greedy_search(any_model, prompts, options):
    expected = generate(any_model, prompts, do_sample=False)
    assert generate(any_model, prompts, **options).tolist() == expected.tolist()


def test_a_compiled_step_changes_no_token(any_model, prompts):
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # or else accelerators only
    expected = generate(any_model, prompts)
    options = {"cache_implementation": "static", "compile_config": compiled}
    assert generate(any_model, prompts, **options).tolist() == expected.tolist()
    assert hasattr(any_model, "_compiled_call")


@pytest.mark.slow
def test_two_source_lengths_are_enough_to_compile_for_all(seq2seq):
    """One full graph for the first step and one for all others; both again for the second length,
    and never after that."""
    torch._dynamo.reset()  # what other tests have compiled
    counter = CompileCounter()
    sources = [random_ids(2, length) for length in (6, 8, 5, 20)]
    expected = [generate(seq2seq, source).tolist() for source in sources]
    seq2seq.forward = torch.compile(seq2seq.forward, backend=counter, fullgraph=True)
    graphs, actual = [], []
    for source in sources:
        actual.append(generate(seq2seq, source, cache_implementation="static").tolist())
        graphs.append(counter.frame_count)
    assert actual == expected
    assert graphs == [2, 4, 4, 4]


def test_a_static_cache_respects_the_mask_of_a_target_prompt(seq2seq, prompts):
    target = torch.tensor([[3, 3, 8], [3, 9, 10], [3, 3, 3]])[: len(prompts)]
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])[: len(prompts)]
    prompt = {"decoder_input_ids": target, "decoder_attention_mask": mask}
    expected = generate(seq2seq, prompts, **prompt)
    actual = generate(seq2seq, prompts, **prompt, cache_implementation="static")
    assert actual.tolist() == expected.tolist()


def test_a_prompt_can_be_read_in_chunks(causal, prompts):
    expected = generate(causal, prompts)
    assert generate(causal, prompts, prefill_chunk_size=4).tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_a_static_cache_can_be_longer_than_needed(any_model, prompts, strategy):
    cache = {"cache_implementation": "static", "max_cache_len": 40}
    expected = generate(any_model, prompts, **strategy)
    assert generate(any_model, prompts, **strategy, **cache).tolist() == expected.tolist()


# ---------------------------------------------------------------- speculative decoding


class Calls:
    """Counts a module's forward passes."""

    def __init__(self, module):
        self.count = 0
        module.register_forward_hook(self.add)

    def add(self, *_):
        self.count += 1


@pytest.mark.parametrize("row", range(3))
def test_a_small_draft_model_changes_no_token(any_model, prompts, row):
    draft = build(
        type(any_model), seed=1, d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=50
    )
    drafted = Calls(draft)
    one = prompts[row : row + 1]
    expected = generate(any_model, one)
    assert generate(any_model, one, assistant_model=draft).tolist() == expected.tolist()
    assert drafted.count


def test_a_draft_model_that_is_always_right_saves_steps(any_model, prompts):
    prompt = prompts[:1]
    expected = generate(any_model, prompt, eos_token_id=None)
    calls = Calls(any_model.lm_head)
    same = build(type(any_model))
    same.generation_config.assistant_confidence_threshold = 0.0
    assisted = generate(any_model, prompt, eos_token_id=None, assistant_model=same)
    assert assisted.tolist() == expected.tolist()
    assert calls.count <= 2


def test_token_id_minus_one_means_no_token(any_model, prompts):
    """As transformers' users have it: no sentence ends, and nothing in a prompt is padding."""
    expected = generate(any_model, prompts, eos_token_id=None)
    assert (
        generate(any_model, prompts, eos_token_id=-1, pad_token_id=-1).tolist() == expected.tolist()
    )


def test_padding_does_not_affect_a_draft_model(any_model, prompts):
    ids, mask = pad([prompts[0, :4], prompts[1]], "left")
    draft = build(type(any_model), seed=1, encoder_layers=1, decoder_layers=1)
    padded = generate(any_model, ids[:1], attention_mask=mask[:1], assistant_model=draft)
    assert padded.tolist() == generate(any_model, prompts[:1, :4]).tolist()


def test_prompt_lookup_saves_steps(any_model, prompts):
    prompt = prompts[:1]
    expected = generate(any_model, prompt, eos_token_id=None)
    if is_causal(any_model):
        # The prompt contains what the model will generate, so that it can be looked up.
        prompt = torch.cat([prompt, expected], 1)
        expected = generate(any_model, prompt, eos_token_id=None)
    calls = Calls(any_model.lm_head)
    looked_up = generate(any_model, prompt, eos_token_id=None, prompt_lookup_num_tokens=4)
    assert looked_up.tolist() == expected.tolist()
    assert calls.count < STEPS


def test_prompt_lookup_has_the_length_limit_of_a_padded_source():
    # Also within a block of accepted tokens.
    source = random_ids(1, 3)
    padded = torch.cat([source, torch.zeros_like(source)], dim=1)
    options = {"extra_output_tokens": 4, "prompt_lookup_num_tokens": 3, "eos_token_id": None}
    for seed in range(10):
        model = build(CLASSES[0], seed=seed)
        expected = model.generate(source, **options)
        found = model.generate(padded, attention_mask=padded != 0, **options)
        assert found.tolist() == expected.tolist()
        assert expected.shape == (1, 1 + 3 + 4)


# ---------------------------------------------------------------- search and sampling


def best_pairs(model, prompt):
    """All pairs of tokens, the most probable first, and their log-probabilities."""
    vocabulary = torch.arange(SMALL["vocab_size"])
    first = next_logits(model, prompt, vocabulary[:0][None])[:, -1].log_softmax(-1)
    rows = prompt.expand(len(vocabulary), -1)
    second = next_logits(model, rows, vocabulary[:, None])[:, -1].log_softmax(-1)
    scores, order = (first.T + second).flatten().sort(descending=True)
    return torch.stack([order // len(vocabulary), order % len(vocabulary)], 1), scores


@pytest.mark.parametrize("row", range(3))
def test_as_many_beams_as_tokens_find_the_best(any_model, prompts, row):
    prompt = prompts[row : row + 1]
    pairs, scores = best_pairs(any_model, prompt)
    options = {"num_beams": SMALL["vocab_size"], "num_return_sequences": 5, "max_new_tokens": 2}
    found = any_model.generate(
        prompt,
        **options,
        eos_token_id=None,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert found.sequences[:, -2:].tolist() == pairs[:5].tolist()
    assert_close(found.sequences_scores, scores[:5])


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_beams_score_is_its_log_probability_over_its_length(any_model, prompts, length_penalty):
    found = any_model.generate(
        prompts,
        num_beams=3,
        max_new_tokens=STEPS,
        eos_token_id=None,
        length_penalty=length_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = log_probability(any_model, prompts, found.sequences[:, -STEPS:])
    assert_close(found.sequences_scores, expected / STEPS**length_penalty)


SAMPLING = {
    "sample": {"do_sample": True, "temperature": 2.0},
    "beam-sample": {"do_sample": True, "temperature": 2.0, "num_beams": 3},
    "several": {"do_sample": True, "temperature": 2.0, "num_return_sequences": 4},
    "several beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_sampling_follows_its_seed(any_model, prompts, options):
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(generate(any_model, prompts, **options).tolist())
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0]) == 3 * options.get("num_return_sequences", 1)


def nucleus(probabilities, mass):
    """The likeliest tokens, as few as make up so much of the probability."""
    values, order = probabilities.sort(descending=True)
    return order[: int((values.cumsum(-1) < mass).sum()) + 1]


LIKELIEST = {
    "top_k": ({"top_k": 3}, lambda p: p.topk(3).indices),
    "top_p": ({"top_p": 0.3}, lambda p: nucleus(p, 0.3)),
    "min_p": ({"min_p": 0.5}, lambda p: (p >= 0.5 * p.max()).nonzero()[:, 0]),
    "epsilon": ({"epsilon_cutoff": 0.04}, lambda p: (p >= 0.04).nonzero()[:, 0]),
}


@pytest.mark.parametrize(("options", "candidates"), LIKELIEST.values(), ids=LIKELIEST)
def test_samples_come_from_the_most_likely_tokens(any_model, prompts, options, candidates):
    prompt = prompts[:1]
    probabilities = next_logits(any_model, prompt, prompts[:1, :0])[0, -1].softmax(-1)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 300, **options}
    samples = generate(any_model, prompt, max_new_tokens=1, **options)
    expected = set(candidates(probabilities).tolist())
    assert 1 < len(expected) < SMALL["vocab_size"]
    assert set(samples[:, 0].tolist()) == expected


# ---------------------------------------------------------------- constraints


def pairs_of(row):
    return list(pairwise(row))


# A constraint, given what greedy search says without it: the options, and what they assure of each
# row of tokens, up to its end, and of its prompt.
CONSTRAINTS = {
    "bad words": lambda plain: (
        {"bad_words_ids": [[int(row[1])] for row in plain]},
        lambda row, _: not set(row) & set(plain[:, 1].tolist()),
    ),
    "bad phrases": lambda plain: (
        {"bad_words_ids": [row[:2].tolist() for row in plain]},
        lambda row, _: not {tuple(p[:2].tolist()) for p in plain} & set(pairs_of(row)),
    ),
    "no repeated pair": lambda plain: (
        {"no_repeat_ngram_size": 2},
        lambda row, _: len(pairs_of(row)) == len(set(pairs_of(row))),
    ),
    "only even tokens": lambda plain: (
        {"prefix_allowed_tokens_fn": lambda batch, sent: list(range(4, 50, 2))},
        lambda row, _: all(token % 2 == 0 for token in row),
    ),
    "suppressed": lambda plain: (
        {"suppress_tokens": plain[:, 2].tolist()},
        lambda row, _: not set(row) & set(plain[:, 2].tolist()),
    ),
    "suppressed at first": lambda plain: (
        {"begin_suppress_tokens": plain[:, 0].tolist()},
        lambda row, _: row[0] not in plain[:, 0].tolist(),
    ),
    "biased": lambda plain: ({"sequence_bias": [[[44], 100.0]]}, lambda row, _: 44 in row),
    "forced end": lambda plain: (
        {"forced_eos_token_id": EOS, "min_new_tokens": STEPS - 1},
        lambda row, _: len(row) == STEPS and row[-1] == EOS,
    ),
    "at least 8 new tokens": lambda plain: (
        {"min_new_tokens": 8, "sequence_bias": [[[EOS], 100.0]]},
        lambda row, _: len(row) == 9 and row[-1] == EOS,
    ),
    "at least 8 tokens": lambda plain: (
        {"min_length": 8, "sequence_bias": [[[EOS], 100.0]]},
        lambda row, start: len(row) + start == 9 and row[-1] == EOS,
    ),
    "any of several ends": lambda plain: (
        {"eos_token_id": [EOS, int(plain[0, 3])]},
        lambda row, _: int(plain[0, 3]) not in row[:-1],
    ),
    "ever nearer the end": lambda plain: (
        {"exponential_decay_length_penalty": (3, 100.0)},
        lambda row, _: len(row) <= 6,
    ),
}
SEARCHES = {"greedy": {}, "beam": {"num_beams": 3}, "sample": {"do_sample": True}}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_constraints_are_kept(any_model, prompts, constraint, search):
    torch.manual_seed(0)
    plain = generate(any_model, prompts, suppress_tokens=[EOS])
    options, holds = constraint(plain)
    start = prompts.shape[1] if is_causal(any_model) else 1
    if not search:
        assert not all(holds(row.tolist(), start) for row in plain)
    stops = options.get("eos_token_id", [EOS])
    for row in generate(any_model, prompts, **search, **options).tolist():
        ends = [place for place, token in enumerate(row) if token in stops]
        assert holds(row[: ends[0] + 1] if ends else row, start)


def test_guidance_scales_the_effect_of_the_prompt(causal, prompts):
    alone = next_logits(causal, prompts[:, -1:], prompts[:, :0])[:, -1].log_softmax(-1)
    given = next_logits(causal, prompts, prompts[:, :0])[:, -1].log_softmax(-1)
    expected = (alone + 3.0 * (given - alone)).argmax(-1)
    guided = generate(causal, prompts, guidance_scale=3.0, max_new_tokens=1)[:, 0]
    assert guided.tolist() == expected.tolist()
    assert guided.tolist() != generate(causal, prompts, max_new_tokens=1)[:, 0].tolist()


def test_guidance_is_only_for_decoder_only_models(seq2seq, prompts):
    generate(seq2seq, prompts, guidance_scale=1.0, max_new_tokens=1)
    with pytest.raises(
        ValueError, match=r"guidance_scale=3\.0: expected None or 1 for an encoder-d"
    ):
        generate(seq2seq, prompts, guidance_scale=3.0)


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_a_high_repetition_penalty_prevents_repeated_tokens(any_model, prompts, strategy):
    options = {"min_new_tokens": STEPS, **strategy}
    plain = generate(any_model, prompts, **options)
    new = generate(any_model, prompts, repetition_penalty=1e6, **options)
    for row, prompt in zip(new.tolist(), prompts.tolist(), strict=True):
        seen = prompt if is_causal(any_model) else [START]
        assert len(set(row)) == STEPS
        assert not set(row) & set(seen)
    assert all(len(set(row)) < STEPS for row in plain.tolist())


def test_the_first_token_can_be_forced(seq2seq, prompts):
    free = generate(seq2seq, prompts)
    forced = generate(seq2seq, prompts, forced_bos_token_id=44)
    assert 44 not in free[:, 0]
    assert (forced[:, 0] == 44).all()


def test_tokens_of_the_source_can_be_preferred_or_forbidden(seq2seq, prompts):
    """`encoder_repetition_penalty` prefers the source's tokens; its n-grams can be forbidden."""
    held = generate(seq2seq, prompts, encoder_repetition_penalty=1e6)
    out = generate(seq2seq, prompts, encoder_no_repeat_ngram_size=1)
    free = generate(seq2seq, prompts)
    for row, source in enumerate(prompts.tolist()):
        assert set(until_eos(held[row])) <= {*source, EOS}
        assert not set(until_eos(out[row])) & set(source)
    assert any(not set(until_eos(free[row])) <= set(prompts[row].tolist()) for row in range(3))


class Until(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == self.token


def test_a_custom_stopping_criterion_stops_each_row(any_model, prompts):
    plain = generate(any_model, prompts)
    token = int(plain[0, 3])
    stopped = generate(any_model, prompts, stopping_criteria=[Until(token)])
    for row, full in zip(stopped.tolist(), plain.tolist(), strict=True):
        end = full.index(token) + 1 if token in full else len(full)
        assert row[:end] == full[:end]
        assert not any(row[end:])  # padding
    assert token in stopped


# ---------------------------------------------------------------- what else generate returns


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cls", CLASSES, ids=["seq2seq", "causal"])
def test_scores_logits_attentions_and_hidden_states_can_be_returned(cls, prompts, beams):
    model = build(cls, attn_implementation="eager")
    outputs = model.generate(
        prompts,
        num_beams=beams,
        max_new_tokens=4,
        eos_token_id=None,
        return_dict_in_generate=True,
        **dict.fromkeys(
            ("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True
        ),
    )
    rows, width = 3 * beams, SMALL["d_model"]
    assert [x.shape for x in outputs.scores] == [(rows, 50)] * 4
    assert [x.shape for x in outputs.logits] == [(rows, 50)] * 4
    prefix = "" if cls is CLASSES[1] else "decoder_"
    past = 6 if cls is CLASSES[1] else 1
    for step in range(4):
        new = past if step == 0 else 1
        states = outputs[f"{prefix}hidden_states"][step]
        assert [x.shape for x in states] == [(rows, new, width)] * 4
        weights = outputs[f"{prefix}attentions"][step]
        assert [x.shape for x in weights] == [(rows, 4, new, past + step)] * 3
        if prefix:
            across = outputs.cross_attentions[step]
            assert [x.shape for x in across] == [(rows, 4, 1, 6)] * 3
    if prefix:
        assert [x.shape for x in outputs.encoder_attentions] == [(3, 2, 6, 6)] * 2
        assert [x.shape for x in outputs.encoder_hidden_states] == [(3, 6, width)] * 3
    if beams > 1:
        assert outputs.sequences_scores.shape == (3,)
        assert outputs.beam_indices.shape == (3, 4)


@pytest.mark.parametrize("cls", CLASSES, ids=["seq2seq", "causal"])
def test_outputs_of_all_steps_equal_those_of_one_forward_pass(cls, prompts):
    model = build(cls, attn_implementation="eager")
    asked = {"output_attentions": True, "output_hidden_states": True}
    outputs = model.generate(
        prompts,
        max_new_tokens=4,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **asked,
    )
    if cls is CLASSES[1]:
        full, prefix = model(outputs.sequences[:, :-1], **asked), ""
    else:
        full = model(input_ids=prompts, decoder_input_ids=outputs.sequences[:, :-1], **asked)
        prefix = "decoder_"
    assert_close(torch.stack(outputs.logits, 1), full.logits[:, -4:])
    last = full[f"{prefix}hidden_states"][-1]
    steps = [step[-1] for step in outputs[f"{prefix}hidden_states"]]
    assert_close(torch.cat(steps, 1), last)
    for layer, weights in enumerate(full[f"{prefix}attentions"]):
        assert_close(outputs[f"{prefix}attentions"][-1][layer], weights[:, :, -1:])
    if prefix:
        for layer, weights in enumerate(full.cross_attentions):
            steps = [step[layer] for step in outputs.cross_attentions]
            assert_close(torch.cat(steps, 2), weights)


# ---------------------------------------------------------------- inputs of generate


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        (lambda encoded: encoded, {}),
        (lambda encoded: encoded.to_tuple(), {}),
        (lambda encoded: encoded, {"num_beams": 3, "num_return_sequences": 2}),
        (lambda encoded: encoded.to_tuple(), {"num_beams": 3, "num_return_sequences": 2}),
    ],
    ids=["greedy", "greedy-tuple", "beam", "beam-tuple"],
)
def test_encoder_outputs_can_be_passed(seq2seq, form, strategy):
    ids, mask = pad([random_ids(1, n, seed=n)[0] for n in (3, 6)], "right")
    encoded = seq2seq.get_encoder()(ids, attention_mask=mask)
    expected = seq2seq.generate(ids, attention_mask=mask, max_new_tokens=STEPS, **strategy)
    given = seq2seq.generate(
        encoder_outputs=form(encoded),
        attention_mask=mask,
        max_new_tokens=STEPS,
        **strategy,
    )
    assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_a_translation_can_start_with_given_tokens(seq2seq, prompts, strategy):
    free = seq2seq.generate(prompts, max_new_tokens=STEPS, eos_token_id=None)
    begun = seq2seq.generate(
        prompts,
        decoder_input_ids=free[:, :5],
        max_new_tokens=STEPS - 4,
        eos_token_id=None,
        **strategy,
    )
    assert begun[:, :5].tolist() == free[:, :5].tolist()
    if not strategy:
        assert begun.tolist() == free.tolist()
    other = torch.tensor([[START, 44, 45]]).expand(3, -1)
    assert seq2seq.generate(prompts, decoder_input_ids=other)[:, :3].tolist() == other.tolist()


def test_target_prompts_of_different_lengths_are_padded_on_the_left(seq2seq, prompts):
    begun = [torch.tensor([START, 44]), torch.tensor([START, 20, 31, 7]), torch.tensor([START])]
    ids, mask = pad(begun, "left")
    together = seq2seq.generate(
        prompts,
        decoder_input_ids=ids,
        decoder_attention_mask=mask,
        max_new_tokens=5,
        eos_token_id=None,
    )
    for row, beginning in enumerate(begun):
        alone = seq2seq.generate(
            prompts[row : row + 1],
            decoder_input_ids=beginning[None],
            max_new_tokens=5,
            eos_token_id=None,
        )
        assert together[row, -5:].tolist() == alone[0, -5:].tolist()


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_embeddings_can_replace_the_prompts_ids(any_model, prompts, strategy):
    expected = generate(any_model, prompts, **strategy)
    embeddings = any_model.get_input_embeddings()(prompts)
    given = any_model.generate(inputs_embeds=embeddings, max_new_tokens=STEPS, **strategy)
    start = 0 if is_causal(any_model) else 1
    assert given[:, start:].tolist() == expected.tolist()


def test_padding_is_recognized_without_a_mask(causal):
    ids, mask = pad([random_ids(1, n, seed=n)[0] for n in (3, 6)], "left")
    expected = generate(causal, ids, attention_mask=mask)
    assert generate(causal, ids).tolist() == expected.tolist()
    blind = generate(causal, ids, attention_mask=torch.ones_like(mask))
    assert blind.tolist() != expected.tolist()


def test_a_conversation_continues_from_its_cache(causal, prompts):
    first = causal.generate(
        prompts, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True
    )
    said = torch.cat([first.sequences, random_ids(3, 2, seed=5)], 1)
    expected = generate(causal, said, eos_token_id=None)
    calls = []
    hook = causal.model.decoder.layers[0].register_forward_hook(
        lambda _, args, output: calls.append(output.shape[1])
    )
    resumed = generate(causal, said, eos_token_id=None, past_key_values=first.past_key_values)
    hook.remove()
    assert resumed.tolist() == expected.tolist()
    assert calls == [3] + [1] * (STEPS - 1)  # the last answer's last token, and the two new ones


def test_requests_are_batched_continuously(causal):
    """Each request's keys and values are in pages of one cache."""
    requests = [random_ids(1, n, seed=n)[0].tolist() for n in (3, 9, 6)]
    results = causal.generate_batch(
        requests,
        generation_config=GenerationConfig(
            max_new_tokens=STEPS, do_sample=False, eos_token_id=EOS, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            32,  # tokens of a page, block_size in transformers 5.17
            num_blocks=16,
            max_batch_tokens=64,
        ),
        progress_bar=False,
    )
    for result in results.values():
        assert result.error is None
        alone = generate(causal, torch.tensor([result.prompt_ids]))
        assert result.generated_tokens == until_eos(alone[0])
    assert [result.prompt_ids for result in results.values()] == requests


# ---------------------------------------------------------------- text


NO_LETTERS = list(range(260))  # special tokens and bytes: a random model writes little else


class Collect(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_tokens_are_streamed_one_by_one(any_model, prompts):
    streamer = Collect()
    tokens = any_model.generate(prompts[:1], max_new_tokens=5, eos_token_id=None, streamer=streamer)
    prompt, *new = streamer.pieces
    assert prompt == (prompts[0].tolist() if is_causal(any_model) else [START])
    assert [token for [token] in new] == tokens[0, -5:].tolist()
    assert streamer.ended


@pytest.fixture
def writer(any_model, tokenizer):
    """A model of either class that generates readable text."""
    model = build(type(any_model), vocab_size=len(tokenizer))
    model.generation_config.update(suppress_tokens=NO_LETTERS, max_new_tokens=STEPS)
    return model


def written(model, tokenizer, text="a house by", **options):
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, tokenizer=tokenizer, **options)[0]
    start = inputs["input_ids"].shape[1] if is_causal(model) else 1
    return tokenizer.decode(tokens[start:], skip_special_tokens=True)


def test_text_is_streamed_to_standard_output(writer, tokenizer, capsys):
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    expected = written(writer, tokenizer, streamer=streamer)
    assert capsys.readouterr().out.strip("\n") == expected
    assert expected.isprintable()
    assert len(expected) >= STEPS


def test_text_is_streamed_to_a_different_thread(writer, tokenizer):
    streamer = TextIteratorStreamer(
        tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60
    )
    inputs = tokenizer("a house by", return_tensors="pt")
    thread = threading.Thread(target=writer.generate, kwargs={**inputs, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == written(writer, tokenizer)


def test_a_stop_string_ends_the_text(writer, tokenizer):
    full = written(writer, tokenizer)
    stop = full[4:6]
    text = written(writer, tokenizer, stop_strings=[stop])
    end = full.index(stop) + len(stop)
    assert full.startswith(text)
    assert end <= len(text) < len(full)


@pytest.fixture
def text_folder(tokenizer, tmp_path):
    model = build(CLASSES[1], vocab_size=len(tokenizer))
    model.generation_config.update(suppress_tokens=NO_LETTERS, max_new_tokens=STEPS)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_folder_is_a_text_generation_pipeline(text_folder, tokenizer):
    pipe = pipeline("text-generation", model=str(text_folder))
    assert isinstance(pipe.model, VanillaTransformerForCausalLM)
    expected = written(pipe.model, tokenizer)
    assert pipe("a house by", do_sample=False) == [{"generated_text": "a house by" + expected}]
    assert pipe("a house by", do_sample=False, return_full_text=False) == [
        {"generated_text": expected}
    ]
    several = pipe("a house by", num_beams=3, num_return_sequences=3)
    assert len({answer["generated_text"] for answer in several}) == 3


def test_the_pipeline_returns_the_same_for_a_batch_as_for_each_text(text_folder):
    pipe = pipeline("text-generation", model=str(text_folder))
    texts = ["a house by", "the lake is deep der See", "ein"]
    alone = [pipe(text, do_sample=False) for text in texts]
    assert len({answer[0]["generated_text"] for answer in alone}) == 3
    assert pipe(texts, batch_size=3, do_sample=False) == alone


def test_the_pipeline_continues_a_prompt_without_an_end_token_if_asked_to(text_folder, tokenizer):
    pipe = pipeline("text-generation", model=str(text_folder))
    prompt = tokenizer("a house by", add_special_tokens=False, return_tensors="pt")
    options = {"do_sample": False, "return_tensors": True}
    (open_ended,) = pipe("a house by", add_special_tokens=False, **options)
    assert open_ended["generated_token_ids"] == pipe.model.generate(**prompt)[0].tolist()
    (ended,) = pipe("a house by", **options)
    assert ended["generated_token_ids"][prompt["input_ids"].shape[1]] == tokenizer.eos_token_id


def test_a_tokenizer_for_prompts_adds_no_end_token(text_folder, tokenizer):
    for_prompts = AutoTokenizer.from_pretrained(text_folder, add_eos_token=False)
    text = "a house by"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert for_prompts(text)["input_ids"] == expected
    pipe = pipeline("text-generation", model=str(text_folder), tokenizer=for_prompts)
    open_ended = pipe(text, add_special_tokens=False, do_sample=False)
    assert pipe(text, do_sample=False) == open_ended
