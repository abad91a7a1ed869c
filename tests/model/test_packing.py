"""Attention implementations that keep packed rows apart compute the same as with padded rows,
without the padding.

GPU kernels are not available everywhere: `flash` replaces the kernels behind transformers' flash
attention with a row-by-row implementation, and leaves everything else as it is.
"""

import pytest
import torch
from conftest import random_ids, small_config, watch
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils import is_flash_attn_2_available

from vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model import packing
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerStack

EXACT = {"atol": 1e-5, "rtol": 1e-4}
NO_DROPOUT = {"dropout": 0.0, "label_smoothing": 0.1, "head_dim": 8}


def attend_to_rows(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=1.0,
    causal=False,
):
    """What flash attention's function for rows of any length computes: (tokens, heads, dim)."""
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    rows = []
    for (start, end), (first, last) in zip(
        cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True
    ):
        query, key, value = (
            states.transpose(0, 1) for states in (q[start:end], k[first:last], v[first:last])
        )
        scores = query @ key.transpose(1, 2) * softmax_scale
        if causal:  # the last query attends to the last key
            later = torch.ones(scores.shape[1:], dtype=torch.bool)
            scores = scores.masked_fill(later.triu(1 + last - first - end + start), -torch.inf)
        rows.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(rows)


def attend_to_batch(q, k, v, **options):
    """Likewise for rows of one length: (batch, length, heads, dim)."""
    lengths = {}
    for name, states in (("q", q), ("k", k)):
        batch, length = states.shape[:2]
        lengths[f"cu_seqlens_{name}"] = torch.arange(batch + 1) * length
        lengths[f"max_seqlen_{name}"] = length
    flat = (states.flatten(0, 1) for states in (q, k, v))
    return attend_to_rows(*flat, **lengths, **options).unflatten(0, q.shape[:2])


@pytest.fixture
def flash(monkeypatch):
    kernels = (
        attend_to_batch,
        attend_to_rows,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    options = flash_utils._lazy_define_process_function(attend_to_rows)
    if hasattr(flash_utils, "_process_with_kvcache_kwargs_fn"):  # not yet in transformers 5.17
        options = (options, None)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda name: (kernels, options))


@pytest.fixture
def without_compiler():
    with torch.compiler.set_stance("force_eager"):
        yield


def with_attention(cls, name, **options):
    """The same model for each name; otherwise transformers would require an installed kernel."""
    torch.manual_seed(0)
    model = cls(small_config(**NO_DROPOUT, **options))
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = name
    return model


def seq2seq(name, **options):
    return with_attention(VanillaTransformerForConditionalGeneration, name, **options)


def batch_of(cls):
    """Rows with padding on the left, on the right, everywhere and nowhere; likewise missing
    labels."""
    ids, mask, labels = random_ids(4, 9), torch.ones(4, 9).long(), random_ids(4, 12, seed=1)
    mask[0, 5:] = mask[1, :3] = 0
    labels[1, 4:] = labels[2, :2] = labels[3, 5] = labels[3, 11] = -100
    if cls is VanillaTransformerForConditionalGeneration:
        mask[3] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if cls is VanillaTransformerForCausalLM:
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 3] = -100  # it would be predicted from padding
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {"input_ids": ids, "attention_mask": mask}


def train_once(model, inputs):
    """The loss, the gradients, and (rows, length) of what each stack's first layer returned."""
    shapes = []
    for part in model.train().modules():
        if isinstance(part, VanillaTransformerStack):
            watch(part.layers[0], lambda *seen: shapes.append(tuple(seen[-1].shape[:2])))
    outputs = model(**inputs)
    if "labels" in inputs:
        loss = outputs.loss
    else:
        loss = outputs.last_hidden_state[inputs["attention_mask"] == 1].exp().mean()
    if loss.requires_grad:
        loss.backward()
    return loss, {name: weight.grad for name, weight in model.named_parameters()}, shapes


def expect_equal(actual, expected):
    torch.testing.assert_close(actual, expected, **EXACT)


every_class = pytest.mark.parametrize(
    "cls",
    [
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerForCausalLM,
        VanillaTransformerEncoderModel,
    ],
)


# ---------------------------------------------------------------- training


@every_class
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
def test_packed_rows_train_as_padded_rows_do(monkeypatch, flash, cls, name):
    inputs = batch_of(cls)
    loss, grads, padded = train_once(with_attention(cls, "sdpa"), inputs)
    # masks for flex attention keep packed rows apart too, at the cost of all pairs of tokens
    monkeypatch.setattr(packing, "is_flex", lambda name: not packing.is_flash(name))
    packed_loss, packed_grads, packed = train_once(with_attention(cls, name), inputs)
    expect_equal((packed_loss, packed_grads), (loss, grads))
    tokens = int(inputs["attention_mask"].sum())
    assert padded[0] == (4, 9)
    assert packed[0] == (1, tokens)
    if cls is VanillaTransformerForConditionalGeneration:
        assert padded[1] == (4, 12)
        assert packed[1] == (1, 12 + 4 + 12 + 11)  # up to each row's last label


