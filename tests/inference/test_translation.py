"""Lines in, lines out: order, blank lines, batches by length, bounded reading."""

import copy
import json
import math
import re

import pytest
import torch
from conftest import PAIRS, REPOSITORY, run_program, seq2seq
from tokenizers import normalizers
from transformers import (
    BartConfig,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2Config,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    RobertaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    SynthIDTextWatermarkingConfig,
    pipeline,
)
from transformers import logging as transformers_logging

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.collation import PairCollator
from vanilla_transformer.data.text_files import read_lines
from vanilla_transformer.inference import translation as translating
from vanilla_transformer.inference.decoding import (
    expect_hypotheses,
    expect_known_search,
    expect_valid_options,
    position_limits,
)
from vanilla_transformer.inference.translation import (
    BATCHES_PER_WINDOW,
    Hypothesis,
    encode_prefixes,
    translate,
    translate_n_best,
)

LINES = ["a house", "", "the lake is deep the lake is deep", "see", "  \t ", "ein Haus am See"]
NASTY = ["😀 🏳️‍🌈", "שלום עולם", "a\x00b\x07\x1b[0m", "</s><pad>", "a " * 5000, "\u2028"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def alone(model, tokenizer):
    def generate(line):
        inputs = tokenizer(line, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=6)[0]
        return tokenizer.decode(ids, skip_special_tokens=True)

    return [generate(line) if line.strip() else "" for line in LINES]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_order_is_kept_and_blank_lines_stay_blank(model, tokenizer, alone, batch_size):
    results = translate(LINES, model, tokenizer, batch_size=batch_size, max_new_tokens=6)
    assert list(results) == alone


def test_long_sources_are_cut_before_their_end_token(model, tokenizer, monkeypatch):
    read, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **given: read.append(given) or generate(**given))
    list(translate(LINES[2:4], model, tokenizer, max_source_length=5, max_new_tokens=6))
    longest, shortest = read[0]["input_ids"].tolist()
    whole = tokenizer(LINES[2])["input_ids"]
    assert longest == [*whole[:4], tokenizer.eos_token_id]
    assert shortest[: len(tokenizer("see")["input_ids"])] == tokenizer("see")["input_ids"]


@pytest.mark.parametrize("blank", ["\u200b", "\ufeff \xad", "\x00\u200f"])
def test_a_line_of_invisible_characters_stays_blank(model, tokenizer, blank):
    # The tokenizer has bytes for it, and the model a translation.
    assert len(tokenizer(blank)["input_ids"]) > len(tokenizer("")["input_ids"])
    assert list(translate([blank], model, tokenizer, max_new_tokens=6)) == [""]
    pipe = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6)
    assert pipe(blank) == [{"translation_text": ""}]


def test_a_line_that_the_tokenizer_removes_counts_as_blank(model, tokenizer):
    # Otherwise engines would treat sources without tokens differently.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("#", "")
    lines = ["a house", "#", "##"]
    found = list(translate(lines, model, tokenizer, max_new_tokens=6))
    assert found[1:] == ["", ""]
    assert found[0] == next(translate(["a house"], model, tokenizer, max_new_tokens=6))
    pipe = pipeline("translation", model=model, tokenizer=tokenizer, num_beams=1, max_new_tokens=6)
    assert [one["translation_text"] for one in pipe(lines)] == found


def test_batches_hold_lines_of_similar_length(model, tokenizer, monkeypatch):
    lengths = []
    generate = type(model).generate

    def spy(self, input_ids, **kwargs):
        lengths.append(kwargs["attention_mask"].sum(-1).tolist())
        return generate(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "generate", spy)
    lines = ["see " * n for n in (1, 9, 5, 5, 1, 9)]
    list(translate(lines, model, tokenizer, batch_size=2, max_new_tokens=2))
    assert [max(row) for row in lengths] == sorted((max(row) for row in lengths), reverse=True)
    assert all(max(row) - min(row) <= 2 for row in lengths)


TOGETHER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from accelerate import Accelerator
from test_translation import SMALL_WINDOW, TWO_WINDOWS
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vanilla_transformer.inference import translation

