"""BPE-dropout: the paper's algorithm, the same for one seed, epoch and text."""

import json
import math
from collections import Counter
from copy import deepcopy
from functools import cache
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from conftest import as_typed, small_config
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    WhisperTokenizer,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data import bpe_dropout
from vanilla_transformer.data.bpe_dropout import BPEDropout, with_bpe_dropout
from vanilla_transformer.data.parallel_text import DataArguments, tokenize_dataset
from vanilla_transformer.data.token_batches import count_tokens
from vanilla_transformer.data.tokenizer_options import TokenizerArguments
from vanilla_transformer.training.arguments import ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.defaults import TextSize
from vanilla_transformer.training.preparation import prepare, target_tokens_of_epoch
from vanilla_transformer.training.trainer import make_trainer

TEXTS = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"]


ODD_TEXTS = ["</s> <0x41> 12", "中文 😀 lakes", "<s>", "The  LAKE\n", ""]


def with_template(tokenizer, template):
    """A copy that adds different special tokens around a text."""
    copy = deepcopy(tokenizer)
    copy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return copy


@cache
def tokenizer_of(family):
    """A small tokenizer like those of other projects."""
    if family is None:
        backend = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"special_tokens": ["[UNK]"], "continuing_subword_prefix": "##"}
        trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False, **special)
        backend.train_from_iterator(TEXTS, trainer)
        new = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    else:
        languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
        empty = family(**languages if family is NllbTokenizer else {})
        new = empty.train_new_from_iterator(TEXTS * 3, 500, show_progress=False)
    new.add_tokens(["lake"])
    return new


FAMILIES = [
    GPT2Tokenizer,  # bytes, no special tokens around a text
    RobertaTokenizer,  # <s> $A </s>
    WhisperTokenizer,  # two tokens before the text
    LlamaTokenizer,  # no pre-tokenizer: a text is one word
    GemmaTokenizer,
    CLIPTokenizer,  # end_of_word_suffix
    NllbTokenizer,  # language codes: different ones for targets
    None,  # continuing_subword_prefix
]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from([*TEXTS, *ODD_TEXTS]))
def test_without_dropout_it_equals_the_tokenizer(tokenizer, text):
    assert BPEDropout(tokenizer, 0.0).encode(text) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from([*TEXTS, *ODD_TEXTS]))
def test_without_dropout_it_equals_any_bpe_tokenizer(family, text):
    tokenizer = tokenizer_of(family)
    encoder = BPEDropout(tokenizer, 0.0)
    assert encoder.encode(text) == tokenizer(text)["input_ids"]
    assert encoder.encode(text, as_target=True) == tokenizer(text_target=text)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_and_added_tokens_are_never_split(family):
    tokenizer = tokenizer_of(family)
    added = tokenizer.added_tokens_decoder
    own = tokenizer("the lake is deep")["input_ids"]
    ids = BPEDropout(tokenizer, 1.0).encode("the lake is deep")
    assert len(ids) > len(own)
    assert [token for token in ids if token in added] == [token for token in own if token in added]
    assert tokenizer.convert_ids_to_tokens(ids).count("lake") == 1


def test_the_text_is_placed_between_the_special_tokens(tokenizer):
    """A checkpoint's tokenizer can have special tokens before a text too, as in `<s> $A </s>`."""
    tokenizer = with_template(tokenizer, "<s> $A </s>")
    ids = BPEDropout(tokenizer, 1.0).encode("the lake")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *" the lake", "</s>"]


def test_sources_and_targets_have_their_own_language_codes():
    tokenizer = tokenizer_of(NllbTokenizer)
    pairs = Dataset.from_list([{"source": "the deep", "target": "der See"}])
    example = with_bpe_dropout(pairs, None, BPEDropout(tokenizer, 1.0))[0]
    tokens = {side: tokenizer.convert_ids_to_tokens(ids) for side, ids in example.items()}
    assert tokens["input_ids"] == ["eng_Latn", *"▁the▁deep", "</s>"]
    assert tokens["labels"] == ["deu_Latn", *"▁der▁See", "</s>"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_length", [0, 1, 2, 3, 4, 100])
def test_longer_texts_are_truncated_as_by_the_tokenizer(tokenizer, side, max_length):
    """Also to fewer tokens than there are special tokens, which are all kept."""
    tokenizer = with_template(tokenizer, "<s> $A </s>")
    tokenizer.truncation_side = side
    for text in [*TEXTS, *ODD_TEXTS]:
        expected = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        assert BPEDropout(tokenizer, 0.0).encode(text, max_length=max_length) == expected
        ids = BPEDropout(tokenizer, 0.5).encode(text, max_length=max_length)
        assert (ids[0], ids[-1]) == (1, 2)
        assert len(ids) <= max_length or max_length < 2


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), epoch=st.integers(0, 99))
def test_different_segmentations_decode_to_the_same_text(tokenizer, text, epoch):
    ids = BPEDropout(tokenizer, 0.5).encode(text, epoch)
    expected = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def test_with_dropout_1_every_character_is_a_token(tokenizer):
    ids = BPEDropout(tokenizer, 1.0).encode("the lake")
    assert tokenizer.convert_ids_to_tokens(ids) == [*" the lake", "</s>"]