@every_class
def test_flex_attention_gets_packed_rows(without_compiler, cls):
    inputs = batch_of(cls)
    with torch.no_grad():  # torch has no backward pass of it on a CPU
        loss, _, _ = train_once(with_attention(cls, "sdpa"), inputs)
        packed_loss, _, packed = train_once(with_attention(cls, "flex_attention"), inputs)
    expect_equal(packed_loss, loss)
    assert {rows for rows, _ in packed} == {1}


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_flash_attn_2_available()),
    reason="flash-attn is not installed, or there is no GPU to run it on",
)
@every_class
def test_packed_rows_train_as_padded_rows_do_on_a_gpu(cls):
    inputs = {name: value.cuda() for name, value in batch_of(cls).items()}
    reference, model = with_attention(cls, "sdpa"), with_attention(cls, "flash_attention_2")
    loss, grads, _ = train_once(reference.cuda(), inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        packed_loss, packed_grads, packed = train_once(model.cuda(), inputs)
    torch.testing.assert_close(packed_loss, loss, atol=0.02, rtol=0.02)
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=0.05, rtol=0.1)
    assert {rows for rows, _ in packed} == {1}


def test_all_layers_share_the_ends_of_rows(monkeypatch, flash):
    """They are read once, because each read makes the CPU wait for the GPU."""
    asked, ends = [], packing.PackedRows.ends
    monkeypatch.setattr(packing.PackedRows, "ends", lambda rows: asked.append(1) or ends(rows))
    model = seq2seq("flash_attention_2", encoder_layers=3, decoder_layers=4)
    model(**batch_of(VanillaTransformerForConditionalGeneration))
    model.train()(**batch_of(VanillaTransformerForConditionalGeneration))
    assert len(asked) == 2 * len(["encoder", "target", "source"])


def test_gradient_checkpointing_works_with_packed_rows(flash):
    inputs = batch_of(VanillaTransformerForConditionalGeneration)
    loss, grads, _ = train_once(seq2seq("flash_attention_2"), inputs)
    model = seq2seq("flash_attention_2")
    model.gradient_checkpointing_enable()
    again, grads_again, packed = train_once(model, inputs)
    expect_equal((again, grads_again), (loss, grads))
    assert {rows for rows, _ in packed} == {1}


def test_a_target_mask_takes_precedence_over_labels(flash):
    inputs = batch_of(VanillaTransformerForConditionalGeneration)
    inputs["decoder_attention_mask"] = torch.ones(4, 12).long()
    _, _, packed = train_once(seq2seq("flash_attention_2"), inputs)
    assert packed[1] == (1, 48)


def test_batches_without_padding_are_not_packed(flash):
    ids = random_ids(3, 7)
    _, _, shapes = train_once(seq2seq("flash_attention_2"), {"input_ids": ids, "labels": ids})
    assert shapes == [(3, 7), (3, 7)]


def test_hidden_states_are_returned_as_a_padded_batch(flash):
    inputs = batch_of(VanillaTransformerForConditionalGeneration)
    inputs["attention_mask"][3] = 1
    expected = seq2seq("sdpa")(**inputs, output_hidden_states=True)
    outputs = seq2seq("flash_attention_2")(**inputs, output_hidden_states=True)
    tokens = inputs["attention_mask"] == 1
    for states, wanted in zip(
        outputs.encoder_hidden_states, expected.encoder_hidden_states, strict=True
    ):
        expect_equal(states[tokens], wanted[tokens])
    for states, wanted in zip(
        outputs.decoder_hidden_states, expected.decoder_hidden_states, strict=True
    ):
        expect_equal(states, wanted)


def test_several_targets_of_one_source_are_packed_too(flash):
    inputs = batch_of(VanillaTransformerForConditionalGeneration)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name][:2]
    loss, grads, _ = train_once(seq2seq("sdpa"), inputs)
    unpacked_loss, unpacked_grads, shapes = train_once(seq2seq("flash_attention_2"), inputs)
    expect_equal((unpacked_loss, unpacked_grads), (loss, grads))
    assert shapes == [(1, 5 + 6), (1, 12 + 4 + 12 + 11)]


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}], ids=str
)
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_padded_sources_are_decoded_as_with_sdpa(flash, without_compiler, name, options):
    inputs = batch_of(VanillaTransformerEncoderModel)
    options = {**options, "max_new_tokens": 6, "do_sample": False, "output_scores": True}
    options["return_dict_in_generate"] = True
    expected = seq2seq("sdpa").eval().generate(**inputs, **options)
    outputs = seq2seq(name).eval().generate(**inputs, **options)
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    expect_equal(outputs.scores, expected.scores)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flex_attention"])
def test_a_4d_mask_has_the_same_effect_with_every_attention(flash, without_compiler, name, kind):
    # Booleans too, which "eager" and flex attention must not add to the scores.
    model, ids, mask = seq2seq(name).eval(), random_ids(2, 5), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    causal = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    masks = [mask[:, None, None], causal & mask[:, None, None]]
    if kind != torch.bool:
        masks = [torch.zeros(each.shape).masked_fill(~each, -torch.inf) for each in masks]
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    expected = seq2seq("sdpa").eval()(**inputs, attention_mask=mask, decoder_attention_mask=mask)
    source, target = masks
    outputs = model(**inputs, attention_mask=source, decoder_attention_mask=target)
    expect_equal(outputs.logits[mask], expected.logits[mask])