accelerator = Accelerator(cpu=True)
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
generate, lines = model.generate, []
model.generate = lambda **inputs: lines.extend(inputs["input_ids"]) or generate(**inputs)
translation.BATCHES_PER_WINDOW = SMALL_WINDOW
made = list(translation.translate(TWO_WINDOWS, model, tokenizer, batch_size=2, together=True))
with open(f"{accelerator.process_index}.json", "w") as file:
    json.dump([made, len(lines)], file)
accelerator.end_training()
"""

SMALL_WINDOW = 8  # in batches
TWO_WINDOWS = ["see " * (n % 7) for n in range(2 * SMALL_WINDOW + 9)]


def test_two_processes_translate_half_of_the_batches_each(model, checkpoint, tokenizer, tmp_path):
    failed, output = run_program(2, TOGETHER, REPOSITORY / "tests", checkpoint, cwd=tmp_path)
    assert not failed, output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = list(translate(TWO_WINDOWS, model, tokenizer, batch_size=2))
    assert len(set(expected)) == 7
    assert [made for made, _ in ranks] == [expected] * 2
    assert sum(lines for _, lines in ranks) == sum(bool(line) for line in TWO_WINDOWS)
    assert abs(ranks[0][1] - ranks[1][1]) <= 2


def test_lines_are_read_a_window_at_a_time(model, tokenizer):
    read = []
    source = (read.append(n) or "see" for n in range(10**9))
    translations = translate(source, model, tokenizer, batch_size=1, max_new_tokens=1)
    next(translations)
    assert len(read) == BATCHES_PER_WINDOW


@pytest.mark.parametrize("line", NASTY, ids=lambda line: ascii(line)[:12])
def test_any_text_is_accepted(model, tokenizer, line):
    (translation,) = translate([line], model, tokenizer, max_new_tokens=3)
    assert isinstance(translation, str)


def test_generation_options_reach_the_model(model, tokenizer):
    with pytest.raises(ValueError, match="no_such_option"):
        list(translate(["see"], model, tokenizer, no_such_option=1))


def test_a_line_has_one_translation_whatever_num_return_sequences_is(model, tokenizer):
    # `num_return_sequences` can be saved with the model.
    several = copy.copy(model)
    several.generation_config = copy.deepcopy(model.generation_config)
    several.generation_config.update(num_beams=3, num_return_sequences=3)
    expected = translate(LINES, model, tokenizer, num_beams=3, max_new_tokens=6)
    assert list(translate(LINES, several, tokenizer, max_new_tokens=6)) == list(expected)
    expect_valid_options(several, {"num_beams": 2})  # fewer than the sequences


def test_n_best_lists_are_ranked_by_the_scores_of_the_beam(model, tokenizer):
    options = {"num_beams": 4, "max_new_tokens": 6, "length_penalty": 0.0}
    lists = list(translate_n_best(LINES, model, tokenizer, 3, batch_size=2, **options))
    assert len(lists) == len(LINES)
    assert [hypotheses[0].text for hypotheses in lists] == list(
        translate(LINES, model, tokenizer, **options)
    )
    for line, hypotheses in zip(LINES, lists, strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        if not line.strip():
            assert hypotheses == [Hypothesis("", 0.0)]
            continue
        inputs = tokenizer(line, return_tensors="pt")
        outputs = model.generate(
            **inputs, num_return_sequences=3, return_dict_in_generate=True, **options
        )
        log_probabilities = [log_probability(model, inputs, row) for row in outputs.sequences]
        assert scores == pytest.approx(log_probabilities, abs=1e-4)


def log_probability(model, inputs, row):
    """Of an output, except the start token and padding at the end."""
    labels = row[1:][None]
    logits = model(**inputs, decoder_input_ids=row[:-1][None]).logits.log_softmax(-1)
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return chosen[labels != model.config.pad_token_id].sum().item()


def test_beams_without_a_hypothesis_are_left_out(model, tokenizer):
    """Those of transformers have the score -1e9."""
    end = model.generation_config.eos_token_id
    options = {"num_beams": 4, "forced_eos_token_id": end, "max_new_tokens": 1}
    ((only,),) = translate_n_best(["a"], model, tokenizer, 4, **options)
    assert (only.token_ids, only.score) == ((end,), 0.0)


@pytest.mark.parametrize(("n_best", "beams"), [(0, 4), (5, 4), (1, 1), (2, None)])
def test_n_best_lists_need_as_many_beams(model, tokenizer, n_best, beams):
    message = f"n_best={n_best} with num_beams={beams or 1}: expected"
    with pytest.raises(ValueError, match=message):
        list(translate_n_best(["see"], model, tokenizer, n_best, num_beams=beams))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 0), ({"num_beams": 2}, 2), ({"do_sample": True}, 9),
     ({"do_sample": True, "num_beams": 2}, 2)],
    ids=str,
)  # fmt: skip
def test_there_are_as_many_hypotheses_as_beams_or_any_number_of_samples(
    model, monkeypatch, options, most, saved
):
    """A single hypothesis of greedy search has no score."""
    for name, value in options.items() if saved else ():
        monkeypatch.setattr(model.generation_config, name, value)
    for n_best in range(-1, 10):
        if 1 <= n_best <= most:
            expect_hypotheses(n_best, model, {} if saved else options)
        else:
            with pytest.raises(ValueError, match=f"n_best={n_best} with num_beams="):
                expect_hypotheses(n_best, model, {} if saved else options)


def test_a_given_generation_config_has_the_beams_of_the_hypotheses(model, tokenizer, caplog):
    """transformers warns of a config together with options that can be in it."""
    search, given = {"num_beams": 3, "max_new_tokens": 4}, copy.deepcopy(model.generation_config)
    given.update(**search)
    transformers_logging.enable_propagation()
    try:
        found = list(translate_n_best(LINES, model, tokenizer, 2, generation_config=given))
    finally:
        transformers_logging.disable_propagation()
    assert found == list(translate_n_best(LINES, model, tokenizer, 2, **search))
    several = {"num_return_sequences": 3, "generation_config": given}
    assert found == list(translate_n_best(LINES, model, tokenizer, 2, **several))
    assert "Passing `generation_config`" not in caplog.text
    given.num_beams = 1
    with pytest.raises(ValueError, match="n_best=2 with num_beams=1: expected"):
        list(translate_n_best(LINES, model, tokenizer, 2, num_beams=None, generation_config=given))


def test_an_invalid_batch_size_is_reported(model, tokenizer):
    with pytest.raises(ValueError, match="batch_size=0: expected a positive integer"):
        list(translate(["see"], model, tokenizer, batch_size=0))


def test_a_batch_holds_at_most_max_tokens_source_tokens(model, tokenizer, monkeypatch):
    batches = []
    generate = type(model).generate

    def spy(self, input_ids, **kwargs):
        batches.append(input_ids.shape)
        return generate(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "generate", spy)
    lines = ["see " * n for n in (1, 9, 5, 5, 1, 9, 40)]
    options = {"max_new_tokens": 2}
    found = list(translate(lines, model, tokenizer, max_tokens=24, **options))
    assert found == list(translate(lines, model, tokenizer, batch_size=1, **options))
    batches = batches[: -len(lines)]
    assert all(rows * length <= 24 or rows == 1 for rows, length in batches)
    assert any(rows > 1 for rows, _ in batches)
    with pytest.raises(ValueError, match="max_tokens=0: expected a positive integer"):
        list(translate(lines, model, tokenizer, max_tokens=0))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_a_translation_continues_its_prefix(model, tokenizer, options):
    """As `generate` does with the prefix as the decoder's prompt."""
    options = {"max_new_tokens": 9, **options}
    prefixes = ["ein", "ein", "", "ein Haus", "", "ein Haus am"]
    found = list(translate(LINES, model, tokenizer, prefixes=prefixes, batch_size=4, **options))
    for line, prefix, translation in zip(LINES, prefixes, found, strict=True):
        if not line.strip():
            assert translation == ""
            continue
        prompt = [[1, *tokenizer(text_target=prefix)["input_ids"][:-1]]]
        (ids,) = model.generate(
            **tokenizer(line, return_tensors="pt"),
            decoder_input_ids=torch.tensor(prompt),
            **options,
        )
        assert translation == tokenizer.decode(ids, skip_special_tokens=True)
        assert translation.startswith(prefix)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"max_new_tokens": 3}, 3),
        ({"extra_output_tokens": 0}, 2),
        ({"max_length_factor": 1.5}, 3),
        ({"max_new_tokens": 2, "max_length": 4}, 2),
    ],
)
def test_a_limit_counts_the_tokens_after_a_prefix(model, tokenizer, options, limit):
    prefix, source = "ein Haus am See ein Haus am See", tokenizer("see")["input_ids"]
    options = {**options, "suppress_tokens": [tokenizer.eos_token_id]}
    if "max_new_tokens" not in options:
        limit = limit * len(source) // 2
    ((found,),) = translate_n_best(["see"], model, tokenizer, None, prefixes=[prefix], **options)
    tokens = len(tokenizer(text_target=prefix)["input_ids"]) - 1
    assert len(found.token_ids) == tokens + limit


