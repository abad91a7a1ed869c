"""Positions, embeddings and the page with attention weights."""

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
from conftest import seq2seq
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.analysis.attention import attention_maps, attention_page
from vanilla_transformer.analysis.embeddings import (
    analyze_embeddings,
    nearest_tokens,
    vocabulary_of,
)
from vanilla_transformer.analysis.heads import analyze_heads
from vanilla_transformer.analysis.positions import (
    attention_reach,
    position_encodings,
    position_similarities,
)
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.data.vocabularies import Specials, words
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.plotting import (
    KINDS,
    AttentionMaps,
    plot_heads,
    plot_norms,
    plot_similarities,
)

PAIRS = [("a house by the lake", "ein Haus am See"), ("deep", "tief"), ("the lake", "der See")]


@pytest.fixture(scope="module")
def translator(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(checkpoint)


# ---------------------------------------------------------------- Positions


def test_the_similarity_of_sinusoids_only_depends_on_their_distance(translator):
    encodings = position_encodings(translator[0].model.encoder.embed_positions, 30)
    similarities = position_similarities(encodings)
    frequencies = 10000 ** (-torch.arange(0, 24, 2) / 24)
    for distance in (0, 1, 7):
        expected = (distance * frequencies).cos().mean()
        torch.testing.assert_close(
            similarities.diagonal(distance), expected.expand(30 - distance), atol=1e-5, rtol=0
        )
    axes, _ = plot_similarities(similarities, "sinusoidal").axes
    assert torch.equal(torch.tensor(axes.images[0].get_array()), similarities)


def test_attention_reach_is_measured_over_the_tokens_of_each_sentence(translator):
    model, tokenizer = translator
    reach = attention_reach(PAIRS, model, tokenizer)
    assert list(reach) == ["distance", "previous", "same", "next"]
    assert all(set(kinds) == {"encoder", "decoder"} for kinds in reach.values())
    for kind, layer, head in product(("encoder", "decoder"), (0, 1), range(2)):
        distances, offsets = [], []
        for source, target in PAIRS:
            inputs = tokenizer(source, text_target=target, return_tensors="pt")
            outputs = model(**inputs, output_attentions=True)
            weights = outputs[f"{kind}_attentions"][layer][0, head]
            for query, row in enumerate(weights.tolist()):
                distances.append(sum(abs(key - query) * value for key, value in enumerate(row)))
                offsets.append(max(range(len(row)), key=row.__getitem__) - query)
        of_head = {name: kinds[kind][layer, head].item() for name, kinds in reach.items()}
        assert of_head["distance"] == pytest.approx(sum(distances) / len(distances))
        for name, offset in (("previous", -1), ("same", 0), ("next", 1)):
            assert of_head[name] == pytest.approx(offsets.count(offset) / len(offsets))
    assert not reach["next"]["decoder"].any()
    alone = attention_reach(PAIRS, model, tokenizer, max_tokens=1)
    torch.testing.assert_close(alone, reach)


@pytest.mark.parametrize("measure", [attention_reach, analyze_heads, attention_maps])
def test_a_model_that_trains_is_measured_without_dropout_and_trains_on_with_it(translator, measure):
    model, tokenizer = translator
    text = (model, tokenizer, "the lake", "der See")
    arguments = text if measure is attention_maps else (PAIRS, model, tokenizer)

    def numbers():
        found = measure(*arguments)
        return getattr(found, "weights", found)

    expected = numbers()
    modes = [module.training for module in model.train().modules()]
    try:
        torch.testing.assert_close(numbers(), expected)
        assert [module.training for module in model.modules()] == modes
        interrupted = patch.object(model, "forward", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            numbers()
        assert [module.training for module in model.modules()] == modes
    finally:
        model.eval()


def test_encodings_of_positions_can_take_part_in_a_training(translator):
    encodings = position_encodings(translator[0].model.encoder.embed_positions, 5)
    weight = torch.ones(24, requires_grad=True)
    (encodings * weight).sum().backward()
    torch.testing.assert_close(weight.grad, encodings.sum(0))


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_encodings_are_on_the_cpu_whatever_the_default_device(position_encoding):
    positions = seq2seq(position_encoding=position_encoding).model.encoder.embed_positions
    expected = position_encodings(positions, 5)
    with torch.device("meta"):
        torch.testing.assert_close(position_encodings(positions, 5), expected)


def test_heads_are_drawn_by_layer(translator):
    reach = attention_reach(PAIRS, *translator)["distance"]
    encoder, decoder, bar = plot_heads(reach, "How far", "tokens").axes
    assert encoder.images[0].get_array().shape == (2, 2)
    assert decoder.images[0].get_array().shape == (3, 4)
    assert encoder.images[0].get_clim() == decoder.images[0].get_clim()
    assert [label.get_text() for label in decoder.get_xticklabels()] == ["1", "2", "3", "4"]
    assert bar.get_ylabel() == "tokens"


# ---------------------------------------------------------------- Embeddings


@pytest.mark.parametrize("scale_embedding", [True, False])
def test_the_embedding_scale_determines_the_share_of_position_in_the_input(scale_embedding):
    model = seq2seq(scale_embedding=scale_embedding)
    report = analyze_embeddings(model.model.encoder, 40)
    weight = model.model.encoder.embed_tokens.weight.detach()
    torch.testing.assert_close(report.norms, weight.norm(dim=1))
    assert report.position_norm == pytest.approx(math.sqrt(24 / 2))  # sin^2 + cos^2 of 12 pairs
    assert report.scale == (math.sqrt(24) if scale_embedding else 1.0)
    assert report.scales == {"1": 1.0, "sqrt(d_model)": math.sqrt(24)}
    for scale in report.scales.values():
        squared = (scale * weight).square().sum(1).mean().item()
        assert report.norm(scale) ** 2 == pytest.approx(squared)
        assert report.position_share(scale) == pytest.approx(12 / (12 + squared))
    axes = plot_norms(report.norms, report.scales, report.position_norm).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "embedding * 1", "embedding * sqrt(d_model)", "position",
    ]  # fmt: skip


def test_neighbours_are_the_most_similar_tokens(translator):
    vocabulary = vocabulary_of(translator[1], "encoder")
    lake, see = (vocabulary.encode(word, add_special_tokens=False) for word in ("lake", "See"))
    matrix = torch.eye(vocabulary.get_vocab_size() + 1)
    matrix[see.ids[0]] = matrix[lake.ids[0]] + 0.5 * matrix[see.ids[0]]
    matrix[-1] = matrix[lake.ids[0]]  # a row without a token
    (neighbours,) = nearest_tokens(matrix, vocabulary, ["lake"], 2).values()
    assert neighbours[0] == (see.tokens[0], pytest.approx(1 / 1.25**0.5))
    assert len(neighbours) == 2
    (others,) = nearest_tokens(matrix, vocabulary, ["lake"], 1000).values()
    assert {"lake", None}.isdisjoint(token for token, _ in others)
    assert len(others) == vocabulary.get_vocab_size() - 1


def test_each_stack_has_its_own_vocabulary(tokenizer):
    sides = [train_tokenizer([text] * 3, 300, show_progress=False) for text in ("lake", "See")]
    both = VanillaTransformerTokenizer(
        tokenizer_object=sides[0].backend_tokenizer,
        target_tokenizer_object=sides[1].backend_tokenizer,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
    )
    for stack, word in (("encoder", "lake"), ("decoder", "See")):
        encoded = vocabulary_of(both, stack).encode(word, add_special_tokens=False)
        assert len(encoded) == 1
        assert vocabulary_of(tokenizer, stack) is tokenizer.backend_tokenizer


@pytest.mark.parametrize(
    "options", [{"padding": "max_length", "max_length": 9}, {"truncation": True, "max_length": 1}]
)
def test_the_last_call_of_the_tokenizer_changes_no_neighbours(translator, options):
    model, tokenizer = translator
    matrix, words = model.lm_head.weight, ["lake", "lakes"]
    expected = nearest_tokens(matrix, tokenizer.backend_tokenizer, words[:1])
    tokenizer("the lake is deep", **options)
    try:
        assert nearest_tokens(matrix, tokenizer.backend_tokenizer, words[:1]) == expected
        with pytest.raises(ValueError, match="tokens='lakes': expected one token"):
            nearest_tokens(matrix, tokenizer.backend_tokenizer, words)
    finally:
        tokenizer("")


def test_a_single_string_is_not_several_words(translator):
    model, tokenizer = translator
    with pytest.raises(TypeError, match=r"^tokens='lake': expected an iterable of strings"):
        nearest_tokens(model.lm_head.weight, tokenizer.backend_tokenizer, "lake")


def test_neighbours_are_only_found_for_single_tokens(translator):
    message = "tokens='lakehouse': expected one token of the vocabulary, but it consists of ' lake'"
    with pytest.raises(ValueError, match=message):
        nearest_tokens(torch.eye(300), vocabulary_of(translator[1], "encoder"), ["lakehouse"])


def test_a_token_inside_a_text_without_spaces_has_neighbours():
    texts = ["我吃苹果", "他买苹果", "你要苹果"] * 3
    vocabulary = train_tokenizer(texts, 280, show_progress=False).backend_tokenizer
    assert vocabulary.encode("苹果", add_special_tokens=False).tokens == [" ", "苹果"]
    row = vocabulary.token_to_id("苹果")
    matrix = torch.eye(vocabulary.get_vocab_size())
    matrix[5] = matrix[row] + 0.1 * matrix[5]
    assert nearest_tokens(matrix, vocabulary, ["苹果"], 1)["苹果"][0][0] == "<0x01>"


def test_a_word_is_looked_up_as_a_token_at_the_start_of_a_text_first():
    vocabulary = train_tokenizer(["a b"] * 3, 270, show_progress=False).backend_tokenizer
    start, inside = map(vocabulary.token_to_id, (" a", "a"))
    matrix = torch.eye(vocabulary.get_vocab_size())
    matrix[5] = matrix[start] + 0.1 * matrix[5]
    matrix[6] = matrix[inside] + 0.1 * matrix[6]
    assert nearest_tokens(matrix, vocabulary, ["a"], 1)["a"][0][0] == vocabulary.id_to_token(5)


@pytest.mark.parametrize("word", ["boat", "See"])
def test_a_word_missing_from_the_model_has_no_neighbours(word):
    """Neither a word missing from the vocabulary, nor one beyond the rows of the matrix."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "lake", "See"]
    vocabulary = words({name: i for i, name in enumerate(names)}, Specials()).backend_tokenizer
    matrix = torch.eye(5)
    message = f"tokens='{word}': expected one token of the vocabulary, but it consists of '<unk>'"
    with pytest.raises(ValueError, match=message):
        nearest_tokens(matrix, vocabulary, [word])
    assert list(nearest_tokens(matrix, vocabulary, ["lake", "<unk>"])) == ["lake", "<unk>"]


# ---------------------------------------------------------------- Attention


@pytest.mark.parametrize("view", ["head", "model"])
def test_the_page_has_the_weights_of_each_kind_of_attention(translator, view):
    pytest.importorskip("bertviz")
    pytest.importorskip("IPython")
    maps = [attention_maps(*translator, "the lake is", "See ist", kind) for kind in KINDS]
    page = attention_page(maps, view)
    for title in (
        "Self-attention of the encoder",
        "Self-attention of the decoder",
        "Attention from decoder to encoder",
    ):
        assert f"<h2>{title}</h2>" in page
    for one in maps:
        assert str(one.weights[0, 0, 0, 0].item()) in page
    assert r'"left_text": ["See", "is", "t", "\u003c/s>"]' in page
    assert r'"right_text": ["the", "lake", "is", "\u003c/s>"]' in page


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_cannot_add_a_script_to_the_page(kind):
    pytest.importorskip("bertviz")
    pytest.importorskip("IPython")
    tokens = ["</script><script>alert(1)</script>", "<!--"]
    maps = AttentionMaps(torch.full((1, 1, 2, 2), 0.5), tokens, tokens, kind)
    page = attention_page([maps])
    assert page.count("alert(1)") > 1
    assert "<script>alert" not in page
    assert "<!--" not in page


def test_a_page_requires_bertviz_and_a_known_view(translator, monkeypatch):
    maps = [attention_maps(*translator, "the lake", "See")]
    with pytest.raises(ValueError, match="view='neuron': expected one of head, model"):
        attention_page(maps, "neuron")
    monkeypatch.setattr("vanilla_transformer.analysis.attention.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package bertviz; .*\[analysis\]"):
        attention_page(maps)
