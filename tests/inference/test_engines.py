"""An engine gives the same as `generate()` of the exported model, or reports what it lacks."""

import math
import os
import shutil
import sys

import pytest
import torch
from conftest import ragged, run_command
from conversion.models import random_model
from transformers import AutoTokenizer, GenerationConfig, pipeline

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.cli.main import needs_traceback
from vanilla_transformer.export import export
from vanilla_transformer.inference.decoding import position_limits
from vanilla_transformer.inference.engines import find_engine, load
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.parallel_translation import fingerprint
from vanilla_transformer.inference.scoring import add_token_scores, score_pairs, token_scores
from vanilla_transformer.inference.translation import translate, translate_n_best

pytest.importorskip("ctranslate2", reason="needs vanilla-transformer[export]")

LINES = ["a house by the lake", "", "the lake is deep", "der See ist tief and the house"]


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A random model, and its export for CTranslate2."""
    folder = tmp_path_factory.mktemp("engines")
    model = random_model(vocab_size=len(tokenizer))
    model.generation_config.num_beams = 3
    model.generation_config.early_stopping = True
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model", export(folder / "model", folder / "ctranslate2", "ctranslate2")


@pytest.fixture(scope="module")
def model(folders):
    return LoadingArguments(device="cpu").load(folders[0])[0]


@pytest.fixture(scope="module")
def engine(folders):
    return load(folders[1])


def both(model, engine, *lengths, **options):
    ids, mask = ragged(*lengths)
    return [
        each.generate(input_ids=ids, attention_mask=mask, **options) for each in (model, engine)
    ]


def without_end(ids):
    """Rows without </s>, which transformers' beam search uses for padding where that has id 0."""
    last = [max(place for place, number in enumerate(row) if number not in (0, 2)) for row in ids]
    return [row[: end + 1].tolist() for row, end in zip(ids, last, strict=True)]


