"""What the families of scripts/checks/fuzz.py check, and that the harness detects failures."""

from functools import partial

import pytest
import torch
from conftest import small_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache, pipeline

from scripts.checks import fuzz
from scripts.checks import fuzz_families as families
from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.data.parallel_text import DataArguments, load_parallel_dataset
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.model.cache import CACHE_NAME

FEW, MANY = 30, 1000


def assert_correct_or_refused(family, cases):
    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(family.cases)
    def run(case):
        assert family.outcome(case) in ("right", "refused")

    run()


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """Restores the cache folder, which families that read files change."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", None)


@pytest.mark.parametrize("name", fuzz.FAMILIES)
def test_each_case_is_correct_or_refused(name):
    # a comparison computes everything twice, and more
    assert_correct_or_refused(fuzz.FAMILIES[name], FEW // 3 if name in fuzz.COMPARISONS else FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.FAMILIES)
def test_each_of_many_cases_is_correct_or_refused(name):
    assert_correct_or_refused(fuzz.FAMILIES[name], MANY)


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_refusal_is_an_intended_error_that_names_the_input():
    refusal = raised_by(lambda: families.small_model("seq2seq", "learned", "sdpa")(input_ids=[[1]]))
    assert families.is_refusal(refusal, ["input_ids"])
    assert not families.is_refusal(refusal, ["labels"])
    of_torch = raised_by(lambda: torch.ones(2).view(3))
    assert not families.is_refusal(of_torch, ["shape"])
    by_accident = raised_by(lambda: families.lines_of(None))
    assert not families.is_refusal(by_accident, ["decode"])


@pytest.mark.parametrize("limit", [0, 10])
def test_a_failing_family_reports_its_smallest_failure(monkeypatch, limit):
    def check(number):
        assert number <= limit

    broken = families.Family(st.integers(0, 10**6), check, families.named("number"), 1)
    monkeypatch.setitem(fuzz.FAMILIES, "broken", broken)
    result = fuzz.fuzz("broken", 100, seed=0)
    assert result["failed"] == 1
    assert result["example"].startswith(f"{limit + 1}\n")
    assert "AssertionError" in result["example"]


def test_all_cases_are_distributed_over_the_families():
    shares = fuzz.shares(list(fuzz.FAMILIES), 10_000)
    assert sum(shares.values()) == 10_000
    assert min(shares.values()) >= 100


# ---------------------------------------------------------------- single cases


IDS = torch.tensor([[4, 5, 6], [7, 8, 9]])


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": IDS[:0]}, ValueError, r"input_ids of shape \(0, 3\) .* both 1 at least"),
        (
            {"input_ids": IDS.float()},
            ValueError,
            "input_ids .*torch.float32: expected .*torch.int64",
        ),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids of shape \(3,\) and torch.int64: expected"),
        ({"input_ids": [[4]]}, TypeError, "input_ids of type list: expected a tensor"),
        ({"labels": IDS[0]}, ValueError, r"labels of shape \(3,\)"),
        ({"attention_mask": torch.ones(2, 4)}, ValueError, r"mask of shape \(2, 4\) for 2 rows"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, r"mask of shape \(1, 3\) for 2 rows"),
        ({"attention_mask": [[1] * 3] * 2}, TypeError, "attention_mask of type list: expected a"),
        ({"attention_mask": torch.ones(2)}, ValueError, r"mask of shape \(2,\) for 2 rows"),
        (
            {"attention_mask": torch.ones(3, 1, 1, 3, dtype=torch.bool)},
            ValueError,
            r"mask of shape \(3, 1, 1, 3\) for 2 rows of 3 tokens",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 1, 3, dtype=torch.long)},
            ValueError,
            "mask of torch.int64 and four dimensions: expected torch.bool or torch.float32",
        ),
        (
            {"position_ids": torch.zeros(2, 4, dtype=torch.long)},
            ValueError,
            r"position_ids of shape \(2, 4\) for 2 rows of 3 tokens",
        ),
        ({"position_ids": torch.arange(3)}, ValueError, r"position_ids of shape \(3,\)"),
        (
            {"position_ids": torch.zeros(3, 3, dtype=torch.long)},
            ValueError,
            r"position_ids of shape \(3, 3\) for 2 rows of 3 tokens",
        ),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 3, 7)},
            ValueError,
            r"inputs_embeds of shape \(2, 3, 7\) .* expected \(batch, length, 24\)",
        ),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 0, 24)},
            ValueError,
            r"inputs_embeds of shape \(2, 0, 24\) .* all 1 at least",
        ),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 3, 24).double()},
            ValueError,
            r"inputs_embeds .* torch.float64: expected .* of torch.float32",
        ),
        (
            {"input_ids": None, "inputs_embeds": [[[0.0] * 24]]},
            TypeError,
            "inputs_embeds of type list: expected a tensor",
        ),
        ({"encoder_outputs": ()}, TypeError, "encoder_outputs of type tuple"),
        ({"encoder_outputs": torch.ones(2, 3, 24)}, TypeError, "encoder_outputs of type Tensor"),
        (
            {"encoder_outputs": (torch.ones(2, 3, 7),)},
            ValueError,
            r"encoder_outputs of shape \(2, 3, 7\) .* expected \(batch, length, 24\)",
        ),
        (
            {"encoder_outputs": (torch.ones(2, 3, 24),), "attention_mask": torch.ones(2, 4)},
            ValueError,
            r"mask of shape \(2, 4\) for 2 rows of 3 tokens",
        ),
        (
            {"labels": IDS, "num_items_in_batch": [[1, 2]]},
            TypeError,
            r"num_items_in_batch=\[\[1, 2\]\]: expected a number",
        ),
        (
            {"labels": IDS, "num_items_in_batch": IDS[0]},
            TypeError,
            r"num_items_in_batch of shape \(3,\) and torch.int64: expected a number",
        ),
        ({"past_key_values": {}}, TypeError, f"{CACHE_NAME} of type dict: expected a Cache"),
        ({"past_key_values": IDS}, TypeError, f"{CACHE_NAME} of type Tensor: expected a Cache"),
        (
            {"past_key_values": DynamicCache()},
            TypeError,
            f"{CACHE_NAME} of type DynamicCache: expected an EncoderDecoderCache",
        ),
    ],
)
def test_an_invalid_input_is_reported_before_torch_refuses_it(model, inputs, error, message):
    target = {} if "labels" in inputs else {"decoder_input_ids": IDS}
    with pytest.raises(error, match=message):
        model(**{"input_ids": IDS, **target, **inputs})


def test_position_ids_apply_to_the_source(model):
    """They do not reach the decoder, not even as `None`."""
    counted = model(input_ids=IDS, decoder_input_ids=IDS).logits
    for position_ids in (None, torch.arange(3)[None]):
        again = model(input_ids=IDS, decoder_input_ids=IDS, position_ids=position_ids).logits
        assert torch.equal(again, counted)
    moved = model(input_ids=IDS, decoder_input_ids=IDS, position_ids=torch.arange(3)[None] * 2)
    assert not torch.allclose(moved.logits, counted)


def test_a_mask_with_values_above_one_equals_one_of_zeros_and_ones(model):
    mask = torch.tensor([[0, 7, 7], [0.5, 0.5, 0.5]])
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    expected = model(**inputs, attention_mask=mask.bool().long()).logits
    assert torch.equal(model(**inputs, attention_mask=mask).logits, expected)


@pytest.mark.parametrize(
    "cls", [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]
)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (1, 7), (1, 1, 1, 5)], ids=str)
def test_a_mask_must_cover_past_and_new_tokens(cls, shape):
    # A mask of only the new token would move it to the first position.
    model = cls(small_config()).eval()
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    prompt, new = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[10]])
    if model.config.is_encoder_decoder:
        read = partial(model, prompt, use_cache=True)
        past = read(decoder_input_ids=prompt).past_key_values
        read = partial(read, decoder_input_ids=new, past_key_values=past)
    else:
        read = partial(model, new, past_key_values=model(prompt, use_cache=True).past_key_values)
    mask = torch.ones(shape, dtype=torch.bool if len(shape) == 4 else torch.long)
    with pytest.raises(ValueError, match=r"1 rows of 1 tokens and 5 before them: .* \(1, 6\)"):
        read(**{name: mask})
    read(**{name: torch.ones(1, 6).long()})


def test_a_4d_mask_is_as_long_as_a_static_cache():
    # transformers creates it this way, before the cache contains anything.
    model = VanillaTransformerForCausalLM(small_config()).eval()
    prompt = torch.tensor([[5, 6, 7]])
    cache = StaticCache(model.config.get_text_config(decoder=True), max_cache_len=9)
    mask = torch.ones(3, 9, dtype=torch.bool).tril()[None, None]
    logits = model(prompt, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits, model(prompt).logits)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("num_beams", 2.5, "a whole number from 1"),
        ("max_new_tokens", 0, "a whole number from 1"),
        ("top_k", "5", "a whole number from 0"),
        ("num_beams", 10**9, "a whole number from 1 to 1048576"),
        ("encoder_no_repeat_ngram_size", 10**9, "a whole number from 0 to 1000"),
        ("temperature", float("nan"), "a finite number"),
        ("length_penalty", float("inf"), "a finite number"),
        ("forced_eos_token_id", 50, "0 <= id < 50"),
        ("bad_words_ids", [[3, -1]], "0 <= id < 50"),
        ("exponential_decay_length_penalty", "", "a length and a factor"),
        ("early_stopping", [], "True, False or 'never'"),
    ],
)
def test_an_invalid_option_of_generate_is_reported(model, option, value, expected):
    with pytest.raises(ValueError, match=f"{option}=.*: expected {expected}"):
        model.generate(IDS, **{option: value})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"source": "a\\ud800", "target": "b"}',
            r"'source' has the surrogate '\\ud800' at position 1",
        ),
        ('{"source": 7, "target": "b"}', "column 'source' must hold text, not 7"),
        ("[" * 100_000, "line 1: "),
        ("9" * 10_000, r"line 1: not readable JSON \(Exceeds the limit"),
    ],
)
def test_a_defect_in_a_table_is_reported_with_its_file(tmp_path, line, message):
    file = tmp_path / "train.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=rf"train\.jsonl.*{message}"):
        load_parallel_dataset(DataArguments(train_file=str(file)))


def test_unpaired_surrogates_are_refused(checkpoint):
    with pytest.raises(
        ValueError, match=r"text 2 has the surrogate '\\ud800' at position 1: expected"
    ):
        train_tokenizer(["a", "b\ud800"], 300, show_progress=False)
    translate = pipeline("translation", model=str(checkpoint))
    with pytest.raises(ValueError, match=r"expects Unicode, .* got '\\udfff' at position 1"):
        translate(["a", "\udfff"])
