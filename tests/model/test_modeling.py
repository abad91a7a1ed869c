"""The model: what each of the four classes computes, and what must not change it."""

import math

import pytest
import torch
from conftest import SMALL, random_ids, seq2seq, small_config, watch
from torch.nn import functional as F
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers import logging as transformers_logging
from transformers.testing_utils import CaptureLogger

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.model.loss import SUPPRESSED
from vanilla_transformer.model.modeling_vanilla_transformer import (
    SinusoidalPositions,
    label_smoothed_cross_entropy,
)

VARIANTS = [
    {},
    {"norm_position": "pre"},
    {"position_encoding": "learned"},
    {"tie_word_embeddings": False},
    {"decoder_vocab_size": 60},
    {"attention_bias": True, "head_dim": 6, "value_head_dim": 10},
]


def variant_name(fields):
    return ",".join(fields) or "paper"


@pytest.fixture(params=VARIANTS, ids=variant_name)
def any_model(request):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(small_config(**request.param)).eval()


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def pad(rows, side, value=0):
    """Rows of token ids as a batch: (ids, mask)."""
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), value), torch.zeros(len(rows), length).long()
    for row, tokens in enumerate(rows):
        place = slice(0, len(tokens)) if side == "right" else slice(length - len(tokens), None)
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


# ---------------------------------------------------------------- what must not change the result


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batching_change_nothing(any_model, side):
    sources = [random_ids(1, n, seed=n)[0] for n in (3, 9, 5)]
    targets = random_ids(3, 4)
    alone = [
        any_model(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, targets, strict=True)
    ]
    input_ids, attention_mask = pad(sources, side)
    batch = any_model(
        input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=targets
    ).logits
    for row, expected in enumerate(alone):
        assert_close(batch[row], expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "cls", [VanillaTransformerForConditionalGeneration, VanillaTransformerEncoderModel]
)
def test_padding_without_a_mask_gives_a_warning(cls, side):
    """A training loop without masks learns from different states than `generate()` decodes."""
    model = cls(small_config())
    ids, mask = pad([random_ids(1, 3)[0], random_ids(1, 5)[0]], side)
    target = {"labels": ids} if cls is VanillaTransformerForConditionalGeneration else {}
    transformers_logging.set_verbosity_warning()
    for inputs, is_told in (({"attention_mask": mask}, False), ({}, True)):
        transformers_logging.warning_once.cache_clear()
        with CaptureLogger(transformers_logging.get_logger()) as captured:
            model(input_ids=ids, **target, **inputs)
        assert ("attention_mask" in captured.out) == is_told


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_target_changes_nothing(any_model, side):
    source, target = random_ids(1, 6), random_ids(1, 4)
    expected = any_model(input_ids=source, decoder_input_ids=target).logits[0]
    ids, mask = pad([target[0], random_ids(1, 7)[0]], side)
    batch = any_model(
        input_ids=source.expand(2, -1), decoder_input_ids=ids, decoder_attention_mask=mask
    ).logits
    assert_close(batch[0][mask[0].bool()], expected)


def test_no_target_position_sees_a_later_one(any_model):
    source, target = random_ids(1, 6), random_ids(1, 5)
    changed = target.clone()
    changed[0, 3:] = 4 + (changed[0, 3:] - 3) % 40
    first = any_model(input_ids=source, decoder_input_ids=target).logits
    second = any_model(input_ids=source, decoder_input_ids=changed).logits
    assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3], second[:, 3])