def exact_distribution(tokens, merges, dropout):
    """Algorithm 1 of the paper, by enumeration: each merge is available with probability 1 -
    dropout, and the first by rank, then by position, is applied, until there is none."""
    places = sorted(
        (merges.index((left, right)), place)
        for place, (left, right) in enumerate(pairwise(tokens))
        if (left, right) in merges
    )
    result = Counter({tokens: dropout ** len(places)})
    for dropped, (_, place) in enumerate(places):
        merged = (*tokens[:place], tokens[place] + tokens[place + 1], *tokens[place + 2 :])
        for outcome, share in exact_distribution(merged, merges, dropout).items():
            result[outcome] += share * (1 - dropout) * dropout**dropped
    return result


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_segmentations_have_the_probabilities_of_the_papers_algorithm(tokenizer, dropout):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    expected = exact_distribution(tuple(" lake"), merges, dropout)
    assert len(expected) > 3
    encoder, trials = BPEDropout(tokenizer, dropout), 10_000
    found = Counter(
        tuple(tokenizer.convert_ids_to_tokens(encoder.encode("lake", epoch)[:-1]))
        for epoch in range(trials)
    )
    assert found.keys() <= expected.keys()
    for tokens, share in expected.items():
        deviation = (share * (1 - share) / trials) ** 0.5
        assert found[tokens] / trials == pytest.approx(share, abs=4 * deviation), tokens


def test_segmentation_depends_on_seed_epoch_and_text(tokenizer):
    text = " ".join(TEXTS)
    encoder = BPEDropout(tokenizer, 0.3, seed=1)
    again = BPEDropout(tokenizer, 0.3, seed=1)
    assert encoder.encode(text, 5) == again.encode(text, 5)
    assert encoder.encode(text, 5) != encoder.encode(text, 6)
    assert encoder.encode(text, 5) != BPEDropout(tokenizer, 0.3, seed=2).encode(text, 5)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_dropout_must_be_a_probability(tokenizer, dropout):
    message = f"bpe_dropout={dropout}: expected a probability"
    with pytest.raises(ValueError, match=message):
        BPEDropout(tokenizer, dropout)
    with pytest.raises(ValueError, match=message):
        DataArguments(dataset_name="phrases", bpe_dropout=dropout)


MERGES = {"vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [("a", "b")]}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (models.WordLevel({"a": 0}, unk_token="a"), "WordLevel"),
        (models.BPE(**MERGES, ignore_merges=True), "BPE with ignore_merges=True"),
        (models.BPE(**MERGES, dropout=0.1), "BPE with dropout=0.1"),
    ],
)
def test_other_tokenizers_are_refused(model, kind):
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    message = f"expected a plain BPE tokenizer, not this {kind}"
    with pytest.raises(ValueError, match=message):
        BPEDropout(other, 0.1)


def test_each_of_two_vocabularies_has_its_own_merges():
    pairs = Dataset.from_dict({"source": TEXTS[::2], "target": TEXTS[1::2]})
    tokenizer = TokenizerArguments(vocab_size=330, separate_vocabularies=True).train(pairs)
    encoder = BPEDropout(tokenizer, 0.5)
    for side, as_target in (("source", False), ("target", True)):
        found = {tuple(encoder.encode(pairs[side][0], n, as_target=as_target)) for n in range(9)}
        assert len(found) > 1
        assert {tokenizer.decode(ids, True, not as_target) for ids in found} == {pairs[side][0]}


def test_a_tokenizer_of_characters_has_no_merges_to_skip():
    pairs = Dataset.from_dict({"source": TEXTS[::2], "target": TEXTS[1::2]})
    characters = TokenizerArguments(tokenizer_type="char").train(pairs)
    with pytest.raises(ValueError, match="expected a BPE tokenizer with merges to skip"):
        BPEDropout(characters, 0.1)
    one_side = TokenizerArguments(separate_vocabularies=True, target_tokenizer_type="char")
    encoder = BPEDropout(one_side.train(pairs), 0.5)
    text = TEXTS[0]
    assert len({tuple(encoder.encode(text, n)) for n in range(9)}) > 1
    assert len({tuple(encoder.encode(text, n, as_target=True)) for n in range(9)}) == 1


