"""Log-probabilities of tokens, alignments from attention, and unknown words."""

import copy

import pytest
import torch
from conftest import small_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    ByT5Tokenizer,
    EncoderDecoderConfig,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.vocabularies import Specials, pair, with_moses
from vanilla_transformer.data.vocabularies import words as words_tokenizer
from vanilla_transformer.inference import alignment
from vanilla_transformer.inference.alignment import (
    add_alignments,
    layers_and_heads,
)
from vanilla_transformer.inference.ensemble import VanillaTransformerEnsemble
from vanilla_transformer.inference.scoring import add_token_scores, score_pairs
from vanilla_transformer.inference.translation import BLANK, Hypothesis, translate_n_best

LINES = ["a house by the lake", "", "the lake"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint).eval()


def target(tokenizer, text):
    return Hypothesis(text, token_ids=tuple(tokenizer(text_target=text)["input_ids"]))


def test_layers_and_heads_are_found_under_the_names_of_bart_t5_and_bert():
    ours = small_config()
    assert layers_and_heads(ours, "encoder") == (ours.encoder_layers, ours.encoder_attention_heads)
    assert layers_and_heads(ours, "decoder") == (ours.decoder_layers, ours.decoder_attention_heads)
    theirs = T5Config(num_layers=2, num_decoder_layers=3, num_heads=4)
    assert layers_and_heads(theirs, "encoder") == (2, 4)
    assert layers_and_heads(theirs, "decoder") == (3, 4)
    with pytest.raises(AttributeError):
        layers_and_heads(BertConfig(), "decoder")
    parts = [BertConfig(num_hidden_layers=n, num_attention_heads=2 * n) for n in (2, 3)]
    both = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    assert layers_and_heads(both, "encoder") == (2, 4)
    assert layers_and_heads(both, "decoder") == (3, 6)


def test_token_scores_add_up_to_the_score_of_the_pair(model, tokenizer):
    texts = [["ein Haus am See", "Haus"], [], ["der See"]]
    found = [[target(tokenizer, text) for text in row] or [BLANK] for row in texts]
    scored = list(add_token_scores(LINES, found, model, tokenizer))
    assert scored[1] == [BLANK]
    pairs = [(line, text) for line, row in zip(LINES, texts, strict=True) for text in row]
    expected = [score.log_probability for score in score_pairs(pairs, model, tokenizer)]
    rows = [h for row in scored for h in row if h.text]
    assert [sum(h.token_scores) for h in rows] == pytest.approx(expected, rel=1e-5)
    assert all(len(h.token_scores) == len(h.token_ids) for h in rows)


def test_the_scores_of_a_beam_are_those_of_its_tokens(model, tokenizer):
    options = {"num_beams": 3, "max_new_tokens": 7, "length_penalty": 0.0}
    found = list(translate_n_best(LINES, model, tokenizer, 3, **options))
    for row in add_token_scores(LINES, found, model, tokenizer):
        for h in row:
            assert sum(h.token_scores) == pytest.approx(h.score, abs=1e-4)


@pytest.mark.parametrize("start", [2, 9])
def test_token_scores_of_mbart_start_where_its_search_starts(tokenizer, start):
    """Its labels end with the language token that starts the decoder; a hypothesis does not."""
    torch.manual_seed(0)
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
    config = MBartConfig(
        vocab_size=len(tokenizer), encoder_ffn_dim=16, decoder_ffn_dim=16,
        decoder_start_token_id=start, **small, **heads, **ids,
    )  # fmt: skip
    mbart = MBartForConditionalGeneration(config).eval()
    options = {"num_beams": 3, "max_new_tokens": 7, "length_penalty": 0.0}
    found = list(translate_n_best(LINES, mbart, tokenizer, 3, **options))
    scored = [h for row in add_token_scores(LINES, found, mbart, tokenizer) for h in row]
    assert len(scored) == 7
    for h in scored:
        assert sum(h.token_scores) == pytest.approx(h.score or 0, abs=1e-4)