def test_a_prefix_that_leaves_no_room_for_a_translation_is_reported(model, tokenizer, monkeypatch):
    prefixes = ["", "", "ein Haus am See"]
    tokens = len(tokenizer(text_target=prefixes[2])["input_ids"]) - 1
    message = f"target prefix 3 has {tokens} tokens: expected fewer than {tokens}, the length limit"
    monkeypatch.setattr(translating, "BATCHES_PER_WINDOW", 1)
    options = {"prefixes": prefixes, "batch_size": 2}
    assert list(translate(["see"] * 3, model, tokenizer, **options, max_length=1 + tokens + 1))
    with pytest.raises(ValueError, match=message):
        list(translate(["see"] * 3, model, tokenizer, **options, max_length=1 + tokens))
    monkeypatch.setattr(model.config, "position_encoding", "learned")
    monkeypatch.setattr(model.config, "max_position_embeddings", 1 + tokens)
    with pytest.raises(ValueError, match=message):
        list(translate(["see"] * 3, model, tokenizer, **options))


def test_new_tokens_are_counted_after_a_prefix_that_max_length_would_refuse(
    model, tokenizer, monkeypatch
):
    """`generate()` prefers `max_new_tokens`, wherever it is set."""
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 2)
    options = {"max_length": 4, "suppress_tokens": [tokenizer.eos_token_id]}
    prefixes = ["ein Haus am See"]
    ((found,),) = translate_n_best(["see"], model, tokenizer, None, prefixes=prefixes, **options)
    assert len(found.token_ids) == len(tokenizer(text_target=prefixes[0])["input_ids"]) - 1 + 2