def test_every_source_position_sees_every_other():
    model = VanillaTransformerEncoderModel(small_config()).eval()
    source = random_ids(1, 6)
    for position in (0, 5):
        changed = source.clone()
        changed[0, position] = 4 + (changed[0, position] - 3) % 40
        difference = model(source).last_hidden_state - model(changed).last_hidden_state
        assert (difference.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_cache_changes_nothing(any_model, side):
    input_ids, attention_mask = pad([random_ids(1, 6)[0], random_ids(1, 3)[0]], side)
    target = random_ids(2, 5)
    expected = any_model(
        input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=target
    ).logits
    encoder_outputs = any_model.get_encoder()(input_ids, attention_mask=attention_mask)
    past, steps = None, []
    for position in range(5):
        outputs = any_model(
            attention_mask=attention_mask,
            encoder_outputs=encoder_outputs,
            decoder_input_ids=target[:, position : position + 1],
            past_key_values=past,
            use_cache=True,
        )
        past = outputs.past_key_values
        steps.append(outputs.logits)
    assert_close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(any_model, attention):
    input_ids, attention_mask = pad([random_ids(1, 6)[0], random_ids(1, 3)[0]], "right")
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": random_ids(2, 5),
    }
    any_model.set_attn_implementation("eager")
    expected = any_model(**inputs).logits
    any_model.set_attn_implementation(attention)
    assert_close(any_model(**inputs).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_rows_of_only_padding_stay_finite(attention, norm_position):
    model = VanillaTransformerForConditionalGeneration(
        small_config(norm_position=norm_position, attn_implementation=attention)
    )
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    outputs = model(
        input_ids=random_ids(2, 3),
        attention_mask=mask,
        labels=random_ids(2, 4),
        decoder_attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]),
        skip_logits=False,
    )
    outputs.loss.backward()
    assert outputs.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_saving_and_loading_changes_nothing(any_model, tmp_path):
    inputs = {"input_ids": random_ids(2, 6), "labels": random_ids(2, 5)}
    expected = any_model(**inputs)
    generated = any_model.generate(inputs["input_ids"], max_new_tokens=8)
    any_model.save_pretrained(tmp_path)
    loaded = type(any_model).from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).loss, expected.loss)
    assert torch.equal(loaded(**inputs).logits, expected.logits)
    assert torch.equal(loaded.generate(inputs["input_ids"], max_new_tokens=8), generated)


# ---------------------------------------------------------------- sections 3.4 and 3.5


def test_embeddings_and_projection_are_one_matrix(model, tmp_path):
    def matrices(model):
        return {
            id(model.get_input_embeddings().weight),
            id(model.model.encoder.embed_tokens.weight),
            id(model.model.decoder.embed_tokens.weight),
            id(model.lm_head.weight),
        }

    assert len(matrices(model)) == 1
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert len(matrices(loaded)) == 1
    loaded.resize_token_embeddings(60)
    assert len(matrices(loaded)) == 1
    assert loaded.lm_head.weight.shape[0] == loaded.config.vocab_size == 60


def test_two_vocabularies_only_share_target_embedding_and_projection():
    config = small_config(decoder_vocab_size=60)
    model = VanillaTransformerForConditionalGeneration(config)
    assert model.model.encoder.embed_tokens.weight.shape[0] == 50
    assert model.model.decoder.embed_tokens.weight is model.lm_head.weight
    assert model.lm_head.weight.shape[0] == 60
    assert not hasattr(model.model, "shared")


def test_two_vocabularies_can_have_the_same_size():
    model = VanillaTransformerModel(small_config(decoder_vocab_size=SMALL["vocab_size"]))
    assert model.encoder.embed_tokens.weight is not model.decoder.embed_tokens.weight


def test_there_are_three_untied_matrices():
    model = VanillaTransformerForConditionalGeneration(small_config(tie_word_embeddings=False))
    encoder, decoder = (
        model.model.encoder.embed_tokens.weight,
        model.model.decoder.embed_tokens.weight,
    )
    assert encoder is not decoder
    assert decoder is not model.lm_head.weight
    assert not hasattr(model.model, "shared")


def test_every_weight_has_a_gradient(any_model):
    any_model.train()
    any_model(input_ids=random_ids(2, 6), labels=random_ids(2, 5)).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in any_model.parameters())


def test_positions_are_the_papers_formula():
    d_model, positions = 24, torch.tensor([[0, 1, 7, 5000]])
    encodings = SinusoidalPositions(small_config())(positions, torch.float64)
    for column, position in enumerate([0, 1, 7, 5000]):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            assert encodings[0, column, 2 * i] == pytest.approx(math.sin(angle), abs=1e-9)
            assert encodings[0, column, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-9)


def test_sinusoidal_positions_have_no_limit_and_are_not_in_the_checkpoint(model):
    outputs = model(input_ids=random_ids(1, 5000), decoder_input_ids=random_ids(1, 1500))
    assert outputs.logits.isfinite().all()
    assert not [name for name in model.state_dict() if "position" in name]