# ---------------------------------------------------------------- Alignments


@pytest.fixture(scope="module")
def words():
    """A word vocabulary: white space separates tokens."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "x", "y", "z"]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    raw = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


@pytest.fixture
def attentive(words, monkeypatch):
    """A model with attention weights that the test sets: (target, source) weights for each
    layer."""
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(words)))

    def attend(*layers):
        forward = type(model).forward

        def replaced(self, **inputs):
            outputs = forward(self, **inputs)
            given = outputs.cross_attentions
            assert given[0].shape[2:] == torch.tensor(layers[0]).shape
            outputs.cross_attentions = [
                torch.tensor(layer).expand_as(real)
                for layer, real in zip(layers, given, strict=True)
            ]
            return outputs

        monkeypatch.setattr(type(model), "forward", replaced)
        return model

    return attend


TO_FIRST = [[1.0, 0.0, 0.0, 0.0]] * 3
CROSSED = [[0.1, 0.2, 0.1, 0.6], [0.3, 0.2, 0.1, 0.4], [0.0, 0.0, 0.9, 0.1]]  # over a, b, c, </s>


def test_the_penultimate_layer_aligns_all_but_special_tokens(words, attentive):
    model = attentive(TO_FIRST, CROSSED, TO_FIRST)
    hypotheses = [Hypothesis("x y", token_ids=(7, 8, 2))]
    ((found,),) = add_alignments(["a b c"], [hypotheses], model, words)
    assert found.alignment == ((0, 1), (1, 0))
    ((last,),) = add_alignments(["a b c"], [hypotheses], model, words, layer=-1)
    assert last.alignment == ((0, 0), (0, 1))
    ((first,),) = add_alignments(["a b c"], [hypotheses], model, words, layer=-3)
    assert first == last
    assert [alignment.penultimate_layer(layers) for layers in (1, 2, 6)] == [0, 0, 4]


def test_unknown_words_are_replaced_by_the_source_words_they_are_aligned_to(words, attentive):
    model = attentive(CROSSED, CROSSED, CROSSED)
    hypotheses = [Hypothesis("y", token_ids=(3, 8, 2))]
    options = {"replace_unknown": True}
    ((found,),) = add_alignments(["a Köln c"], [hypotheses], model, words, **options)
    assert found.text == "Köln y"
    assert found.alignment == ((0, 1), (1, 0))
    later = [Hypothesis("y", token_ids=(8, 3, 2))]
    ((found,),) = add_alignments(["Köln b c"], [later], model, words, **options)
    assert (found.text, found.alignment) == ("y Köln", ((0, 1), (1, 0)))
    ((kept,),) = add_alignments(["a Köln c"], [hypotheses], model, words)
    assert kept.text == "y"
    assert kept.alignment == ((0, 0),)
    pieces = next(add_alignments(["a Köln c"], [hypotheses], model, words, unit="pieces"))
    assert pieces == [kept]


def test_an_unknown_token_that_decoding_prints_counts_as_a_word(attentive):
    """As in the tokenizers of SentencePiece models and of vocabulary files."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "x", "y", "z"]
    tokenizer = words_tokenizer(dict(zip(names, range(10), strict=True)), Specials())
    assert tokenizer.unk_token is None
    model = attentive(CROSSED, CROSSED, CROSSED)
    hypotheses = [Hypothesis("<unk> y", token_ids=(3, 8, 2))]
    found = {
        replaced: next(add_alignments(["a Köln c"], [hypotheses], model, tokenizer,
                                      replace_unknown=replaced))[0]
        for replaced in (True, False)
    }  # fmt: skip
    assert (found[True].text, found[False].text) == ("Köln y", "<unk> y")
    assert found[True].alignment == found[False].alignment == ((0, 1), (1, 0))
    pieces = next(add_alignments(["a Köln c"], [hypotheses], model, tokenizer, unit="pieces"))
    assert pieces == [found[False]]
    later = [Hypothesis("y <unk>", token_ids=(8, 3, 2))]
    options = {"replace_unknown": True}
    ((found,),) = add_alignments(["Köln b c"], [later], model, tokenizer, **options)
    assert (found.text, found.alignment) == ("y Köln", ((0, 1), (1, 0)))