def test_a_blank_prefix_has_no_tokens(model, tokenizer):
    assert len(tokenizer(text_target=" ")["input_ids"]) > 1
    assert encode_prefixes(["", " \t"], model, tokenizer, {}) == [[], []]


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_a_prefix_may_be_longer_than_the_limit_that_a_trainer_leaves_in_the_model(
    tokenizer, tmp_path, wrap
):
    """`Seq2SeqTrainer` writes a limit of 20 tokens into the generation config."""
    model, prefix = seq2seq(vocab_size=len(tokenizer)), "der See " * 15
    arguments = Seq2SeqTrainingArguments(
        tmp_path, predict_with_generate=True, use_cpu=True, report_to="none", disable_tqdm=True
    )
    Seq2SeqTrainer(model, arguments, PairCollator(tokenizer, model=model)).predict(PAIRS)
    assert model.generation_config.max_length == 20
    (found,) = translate(["the lake"], wrap(model), tokenizer, prefixes=[prefix])
    assert found.startswith(prefix.strip())


@pytest.mark.parametrize("ends", [2, [2, 9]])
def test_eos_is_removed_from_a_prefix_though_the_tokenizer_has_no_eos_token(model, tokenizer, ends):
    whole = tokenizer(text_target="ein Haus")["input_ids"]
    nameless = copy.deepcopy(tokenizer)
    nameless.eos_token = None
    assert nameless(text_target="ein Haus")["input_ids"] == whole
    options = {"eos_token_id": ends, "max_new_tokens": 9}
    assert encode_prefixes(["ein Haus"], model, nameless, options) == [whole[:-1]]


