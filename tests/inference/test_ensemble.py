"""An ensemble predicts the mean of its members' probabilities, with any decoding method."""

import shutil

import pytest
import torch
from conftest import ragged, random_ids, seq2seq, small_config
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC, Lowercase, Sequence
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, NllbTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.data.vocabularies import with_moses
from vanilla_transformer.inference.ensemble import (
    VanillaTransformerEnsemble,
    expect_same_vocabulary,
)
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.scoring import score_pairs
from vanilla_transformer.inference.translation import translate, translate_n_best
from vanilla_transformer.model.cache import CACHE_NAME
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

SOURCE = dict(zip(("input_ids", "attention_mask"), ragged(5, 9, 3), strict=True))
SEARCHES = (
    {},
    {"num_beams": 4},
    {"num_beams": 4, "num_return_sequences": 3, "use_cache": False},
    {"num_beams": 3, "length_penalty_type": "gnmt", "early_stopping": "never"},
    {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9},
    {"decoder_input_ids": torch.tensor([[0, 7, 8]] * 3), "num_beams": 2},
    {"repetition_penalty": 1.3},
)


def make(seed, **overrides):
    torch.manual_seed(seed)
    config = small_config(decoder_start_token_id=0, **overrides)
    return VanillaTransformerForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def members():
    """Models of different sizes, with different positional encodings."""
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    other = make(1, **sizes, position_encoding="learned", max_position_embeddings=40)
    return make(0), other, make(2, norm_position="pre")


def generate(model, **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "output_scores": True, **options}
    return model.generate(**SOURCE, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("copies", [1, 2])
def test_copies_of_a_model_decode_the_same_as_the_model(members, search, copies):
    ensemble = VanillaTransformerEnsemble([members[0]] * copies)
    expected, found = (generate(model, **search) for model in (members[0], ensemble))
    assert torch.equal(found.sequences, expected.sequences)
    if search.get("num_beams"):
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    else:  # a penalty depends on the sign of logits
        torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=str)
def test_prompts_of_different_lengths_are_continued_as_each_by_itself(members, search):
    prompts, mask = ragged(2, 4, 3, padding_side="left")
    ensemble = VanillaTransformerEnsemble(members)
    options = {"max_new_tokens": 6, "eos_token_id": None, **search}
    together = ensemble.generate(
        **SOURCE, decoder_input_ids=prompts, decoder_attention_mask=mask, **options
    )
    for row in range(3):
        source = {name: value[row : row + 1] for name, value in SOURCE.items()}
        alone = prompts[row : row + 1, mask[row].bool()]
        found = ensemble.generate(**source, decoder_input_ids=alone, **options)
        assert torch.equal(together[row, -6:], found[0, -6:])


def test_the_softmax_of_the_logits_is_the_mean_probability(members):
    inputs = {**SOURCE, "decoder_input_ids": random_ids(3, 6)}
    mean = sum(member(**inputs).logits.softmax(-1) for member in members) / 3
    ensemble = VanillaTransformerEnsemble(members)
    logits = ensemble(**inputs).logits
    torch.testing.assert_close(logits.softmax(-1), mean)
    cache, parts = None, []
    for ids in inputs["decoder_input_ids"].split(4, 1):
        outputs = ensemble(**SOURCE, decoder_input_ids=ids, cache=cache, use_cache=True)
        cache = outputs[CACHE_NAME]
        parts.append(outputs.logits)
    torch.testing.assert_close(torch.cat(parts, 1), logits)


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_the_cache_changes_nothing(members, search):
    """Beams are reordered in every step, and with them the caches of all members."""
    ensemble = VanillaTransformerEnsemble(members)
    found = generate(ensemble, **search)
    expected = generate(ensemble, **{**search, "use_cache": False})
    assert torch.equal(found.sequences, expected.sequences)


def test_scores_of_beams_are_mean_probabilities_step_by_step(members):
    """The scores of a beam are the log-probabilities of its tokens under the mean."""
    ensemble = VanillaTransformerEnsemble(members)
    found = generate(ensemble, num_beams=4, num_return_sequences=4, length_penalty=0.0)
    inputs = {name: value.repeat_interleave(4, 0) for name, value in SOURCE.items()}
    read, labels = found.sequences[:, :-1], found.sequences[:, 1:]
    probabilities = sum(m(**inputs, decoder_input_ids=read).logits.softmax(-1) for m in members) / 3
    chosen = probabilities.log().gather(-1, labels[..., None])[..., 0]
    is_end = labels == ensemble.config.eos_token_id
    total = chosen.masked_fill(is_end.cumsum(-1) > is_end.int(), 0).sum(-1)
    torch.testing.assert_close(found.sequences_scores, total)