def test_a_language_token_of_a_target_does_not_count_as_a_piece(words, attentive):
    """As in mBART-50 and NLLB."""
    tokenizer = copy.deepcopy(words)
    tokenizer.add_special_tokens({"additional_special_tokens": ["z"]})
    model = attentive(CROSSED, CROSSED, CROSSED)
    hypotheses = [Hypothesis("x", token_ids=(9, 7, 2))]
    for unit in alignment.UNITS:
        ((found,),) = add_alignments(["a b c"], [hypotheses], model, tokenizer, unit=unit)
        assert found.alignment == ((0, 0),)


def test_special_ids_of_the_source_vocabulary_can_be_words_of_the_target(attentive):
    sides = ["<pad> <unk> a b <s> </s>", "<pad> <s> </s> <unk> x y"]
    tokenizer = pair(*(words_tokenizer(dict(zip(side.split(), range(6), strict=True)), Specials())
                       for side in sides))  # fmt: skip
    model = attentive(CROSSED, CROSSED, CROSSED)
    hypotheses = [target(tokenizer, "x y")]
    ((found,),) = add_alignments(["a b a"], [hypotheses], model, tokenizer, unit="pieces")
    assert found.alignment == ((0, 1), (1, 0))


def test_alignments_of_words_follow_from_those_of_their_pieces(model, tokenizer):
    line, text = "a house by the lake", "ein Haus am See"
    options = {"layer": 1}
    found = {
        unit: next(add_alignments([line], [[target(tokenizer, text)]], model, tokenizer, unit=unit,
                                  **options))[0].alignment
        for unit in alignment.UNITS
    }  # fmt: skip
    encoded = tokenizer(line, return_tensors="pt")
    labels = torch.tensor([target(tokenizer, text).token_ids])
    model.set_attn_implementation("eager")
    outputs = model(**encoded, labels=labels, output_attentions=True)
    model.set_attn_implementation("sdpa")
    weights = outputs.cross_attentions[1].mean(1)[0, :, :-1]  # except </s>
    pairs = [(int(source), place) for place, source in enumerate(weights.argmax(-1)[:-1])]
    assert found["pieces"] == tuple(sorted(pairs))

    def word(ids, place):
        return len(tokenizer.decode(ids[: place + 1], skip_special_tokens=True).split()) - 1

    source_ids, target_ids = encoded["input_ids"][0], labels[0]
    expected = {(word(source_ids, s), word(target_ids, t)) for s, t in pairs}
    assert found["words"] == tuple(sorted(expected))
    assert max(t for _, t in found["words"]) == 3


def test_white_space_belongs_to_the_next_word_for_any_tokenization(tokenizer, monkeypatch):
    """The tokens of a hypothesis can differ from those of its text."""
    model = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(tokenizer)))
    found = Hypothesis("der See", token_ids=(*tokenizer.convert_tokens_to_ids([*" der See "]), 2))
    monkeypatch.setattr(alignment, "_aligned_places", lambda *_: [[0] * 4 + [1] * 6])
    assert tokenizer.tokenize("the lake") == [" the", " lake"]
    ((aligned,),) = add_alignments(["the lake"], [[found]], model, tokenizer)
    assert aligned.alignment == ((0, 0), (1, 1))


def test_alignments_start_after_decoder_start_token_id(model, tokenizer, monkeypatch):
    seen = []

    def places(model, inputs, *_):
        seen.extend(inputs["decoder_input_ids"].tolist())
        return [[0] * 3]

    monkeypatch.setattr(alignment, "_aligned_places", places)
    monkeypatch.setattr(model.generation_config, "decoder_start_token_id", 9)
    list(add_alignments(["a"], [[Hypothesis("x y", token_ids=(7, 8, 2))]], model, tokenizer))
    assert seen == [[9, 7, 8]]