def test_positions_beyond_the_learned_ones_are_refused():
    model = VanillaTransformerForConditionalGeneration(
        small_config(position_encoding="learned", max_position_embeddings=8)
    )
    with pytest.raises(IndexError, match="position 8 is out of range: expected 0 <= position < 8"):
        model(input_ids=random_ids(1, 9), decoder_input_ids=random_ids(1, 2))
    inputs = {"input_ids": random_ids(1, 5), "decoder_input_ids": random_ids(1, 7)}
    with pytest.raises(IndexError, match="position 9 is out of range"):
        model(**inputs, position_ids=torch.tensor([[0, 1, 2, 3, 9]]))
    inputs["past_key_values"] = model.eval()(**inputs, use_cache=True).past_key_values
    with pytest.raises(IndexError, match="position 8 is out of range"):
        model(**inputs | {"decoder_input_ids": random_ids(1, 2)})


def test_embeddings_are_scaled_on_input_only(model):
    encoder, source = model.get_encoder(), random_ids(1, 4)
    captured = {}
    encoder.layers[0].register_forward_pre_hook(lambda _, args: captured.update(x=args[0]))
    encoder(source)
    positions = encoder.embed_positions(torch.arange(4)[None], torch.float32)
    expected = model.get_input_embeddings()(source) * math.sqrt(SMALL["d_model"]) + positions
    assert_close(captured["x"], expected)
    states = torch.randn(1, 2, SMALL["d_model"])
    assert_close(model.lm_head(states), states @ model.get_input_embeddings().weight.T)


def test_embeddings_can_replace_token_ids(any_model):
    source, target = random_ids(2, 6), random_ids(2, 4)
    encoder, decoder = any_model.get_encoder(), any_model.get_decoder()
    expected = any_model(input_ids=source, decoder_input_ids=target).logits
    given = any_model(
        inputs_embeds=encoder.embed_tokens(source),
        decoder_inputs_embeds=decoder.embed_tokens(target),
    ).logits
    assert_close(given, expected)


@pytest.mark.parametrize("initializer", ["depth_scaled", "tensor2tensor"])
def test_initialization_follows_its_table(initializer):
    config = VanillaTransformerConfig(
        vocab_size=5000, d_model=128, encoder_layers=2, decoder_layers=3, attention_bias=True,
        initializer=initializer,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    model.requires_grad_(False)
    layer, upper = model.model.encoder.layers[0], model.model.decoder.layers[2]
    assert model.lm_head.weight.std() == pytest.approx(128**-0.5, rel=0.02)
    scaled = initializer == "depth_scaled"
    in_encoder, in_decoder = ((2 * 2) ** -0.5, (3 * 3) ** -0.5) if scaled else (1, 1)
    for matrix, gain in (
        (layer.self_attn.q_proj.weight, 1),
        (layer.ffn.fc1.weight, 1),
        (layer.self_attn.out_proj.weight, in_encoder),
        (layer.ffn.fc2.weight, in_encoder),
        (upper.self_attn.out_proj.weight, in_decoder),
        (upper.encoder_attn.out_proj.weight, in_decoder),
        (upper.ffn.fc2.weight, in_decoder),
    ):
        bound = gain * math.sqrt(6 / sum(matrix.shape))
        assert matrix.abs().max() <= bound
        assert matrix.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not layer.ffn.fc1.bias.any()
    assert not layer.self_attn.q_proj.bias.any()
    assert (layer.ffn_layer_norm.weight == 1).all()
    assert not layer.ffn_layer_norm.bias.any()


# ---------------------------------------------------------------- section 5.4


def smoothed_loss(logits, labels, eps):
    """Cross-entropy against the smoothed distribution, written out."""
    total, count = 0.0, 0
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label == -100:
            continue
        target = torch.full_like(row, eps / len(row))
        target[label] += 1 - eps
        total -= (target * row.log_softmax(-1)).sum()
        count += 1
    return total / count


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.4])
def test_the_loss_is_smoothed_cross_entropy_over_real_labels(eps):
    logits, labels = torch.randn(2, 3, 11), torch.tensor([[1, 2, -100], [10, -100, 0]])
    loss = label_smoothed_cross_entropy(logits, labels, eps)
    assert_close(loss, smoothed_loss(logits, labels, eps))