@pytest.mark.parametrize("attention", [["eager", "eager"], ["eager", "sdpa"], ["sdpa", "eager"]])
def test_beams_do_not_depend_on_the_members_attention_implementation(attention):
    expected = generate(VanillaTransformerEnsemble([make(0), make(1)]), num_beams=4)
    members = [make(seed, attn_implementation=name) for seed, name in enumerate(attention)]
    found = generate(VanillaTransformerEnsemble(members), num_beams=4)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    "endless", [{"eos_token_id": None, "pad_token_id": 0}, {"suppress_tokens": [0, 2]}], ids=str
)
def test_an_output_is_at_most_50_tokens_longer_than_its_source(members, endless):
    ensemble = VanillaTransformerEnsemble([members[0]])
    found = ensemble.generate(**SOURCE, **endless, num_beams=2)
    assert (found[:, 1:] != 0).sum(1).tolist() == [55, 59, 53]


def with_hook(projection, seen):
    projection.register_forward_hook(lambda module, args, output: seen.append(output))


def with_own_forward(projection, seen):
    whole = projection.forward

    def forward(states):
        seen.append(whole(states))
        return seen[-1]

    projection.forward = forward


@pytest.mark.parametrize("change", [with_hook, with_own_forward])
def test_what_a_user_adds_to_a_member_gets_the_rows_of_all_beams_and_can_keep_them(change):
    ensemble, seen = VanillaTransformerEnsemble([make(0), make(1)]), []
    change(ensemble.members[0].get_decoder().layers[0].encoder_attn.k_proj, seen)
    ensemble.generate(**SOURCE, num_beams=4, max_new_tokens=3)
    assert [len(states) for states in seen] == [12]
    assert not any(states.is_inference() for states in seen)


def test_the_member_with_the_fewest_learned_positions_limits_the_output(members):
    sinusoids = make(0, max_position_embeddings=8)  # without EOS
    more = make(1, position_encoding="learned", max_position_embeddings=50)
    ensemble = VanillaTransformerEnsemble([sinusoids, more, members[1]])
    found = ensemble.generate(**SOURCE, eos_token_id=None)
    assert found.shape[1] == 40


def test_members_in_half_precision_are_averaged_without_loss_of_precision():
    members = [make(0), make(1).bfloat16()]
    inputs = {**SOURCE, "decoder_input_ids": random_ids(3, 6)}
    mean = sum(member(**inputs).logits.double().softmax(-1) for member in members) / 2
    for order in (members, members[::-1]):
        logits = VanillaTransformerEnsemble(order)(**inputs).logits
        torch.testing.assert_close(logits.double().softmax(-1), mean, rtol=1e-5, atol=1e-7)


def test_the_first_member_has_the_generation_config():
    first = make(0)
    first.generation_config.update(max_new_tokens=4, eos_token_id=None)
    ensemble = VanillaTransformerEnsemble([first, make(1)])
    assert ensemble.generate(**SOURCE).shape[1] == 1 + 4
    ensemble.generation_config.max_new_tokens = 5
    assert first.generation_config.max_new_tokens == 4


def test_members_keep_their_modes(members):
    VanillaTransformerEnsemble([members[0].train(), members[1].eval()])
    assert [member.training for member in members[:2]] == [True, False]


def test_members_can_have_two_vocabularies(members):
    both = [make(seed, vocab_size=50, decoder_vocab_size=33) for seed in (0, 1)]
    ensemble = VanillaTransformerEnsemble(both)
    assert generate(ensemble, num_beams=3).sequences.max() < 33


def test_members_must_share_their_vocabulary(members):
    with pytest.raises(ValueError, match="vocab_size=51 in member 1 of the ensemble: expected 50"):
        VanillaTransformerEnsemble([members[0], make(0, vocab_size=51)])
    with pytest.raises(ValueError, match="eos_token_id=3 in member 1 of the ensemble: expected 2"):
        VanillaTransformerEnsemble([members[0], make(0, eos_token_id=3)])
    with pytest.raises(ValueError, match="expected at least one model"):
        VanillaTransformerEnsemble([])


def test_members_must_be_models_of_this_package(members):
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=8,
            decoder_ffn_dim=8, pad_token_id=0, decoder_start_token_id=0,
        )
    )  # fmt: skip
    with pytest.raises(TypeError, match="member 1 of the ensemble is a MarianMTModel: expected"):
        VanillaTransformerEnsemble([members[0], marian])