@pytest.mark.parametrize(
    ("table", "limit"),
    [
        (BertConfig(max_position_embeddings=9), 9),
        (RobertaConfig(max_position_embeddings=11, pad_token_id=1), 9),  # its rows are 0 and 1
        (GPT2Config(n_positions=9), 9),
        (BartConfig(max_position_embeddings=9, decoder_layers=1), 9),  # a table of 11 rows
    ],
)
def test_the_tables_of_encoder_and_decoder_are_the_limits(table, limit):
    """For an `EncoderDecoderModel`, whose configuration has none."""
    encoder = BertConfig(max_position_embeddings=20)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, table)
    with torch.device("meta"):
        assert position_limits(EncoderDecoderModel(config)) == (20, limit)


def short_table(kind, tokenizer):
    """A model with positions for 12 tokens, of this package or of transformers."""
    if kind == "ours":
        options = {"position_encoding": "learned", "max_position_embeddings": 12}
        return seq2seq(vocab_size=len(tokenizer), **options)
    return MarianMTModel(
        MarianConfig(
            vocab_size=len(tokenizer), d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=12,
            pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, forced_eos_token_id=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["ours", "marian"])
def test_a_line_that_is_longer_than_the_table_of_positions_is_shown(tokenizer, kind):
    model, line = short_table(kind, tokenizer), "ein Haus am See"
    assert len(tokenizer(line)["input_ids"]) <= 12
    assert len(list(translate([line], model, tokenizer, max_new_tokens=2))) == 1
    lines = [line] * BATCHES_PER_WINDOW + ["the lake is deep " * 9]
    message = rf"line {len(lines)} has \d+ tokens: expected at most 12, where the model's table of"
    with pytest.raises(ValueError, match=message):
        list(translate(lines, model, tokenizer, batch_size=1, max_new_tokens=2))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (FSMTForConditionalGeneration, FSMTConfig(src_vocab_size=9, tgt_vocab_size=9)),
        (M2M100ForConditionalGeneration, M2M100Config(vocab_size=9)),
    ],
)
def test_a_table_that_grows_is_not_a_limit(kind, config):
    with torch.device("meta"):
        assert position_limits(kind(config)) == (math.inf, math.inf)