@pytest.mark.parametrize("rows", [1, 255, 256, 700])
def test_the_loss_and_its_gradient_equal_those_of_torch(rows):
    logits = torch.randn(1, rows, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (1, rows))
    labels[0, 1::3] = -100
    ours = label_smoothed_cross_entropy(logits, labels, 0.2, num_items_in_batch=10)
    torchs = F.cross_entropy(logits[0], labels[0], label_smoothing=0.2, reduction="sum") / 10
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits), torch.autograd.grad(torchs, logits)
    )


def test_suppressed_tokens_get_no_smoothing():
    logits, labels = torch.randn(2, 3, 11), torch.tensor([[1, 2, -100], [10, -100, 0]])
    added = (torch.randn(2, 3, 4) + SUPPRESSED).requires_grad_()
    loss = label_smoothed_cross_entropy(torch.cat([logits, added], -1), labels, 0.1)
    assert_close(loss, smoothed_loss(logits, labels, 0.1))
    loss.backward()
    assert not added.grad.any()


def test_labels_are_only_smoothed_in_training():
    config = small_config(label_smoothing=0.3, dropout=0.0)
    model = VanillaTransformerForConditionalGeneration(config)
    inputs = {"input_ids": random_ids(2, 5), "labels": random_ids(2, 4)}
    logits = model.train()(**inputs, skip_logits=False).logits
    assert_close(model.train()(**inputs).loss, smoothed_loss(logits, inputs["labels"], 0.3))
    assert_close(model.eval()(**inputs).loss, smoothed_loss(logits, inputs["labels"], 0.0))


def test_losses_of_parts_of_a_batch_add_up_to_that_of_the_batch(model):
    source, labels = random_ids(4, 5), random_ids(4, 6)
    labels[1, 2:] = labels[3, 1:] = -100
    whole = model(input_ids=source, labels=labels).loss
    count = (labels != -100).sum()
    parts = [
        model(input_ids=source[rows], labels=labels[rows], num_items_in_batch=count).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert_close(sum(parts), whole)


def test_a_batch_without_labels_to_predict_has_loss_0(model):
    loss = model(input_ids=random_ids(1, 3), labels=torch.full((1, 4), -100)).loss
    assert loss == 0


def test_labels_are_shifted_right_for_the_decoder(model):
    labels = torch.tensor([[7, 8, 2], [9, 2, -100]])
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[1, 7, 8], [1, 9, 2]]
    source = random_ids(2, 3)
    expected = model(input_ids=source, decoder_input_ids=shifted, labels=labels)
    assert torch.equal(model(input_ids=source, labels=labels).loss, expected.loss)


def test_unshifted_labels_as_decoder_input_give_a_warning(model, caplog):
    """It would learn to copy them, with a loss near 0, and generate nothing of use."""
    labels, blank = torch.tensor([[7, 8, 2], [9, 2, -100]]), torch.tensor([[2], [2]])
    copied = labels.masked_fill(labels == -100, 0)
    right = model.prepare_decoder_input_ids_from_labels(labels)
    for gold, given, is_told in (
        (labels, right, False), (labels, None, False),
        (blank, blank, False),  # shifted, where </s> also begins a target
        (labels, copied, True),
    ):  # fmt: skip
        transformers_logging.warning_once.cache_clear()
        model(input_ids=random_ids(2, 3), decoder_input_ids=given, labels=gold)
        assert ("decoder_input_ids are the labels" in caplog.text) == is_told


