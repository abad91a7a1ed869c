"""ONNX Runtime behind `generate()`: every option gives the same as with the model."""

import os
import shutil

import pytest
import torch
from conftest import ragged, random_ids
from transformers import AutoTokenizer

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.inference.engines import find_engine, onnxruntime_engine
from vanilla_transformer.inference.parallel_translation import fingerprint
from vanilla_transformer.inference.scoring import score_pairs
from vanilla_transformer.inference.translation import translate, translate_n_best
from vanilla_transformer.model.cache import CACHE_NAME

LINES = ["a house by the lake", "", "the lake is deep", "der See ist tief and the house"]
OPTIONS = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4, "early_stopping": "never"},
    "gnmt": {"num_beams": 3, "length_penalty_type": "gnmt", "length_penalty": 0.6},
    "n-best": {"num_beams": 4, "num_return_sequences": 3},
    "sampling": {"num_beams": 1, "do_sample": True, "top_k": 5, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "temperature": 0.7},
    "no repeats": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "prompt": {"num_beams": 2, "decoder_input_ids": random_ids(3, 3)},
    "no cache": {"num_beams": 2, "use_cache": False},
    "prompt lookup": {"num_beams": 1, "prompt_lookup_num_tokens": 2},
}


@pytest.fixture(scope="module")
def model(onnx_folder):
    return onnx_folder[0]


@pytest.fixture(scope="module")
def engine(onnx_folder):
    return onnxruntime_engine.load(onnx_folder[2])


@pytest.fixture(scope="module")
def tokenizer(onnx_folder):
    return AutoTokenizer.from_pretrained(onnx_folder[2])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_generate_works(model, engine, options):
    lengths = (5,) if "prompt_lookup_num_tokens" in options else (7, 3, 5)
    ids, mask = ragged(*lengths)
    found = []
    for each in (model, engine):
        torch.manual_seed(1)
        found.append(each.generate(ids, attention_mask=mask, max_new_tokens=12, **options))
    assert found[0].tolist() == found[1].tolist()


def test_scores_and_the_cache_equal_those_of_the_model(model, engine):
    ids, mask = ragged(7, 3)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    ours, theirs = (each.generate(ids, attention_mask=mask, **options) for each in (model, engine))
    torch.testing.assert_close(theirs.sequences_scores, ours.sequences_scores)
    assert len(ours.scores) == len(theirs.scores)
    for part in ("self_attention_cache", "cross_attention_cache"):
        expected, found = (getattr(each[CACHE_NAME], part).layers[-1] for each in (ours, theirs))
        assert found.keys.shape == expected.keys.shape


def test_outputs_are_at_most_50_tokens_longer_than_their_source(model, engine):
    ids, mask = ragged(4, 2)
    ours, theirs = (
        each.generate(ids, attention_mask=mask, eos_token_id=None) for each in (model, engine)
    )
    assert theirs.shape == ours.shape == (2, 1 + 4 + 50)


def test_translate_n_best_pipeline_and_score_work_unchanged(model, engine, tokenizer):
    assert list(translate(LINES, engine, tokenizer)) == list(translate(LINES, model, tokenizer))
    ours, theirs = (
        list(translate_n_best(LINES, each, tokenizer, 2, num_beams=3)) for each in (model, engine)
    )
    assert [[h.text for h in row] for row in theirs] == [[h.text for h in row] for row in ours]
    pipelines = (
        TranslationPipeline(each, tokenizer=tokenizer, device="cpu") for each in (model, engine)
    )
    ours, theirs = (pipeline(LINES, batch_size=2) for pipeline in pipelines)
    assert theirs == ours
    pairs = list(zip(LINES[2:], LINES[:2], strict=True))
    ours, theirs = (list(score_pairs(pairs, each, tokenizer)) for each in (model, engine))
    assert [s.log_probability for s in theirs] == pytest.approx([s.log_probability for s in ours])


def test_a_folder_is_recognized_and_its_fingerprint_includes_the_weights(
    onnx_folder, engine, tokenizer
):
    _, folder, exported = onnx_folder
    assert find_engine(exported) is onnxruntime_engine
    assert not onnxruntime_engine.recognizes(folder)
    assert not list(engine.parameters())
    before = fingerprint(engine, tokenizer)["weights"]
    engine.decoder_model = torch.zeros(1, dtype=torch.uint8)
    after = fingerprint(engine, tokenizer)["weights"]
    assert before != after


@pytest.mark.parametrize("file", ["encoder_model.onnx", "decoder_model.onnx"])
def test_a_graph_that_is_cut_short_is_reported(onnx_folder, tmp_path, file):
    folder = shutil.copytree(onnx_folder[2], tmp_path / "model")
    os.truncate(folder / file, 1000)
    with pytest.raises(ValueError, match=f"^{folder / file}: can't open the graph: "):
        onnxruntime_engine.load(folder)


def test_a_fingerprint_includes_the_version_of_onnx_runtime(engine, tokenizer, monkeypatch):
    before = fingerprint(engine, tokenizer)
    monkeypatch.setattr("onnxruntime.__version__", "0.0")
    after = fingerprint(engine, tokenizer)
    assert [name for name in before if before[name] != after[name]] == ["versions"]


def test_options_that_the_graphs_lack_are_refused_by_name(onnx_folder, engine):
    folder, (ids, mask) = onnx_folder[2], ragged(4, 2)
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=name):
            engine.generate(ids, attention_mask=mask, return_dict_in_generate=True, **{name: True})
    with pytest.raises(ValueError, match="inputs_embeds"):
        engine.generate(inputs_embeds=torch.zeros(1, 3, 24))
    with pytest.raises(ValueError, match="decoder_attention_mask"):
        engine(ids, mask, ids, decoder_attention_mask=mask)
    with pytest.raises(ValueError, match="cache_implementation"):
        engine.generate(ids, attention_mask=mask, cache_implementation="static")
    with pytest.raises(IndexError, match="token id 999"):
        engine.generate(torch.tensor([[999, 2]]))
    with pytest.raises(ValueError, match="dtype='bfloat16': expected 'float32'"):
        onnxruntime_engine.load(folder, device="cpu", dtype="bfloat16")
    with pytest.raises(ValueError, match="device='xpu': expected cpu"):
        onnxruntime_engine.load(folder, device="xpu")
    with pytest.raises(ValueError, match="device='meta'"):
        engine.to("meta")