GREEDY = {"num_beams": 1, "max_new_tokens": 12}
BEAMS = {"num_beams": 4, "max_new_tokens": 12, "early_stopping": True}
AGAIN = {**BEAMS, "renormalize_logits": True}
PROMPT = torch.tensor([[1, 50, 17], [1, 60, 61], [1, 51, 2]])
OPTIONS = {
    "the model's own": {},
    "greedy, source + 50": {"num_beams": 1},
    "beams, source + 50": {"num_beams": 2, "early_stopping": True},
    "source + 3": {"num_beams": 2, "early_stopping": True, "extra_output_tokens": 3},
    "source * 1.5": {"num_beams": 2, "early_stopping": True, "max_length_factor": 1.5},
    "max_length": {"num_beams": 1, "max_length": 6},
    "gnmt": {**BEAMS, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
    "avg": {**BEAMS, "length_penalty": 1.0, "length_penalty_type": "avg"},
    "wu": {**BEAMS, "length_penalty": 0.9, "length_penalty_type": "wu"},
    "long": {**BEAMS, "length_penalty": 3.0},
    "short": {**BEAMS, "length_penalty": -1.0},
    "no penalty": {**BEAMS, "length_penalty": 0.0},
    "never": {**BEAMS, "early_stopping": "never"},
    "several": {**BEAMS, "num_return_sequences": 3},
    "early": {**BEAMS, "length_penalty": 4.0, "eos_token_id": [2, 85]},
    "another rank": {
        **BEAMS, "length_penalty": 3.0, "length_penalty_type": "gnmt", "eos_token_id": [2, 85],
    },
    "several ends": {**BEAMS, "eos_token_id": [2, 17]},
    "min_new_tokens": {**GREEDY, "min_new_tokens": 12},
    "min_length": {**AGAIN, "min_length": 11},
    "two minima": {**GREEDY, "min_length": 11, "min_new_tokens": 2, "eos_token_id": [2, 218]},
    "a minimum above the limit": {**AGAIN, "max_new_tokens": 4, "min_length": 9},
    "a minimum above a row's limit": {
        **AGAIN, "max_new_tokens": None, "extra_output_tokens": 0, "min_new_tokens": 5,
    },
    "no repetition": {**GREEDY, "no_repeat_ngram_size": 2},
    "no repetition, beams": {**AGAIN, "no_repeat_ngram_size": 2},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.3},
    "bad words": {**GREEDY, "bad_words_ids": [[218], [213, 213]]},
    "bad words that end": {**GREEDY, "bad_words_ids": [[218], [213]], "eos_token_id": [2, 218]},
    "suppressed": {**GREEDY, "suppress_tokens": [218, 213]},
    "forced end": {"num_beams": 1, "extra_output_tokens": 3, "forced_eos_token_id": 2},
    "forced end, beams": {**BEAMS, "max_new_tokens": 5, "forced_eos_token_id": 17},
    "forced end, source + 3": {
        **AGAIN, "max_new_tokens": None, "extra_output_tokens": 3, "forced_eos_token_id": 17,
        "suppress_tokens": [2],
    },
    "forced end at once": {"num_beams": 1, "max_new_tokens": 1, "forced_eos_token_id": [17, 9]},
    "sampling of one": {**GREEDY, "do_sample": True, "top_k": 1},
    "prompt, source + 50": {"num_beams": 1, "decoder_input_ids": PROMPT},
    "prompt, gnmt": {
        **BEAMS, "length_penalty": 0.6, "length_penalty_type": "gnmt", "decoder_input_ids": PROMPT,
    },
    "prompt without a start": {**BEAMS, "decoder_input_ids": PROMPT[:, 1:]},
    "prompt of a start": {**BEAMS, "decoder_input_ids": PROMPT[:, :1]},
    "prompt, max_length": {"num_beams": 1, "max_length": 6, "decoder_input_ids": PROMPT},
    "prompt, min_length": {**AGAIN, "min_length": 11, "decoder_input_ids": PROMPT},
    "prompt, min_new_tokens": {**GREEDY, "min_new_tokens": 12, "decoder_input_ids": PROMPT},
    "prompt, no repetition": {
        **AGAIN, "no_repeat_ngram_size": 2, "decoder_input_ids": PROMPT.repeat(1, 2),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_option_has_the_same_effect(model, engine, options):
    expected, found = both(model, engine, 6, 3, 5, **options)
    assert without_end(found) == without_end(expected)


@pytest.mark.parametrize(("pad", "expected_pad"), [(9, 9), (None, 218)])
def test_the_padding_of_outputs_is_pad_token_id_or_else_the_end(model, engine, pad, expected_pad):
    options = {**GREEDY, "eos_token_id": [218, 2], "pad_token_id": pad}
    expected, found = both(model, engine, 6, 3, **options)
    assert found.tolist() == expected.tolist()
    assert found[0, -1] == expected_pad


def test_all_hypotheses_of_a_row_end_at_its_limit(model, engine):
    # Including hypotheses that a search up to a longer row's limit drops when it has enough.
    options = {"early_stopping": True, "num_beams": 4, "num_return_sequences": 4}
    options |= {"extra_output_tokens": 2, "eos_token_id": [2, 200], "length_penalty": 0.0}
    expected, found = both(model, engine, 9, 2, 4, **options)
    assert without_end(found) == without_end(expected)


def test_scores_are_the_same(model, engine):
    options = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 4}
    penalty = {"length_penalty": 0.6, "length_penalty_type": "gnmt"}
    prompt = {"decoder_input_ids": PROMPT[:2]}
    expected, found = both(model, engine, 6, 3, **BEAMS, **options, **penalty, **prompt)
    scores = found.sequences_scores, expected.sequences_scores
    torch.testing.assert_close(*scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [GREEDY, {**BEAMS, "length_penalty": -1.0}])
@pytest.mark.parametrize("prompt", [None, torch.tensor([[1, 50], [1, 51]])])
def test_a_source_of_only_eos_has_a_target_of_only_eos(engine, options, prompt):
    ids, mask = torch.tensor([[5, 6, 2], [2, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = engine.generate(ids, attention_mask=mask, decoder_input_ids=prompt, **options)
    expected = [1] if prompt is None else prompt[1].tolist()
    assert found[1].tolist() == [*expected, 2] + [0] * (found.shape[1] - len(expected) - 1)


def test_padding_on_the_left_and_without_a_mask_changes_nothing(engine):
    right, left = (
        engine.generate(input_ids=ids, attention_mask=mask, **GREEDY)
        for ids, mask in (ragged(6, 3), ragged(6, 3, padding_side="left"))
    )
    assert right[0].tolist() == left[0].tolist()
    assert right.tolist() == engine.generate(input_ids=ragged(6, 3)[0], **GREEDY).tolist()


def test_a_given_generation_config_overrides_the_models(model, engine):
    config = GenerationConfig(num_beams=1, max_new_tokens=5, eos_token_id=2, pad_token_id=0)
    expected, found = both(model, engine, 6, 3, generation_config=config)
    assert found.tolist() == expected.tolist()


def test_samples_come_from_the_top_k_tokens(model, engine):
    ids, mask = ragged(6)
    options = {"num_beams": 1, "do_sample": True, "top_k": 2, "num_return_sequences": 30}
    found = engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=1, **options)
    logits = model(ids, mask, decoder_input_ids=torch.tensor([[1]])).logits[0, -1]
    assert len(found) == 30
    assert {*found[:, 1].tolist()} == {*logits.topk(2).indices.tolist()}


def test_top_k_can_exceed_the_vocabulary_size(engine):
    ids, mask = ragged(6)
    options = {"num_beams": 1, "do_sample": True, "top_k": 10_000, "max_new_tokens": 1}
    assert engine.generate(input_ids=ids, attention_mask=mask, **options).shape == (1, 2)


def test_samples_are_the_same_after_the_same_torch_seed(engine):
    ids, mask = ragged(6, 3)
    options = {"num_beams": 1, "do_sample": True, "num_return_sequences": 9, "max_new_tokens": 9}

    def two_calls(seed):
        torch.manual_seed(seed)
        calls = (engine.generate(input_ids=ids, attention_mask=mask, **options) for _ in range(2))
        return [found.tolist() for found in calls]

    first, again, other = map(two_calls, (1, 1, 2))
    assert first == again
    assert first[0] != first[1]
    assert first != other


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6},
        {"output_attentions": True},
        {"logits_processor": [print]},
        {"sequence_bias": [[[5], 1.0]]},
        {"decoder_attention_mask": torch.tensor([[1, 1]])},
        {"decoder_input_ids": [[1, 5]]},
        {"decoder_input_ids": torch.tensor([[1, 5], [1, 6]])},
        {"max_length": 4, "decoder_input_ids": torch.tensor([[1, 5, 6, 7]])},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 2, "repetition_penalty": 1.3},
        {"num_beams": 2, "no_repeat_ngram_size": 2},
        {"num_beams": 1, "output_scores": True},
        {"num_beams": 2, "num_return_sequences": 3},
        {"decoder_start_token_id": 5},
        {"num_beams": 2, "early_stopping": "soon"},
        {"eos_token_id": -1},
        {"eos_token_id": None},
        {"extra_output_tokens": -1},
        {"nonsense": 5},
    ],
    ids=lambda options: list(options)[-1],
)
def test_options_that_the_engine_lacks_are_refused_by_name(engine, options):
    ids, mask = ragged(4)
    with pytest.raises(ValueError, match=list(options)[-1]):
        engine.generate(input_ids=ids, attention_mask=mask, **options)