def test_half_precision_losses_are_summed_in_float32():
    logits, labels = torch.randn(4, 8, 100), torch.randint(0, 100, (4, 8))
    half = label_smoothed_cross_entropy(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    assert_close(half, label_smoothed_cross_entropy(logits.bfloat16().float(), labels))


# ---------------------------------------------------------------- the other classes


def test_the_decoder_by_itself_is_a_causal_language_model():
    torch.manual_seed(0)
    model = VanillaTransformerForCausalLM(small_config(label_smoothing=0.0)).eval()
    ids = random_ids(2, 6)
    outputs = model(ids, labels=ids)
    assert not [name for name, _ in model.named_parameters() if "encoder" in name]
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(outputs.loss, expected)
    changed = ids.clone()
    changed[:, 4:] = 5
    assert_close(model(changed).logits[:, :4], outputs.logits[:, :4])
    assert_close(model(ids, logits_to_keep=2).logits, outputs.logits[:, -2:])


def test_the_causal_model_accepts_shift_labels():
    decoder = VanillaTransformerForCausalLM(small_config(is_encoder_decoder=False)).eval()
    ids = random_ids(2, 6)
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    expected = decoder(input_ids=ids, labels=ids).loss
    assert torch.equal(decoder(input_ids=ids, shift_labels=shifted).loss, expected)
    unheeded = random_ids(2, 6, seed=1)
    assert torch.equal(decoder(input_ids=ids, shift_labels=shifted, labels=unheeded).loss, expected)


def test_a_trainer_of_transformers_shifts_labels_and_evaluates_a_causal_model(tmp_path):
    decoder = VanillaTransformerForCausalLM(small_config(is_encoder_decoder=False)).eval()
    ids = random_ids(4, 6)
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(decoder, arguments, eval_dataset=rows, data_collator=default_data_collator)
    predicted = decoder(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(predicted, ids[:, 1:].flatten(), label_smoothing=0.1).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


class Subclass(VanillaTransformerForCausalLM):
    """transformers finds the kind of loss by the name of a class."""


def test_a_trainer_divides_the_loss_of_a_causal_subclass_by_the_predicted_labels(tmp_path):
    decoder, ids = Subclass(small_config(dropout=0.0, label_smoothing=0.0)), random_ids(4, 3)
    options = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=1, logging_steps=1, **options)
    expected = decoder.eval()(ids, labels=ids).loss.item()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(decoder, arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "cls", [VanillaTransformerForConditionalGeneration, VanillaTransformerForCausalLM]
)
def test_a_replaced_embedding_is_used_and_saved(cls, tmp_path):
    model, ids = cls(small_config()).eval(), random_ids(2, 5)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    before = model(**inputs).logits
    model.set_input_embeddings(torch.nn.Embedding(50, 24))
    after = model(**inputs).logits
    assert (after - before).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert_close(cls.from_pretrained(tmp_path).eval()(**inputs).logits, after)


@pytest.mark.parametrize("use_cache", [False, None], ids=["no cache", "default"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_causal_model_accepts_sequences_packed_into_one_row(attention, use_cache):
    decoder = VanillaTransformerForCausalLM(small_config(is_encoder_decoder=False)).eval()
    decoder.set_attn_implementation(attention)
    rows = [random_ids(1, n, seed=n) for n in (3, 7, 5)]
    alone = [decoder(input_ids=row, use_cache=False).logits for row in rows]
    packed = decoder(
        input_ids=torch.cat(rows, dim=1),
        position_ids=torch.cat([torch.arange(row.shape[1]) for row in rows])[None],
        use_cache=use_cache,
    )
    assert_close(packed.logits, torch.cat(alone, dim=1))


@pytest.mark.parametrize("positions", [[0, 0, 0, 0], [3, 2, 1, 0], [0, 2, 3, 7]], ids=str)
def test_a_target_sees_all_earlier_tokens_whatever_their_positions(model, positions):
    """There is one source for a row, so it holds one target."""
    ids, places = random_ids(2, 4), torch.tensor([positions])
    inputs = {"input_ids": ids, "decoder_input_ids": ids, "decoder_position_ids": places}
    masked = model(**inputs, decoder_attention_mask=torch.ones_like(ids)).logits
    assert_close(model(**inputs).logits, masked)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_causal_model_accepts_padding_on_either_side(side):
    model = VanillaTransformerForCausalLM(small_config()).eval()
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 7)]
    ids, mask = pad(rows, side)
    logits = model(ids, attention_mask=mask).logits
    for row, tokens in enumerate(rows):
        assert_close(logits[row][mask[row].bool()], model(tokens[None]).logits[0])


def test_the_encoder_model_equals_the_encoder_of_the_whole_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    encoder = VanillaTransformerEncoderModel.from_pretrained(tmp_path)
    source = random_ids(2, 5)
    expected = model.get_encoder()(source).last_hidden_state
    assert torch.equal(encoder(source).last_hidden_state, expected)
    assert torch.equal(
        VanillaTransformerModel.from_pretrained(tmp_path).encoder(source)[0], expected
    )


@pytest.mark.parametrize("fields", VARIANTS, ids=variant_name)
def test_every_class_loads_checkpoints_of_every_other_class(fields, tmp_path):
    classes = (
        VanillaTransformerModel,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerEncoderModel,
        VanillaTransformerForCausalLM,
    )
    for saved in classes:
        folder = tmp_path / saved.__name__
        saved(small_config(**fields)).save_pretrained(folder)
        for loaded in classes:
            if "decoder_vocab_size" in fields and saved in classes[2:] and saved is not loaded:
                continue  # one stack's vocabulary does not determine the other's
            model, report = loaded.from_pretrained(folder, output_loading_info=True)
            assert not report["mismatched_keys"]
            missing, unexpected = (
                {key for key in report[kind] if "lm_head" not in key}
                for kind in ("missing_keys", "unexpected_keys")
            )
            if saved in classes[:2] or saved is loaded:
                assert not missing
            if loaded in classes[:2] or saved is loaded:
                assert not unexpected
            expected = loaded not in classes[2:]
            assert model.config.is_encoder_decoder is expected


# ---------------------------------------------------------------- optional outputs


def test_hidden_states_and_attentions_on_request(model):
    model.set_attn_implementation("eager")
    outputs = model(
        input_ids=random_ids(2, 6),
        decoder_input_ids=random_ids(2, 5),
        output_hidden_states=True,
        output_attentions=True,
    )
    assert [x.shape for x in outputs.encoder_hidden_states] == [(2, 6, 24)] * 3
    assert [x.shape for x in outputs.decoder_hidden_states] == [(2, 5, 24)] * 4
    assert [x.shape for x in outputs.encoder_attentions] == [(2, 2, 6, 6)] * 2
    assert [x.shape for x in outputs.decoder_attentions] == [(2, 4, 5, 5)] * 3
    assert [x.shape for x in outputs.cross_attentions] == [(2, 4, 5, 6)] * 3
    for weights in outputs.cross_attentions:
        assert_close(weights.sum(-1), torch.ones(2, 4, 5))


def test_tuples_on_request(model):
    inputs = {"input_ids": random_ids(2, 6), "labels": random_ids(2, 5)}
    expected = model(**inputs)
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], expected.loss)
    assert torch.equal(as_tuple[1], expected.logits)


