"""`generate()`: the same tokens batched or alone, padded or not, cached or not."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ragged, random_ids, seq2seq, small_config, watch
from test_modeling import VARIANTS, pad, variant_name
from transformers import GenerationConfig, WatermarkDetector, WatermarkingConfig

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model.generation_options import LIMITS, GenerationOptions

STRATEGIES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 2},
}


@pytest.fixture(params=VARIANTS, ids=variant_name)
def any_model(request):
    torch.manual_seed(0)
    config = small_config(initializer="tensor2tensor", **request.param)  # no output ends early
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.generation_config.max_new_tokens = 8
    return model


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batching_and_padding_change_nothing(any_model, strategy, side):
    sources = [random_ids(1, n, seed=n)[0] for n in (3, 9, 6)]
    ids, mask = pad(sources, side)
    batch = any_model.generate(ids, attention_mask=mask, **strategy)
    alone = [any_model.generate(source[None], **strategy) for source in sources]
    width = max(tokens.shape[1] for tokens in alone)
    padded = [torch.nn.functional.pad(tokens, (0, width - tokens.shape[1])) for tokens in alone]
    assert batch.tolist() == torch.cat(padded).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_if_no_mask_is_given(strategy, side):
    # transformers only makes a mask from padding for decoder-only models.
    model = seq2seq(initializer="tensor2tensor").eval()
    ids, mask = pad([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], side)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, **strategy)
    assert model.generate(ids, max_new_tokens=8, **strategy).tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("end", [np.int64(2), torch.tensor(2), torch.tensor([2, 9])])
def test_tokens_that_end_a_target_can_be_numpy_numbers_and_tensors(end, strategy):
    model, source = seq2seq(initializer="tensor2tensor").eval(), random_ids(3, 6)
    ids = torch.as_tensor(end).tolist()
    expected = model.generate(source, eos_token_id=ids, **strategy)
    assert model.generate(source, eos_token_id=end, **strategy).tolist() == expected.tolist()


def test_encoder_outputs_can_be_reused():
    model, source = seq2seq().eval(), random_ids(3, 6)
    encoded = model.get_encoder()(source)
    first, second = (
        model.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=5) for _ in range(2)
    )
    assert first.tolist() == second.tolist()
    assert len(encoded.last_hidden_state) == 3


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("length", [1, 6, 10])
def test_a_mask_of_a_different_length_than_the_source_is_refused(length, rows):
    model, source = seq2seq().eval(), random_ids(rows, 8)
    mask = (torch.arange(length) < 3).long().expand(rows, length)
    message = rf"attention mask of shape \({rows}, {length}\) for {rows} rows of 8 tokens"
    with pytest.raises(ValueError, match=message):
        model.generate(source, attention_mask=mask, max_new_tokens=5)
    with pytest.raises(ValueError, match=message):
        model.get_encoder()(source, attention_mask=mask)


def test_the_cache_changes_nothing(any_model, strategy):
    source = random_ids(2, 6)
    expected = any_model.generate(source, use_cache=False, **strategy)
    assert any_model.generate(source, use_cache=True, **strategy).tolist() == expected.tolist()
    static = any_model.generate(source, cache_implementation="static", **strategy)
    assert static.tolist() == expected.tolist()


def test_eager_and_sdpa_agree(any_model, strategy):
    ids, mask = pad([random_ids(1, 6)[0], random_ids(1, 3)[0]], "right")
    results = []
    for attention in ("eager", "sdpa"):
        any_model.set_attn_implementation(attention)
        results.append(any_model.generate(ids, attention_mask=mask, **strategy).tolist())
    assert results[0] == results[1]


def test_scores_are_those_of_a_forward_pass(any_model):
    source = random_ids(2, 6)
    generated = any_model.generate(source, return_dict_in_generate=True, output_logits=True)
    logits = any_model(input_ids=source, decoder_input_ids=generated.sequences[:, :-1]).logits
    torch.testing.assert_close(torch.stack(generated.logits, 1), logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_transition_scores_are_the_tokens_log_probabilities(any_model, num_beams):
    source = random_ids(2, 6)
    any_model.generation_config.eos_token_id = None
    generated = any_model.generate(
        source, num_beams=num_beams, return_dict_in_generate=True, output_scores=True
    )
    scores = any_model.compute_transition_scores(
        generated.sequences,
        generated.scores,
        generated.get("beam_indices"),
        normalize_logits=num_beams == 1,
    )
    tokens = generated.sequences[:, 1:]
    logits = any_model(input_ids=source, decoder_input_ids=generated.sequences[:, :-1]).logits
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=1e-4)


def state_of(model):
    return model.config.to_dict(), model.generation_config.to_dict(), sorted(vars(model))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generating_does_not_change_state_that_threads_share(any_model, num_beams):
    # Such as `config.vocab_size`: a different thread could save a value that beam search has set.
    before, during = state_of(any_model), []
    watch(any_model.model.decoder, lambda *seen: during.append(state_of(any_model)))
    any_model.generate(random_ids(2, 6), num_beams=num_beams)
    assert during
    assert all(state == before for state in [*during, state_of(any_model)])


@pytest.mark.parametrize("fields", [{}, {"decoder_vocab_size": 60}], ids=["one", "two"])
def test_threads_generate_the_same_as_one_at_a_time(fields):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(**fields)).eval()
    sources = [random_ids(2, 4 + n % 5, seed=n) for n in range(12)]

    def translate(number):
        options = {"num_beams": 1 + number % 3, "max_new_tokens": 8}
        output = model.generate(
            sources[number], return_dict_in_generate=True, output_scores=True, **options
        )
        beams = output.get("beam_indices")
        scores = model.compute_transition_scores(
            output.sequences, output.scores, beams, normalize_logits=True
        )
        return output.sequences.tolist(), scores.tolist()

    before = model.config.to_dict()
    expected = list(map(translate, range(12)))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(translate, range(12))) == expected
    assert model.config.to_dict() == before


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_watermark_covers_the_target_vocabulary(num_beams):
    fields = {"decoder_vocab_size": 60}
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(**fields)).eval()
    marked = WatermarkingConfig(bias=100.0, greenlist_ratio=0.5)
    tokens = model.generate(
        random_ids(2, 6), watermarking_config=marked, max_new_tokens=20, num_beams=num_beams
    )
    detector = WatermarkDetector(
        small_config(vocab_size=60), "cpu", marked.to_dict(), ignore_repeated_ngrams=False
    )
    assert detector(tokens).all()


@pytest.mark.parametrize("source_length", [1, 30])
def test_the_output_is_at_most_50_tokens_longer_than_the_source(source_length):
    config = small_config(eos_token_id=None, max_position_embeddings=7)  # only limits learned ones
    model = VanillaTransformerForConditionalGeneration(config)
    source = random_ids(1, source_length)
    assert model.generate(source).shape[1] == 1 + source_length + 50
    assert model.generate(source, max_new_tokens=3).shape[1] == 4
    assert model.generate(source, max_length=7).shape[1] == 7
    embeddings = model.get_input_embeddings()(source)
    assert model.generate(inputs_embeds=embeddings).shape[1] == 1 + source_length + 50


@pytest.mark.parametrize(("side", "use_cache"), [("left", True), ("right", False)])
@pytest.mark.parametrize("eos", [None, 2, list(range(2, 40))], ids=["endless", "one", "many"])
def test_each_row_ends_at_its_own_limit(monkeypatch, strategy, eos, side, use_cache):
    # Not at the limit of the longest source: an output must not depend on the rest of its batch.
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=eos)).eval()
    monkeypatch.setattr(model, "extra_output_tokens", 4)
    sources = [random_ids(1, n, seed=n)[0] for n in (2, 9, 5)]
    ids, mask = pad(sources, side)
    options = {**strategy, "use_cache": use_cache}
    batch = model.generate(ids, attention_mask=mask, **options)
    alone = [model.generate(source[None], **options) for source in sources]
    if eos is None:
        assert [tokens.shape[1] for tokens in alone] == [1 + n + 4 for n in (2, 9, 5)]
    copies = strategy.get("num_return_sequences", 1)
    for together, tokens in zip(batch.split(copies), alone, strict=True):
        assert together[:, : tokens.shape[1]].tolist() == tokens.tolist()
        assert not together[:, tokens.shape[1] :].any()  # padding


def test_each_row_has_its_forced_eos_at_its_own_limit(monkeypatch, strategy):
    model = seq2seq(initializer="tensor2tensor").eval()  # no output ends early
    monkeypatch.setattr(model, "extra_output_tokens", 4)
    sources = [random_ids(1, n, seed=n)[0] for n in (2, 9, 5)]
    ids, mask = pad(sources, "right")
    options = {**strategy, "forced_eos_token_id": 2}
    batch = model.generate(ids, attention_mask=mask, **options)
    copies = strategy.get("num_return_sequences", 1)
    for together, source in zip(batch.split(copies), sources, strict=True):
        alone = model.generate(source[None], **options)
        assert (alone[:, -1] == 2).all()
        assert together[:, : alone.shape[1]].tolist() == alone.tolist()
        assert not together[:, alone.shape[1] :].any()


def test_scores_of_truncated_beams_are_those_of_their_own_tokens():
    model = seq2seq().eval()
    ids, mask = ragged(2, 9, 5)
    found = model.generate(
        ids, attention_mask=mask, extra_output_tokens=4, suppress_tokens=[0, 2], num_beams=4,
        num_return_sequences=3, length_penalty=0.0, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    lengths = [n + 4 for n in (2, 9, 5) for _ in range(3)]
    assert found.sequences[:, 1:].count_nonzero(1).tolist() == lengths
    assert (found.beam_indices >= 0).sum(1).tolist() == lengths
    scores = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(scores.sum(1), found.sequences_scores)


@pytest.mark.parametrize(("given", "length"), [("padding", 2), (None, 2), ("no padding", 9)])
def test_each_sample_ends_at_its_own_limit_with_or_without_a_mask(given, length):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None)).eval()
    ids, mask = pad([random_ids(1, 2)[0], random_ids(1, 9)[0]], "right")
    masks = {"padding": mask, "no padding": torch.ones_like(mask), None: None}
    samples = model.generate(
        ids, attention_mask=masks[given], do_sample=True, num_return_sequences=2,
        suppress_tokens=[0],
    )  # fmt: skip
    assert samples.count_nonzero(1).tolist() == [1 + length + 50] * 2 + [1 + 9 + 50] * 2


def test_a_custom_limit_is_saved_with_the_model_and_a_call_overrides_it(tmp_path):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None))
    model.generation_config.extra_output_tokens = 70
    model.save_pretrained(tmp_path)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    source = random_ids(1, 5)
    assert model.generate(source).shape[1] == 1 + 5 + 70
    assert model.generate(source, extra_output_tokens=0).shape[1] == 1 + 5
    given = GenerationConfig(extra_output_tokens=3)
    assert model.generate(source, given).shape[1] == 1 + 5 + 3
    assert model.generate(source, max_new_tokens=2, extra_output_tokens=9).shape[1] == 1 + 2


@pytest.mark.parametrize(
    "saved", [{"max_length": 10}, {"max_new_tokens": 9}, {"max_length_factor": 3}], ids=str
)
def test_a_limit_relative_to_the_source_in_a_call_overrides_a_saved_one(saved):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None))
    vars(model.generation_config).update(saved)
    source = random_ids(1, 5)
    assert model.generate(source, extra_output_tokens=20).shape[1] == 1 + 5 + 20
    assert model.generate(source, max_length_factor=4).shape[1] == 1 + 4 * 5
    assert model.generate(source, GenerationConfig(extra_output_tokens=1)).shape[1] == 1 + 5 + 1


def test_marians_limit_is_a_multiple_of_the_longest_source(tmp_path):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None))
    model.generation_config.max_length_factor = 3
    model.save_pretrained(tmp_path)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    ids, mask = pad([random_ids(1, 2)[0], random_ids(1, 5)[0]], "right")
    tokens = model.generate(ids, attention_mask=mask, suppress_tokens=[0])
    assert tokens.count_nonzero(1).tolist() == [1 + 3 * 5] * 2
    assert model.generate(ids, attention_mask=mask, max_length_factor=1.5).shape[1] == 1 + 7
    assert model.generate(ids, attention_mask=mask, max_length_factor=0.1).shape[1] == 1 + 1
    assert model.generate(ids, attention_mask=mask, max_new_tokens=4).shape[1] == 1 + 4
    with pytest.raises(ValueError, match=r"max_length_factor=0: expected a number above 0"):
        model.generate(ids, max_length_factor=0)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("length_penalty_type", ["gnmt"], "one of power, gnmt, avg, wu"),
        ("pad_token_id", [0], "one token id"),
    ],
)
def test_a_list_instead_of_one_value_is_reported(model, option, value, expected):
    with pytest.raises(ValueError, match=re.escape(f"{option}={value}: expected {expected}")):
        model.generate(random_ids(1, 5), **{option: value})


@pytest.mark.parametrize("extra", [-1, 2.5, "many"])
def test_an_invalid_custom_limit_is_reported(model, extra):
    with pytest.raises(
        ValueError, match=rf"extra_output_tokens={extra!r}: expected a whole number"
    ):
        model.generate(random_ids(1, 5), extra_output_tokens=extra)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 12}, {"max_length": 13}], ids=str)
def test_an_explicit_limit_holds_for_all_rows(monkeypatch, limit):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None)).eval()
    monkeypatch.setattr(model, "extra_output_tokens", 1)
    ids, mask = pad([random_ids(1, 2)[0], random_ids(1, 9)[0]], "right")
    tokens = model.generate(ids, attention_mask=mask, suppress_tokens=[0], **limit)
    assert tokens.count_nonzero(1).tolist() == [13, 13]


def test_the_output_ends_at_the_last_learned_position():
    model = VanillaTransformerForConditionalGeneration(
        small_config(eos_token_id=None, position_encoding="learned", max_position_embeddings=12)
    )
    assert model.generate(random_ids(1, 5)).shape[1] == 12
    prompt = torch.tensor([[1, *[7] * 10]])
    assert model.generate(random_ids(1, 5), decoder_input_ids=prompt).shape[1] == 12
    with pytest.raises(ValueError, match="12 tokens, the first included: expected fewer than max_"):
        model.generate(random_ids(1, 5), decoder_input_ids=torch.tensor([[1, *[7] * 11]]))


def test_a_saved_limit_is_kept(tmp_path):
    model = VanillaTransformerForConditionalGeneration(small_config(eos_token_id=None))
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generate(random_ids(1, 3)).shape[1] == 6


@pytest.mark.parametrize("side", ["left"])
def test_the_causal_model_continues_prompts_of_any_length(strategy, side):
    torch.manual_seed(0)
    model = VanillaTransformerForCausalLM(small_config()).eval()
    prompts = [random_ids(1, n, seed=n)[0] for n in (3, 7)]
    ids, mask = pad(prompts, side)
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=6, **strategy)
    copies = strategy.get("num_return_sequences", 1)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], max_new_tokens=6, **strategy)
        together = batch[row * copies : (row + 1) * copies, ids.shape[1] :]
        length = min(alone.shape[1] - len(prompt), together.shape[1])
        expected = alone[:, len(prompt) :]
        assert together[:, :length].tolist() == expected[:, :length].tolist()
    uncached = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, use_cache=False, **strategy
    )
    assert batch.tolist() == uncached.tolist()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("option", ["num_beams", "num_return_sequences"])
def test_none_for_a_number_of_beams_or_sequences_means_one(option):
    model = seq2seq(initializer="tensor2tensor").eval()
    model.generation_config.num_beams = 2
    expected = model.generate(random_ids(2, 5), max_new_tokens=6, **{option: 1})
    assert model.generate(random_ids(2, 5), max_new_tokens=6, **{option: None}).equal(expected)


def test_none_turns_off_an_option_of_the_model():
    """As in transformers, which writes keyword arguments into a copy of the generation config."""
    default = GenerationConfig(max_new_tokens=200, suppress_tokens=[3], num_beams=4)
    given = {"max_new_tokens": None, "max_length": 5, "suppress_tokens": None}
    options = GenerationOptions(default, None, given)
    assert (options["max_new_tokens"], options["suppress_tokens"]) == (None, None)
    assert options["num_beams"] == 4
    assert options.first_of(LIMITS) == "max_length"
    model = seq2seq(eos_token_id=None).eval()
    model.generation_config.max_new_tokens = 200
    assert model.generate(random_ids(1, 3), **given).shape == (1, 5)