@pytest.mark.parametrize(
    ("option", "value"), [("cache_implementation", "static"), ("prompt_lookup_num_tokens", 2)]
)
def test_options_that_need_a_single_model_are_refused_by_name(members, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}: expected None for an ensemble"):
        VanillaTransformerEnsemble(members).generate(**SOURCE, **{option: value})
    with pytest.raises(ValueError, match="inputs_embeds is given to an ensemble: expected a singl"):
        VanillaTransformerEnsemble(members).generate(inputs_embeds=torch.zeros(1, 3, 24))


def test_an_ensemble_cannot_be_saved(members, tmp_path):
    with pytest.raises(NotImplementedError, match="save its members"):
        VanillaTransformerEnsemble(members).save_pretrained(tmp_path)


def test_several_folders_load_as_one_model(checkpoint, tokenizer):
    loading, lines = LoadingArguments(device="cpu"), ["a house", "", "the lake is deep"]
    model, _ = loading.load(checkpoint)
    ensemble, loaded = loading.load([checkpoint, str(checkpoint)])
    assert isinstance(ensemble, VanillaTransformerEnsemble)
    for options in ({}, {"num_beams": 3}):
        options["max_new_tokens"] = 8
        expected, found = (translate(lines, m, loaded, **options) for m in (model, ensemble))
        assert list(found) == list(expected)
    pairs = [("a house", "ein Haus"), ("see", "")]
    expected, found = (list(score_pairs(pairs, m, tokenizer)) for m in (model, ensemble))
    assert [row.log_probability for row in found] == pytest.approx(
        [row.log_probability for row in expected], rel=1e-5
    )
    lists = list(translate_n_best(lines, ensemble, tokenizer, 2, num_beams=3, max_new_tokens=8))
    assert [len(hypotheses) for hypotheses in lists] == [2, 1, 2]


def test_folders_with_different_tokens_are_refused(checkpoint, tokenizer, tmp_path):
    """Though the vocabularies have the same size."""
    other = train_tokenizer(["quite another text altogether"] * 9, 300, show_progress=False)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has a different vocabulary than"):
        LoadingArguments(device="cpu").load([checkpoint, tmp_path])


@pytest.mark.parametrize("other", [("eng_Latn", "deu_Latn"), ("spa_Latn", "fra_Latn")])
def test_folders_with_different_languages_are_refused(other):
    """All would translate into the first one's."""
    pairs = ("eng_Latn", "fra_Latn"), other
    tokenizers = [NllbTokenizer(src_lang=source, tgt_lang=target) for source, target in pairs]
    with pytest.raises(ValueError, match=r"b prepares text in another way than a \(.*_lang\)"):
        expect_same_vocabulary(tokenizers, ["a", "b"])


def test_folders_that_preprocess_text_differently_are_refused(checkpoint, tmp_path):
    """All but the first would get tokens that they were not trained on, and translate worse."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = Sequence([Lowercase(), backend.normalizer])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"prepares text in another way than .* \(normalizer\)"):
        LoadingArguments(device="cpu").load([checkpoint, tmp_path])


def test_folders_that_preprocess_targets_differently_are_refused(tokenizer):
    def with_targets(normalizer):
        target = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        target.normalizer = Sequence([normalizer, target.normalizer])
        return VanillaTransformerTokenizer(
            tokenizer_object=tokenizer.backend_tokenizer, target_tokenizer_object=target
        )

    one, other = with_targets(NFC()), with_targets(Lowercase())
    expect_same_vocabulary([one, with_targets(NFC())], ["a", "b"])
    with pytest.raises(ValueError, match=r"b prepares .* than a \(target normalizer\)"):
        expect_same_vocabulary([one, other], ["a", "b"])


def test_folders_with_moses_for_different_languages_are_refused(tokenizer):
    pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    tokenizers = [with_moses(tokenizer, "en", target) for target in ("de", "fr")]
    with pytest.raises(ValueError, match=r"b prepares text in another way than a \(moses\)"):
        expect_same_vocabulary(tokenizers, ["a", "b"])


@pytest.mark.parametrize("name", ["labels", "output_attentions", "output_hidden_states"])
def test_options_for_single_models_are_reported(name):
    ensemble = VanillaTransformerEnsemble([seq2seq().eval()] * 2)
    value = random_ids(2, 3) if name == "labels" else True
    inputs = {"input_ids": random_ids(2, 4), "decoder_input_ids": random_ids(2, 3)}
    with pytest.raises(ValueError, match=f"^{name} is given to an ensemble"):
        ensemble(**inputs, **{name: value})