def test_encoder_outputs_can_come_from_an_earlier_call(model):
    source, target = random_ids(2, 6), random_ids(2, 5)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    encoded = model.get_encoder()(source)
    assert_close(model(encoder_outputs=encoded, decoder_input_ids=target).logits, expected)
    for plain in (encoded.to_tuple(), list(encoded.to_tuple())):
        assert_close(model(encoder_outputs=plain, decoder_input_ids=target).logits, expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(dropout=0.0)).train()
    inputs = {"input_ids": random_ids(2, 6), "labels": random_ids(2, 5)}
    model(**inputs).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**inputs).loss.backward()
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name])


# ---------------------------------------------------------------- invalid input


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            {"input_ids": torch.tensor([[4, 50]])},
            IndexError,
            "token id 50 is out of range: expected 0 <= token id < 50",
        ),
        ({"input_ids": torch.tensor([[-1]])}, IndexError, "token id -1 is out of range"),
        (
            {"labels": None, "decoder_input_ids": torch.tensor([[4, 50]])},
            IndexError,
            "token id 50 is out of range",
        ),
        ({"labels": torch.tensor([[4, 50]])}, IndexError, "label 50 is out of range"),
        (
            {"labels": random_ids(1, 4), "decoder_input_ids": random_ids(1, 3)},
            ValueError,
            r"labels of shape \(1, 4\) for predictions of shape \(1, 3\)",
        ),
        (
            {"input_ids": random_ids(2, 5), "labels": random_ids(3, 4)},
            ValueError,
            "3 targets for 2 sources: expected as many, or as many for each source",
        ),
        (
            {"attention_mask": torch.ones(1, 4)},
            ValueError,
            r"attention mask of shape \(1, 4\) for 1 rows of 5 tokens",
        ),
        ({"inputs_embeds": torch.zeros(1, 5, 24)}, ValueError, "exactly one of input_ids"),
        ({"input_ids": None}, ValueError, "exactly one of input_ids"),
    ],
)
def test_invalid_input_is_reported(model, inputs, error, message):
    inputs = {"input_ids": random_ids(1, 5), "labels": random_ids(1, 4), **inputs}
    with pytest.raises(error, match=message):
        model(**inputs)