def test_a_word_vocabulary_as_target_is_refused():
    pairs = Dataset.from_dict({"source": TEXTS[::2], "target": TEXTS[1::2]})
    options = TokenizerArguments(separate_vocabularies=True, target_tokenizer_type="word")
    with pytest.raises(ValueError, match="expected a plain BPE tokenizer, not this WordLevel"):
        BPEDropout(options.train(pairs), 0.1)


def test_a_token_with_several_merges_is_spelled_in_characters():
    """A SentencePiece vocabulary has a merge for each pair that forms a token, even if a part is
    not the result of a merge: here "bc"."""
    vocab = {token: number for number, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [("a", "bc"), ("a", "b"), ("ab", "c")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, merges)))
    for dropout, tokens in ((0.0, ["abc"]), (1.0, ["a", "b", "c"])):
        ids = BPEDropout(tokenizer, dropout).encode("abc")
        assert tokenizer.convert_ids_to_tokens(ids) == tokens


def test_equal_merges_are_applied_from_the_left():
    vocab = {"a": 0, "aa": 1}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [("a", "a")])))
    assert BPEDropout(tokenizer, 0.0).encode("aaaaa") == [1, 1, 0]


def test_the_tokenizer_that_training_saves_is_unchanged(tokenizer):
    tokenizer("the lake")  # without truncation
    before = tokenizer.backend_tokenizer.to_str()
    BPEDropout(tokenizer, 0.1)
    assert tokenizer.backend_tokenizer.to_str() == before


class TaggingTokenizer(PreTrainedTokenizerFast):
    """Adds a token outside the pipeline of `tokenizers`."""

    def _encode_plus(self, *args, **kwargs):
        encoded = super()._encode_plus(*args, **kwargs)
        encoded["input_ids"] = [0, *encoded["input_ids"]]
        return encoded


def test_a_tokenizer_that_cannot_be_reproduced_is_refused(tokenizer):
    tagging = TaggingTokenizer(tokenizer_object=Tokenizer(models.BPE(**MERGES)))
    for other in (tagging, with_template(tokenizer, "$A </s> $A")):
        message = f"bpe_dropout: without dropout .* differ from those of {type(other).__name__}"
        with pytest.raises(ValueError, match=message):
            BPEDropout(other, 0.1)


# ---------------------------------------------------------------- in training


@pytest.fixture
def pairs():
    rows = [{"source": text, "target": other} for text in TEXTS for other in TEXTS]
    return Dataset.from_list(rows)


@pytest.fixture
def encoded(tokenizer, pairs):
    data = DatasetDict({"train": pairs})
    tokenized = tokenize_dataset(data, tokenizer, DataArguments(dataset_name="phrases"))["train"]
    return with_bpe_dropout(pairs, tokenized, BPEDropout(tokenizer, 0.3, seed=3), None, 6)


def test_a_data_set_has_different_tokens_in_each_epoch_for_the_same_text(tokenizer, pairs, encoded):
    epochs = []
    for epoch in (0, 1, 0):
        encoded.set_epoch(epoch)
        epochs.append([encoded[row] for row in range(len(encoded))])
    assert epochs[0] == epochs[2] != epochs[1]
    for pair, example in zip(pairs, epochs[1], strict=True):
        assert tokenizer.decode(example["input_ids"], skip_special_tokens=True) == pair["source"]
        assert len(example["labels"]) <= 6


@pytest.mark.parametrize(("sample", "step"), [(1000, 1), (5, 4)])
def test_lengths_are_those_without_dropout_times_their_mean_growth(
    encoded, monkeypatch, sample, step
):
    """So that batches hold `max_tokens` although texts become longer."""
    monkeypatch.setattr(bpe_dropout, "SAMPLE", sample)
    rows = encoded.__getitems__(list(range(0, len(encoded), step)))
    for side, growth, counted in zip(
        ("input_ids", "labels"), encoded.growth, count_tokens(encoded), strict=True
    ):
        plain = [len(ids) for ids in encoded.tokenized[side]]
        longer = sum(len(row[side]) for row in rows) / sum(plain[::step])
        assert growth == pytest.approx(longer)
        assert growth > 1.05 or side == "labels"  # which are truncated at 6
        assert counted.tolist() == [math.ceil(length * growth) for length in plain]