def test_invalid_prompts_are_refused(engine):
    ids, mask = ragged(4, 4)
    with pytest.raises(IndexError, match="target id 10000 is out of range"):
        engine.generate(ids, attention_mask=mask, decoder_input_ids=torch.full((2, 1), 10_000))
    with pytest.raises(ValueError, match="all rows, or none, to begin with 1"):
        engine.generate(ids, attention_mask=mask, decoder_input_ids=torch.tensor([[1], [5]]))


def test_invalid_sources_are_refused(engine):
    with pytest.raises(IndexError, match="source id 10000 is out of range"):
        engine.generate(input_ids=torch.tensor([[4, 10_000]]))
    with pytest.raises(ValueError, match="2049 tokens: expected at most 2048"):
        engine.generate(input_ids=torch.full((1, 2049), 5))
    for mask in ([[0, 0], [1, 1]], [[1, 1]], [[1], [1]]):
        with pytest.raises(
            ValueError, match=r"attention_mask: expected \(2, 2\) like input_ids, w"
        ):
            engine.generate(torch.tensor([[4, 5]] * 2), attention_mask=torch.tensor(mask))
    for ids in (None, torch.tensor([4, 5])):
        with pytest.raises(ValueError, match=r"input_ids=.*: expected a tensor"):
            engine.generate(ids)


def test_a_target_can_fill_the_table_of_positions_including_its_eos(tokenizer, tmp_path):
    """The engine adds an EOS token to a target without one."""
    size = {"position_encoding": "learned", "max_position_embeddings": 6}
    model = random_model(vocab_size=len(tokenizer), **size).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = load(export(tmp_path / "model", tmp_path / "exported", "ctranslate2"))
    ids, mask = ragged(6, 4)
    inputs = {"input_ids": ids, "attention_mask": mask}
    for row in ([7, 8, 9, 10, 11, 2], [7, 8, 9, 10, 11, -100]):
        labels = torch.tensor([row, [5, 2, *[-100] * 4]])
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
        expected = token_scores(model, {**inputs, "labels": labels, "decoder_input_ids": shifted})
        found = engine.token_scores(**inputs, labels=labels)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    labels[0, -1] = 12
    with pytest.raises(
        ValueError, match="labels of 7 tokens, the end included: expected at most 6"
    ):
        engine.token_scores(**inputs, labels=labels)