@pytest.mark.parametrize(
    "saved",
    [
        {"stop_strings": ["See"]},
        {"token_healing": True},
        {"num_beam_groups": 2, "num_beams": 4},
        {"penalty_alpha": 0.6},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]], "num_beams": 2},
    ],
    ids=lambda saved: next(iter(saved)),
)
def test_a_saved_search_that_cannot_work_is_refused_before_translation(
    model, tokenizer, monkeypatch, saved
):
    for name, value in saved.items():
        monkeypatch.setattr(model.generation_config, name, value)
    name, value = next(iter(saved.items()))
    message = re.escape(f"{name}={value!r} in the generation config: expected null")
    with pytest.raises(ValueError, match=message):
        list(translate([], model, tokenizer))
    with pytest.raises(ValueError, match=message):
        expect_valid_options(model, {})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"low_memory": True, "num_beams": 2}, "null with beams"),
        ({"cache_implementation": "quantized"}, "another one for an encoder-decoder"),
        ({"cache_implementation": "offloaded"}, "an accelerator"),
        ({"prompt_lookup_num_tokens": 3}, "batch_size=1 or beams"),
        ({"assistant_early_exit": 1}, "batch_size=1 or beams"),
        ({"prefill_chunk_size": 8}, "null for an encoder-decoder"),
    ],
    ids=str,
)
def test_searches_that_transformers_lacks_are_refused_before_translation(
    model, tokenizer, options, expected
):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: expected {expected}")):
        list(translate([], model, tokenizer, **options))


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize(
    "option",
    [
        {"low_memory": True},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_options_are_only_refused_if_transformers_refuses_them(
    model, option, num_beams, batch_size
):
    options = {**option, "num_beams": num_beams}
    inputs = {"input_ids": torch.tensor([[5, 6, 2]] * batch_size), "max_new_tokens": 3}
    try:
        model.generate(**inputs, **options)
    except ValueError:
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*: expected "):
            expect_known_search(model, options, batch_size)
    else:
        expect_known_search(model, options, batch_size)


def test_a_cache_unknown_to_transformers_is_a_valueerror(model):
    """The command line prints a ValueError without a traceback."""
    with pytest.raises(ValueError, match="Invalid `cache_implementation`") as raised:
        expect_valid_options(model, {"cache_implementation": "none"})
    assert raised.traceback[-1].name == "expect_valid_options"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words_ids": [5]}, "has to be a list of lists"),
        ({"bad_words_ids": []}, "has to be a non-empty list"),
        ({"sequence_bias": [[[5], 1]]}, "has to be a non-empty list of lists of positive integers"),
        ({"sequence_bias": {(999,): 1.0}}, "The model vocabulary size is "),
        ({"watermarking_config": {"unknown": 1}}, "unexpected keyword argument 'unknown'"),
        ({"watermarking_config": {"bias": "a"}}, "unsupported operand"),
        ({"watermarking_config": {"hashing_key": "a"}}, "manual_seed expected a long"),
        ({"watermarking_config": "kgw"}, "expected a WatermarkingConfig"),
        ({"length_penalty_type": "mean"}, "expected one of power, gnmt"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_translation(model, options, message):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ") + ".*" + message):
        expect_valid_options(model, options)


def test_two_limits_of_length_are_refused_as_only_one_would_apply(model):
    """fairseq's --max-len-a and --max-len-b add up, our options do not."""
    limits = {"max_length_factor": 1.2, "extra_output_tokens": 10}
    with pytest.raises(ValueError, match=r"factor=1.2 and extra_output_tokens=10: expected one"):
        expect_valid_options(model, limits)
    expect_valid_options(model, {**limits, "max_length_factor": None})


@pytest.mark.parametrize(
    "options", [{"extra_output_tokens": 9}, {"length_penalty_type": "power"}], ids=str
)
def test_options_of_this_package_are_refused_for_other_models(tokenizer, options):
    ((name, value),) = options.items()
    message = f"{name}={value!r} with MarianMTModel: expected a model of this package"
    with pytest.raises(ValueError, match=message):
        expect_valid_options(short_table("marian", tokenizer), options)


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_ids": [[5], [6, 7]]},
        {"sequence_bias": [[[5], 1.0]]},
        {"sequence_bias": {(5, 6): -1.0}},
        {"watermarking_config": {"bias": 2.5}},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])},
    ],
    ids=str,
)
def test_valid_logits_processors_are_accepted(model, options):
    expect_valid_options(model, options)


@pytest.mark.parametrize("name", ["two vocabularies", "EncoderDecoderModel", "MarianMTModel"])
def test_token_ids_in_options_are_those_of_the_target_vocabulary(name):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sides = [BertConfig(vocab_size=size, **sizes) for size in (50, 33)]
    if name == "two vocabularies":
        model = seq2seq(vocab_size=50, decoder_vocab_size=33)
    elif name == "EncoderDecoderModel":
        config = EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
        model = EncoderDecoderModel(config)
    else:
        heads = {f"{side}_attention_heads": 1 for side in ("encoder", "decoder")}
        layers = {"encoder_layers": 1, "decoder_layers": 1}
        config = MarianConfig(vocab_size=33, d_model=8, pad_token_id=0, **heads, **layers)
        model = MarianMTModel(config)
    expect_valid_options(model, {"sequence_bias": [[[32], 1.0]]})
    with pytest.raises(ValueError, match="vocabulary size is 33"):
        expect_valid_options(model, {"sequence_bias": [[[33], 1.0]]})


