"""Batches of pairs, also in worker processes."""

import copy
import pickle

import pytest
import torch
from conftest import seq2seq, small_config
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.collation import PairCollator
from vanilla_transformer.training.compilation import compile_layers

PAIRS = [
    {"input_ids": [5, 6, 2], "labels": [7, 2], "length": 3},
    {"input_ids": [5, 2], "labels": [8, 9, 2], "length": 3},
]
STOCK = {
    MarianMTModel: MarianConfig,
    MBartForConditionalGeneration: MBartConfig,
    T5ForConditionalGeneration: T5Config,
    M2M100ForConditionalGeneration: M2M100Config,  # cannot create decoder_input_ids for a collator
}


def stock(kind):
    shape = small_config(vocab_size=320).to_dict()
    names = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "pad_token_id")
    sizes = {name: shape[name] for name in names}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    return kind(STOCK[kind](**sizes, **heads, decoder_start_token_id=1, num_layers=2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [None, *STOCK])
def test_a_worker_in_a_new_process_gets_everything_except_the_weights(tokenizer, kind, compiled):
    """If workers are not forked, each receives a pickled collator: on macOS, on Windows, and with
    Python 3.14. Compiled layers cannot be pickled."""
    model = seq2seq(vocab_size=320) if kind is None else stock(kind)
    if compiled:
        compile_layers(model, backend="eager")
    collate = PairCollator(tokenizer, model=model)
    without_model = len(pickle.dumps(PairCollator(tokenizer)))
    sent = pickle.dumps(collate)
    assert len(sent) < without_model + 10_000 < sum(weight.nbytes for weight in model.parameters())
    expected = collate(PAIRS)
    assert "decoder_input_ids" in expected
    for copied in (pickle.loads(sent), copy.copy(collate), copy.deepcopy(collate)):
        batch = copied(PAIRS)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert collate.model is model


def test_a_worker_gets_a_model_of_the_original_class_with_fsdp2(tokenizer):
    """FSDP2 replaces a model's class with one that no other process can import."""
    model = seq2seq(vocab_size=320)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        collate = PairCollator(tokenizer, model=model)
        copied = pickle.loads(pickle.dumps(collate))
    finally:
        distributed.destroy_process_group()
    assert type(copied.model) is VanillaTransformerForConditionalGeneration
    assert torch.equal(copied(PAIRS)["decoder_input_ids"], collate(PAIRS)["decoder_input_ids"])


def test_labels_are_padded_with_minus_100_for_any_model(tokenizer):
    """FSMT replaces this padding in place when it creates `decoder_input_ids` from labels."""
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=320, tgt_vocab_size=320, d_model=24, pad_token_id=0,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    )  # fmt: skip
    batch = PairCollator(tokenizer, model=FSMTForConditionalGeneration(config))(PAIRS)
    assert batch["labels"].tolist() == [[7, 2, -100], [8, 9, 2]]
    assert batch["decoder_input_ids"].tolist() == [[2, 7, 2], [2, 8, 9]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_are_padded_on_the_right_to_a_multiple(tokenizer, monkeypatch, side):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    model = seq2seq(vocab_size=320)
    batch = PairCollator(tokenizer, model=model, pad_to_multiple_of=4)(PAIRS)
    assert batch["labels"].tolist() == [[7, 2, -100, -100], [8, 9, 2, -100]]
    assert all(ids.shape == (2, 4) for ids in batch.values())


def test_a_collator_without_a_model_is_pickled_unchanged(tokenizer):
    collate = pickle.loads(pickle.dumps(PairCollator(tokenizer, label_pad_token_id=-1)))
    assert collate.model is None
    assert collate(PAIRS)["labels"].tolist() == [[7, 2, -1], [8, 9, 2]]