def test_learned_positions_limit_the_output(tokenizer, tmp_path):
    learned = {"position_encoding": "learned", "max_position_embeddings": 9}
    model = random_model(vocab_size=len(tokenizer), **learned)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = load(export(tmp_path / "model", tmp_path / "exported", "ctranslate2"))
    expected, found = both(model, engine, 6, 3, bad_words_ids=[[2]])
    assert found.tolist() == expected.tolist()
    assert found.shape[1] == 9
    # The last token needs no position, because it is not an input.
    ids, mask = ragged(6, 3)
    for prompt, most in (([1], 9), ([1, 50, 17], 7)):
        options = {"attention_mask": mask, "bad_words_ids": [[2]]}
        options["decoder_input_ids"] = torch.tensor([prompt] * 2)
        expected = model.generate(ids, max_new_tokens=most, **options)
        found = engine.generate(ids, max_new_tokens=50, **options)
        assert found.tolist() == expected.tolist()


# ---------------------------------------------------------------- in place of a model


def test_translate_accepts_an_engine(model, engine, tokenizer):
    expected, found = (list(translate(LINES, each, tokenizer)) for each in (model, engine))
    assert found == expected
    assert expected[1] == ""
    ranked = [list(translate_n_best(LINES, each, tokenizer, 2)) for each in (model, engine)]
    for one, other in zip(*ranked, strict=True):
        assert [each.text for each in one] == [each.text for each in other]
        assert [each.score for each in one] == pytest.approx([each.score for each in other], 1e-4)


def test_translations_start_with_their_prefixes(model, engine, tokenizer):
    prefixes = ["ein Haus", "", "", "der See"]
    expected, found = (
        list(translate(LINES, each, tokenizer, prefixes=prefixes, **BEAMS))
        for each in (model, engine)
    )
    assert found == expected
    assert found[0].startswith("ein Haus")


PAIRS = [
    ("a house by the lake", "ein Haus am See"),
    ("the lake", "der See ist tief und tief und tief"),
    ("", "tief"),
    ("the lake is deep", ""),
]


@pytest.mark.parametrize("max_tokens", [1, 2048])
def test_scores_of_given_pairs_are_the_same(model, engine, tokenizer, max_tokens):
    expected, found = (
        list(score_pairs(PAIRS, each, tokenizer, max_tokens=max_tokens)) for each in (model, engine)
    )
    for one, other in zip(expected, found, strict=True):
        assert other.log_probability == pytest.approx(one.log_probability, abs=1e-4)
        assert other.tokens == one.tokens


def test_tokens_of_truncated_translations_have_scores(model, engine, tokenizer):
    """Their last token is not </s>."""
    lines = LINES[2:]
    found = list(translate_n_best(lines, model, tokenizer, None, num_beams=1, max_new_tokens=3))
    assert not any(row[0].is_complete for row in found)
    expected, rows = (
        list(add_token_scores(lines, found, each, tokenizer)) for each in (model, engine)
    )
    for one, other in zip(expected, rows, strict=True):
        assert len(other[0].token_scores) == 3
        assert other[0].token_scores == pytest.approx(one[0].token_scores, abs=1e-4)


def test_invalid_pairs_are_refused(engine, tokenizer):
    with pytest.raises(ValueError, match="the target of pair 1 has 2402 tokens: expected at mo"):
        list(score_pairs([("a", "z " * 1200)], engine, tokenizer))
    ids, mask = ragged(2)
    long = torch.full((1, 2402), 5)
    with pytest.raises(ValueError, match="labels of 2403 tokens, the end included: expected at mo"):
        engine.token_scores(input_ids=ids, attention_mask=mask, labels=long)
    with pytest.raises(IndexError, match="label 10000 is out of range"):
        engine.token_scores(input_ids=ids, attention_mask=mask, labels=torch.tensor([[10_000]]))


def test_positions_end_where_the_engines_table_does(model, engine):
    assert position_limits(model) == (math.inf, math.inf)
    assert position_limits(engine) == (2048, 2048)


def test_the_pipeline_accepts_an_engine(model, folders):
    engine, tokenizer = load(folders[1]), AutoTokenizer.from_pretrained(folders[1])
    pipes = [
        TranslationPipeline(engine, tokenizer=tokenizer),
        pipeline("translation", model=engine, tokenizer=tokenizer, device="cpu"),
    ]
    expected = TranslationPipeline(model, tokenizer=tokenizer)(LINES, num_beams=2)
    for pipe in pipes:
        assert pipe(LINES, num_beams=2) == expected
        assert pipe(LINES, num_beams=2, batch_size=2) == expected


