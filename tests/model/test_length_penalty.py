"""Beam search ranks by the penalties' formulas, and at full width it finds what enumeration
finds."""

import itertools

import pytest
import torch
from conftest import random_ids, small_config
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from vanilla_transformer import VanillaTransformerForConditionalGeneration

VOCABULARY, LONGEST, ALL_BEAMS = 6, 3, 160
PAD, BOS, EOS = 0, 1, 2
PENALTIES = {
    "power": lambda length, alpha: length**alpha,
    "gnmt": lambda length, alpha: ((5 + length) / (5 + 1)) ** alpha,
    "avg": lambda length, alpha: (length + 1) ** alpha,  # the start token counts
    "wu": lambda length, alpha: ((5 + length + 1) / 6) ** alpha,
}


def tiny(seed):
    """A model of six tokens with confident predictions, so that penalties sometimes decide."""
    torch.manual_seed(seed)
    config = small_config(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer="tensor2tensor",
    )
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.shared.weight.mul_(2)
    return model


@torch.no_grad()
def enumerate_targets(model, source):
    """All targets that end with </s>, or at the limit, and their log-probabilities."""
    tokens = [token for token in range(VOCABULARY) if token != EOS]
    targets = [
        (*prefix, last)
        for length in range(1, LONGEST + 1)
        for prefix in itertools.product(tokens, repeat=length - 1)
        for last in ((EOS,) if length < LONGEST else (EOS, *tokens))
    ]
    padded = torch.tensor([target + (EOS,) * (LONGEST - len(target)) for target in targets])
    inputs = torch.cat([torch.full_like(padded[:, :1], BOS), padded[:, :-1]], dim=1)
    logits = model(source.expand(len(targets), -1), decoder_input_ids=inputs).logits.double()
    scores = logits.log_softmax(-1).gather(-1, padded[..., None])[..., 0]
    lengths = torch.tensor([len(target) for target in targets])
    scores = scores.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 0).sum(-1)
    return targets, scores, lengths


def search(model, source, **options):
    outputs = model.generate(
        source,
        do_sample=False,
        max_new_tokens=LONGEST,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return outputs.sequences[:, 1:], outputs.sequences_scores


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
def test_a_beam_of_full_width_finds_the_best_of_all_targets(kind, alpha):
    for seed in range(4):
        model, source = tiny(seed), random_ids(1, 5, VOCABULARY, seed)
        targets, log_probabilities, lengths = enumerate_targets(model, source)
        scores = log_probabilities / PENALTIES[kind](lengths, alpha)
        best = int(scores.argmax())
        found, score = search(
            model,
            source,
            num_beams=ALL_BEAMS,
            early_stopping="never",
            length_penalty=alpha,
            length_penalty_type=kind,
        )
        assert tuple(found[0, : lengths[best]].tolist()) == targets[best]
        torch.testing.assert_close(score[0].double(), scores[best], atol=1e-5, rtol=1e-5)


def test_the_penalties_choose_different_targets():
    choices = set()
    for seed in range(12):
        model, source = tiny(seed), random_ids(1, 5, VOCABULARY, seed)
        options = {"num_beams": 8, "early_stopping": "never", "length_penalty": 3.0}
        found = {
            kind: tuple(search(model, source, length_penalty_type=kind, **options)[0][0].tolist())
            for kind in PENALTIES
        }
        choices.add(found["power"] == found["gnmt"])
    assert choices == {True, False}


def test_an_n_best_list_has_scores_in_descending_order():
    model, source = tiny(1), random_ids(1, 5, VOCABULARY)
    _, log_probabilities, lengths = enumerate_targets(model, source)
    scores = (log_probabilities / PENALTIES["gnmt"](lengths, 0.6)).sort(descending=True).values
    _, found = search(
        model,
        source,
        num_beams=ALL_BEAMS,
        num_return_sequences=10,
        early_stopping="never",
        length_penalty=0.6,
        length_penalty_type="gnmt",
    )
    torch.testing.assert_close(found.double(), scores[:10], atol=1e-5, rtol=1e-5)


def test_the_penalty_type_is_saved_with_the_model_and_a_call_overrides_it(tmp_path):
    model, source = tiny(1), random_ids(1, 5, VOCABULARY)
    options = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"}
    expected = {
        kind: search(model, source, length_penalty_type=kind, **options)[1] for kind in PENALTIES
    }
    assert expected["gnmt"] != expected["power"]
    assert search(model, source, **options)[1] == expected["power"]
    model.generation_config.length_penalty_type = "gnmt"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert loaded.generation_config.length_penalty_type == "gnmt"
    assert search(loaded, source, **options)[1] == expected["gnmt"]
    assert search(loaded, source, length_penalty_type="power", **options)[1] == expected["power"]
    given = GenerationConfig(length_penalty_type="power", **options)
    assert search(loaded, source, generation_config=given)[1] == expected["power"]
    given = GenerationConfig(length_penalty_type="gnmt", **options)
    assert search(model, source, generation_config=given)[1] == expected["gnmt"]
    loaded.save_pretrained(tmp_path / "again")  # arguments of a call are not kept
    assert loaded.generation_config.length_penalty_type == "gnmt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"length_penalty_type": "mean"},
            "length_penalty_type='mean': expected one of power, gnmt, avg, wu",
        ),
        (
            {"length_penalty_type": "gnmt", "length_penalty": -0.5},
            "length_penalty=-0.5 with length_penalty_type='gnmt': expected a number from 0",
        ),
        (
            {"length_penalty_type": "gnmt", "length_penalty": float("nan")},
            "length_penalty=nan: expected a finite number",
        ),
    ],
)
def test_an_invalid_penalty_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(0).generate(random_ids(1, 3, VOCABULARY), num_beams=2, **options)