def test_padding_on_the_left_changes_no_alignment(model, tokenizer, monkeypatch):
    lines = ["a house by the lake", "the lake", ""]  # the last has only special tokens
    found = [[target(tokenizer, text)] for text in ("ein Haus am See", "der See", "See")]
    expected = list(add_alignments(lines, found, model, tokenizer, unit="pieces"))
    assert expected[-1][0].alignment == ()
    monkeypatch.setattr(tokenizer, "padding_side", "left")
    assert list(add_alignments(lines, found, model, tokenizer, unit="pieces")) == expected


def test_an_ensemble_averages_attention(model, tokenizer):
    found = [[target(tokenizer, "ein Haus am See")]]
    torch.manual_seed(1)
    other = VanillaTransformerForConditionalGeneration(small_config(vocab_size=len(tokenizer)))
    weights, aligned = [], []
    for members in ([model], [other.eval()], [model, other]):
        ensemble = VanillaTransformerEnsemble(members)
        ((row,),) = add_alignments(LINES[:1], found, ensemble, tokenizer, unit="pieces")
        aligned.append(row.alignment)
    assert model.config._attn_implementation == "sdpa"
    labels = torch.tensor([found[0][0].token_ids])
    for member in (model, other):
        with alignment._eager_attention(member):
            inputs = tokenizer(LINES[:1], return_tensors="pt")
            outputs = member(**inputs, labels=labels, output_attentions=True)
        weights.append(outputs.cross_attentions[1].mean(1)[0, :-1, :-1])  # except </s>
    for found, expected in zip(aligned, (*weights, sum(weights)), strict=True):
        places = expected.argmax(-1).tolist()
        assert found == tuple(sorted((s, t) for t, s in enumerate(places)))
    assert len(set(aligned)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "letters"}, "alignments='letters': expected one of words, pieces"),
        ({"layer": 3}, "alignment_layer=3: expected -3 to 2"),
        ({"layer": -4}, "alignment_layer=-4: expected -3 to 2"),
    ],
)
def test_inputs_that_cannot_be_aligned_are_reported(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        list(add_alignments([], [], model, tokenizer, **options))


@pytest.mark.parametrize("options", [{}, {"unit": "pieces", "replace_unknown": True}])
def test_words_that_moses_splits_cannot_be_aligned(model, options):
    vocabulary = dict(zip(["<pad>", "<s>", "</s>", "<unk>", "Hello", ","], range(6), strict=True))
    tokenizer = with_moses(words_tokenizer(vocabulary, Specials()), "en", "de")
    with pytest.raises(ValueError, match="splits text as Moses does: expected 'pieces'"):
        list(add_alignments(["Hello, you"], [[]], model, tokenizer, **options))
    assert next(add_alignments(["Hello, you"], [[]], model, tokenizer, unit="pieces")) == []


def test_a_tokenizer_without_an_unknown_token_has_none_to_replace(model):
    raw = Tokenizer(models.BPE())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")
    with pytest.raises(ValueError, match="without an unknown token: expected"):
        list(add_alignments([], [], model, tokenizer, replace_unknown=True))
    assert list(add_alignments([], [], model, tokenizer)) == []


def test_a_tokenizer_without_offsets_of_its_tokens_is_refused(model):
    with pytest.raises(ValueError, match="alignments with ByT5Tokenizer: expected a fast"):
        list(add_alignments([], [], model, ByT5Tokenizer()))


@pytest.mark.parametrize("base", [object, torch.nn.Module])  # as those of CTranslate2 and ONNX
def test_an_engine_without_layers_is_refused_by_name(base, tokenizer):
    class Engine(base):
        pass

    with pytest.raises(TypeError, match="alignments with a Engine: expected a PyTorch model"):
        list(add_alignments([], [], Engine(), tokenizer))