def test_a_folder_is_loaded_by_its_engine(folders, tmp_path):
    assert find_engine(folders[0]) is None
    assert find_engine(tmp_path) is None
    (tmp_path / "model.bin").touch()  # as CTranslate2's own converters write it
    (tmp_path / "config.json").write_text('{"add_source_eos": false}')
    assert find_engine(tmp_path) is None
    for options in ({}, {"engine": "ctranslate2"}):
        assert load(folders[1]).version == LoadingArguments(**options).load(folders[1])[0].version


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (0, {"engine": "ctranslate2"}, "vanilla-transformer export .*model --to ctranslate2"),
        (0, {"engine": "onnxruntime"}, "vanilla-transformer export .*model --to onnx --output"),
        (1, {"engine": "torch"}, "expected a model that torch runs"),
        (1, {"attn_implementation": "eager"}, "attn_implementation='eager'"),
        (1, {"dtype": "float64"}, "dtype='float64' with ctranslate2"),
    ],
)
def test_folders_of_a_different_engine_are_refused(folders, number, options, message):
    with pytest.raises(ValueError, match=message):
        LoadingArguments(device="cpu", **options).load(folders[number])


@pytest.mark.parametrize("file", ["model.bin", "shared_vocabulary.json", "tokenizer.json"])
def test_a_file_that_is_cut_short_is_reported_in_one_line(folders, tmp_path, file):
    folder = shutil.copytree(folders[1], tmp_path / "model")
    os.truncate(folder / file, 1000)
    with pytest.raises(ValueError, match=f"^{folder}: (expected complete files|.*can't open)") as e:
        LoadingArguments(device="cpu").load(folder)
    assert not needs_traceback(e.value)


def test_a_dtype_that_the_device_lacks_is_refused_by_name(folders, monkeypatch):
    monkeypatch.setattr("ctranslate2.get_supported_compute_types", lambda *_: {"int8", "float32"})
    with pytest.raises(ValueError, match="dtype='bfloat16' with ctranslate2 on cpu: expected one"):
        load(folders[1], dtype="bfloat16")


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="engine='abacus': expected one of torch, ctranslate2"):
        LoadingArguments(engine="abacus")


def test_an_ensemble_needs_torch(folders):
    with pytest.raises(ValueError, match="expected a model that torch runs"):
        LoadingArguments(device="cpu").load(folders)


def test_an_unfinished_job_only_resumes_with_the_same_engine(folders, model, engine, tokenizer):
    marks = [fingerprint(each, tokenizer) for each in (model, engine, load(folders[1]))]
    assert marks[1] == marks[2]
    assert marks[0]["weights"] != marks[1]["weights"]
    assert "ctranslate2" in marks[1]["versions"]


def test_a_missing_package_is_reported(folders, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert find_engine(folders[1]) is not None
    with pytest.raises(ImportError, match=r"vanilla-transformer\[export\]"):
        load(folders[1])


def test_the_command_translates_with_an_engine(folders, tmp_path):
    text = "\n".join(LINES) + "\n"
    (tmp_path / "text").write_text(text)
    flags = ["--source", "text", "--output", "found", "--engine", "ctranslate2"]
    run_command("translate", "--model", folders[1], *flags, cwd=tmp_path)
    expected = run_command("translate", "--model", folders[0], cwd=tmp_path, stdin=text).stdout
    assert (tmp_path / "found").read_text() == expected


@pytest.mark.parametrize("command", ["translate --do_sample --num_beams 1", "back-translate"])
def test_a_seed_reproduces_samples_of_an_engine(folders, tmp_path, command):
    (tmp_path / "text").write_text("\n".join(LINES) + "\n")
    flags = ["--model", folders[1], "--source", "text", "--batch_size", 1]
    for name, seed in {"first": 1, "again": 1, "other": 2}.items():
        run_command(*command.split(), *flags, "--output", name, "--seed", seed, cwd=tmp_path)
    first, again, other = ((tmp_path / name).read_text() for name in ("first", "again", "other"))
    assert first == again
    assert first != other


def test_the_command_scores_with_an_engine(folders, tmp_path):
    for place, name in enumerate(("source", "target")):
        (tmp_path / name).write_text("".join(pair[place] + "\n" for pair in PAIRS))
    flags = ["--source", "source", "--target", "target"]
    rows = [
        [line.split() for line in output.splitlines()]
        for output in (
            run_command("score", "--model", folder, *flags, cwd=tmp_path).stdout
            for folder in folders
        )
    ]
    for one, other in zip(*rows, strict=True):
        assert float(other[0]) == pytest.approx(float(one[0]), abs=1e-4)
        assert other[1] == one[1]