@pytest.mark.parametrize("part", ["", "model", "model.encoder", "model.decoder"])
def test_an_input_that_is_given_by_place_and_by_name_is_refused(model, part):
    ids = random_ids(1, 5)
    target = {} if part.endswith("coder") else {"decoder_input_ids": ids}
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model.get_submodule(part)(ids, input_ids=ids, **target)


def test_a_missing_target_is_reported(model):
    expected = "exactly one of decoder_input_ids and decoder_.*; AutoModelForTextEncoding loads the"
    with pytest.raises(ValueError, match=expected):
        model(input_ids=random_ids(1, 5))
    model.model.config = model.config.for_one_stack("encoder")
    with pytest.raises(ValueError, match=expected):  # as EncoderDecoderModel loads an encoder
        model.model(input_ids=random_ids(1, 5))


def test_a_trainer_that_smooths_labels_needs_a_collator_that_makes_targets(tmp_path, tokenizer):
    model = seq2seq(vocab_size=len(tokenizer), label_smoothing=0.1)
    source, labels = random_ids(2, 5), random_ids(2, 4, seed=1)
    options = {"report_to": "none", "use_cpu": True, "label_smoothing_factor": 0.1}
    pairs = zip(source.tolist(), labels.tolist(), strict=True)
    rows = [{"input_ids": ids, "labels": label_ids} for ids, label_ids in pairs]

    def loss(collator):
        trainer = Trainer(
            model, TrainingArguments(str(tmp_path), **options), eval_dataset=rows,
            data_collator=collator,
        )  # fmt: skip
        return trainer.evaluate()["eval_loss"]

    expected = r"decoder_inputs_embeds; .* DataCollatorForSeq2Seq\(tokenizer, model=model\)"
    with pytest.raises(ValueError, match=expected):
        loss(default_data_collator)
    logits = model.eval()(source, labels=labels).logits
    smoothed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1).item()
    found = loss(DataCollatorForSeq2Seq(tokenizer, model=model))
    assert found == pytest.approx(smoothed, rel=1e-5)


def test_shifting_labels_needs_a_start_token():
    model = VanillaTransformerForConditionalGeneration(small_config(decoder_start_token_id=None))
    with pytest.raises(ValueError, match="decoder_start_token_id=None: expected a token id"):
        model(input_ids=random_ids(1, 5), labels=random_ids(1, 4))


# ---------------------------------------------------------------- several devices


@pytest.mark.parametrize(
    "model_class",
    [
        VanillaTransformerModel,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerEncoderModel,
        VanillaTransformerForCausalLM,
    ],
)
@pytest.mark.parametrize("fields", VARIANTS, ids=variant_name)
def test_the_tensor_parallel_plan_includes_every_matrix(model_class, fields):
    model = model_class(small_config(**fields))
    parts = {name for name, _ in model.named_modules()}
    plan = {name.replace("*", "0"): style for name, style in model.tp_plan.items()}
    assert plan.keys() <= parts
    matrices = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        and "positions" not in name
        and not any(part.isdigit() and part != "0" for part in name.split("."))
    }
    assert plan.keys() == matrices


def test_the_plan_for_sharded_data_parallelism_wraps_each_layer(model):
    assert model._fsdp_plan == {
        "model.encoder.layers.*": "free_full_weight",
        "model.decoder.layers.*": "free_full_weight",
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_later_operations_do_not_overwrite_tensors(model, training, with_gradients, hooked):
    # An activation can only overwrite its input if nothing else reads it.
    model.train(training)
    seen = []

    def look(module, args, output):
        tensors = [value for value in (*args, output) if isinstance(value, torch.Tensor)]
        seen.extend((module, tensor, tensor.detach().clone()) for tensor in tensors)

    for module in model.model.modules():
        if hooked:
            module.register_forward_hook(look)
        else:
            watch(module, lambda args, kwargs, output, module=module: look(module, args, output))
    ids, mask = pad([random_ids(1, 9)[0], random_ids(1, 3)[0]], "right")
    with torch.set_grad_enabled(with_gradients):
        model(input_ids=ids, attention_mask=mask, labels=random_ids(2, 5))
        model.eval().generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=4)
    assert len(seen) > 100
    for module, tensor, before in seen:
        assert torch.equal(tensor, before), module
