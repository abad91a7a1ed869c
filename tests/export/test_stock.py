"""Folders for classes of transformers give the same translations without our code."""

import pytest
import torch
from conftest import in_new_process, ragged
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.conversion import convert, convert_back
from vanilla_transformer.export import export

MARIAN = {
    "the paper's": {},
    "biases": {"attention_bias": True, "lm_head_bias": True},
    "narrow heads": {"head_dim": 5, "value_head_dim": 3},
    "untied": {"tie_word_embeddings": False},
    "unscaled, silu": {"scale_embedding": False, "activation_function": "silu"},
    "xielu": {"activation_function": "xielu"},
    "starts with <s>": {"decoder_start_token_id": None, "bos_token_id": 5},
}
PRE = {"norm_position": "pre"}
PEGASUS = {
    "sinusoids": PRE,
    "learned": {**PRE, "position_encoding": "learned", "max_position_embeddings": 40},
    "few positions": {**PRE, "position_encoding": "learned", "max_position_embeddings": 12},
    "biases": {**PRE, "attention_bias": True, "lm_head_bias": True},
    "narrow heads": {**PRE, "head_dim": 5, "value_head_dim": 3},
    "epsilon": {**PRE, "layer_norm_eps": 1e-3},
    "prelu": {**PRE, "activation_function": "prelu"},
    "tensor2tensor": {**PRE, "sinusoid_frequencies": "tensor2tensor", "position_offset": 2},
}
CASES = [
    pytest.param(to, {"layer_norm_eps": 1e-5, **config}, id=f"{to}, {name}")
    for to, configs in (("marian", MARIAN), ("pegasus", PEGASUS))
    for name, config in configs.items()
]