@pytest.mark.parametrize("oversized", ["alone", "drop"])
def test_target_tokens_of_an_epoch_are_counted_with_dropout(tokenizer, pairs, encoded, oversized):
    lengths = np.maximum(*count_tokens(encoded))
    budget = {"max_tokens": int(lengths.max()) - 1, "oversized": oversized}
    arguments = TranslationTrainingArguments("out", **budget, use_cpu=True)
    kept = (lengths <= arguments.max_tokens) | (oversized == "alone")
    assert kept.all() == (oversized == "alone")
    seen = 0
    for epoch in range(20):
        encoded.set_epoch(epoch)
        seen += sum(len(encoded[int(row)]["labels"]) for row in kept.nonzero()[0]) / 20
    size = TextSize.of(encoded.tokenized)
    assert target_tokens_of_epoch(encoded, size, arguments) == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize("streaming", [False, True])
def test_no_text_becomes_longer_than_the_models_table_of_positions(
    tmp_path, monkeypatch, streaming
):
    """Otherwise training would end in any epoch with an error. Without dropout, all texts fit."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "text").write_text("a house by the lake\n" * 9)
    files = dict.fromkeys(("train_source", "train_target"), str(tmp_path / "text"))
    shape = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    prepared = prepare(
        ModelArguments(
            config_overrides={**shape, "position_encoding": "learned", "max_position_embeddings": 6}
        ),
        DataArguments(**files, bpe_dropout=1.0, max_target_length=4, streaming=streaming),
        TranslationTrainingArguments(
            str(tmp_path / "out"), use_cpu=True, max_steps=1, report_to="none"
        ),
    )
    lengths = {(len(row["input_ids"]), len(row["labels"])) for row in prepared.splits["train"]}
    assert lengths == {(6, 4)}


def test_a_stream_gives_the_same_tokens(pairs, encoded):
    stream = with_bpe_dropout(pairs.to_iterable_dataset(), None, encoded.encoder, None, 6)
    for epoch in (0, 4):
        encoded.set_epoch(epoch)
        stream.set_epoch(epoch)
        assert stream.pairs.epoch == epoch  # which determines how it shuffles
        assert list(stream) == [encoded[row] for row in range(len(encoded))]


def trainer_for(folder, tokenizer, dataset, dropout=0.1, **options):
    torch.manual_seed(0)
    config = small_config(vocab_size=len(tokenizer), dropout=dropout)
    model = VanillaTransformerForConditionalGeneration(config)
    arguments = TranslationTrainingArguments(
        output_dir=as_typed(folder),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": 7, "save_strategy": "steps", "save_steps": 5, **options},
    )
    return make_trainer(model, tokenizer, arguments, {"train": dataset})


def test_the_log_says_that_batches_are_larger_than_by_mean_lengths(
    tokenizer, encoded, tmp_path, caplog
):
    """And that they have more padding."""
    caplog.set_level("INFO", "vanilla_transformer")
    logged = []
    for dataset in (encoded, encoded.tokenized):
        trainer = trainer_for(tmp_path, tokenizer, dataset, max_tokens=40)
        batches = list(trainer.get_train_dataloader())
        logged.append(caplog.messages[-1])
        largest = max(side.numel() for batch in batches for side in batch.values())
        assert (largest > 40) == (dataset is encoded)
    note = " (more of both, as BPE-dropout varies lengths)"
    assert note in logged[0]
    assert note not in logged[1]


@pytest.mark.parametrize("batches", ["max_tokens", "per_device_train_batch_size"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_ends_in_the_same_weights(
    tokenizer, pairs, encoded, tmp_path, batches, workers, streaming
):
    """There are 16 pairs in batches of four: step 5 is the first of the second epoch."""
    size = {"max_tokens": 40, "per_device_train_batch_size": 4}[batches]
    options = {batches: size, "dataloader_num_workers": workers}
    data = encoded
    if streaming:
        data = with_bpe_dropout(pairs.to_iterable_dataset(), None, encoded.encoder)
    whole = trainer_for(tmp_path, tokenizer, data, **options)
    whole.train()
    again = trainer_for(tmp_path, tokenizer, data, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for (name, weight), (_, other) in zip(
        whole.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(weight, other), name


def test_data_loader_workers_get_the_epoch_even_if_persistent(tokenizer, encoded, tmp_path):
    weights = []
    for options in (
        {"dataloader_num_workers": 0},
        {"dataloader_num_workers": 1},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ):
        options = {"max_tokens": 40, "dropout": 0.0, "save_strategy": "no", **options}
        trainer = trainer_for(tmp_path, tokenizer, encoded, **options)
        trainer.train()
        weights.append(torch.cat([weight.flatten() for weight in trainer.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