def test_a_saved_option_of_a_different_search_does_not_matter(model, tokenizer, monkeypatch):
    expected = list(translate(LINES, model, tokenizer, num_beams=2, max_new_tokens=6))
    monkeypatch.setattr(model.generation_config, "penalty_alpha", 0.6)
    monkeypatch.setattr(model.generation_config, "num_beam_groups", 1)
    assert list(translate(LINES, model, tokenizer, num_beams=2, max_new_tokens=6)) == expected


@pytest.mark.parametrize("options", [{"lines": "a house"}, {"prefixes": "ein Haus"}])
def test_a_single_string_is_not_several_lines(model, tokenizer, options):
    """Otherwise each of its characters would be a line."""
    ((name, text),) = options.items()
    with pytest.raises(TypeError, match=f"^{name}='{text}': expected an iterable of strings"):
        next(translate(**{"lines": ["a", "house"], **options}, model=model, tokenizer=tokenizer))


def test_there_must_be_a_prefix_for_each_line(model, tokenizer):
    with pytest.raises(ValueError, match=r"^there are only 1 prefixes, and more lines: "):
        list(translate(["a", "b"], model, tokenizer, prefixes=["x"]))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_translations_that_reached_the_length_limit_are_marked(
    model, tokenizer, options, monkeypatch
):
    """They do not end with </s>."""
    cut = list(translate_n_best(["see"], model, tokenizer, None, max_new_tokens=4, **options))
    assert [h.is_complete for h in cut[0]] == [False]
    assert len(cut[0][0].token_ids) == 4
    ending = {"max_new_tokens": 4, "forced_eos_token_id": 2, **options}
    whole = list(translate_n_best(["see"], model, tokenizer, None, **ending))
    assert [h.is_complete for h in whole[0]] == [True]
    assert whole[0][0].token_ids[-1] == 2


@pytest.mark.parametrize("pad", [0, 2, None])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_truncated_translations_in_a_batch_equal_those_alone(model, tokenizer, options, pad):
    """Also if </s> is the padding token too."""
    lines = ["see", "a house by the lake"]
    options = {"extra_output_tokens": 2, "suppress_tokens": [2], "pad_token_id": pad, **options}
    batch = [found for (found,) in translate_n_best(lines, model, tokenizer, None, **options)]
    for line, together in zip(lines, batch, strict=True):
        ((alone,),) = translate_n_best([line], model, tokenizer, None, **options)
        assert together.token_ids == alone.token_ids
        assert not together.is_complete


def test_the_limit_of_a_given_generation_config_overrides_the_models(model, tokenizer):
    lines = ["see", "a house by the lake"]
    given = copy.deepcopy(model.generation_config)
    given.update(max_new_tokens=60, suppress_tokens=[2])
    found = list(translate_n_best(lines, model, tokenizer, None, generation_config=given))
    assert [len(one.token_ids) for (one,) in found] == [60, 60]


def test_samples_need_no_beams(model, tokenizer):
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 4}
    (found,) = translate_n_best(["see"], model, tokenizer, 5, **options)
    assert len({h.text for h in found}) > 1
    assert all(math.isnan(h.score) for h in found)


def test_a_model_in_training_mode_translates_the_same(model, tokenizer, alone):
    assert list(translate(LINES, model.train(), tokenizer, max_new_tokens=6)) == alone
    model.eval()


def test_lines_only_end_at_newlines():
    content = [b"\xef\xbb\xbfone\r\n", b"tw\ro\xe2\x80\xa8\n", b"\n", b"last"]
    assert list(read_lines(content, "f")) == ["one", "tw\ro\u2028", "", "last"]


def test_a_line_that_is_not_utf8_is_reported():
    with pytest.raises(ValueError, match=r"in\.txt, line 2: not UTF-8"):
        list(read_lines([b"fine\n", b"\xff\n"], "in.txt"))