def expect_same(model, folder, beams=3):
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert not type(loaded).__module__.startswith("vanilla_transformer")
    ids, mask = ragged(7, 4)
    targets = torch.tensor([[1, 5, 8, 20], [1, 7, 30, 9]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected, found = (
            each(**inputs, decoder_input_ids=targets).logits.log_softmax(-1)
            for each in (model, loaded)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    generated = [
        each.generate(**inputs, num_beams=beams, max_new_tokens=9) for each in (model, loaded)
    ]
    assert generated[0].tolist() == generated[1].tolist()


@pytest.mark.parametrize(("to", "config"), CASES)
def test_translations_are_the_same(exported, to, config):
    expect_same(*exported(to, **config))


def test_two_vocabularies_are_exported_to_marian(saved, two_sided, tmp_path):
    sizes = {"vocab_size": len(two_sided), "decoder_vocab_size": two_sided.target_vocab_size}
    model, folder = saved(two_sided, layer_norm_eps=1e-5, **sizes)
    output = export(folder, tmp_path / "exported", "marian")
    expect_same(model, output, beams=1)  # with more, transformers 5.17 uses the source's size


READ_BOTH_SIDES = """
    import json, sys
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(sys.argv[1])
        alone = "is read"
    except Exception:
        alone = "is refused"
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
    both = tokenizer("a house", text_target="ein Haus")
    target = tokenizer.decode(both["labels"], skip_special_tokens=True)
    print(json.dumps([alone, both["input_ids"], both["labels"], target]))
"""


def test_a_tokenizer_with_two_vocabularies_needs_our_code(saved, two_sided, tmp_path):
    """transformers' own tokenizer for a Marian folder would encode both sides with the source's."""
    sizes = {"vocab_size": len(two_sided), "decoder_vocab_size": two_sided.target_vocab_size}
    _, folder = saved(two_sided, layer_norm_eps=1e-5, **sizes)
    output = export(folder, tmp_path / "exported", "marian")
    expected = two_sided("a house", text_target="ein Haus")
    ids = [expected["input_ids"], expected["labels"]]
    found = in_new_process(READ_BOTH_SIDES, False, tmp_path, output)
    assert found == ["is refused", *ids, two_sided.decode(ids[1], skip_special_tokens=True)]
    here = AutoTokenizer.from_pretrained(output)("a house", text_target="ein Haus")
    assert [here["input_ids"], here["labels"]] == ids


@pytest.mark.parametrize(("to", "norm"), [("marian", "post"), ("pegasus", "pre")])
def test_prefixes_of_pipelines_are_kept(saved, tmp_path, to, norm):
    model, folder = saved(norm_position=norm)
    fields = {"prefix": "to German: ", "task_specific_params": {"translation": {"num_beams": 2}}}
    model.config.update(fields)
    model.config.save_pretrained(folder)
    output = export(folder, tmp_path / "exported", to)
    if to == "marian":  # and when it is converted back
        output = convert(output, tmp_path / "back")
    config = AutoConfig.from_pretrained(output)
    assert {name: getattr(config, name) for name in fields} == fields


def test_settings_that_are_lost_are_reported(saved, tmp_path, caplog):
    model, folder = saved(layer_norm_eps=1e-4)
    model.generation_config.length_penalty_type = "gnmt"
    model.generation_config.num_beams = 4
    model.generation_config.save_pretrained(folder)
    output = export(folder, tmp_path / "exported", "marian")
    assert "layer_norm_eps is 1e-05 there and 0.0001 here" in caplog.text
    assert "length_penalty_type='gnmt': left out" in caplog.text
    assert "after 512 tokens, whatever the length of the source" in caplog.text
    found = AutoModelForSeq2SeqLM.from_pretrained(output).generation_config
    assert (found.num_beams, found.max_length) == (4, 512)


def test_no_translation_is_longer_than_the_table_of_positions(saved, tmp_path, caplog):
    positions = {"position_encoding": "learned", "max_position_embeddings": 40}
    _, folder = saved(**PRE, **positions, layer_norm_eps=1e-5)
    output = export(folder, tmp_path / "exported", "pegasus")
    assert "after 40 tokens" in caplog.text
    loaded = AutoModelForSeq2SeqLM.from_pretrained(output)
    ids = loaded.generate(torch.tensor([[4, 5, 2]]), suppress_tokens=[2], num_beams=1)
    assert ids.shape[1] == 40


@pytest.mark.parametrize("separate", [False, True])
def test_a_marian_export_is_converted_back(saved, two_sided, tmp_path, separate):
    tokenizer, sizes = None, {}
    if separate:
        tokenizer = two_sided
        sizes = {"vocab_size": len(two_sided), "decoder_vocab_size": two_sided.target_vocab_size}
    model, folder = saved(*filter(None, [tokenizer]), layer_norm_eps=1e-5, **sizes)
    exported = export(folder, tmp_path / "exported", "marian")
    converted = convert(exported, tmp_path / "converted")
    found = AutoModelForSeq2SeqLM.from_pretrained(converted)
    ids, mask = ragged(7, 4)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    with torch.no_grad():
        torch.testing.assert_close(found(**inputs).logits, model.eval()(**inputs).logits)
    texts = ["the lake is deep", "a house"]
    before, after = map(AutoTokenizer.from_pretrained, (folder, converted))
    for side in ("text", "text_target"):
        assert before(**{side: texts}).input_ids == after(**{side: texts}).input_ids


def test_parameters_of_an_activation_are_converted_there_and_back(saved, tmp_path):
    model, folder = saved(layer_norm_eps=1e-5, activation_function="xielu")
    exported = export(folder, tmp_path / "exported", "marian")
    converted = convert(exported, tmp_path / "converted")
    back = convert_back(converted, tmp_path / "back")
    kinds = (model, converted), (AutoModelForSeq2SeqLM.from_pretrained(exported), back)
    for before, after in kinds:
        weights = AutoModelForSeq2SeqLM.from_pretrained(after).state_dict()
        for name, tensor in before.state_dict().items():
            assert weights[name].equal(tensor), name


@pytest.mark.parametrize(("to", "config"), [("marian", {}), ("pegasus", PRE)])
def test_a_tokenizer_that_pads_on_the_left_is_exported_to_pad_on_the_right(
    saved, tokenizer, tmp_path, monkeypatch, to, config
):
    """Otherwise padding would shift the positions of all sources of a batch but the longest."""
    monkeypatch.setattr(tokenizer, "padding_side", "left")
    model, folder = saved(**config)
    output = export(folder, tmp_path / "exported", to)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(output)
    targets = torch.tensor([[1, 5], [1, 7]])
    ours, theirs = (
        each(
            **AutoTokenizer.from_pretrained(place)(
                ["the lake is deep", "a"], padding=True, return_tensors="pt"
            ),
            decoder_input_ids=targets,
        ).logits
        for each, place in ((model.eval(), folder), (loaded, output))
    )
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


def test_the_tokenizer_is_exported_too(exported, tokenizer):
    _, folder = exported("marian")
    found = AutoTokenizer.from_pretrained(folder)
    assert found("the lake is deep").input_ids == tokenizer("the lake is deep").input_ids
