"""The reference: the paper's formulas by themselves, then our model against them, in float64."""

import math

import numpy as np
import pytest
import reference
import torch
from conftest import SMALL, small_config
from reference import Stack
from test_modeling import pad, variant_name
from torch.optim import SGD
from transformers import get_scheduler

from vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)

# ---------------------------------------------------------------- the formulas by themselves


def assert_equal(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_layer_norm_gives_each_row_mean_and_variance_before_gain_and_bias():
    plain = {"weight": np.ones(2), "bias": np.zeros(2)}
    X = np.array([[1.0, 3.0], [30.0, 10.0]])
    assert_equal(reference.layer_norm(X, plain, 0), [[-1, 1], [1, -1]])
    assert_equal(reference.layer_norm(X[:1], plain, 3.0), [[-0.5, 0.5]])
    scaled = {"weight": np.array([2.0, 5.0]), "bias": np.array([0.5, 7.0])}
    assert_equal(reference.layer_norm(X[:1], scaled, 0), [[-1.5, 12.0]])


def test_post_norm_normalizes_the_sum_and_pre_norm_the_sub_layers_input():
    layer = {"ffn_layer_norm.weight": np.ones(2), "ffn_layer_norm.bias": np.zeros(2)}
    X = np.array([[1.0, 3.0]])
    for pre_norm, expected in ((False, [[1, -1]]), (True, [[1 - 3, 3 - 3]])):
        stack = Stack(N=1, h=1, pre_norm=pre_norm, epsilon=0)
        output = reference.residual(X, "ffn", layer, stack, lambda x, _: x * [3, -3])
        assert_equal(output, expected)


def test_attention_divides_scores_by_the_root_of_d_k():
    # scores (2 ln 3, 0) / sqrt(4) give weights 3/4 and 1/4
    Q, K = np.array([[2.0, 0, 0, 0]]), np.array([[math.log(3), 0, 0, 0], [0, 5, 5, 5]])
    assert_equal(reference.attention(Q, K, np.array([[4.0, 0], [0, 8.0]])), [[3, 2]])


def test_attention_with_equal_scores_is_the_mean_of_visible_values():
    Q, K = np.zeros((3, 2)), np.random.default_rng(0).normal(size=(3, 2))
    V = np.array([[3.0], [6.0], [0.0]])
    assert_equal(reference.attention(Q, K, V), [[3]] * 3)
    assert_equal(reference.attention(Q, K, V, reference.causal_mask(3)), [[3], [4.5], [3]])


def test_heads_are_concatenated_attentions():
    identity = {f"{name}_proj.weight": np.eye(2) for name in ("q", "k", "v", "out")}
    X = np.random.default_rng(0).normal(size=(4, 2))
    left, right = X[:, :1], X[:, 1:]
    expected = np.hstack([reference.attention(part, part, part) for part in (left, right)])
    assert_equal(reference.multi_head_attention(X, X, X, identity, h=2), expected)


def test_cross_attention_uses_every_matrix_and_bias():
    # one key: for any query, the output is its value, projected by W^V, b^V, W^O and b^O
    weights = {
        "q_proj.weight": np.ones((4, 2)),
        "k_proj.weight": np.ones((4, 2)),
        "v_proj.weight": np.array([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, 0], [0, 3]]),
        "v_proj.bias": np.array([0, 0, 0, 0, 7.0, 0]),
        "out_proj.weight": np.array([[1.0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0]]),
        "out_proj.bias": np.array([0.25, 0.5]),
    }
    Q, K = np.ones((3, 2)), np.array([[10.0, 20.0]])
    outputs = reference.multi_head_attention(Q, K, K, weights, h=2)
    assert_equal(outputs, [[10 + 60 + 0.25, 20 + 7 + 0.5]] * 3)


def test_the_feed_forward_network_cuts_off_below_zero():
    weights = {
        "fc1.weight": np.array([[1.0, 0], [0, 1], [1, 1]]),
        "fc1.bias": np.array([0, 0, -1.0]),
        "fc2.weight": np.array([[1.0, 10, 100]]),
        "fc2.bias": np.array([0.5]),
    }
    assert_equal(reference.feed_forward(np.array([[2.0, -3], [2, 3]]), weights), [[2.5], [432.5]])


def test_embeddings_are_scaled_on_input_and_not_on_output():
    E = np.arange(12.0).reshape(3, 4)
    assert_equal(reference.embed(np.array([2, 0]), E), [[16, 18, 20, 22], [0, 2, 4, 6]])
    assert_equal(reference.project(np.array([[1.0, 0, 0, 0]]), E), [[0, 4, 8]])


def test_the_first_positional_encodings_have_known_values():
    sin, cos = math.sin, math.cos
    expected = [
        [0, 1, 0, 1],
        [sin(1), cos(1), sin(0.01), cos(0.01)],
        [sin(2), cos(2), sin(0.02), cos(0.02)],
    ]
    assert_equal(reference.positional_encoding(3, 4), expected)


def test_an_offset_of_positions_is_a_rotation():
    """Section 3.5: "for any fixed offset k, PE_pos+k can be represented as a linear function"."""
    d_model, k = 6, 5
    PE = reference.positional_encoding(20 + k, d_model)
    for i in range(d_model // 2):
        angle = k / 10000 ** (2 * i / d_model)
        rotation = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        pair = slice(2 * i, 2 * i + 2)
        assert_equal(PE[k:, pair], PE[:20, pair] @ np.array(rotation).T)


def test_the_learning_rate_rises_to_its_peak_at_the_last_step_of_warmup():
    rates = [reference.learning_rate(step, 512) for step in range(1, 20001)]
    assert np.argmax(rates) + 1 == 4000
    assert max(rates) == pytest.approx((512 * 4000) ** -0.5) == pytest.approx(6.98771243e-4)
    assert rates[999] == pytest.approx(max(rates) / 4)
    assert rates[15999] == pytest.approx(max(rates) / 2)


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 400)])
def test_the_learning_rate_is_transformers_inverse_sqrt(d_model, warmup):
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=(d_model * warmup) ** -0.5)
    scheduler = get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=warmup)
    for step in range(1, 3 * warmup):
        optimizer.step()
        scheduler.step()
        expected = reference.learning_rate(step, d_model, warmup)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected, rel=1e-12)


def test_label_smoothing_moves_probability_from_the_label_evenly_to_all_tokens():
    assert_equal(reference.smoothed_target(1, 4, 0.2), [0.05, 0.85, 0.05, 0.05])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_the_loss_of_uniform_logits_is_the_vocabularys_logarithm(epsilon):
    losses = reference.token_losses(np.full((2, 7), 3.0), np.array([0, 4]), epsilon)
    assert_equal(losses, [math.log(7)] * 2)


def test_the_loss_is_cross_entropy_with_its_minimum_at_the_smoothed_target():
    p = np.array([[0.5, 0.3, 0.2]])
    assert_equal(reference.token_losses(np.log(p) + 9, np.array([2]), 0.0), [-math.log(0.2)])
    # at the target itself, the loss is the target's entropy
    q = np.array([0.1, 0.8, 0.1])
    entropy = -(q * np.log(q)).sum()
    assert_equal(reference.token_losses(np.log(q)[None], np.array([1]), 0.3), [entropy])
    assert reference.token_losses(np.log(p), np.array([1]), 0.3)[0] > entropy


def test_the_length_penalty_has_known_values():
    assert reference.length_penalty(1, 0.6) == 1
    assert reference.length_penalty(7, 1.0) == 2
    assert reference.length_penalty(25, 0.6) == pytest.approx(5**0.6)
    assert reference.length_penalty(99, 0.0) == 1


# ---------------------------------------------------------------- the model against the formulas


ACTIVATIONS = {"relu": reference.relu, "silu": lambda x: x / (1 + np.exp(-x))}
VARIANTS = [
    {},
    {"position_encoding": "learned", "max_position_embeddings": 12},
    {"tie_word_embeddings": False},
    {"decoder_vocab_size": 60},
    {"decoder_vocab_size": 60, "tie_word_embeddings": False},
    {"attention_bias": True},
    {"head_dim": 6, "value_head_dim": 10},
    {"activation_function": "silu", "layer_norm_eps": 0.1},
    {"decoder_norm_position": "pre"},
]
any_variant = pytest.mark.parametrize("fields", VARIANTS, ids=variant_name)
any_norm = pytest.mark.parametrize("norm", ["post", "pre"])
any_side = pytest.mark.parametrize("side", ["left", "right"])
any_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def randomize(model, seed=0):
    """Change every weight, so that no gain is 1, no bias is 0, and no two layers are the same."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def random_model(model_class, norm="post", attention="sdpa", **fields):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "attn_implementation": attention, **fields}
    return randomize(model_class(small_config(norm_position=norm, **options)).double().eval())


def weights_of(model):
    """By name, each once: a tied projection is left out."""
    weights = {
        name.removeprefix("model."): weight.detach().numpy()
        for name, weight in model.named_parameters()
    }
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def stack_of(model, role):
    config = model.config
    norms = {"encoder": None, "decoder": config.decoder_norm_position}
    return Stack(
        N=getattr(config, f"{role}_layers"),
        h=getattr(config, f"{role}_attention_heads"),
        pre_norm=(norms[role] or config.norm_position) == "pre",
        activation=ACTIVATIONS[config.activation_function],
        epsilon=config.layer_norm_eps,
    )


def sentences(*lengths, vocab_size=SMALL["vocab_size"], seed=0):
    """Token ids from the whole vocabulary: none is special to the model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def sources_and_targets(model):
    targets = sentences(6, 2, 7, vocab_size=model.config.target_vocab_size, seed=1)
    return sentences(3, 9, 5), targets


def transform(model, sources, targets):
    """The reference's logits, sentence by sentence."""
    weights = weights_of(model)
    logits = []
    for source, target in zip(sources, targets, strict=True):
        Z = reference.encode(source.numpy(), weights, stack_of(model, "encoder"))
        logits.append(reference.decode(target.numpy(), weights, stack_of(model, "decoder"), Z))
    return logits


def assert_rows_agree(batch, mask, expected, tolerance=1e-10):
    """A padded batch's rows, without their padding, are the sentences by themselves."""
    for row, row_mask, sentence in zip(batch, mask, expected, strict=True):
        assert_equal(row[row_mask.bool()].detach().numpy(), sentence, tolerance)


def mean_loss(logits, labels, epsilon):
    """Over all labels of all sentences but -100."""
    losses = [
        reference.token_losses(row[kept], row_labels[kept], epsilon)
        for row, row_labels in zip(logits, (row.numpy() for row in labels), strict=True)
        if (kept := row_labels != -100).any()
    ]
    return np.concatenate(losses).mean()


@any_variant
@any_norm
def test_the_configuration_determines_which_weights_exist(fields, norm):
    """The reference uses the weights it gets, and would not notice a missing bias."""
    model = random_model(VanillaTransformerForConditionalGeneration, norm, **fields)
    config, names = model.config, {name for name, _ in model.named_parameters()}

    def having(ending):
        return {name.removesuffix(ending) for name in names if name.endswith(ending)}

    stacks = {"model.encoder.", "model.decoder."}
    learned, tied = config.position_encoding == "learned", config.tie_word_embeddings
    assert having("_proj.bias") == (having("_proj.weight") if config.attention_bias else set())
    assert having("embed_positions.weight") == (stacks if learned else set())
    ends = {s for s in stacks if stack_of(model, s.split(".")[1]).pre_norm}
    assert having(".layer_norm.weight") == {s[:-1] for s in ends}
    assert having("lm_head.weight") == (set() if tied else {""})
    assert having("shared.weight") == ({"model."} if config.shares_embeddings else set())


@any_variant
@any_norm
@any_side
@any_attention
def test_a_padded_batch_has_the_papers_logits(fields, norm, side, attention):
    model = random_model(VanillaTransformerForConditionalGeneration, norm, attention, **fields)
    sources, targets = sources_and_targets(model)
    source_ids, source_mask = pad(sources, side)
    target_ids, target_mask = pad(targets, side)
    logits = model(
        input_ids=source_ids,
        attention_mask=source_mask,
        decoder_input_ids=target_ids,
        decoder_attention_mask=target_mask,
    ).logits
    assert_rows_agree(logits, target_mask, transform(model, sources, targets))


@any_variant
@any_norm
@any_side
@any_attention
def test_the_encoder_alone_has_the_papers_states(fields, norm, side, attention):
    model = random_model(VanillaTransformerEncoderModel, norm, attention, **fields)
    sources = sentences(3, 9, 5)
    ids, mask = pad(sources, side)
    weights, stack = weights_of(model), stack_of(model, "encoder")
    expected = [reference.encode(source.numpy(), weights, stack) for source in sources]
    assert_rows_agree(model(ids, attention_mask=mask).last_hidden_state, mask, expected)


@any_variant
@any_norm
@any_side
@any_attention
def test_the_decoder_alone_has_the_papers_logits_and_shifted_loss(fields, norm, side, attention):
    options = {"label_smoothing": 0.3, **fields}
    model = random_model(VanillaTransformerForCausalLM, norm, attention, **options).train()
    _, texts = sources_and_targets(model)
    labels = [text.clone() for text in texts]
    for row in labels:
        row[0] = -100  # nothing comes before it
    labels[0][3] = -100
    ids, mask = pad(texts, side)
    inputs = {"attention_mask": mask, "labels": pad(labels, side, value=-100)[0]}
    loss, outputs = model(ids, **inputs).loss, model(ids, **inputs, skip_logits=False)
    weights, stack = weights_of(model), stack_of(model, "decoder")
    expected = [reference.decode(text.numpy(), weights, stack) for text in texts]
    assert_rows_agree(outputs.logits, mask, expected)
    shifted = mean_loss([row[:-1] for row in expected], [row[1:] for row in labels], 0.3)
    assert_equal(outputs.loss.item(), shifted, 1e-10)
    assert_equal(loss.item(), shifted, 1e-10)


@any_variant
@any_norm
@any_side
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_the_loss_is_the_papers_over_ragged_targets(fields, norm, side, training):
    options = {"label_smoothing": 0.3, **fields}
    model = random_model(VanillaTransformerForConditionalGeneration, norm, **options)
    sources, targets = sources_and_targets(model)
    labels = sentences(6, 2, 7, vocab_size=model.config.target_vocab_size, seed=2)
    labels[0][2] = labels[2][0] = -100
    source_ids, source_mask = pad(sources, side)
    target_ids, target_mask = pad(targets, side)
    loss = model.train(training)(
        input_ids=source_ids,
        attention_mask=source_mask,
        decoder_input_ids=target_ids,
        decoder_attention_mask=target_mask,
        labels=pad(labels, side, value=-100)[0],
    ).loss
    expected = mean_loss(transform(model, sources, targets), labels, 0.3 if training else 0.0)
    assert_equal(loss.item(), expected, 1e-10)


@any_norm
def test_labels_without_a_target_are_shifted_right_after_the_start_token(norm):
    model = random_model(VanillaTransformerForConditionalGeneration, norm).train()
    sources, labels = sources_and_targets(model)
    start = torch.tensor([model.config.decoder_start_token_id])
    targets = [torch.cat([start, row[:-1]]) for row in labels]
    source_ids, source_mask = pad(sources, "right")
    padded = pad(labels, "right", value=-100)[0]
    loss = model(input_ids=source_ids, attention_mask=source_mask, labels=padded).loss
    assert_equal(loss.item(), mean_loss(transform(model, sources, targets), labels, 0.1), 1e-10)


@any_variant
@any_norm
@any_side
def test_tokens_decoded_one_by_one_with_a_cache_have_the_papers_logits(fields, norm, side):
    model = random_model(VanillaTransformerForConditionalGeneration, norm, **fields)
    sources = sentences(3, 9, 5)
    targets = sentences(4, 4, 4, vocab_size=model.config.target_vocab_size, seed=1)
    source_ids, source_mask = pad(sources, side)
    encoded, cache, steps = model.get_encoder()(source_ids, attention_mask=source_mask), None, []
    for tokens in torch.stack(targets).split(1, dim=1):
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=source_mask,
            decoder_input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
        )
        cache = outputs.past_key_values
        steps.append(outputs.logits)
    logits = torch.cat(steps, dim=1)
    assert_rows_agree(logits, torch.ones(3, 4), transform(model, sources, targets))


# A relu with its kink within a step would give a wrong slope; a smooth function has none.
@any_norm
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_every_weight_are_finite_differences_of_the_papers_loss(norm, activation):
    """Along one random direction for each weight, by central differences."""
    model = random_model(
        VanillaTransformerForConditionalGeneration,
        norm,
        attention_bias=True,
        activation_function=activation,
        encoder_layers=1,
        decoder_layers=1,
    ).train()
    sources, targets = sentences(3, 5), sentences(4, 2, seed=1)
    labels = sentences(4, 2, seed=2)
    source_ids, source_mask = pad(sources, "left")
    model(
        input_ids=source_ids,
        attention_mask=source_mask,
        decoder_input_ids=pad(targets, "right")[0],
        labels=pad(labels, "right", value=-100)[0],
    ).loss.backward()

    step, generator = 1e-6, torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        losses, kept = [], weight.data.clone()
        for sign in (1, -1):
            weight.data = kept + sign * step * direction
            losses.append(mean_loss(transform(model, sources, targets), labels, 0.1))
        weight.data = kept
        slope = (losses[0] - losses[1]) / (2 * step)
        assert (weight.grad * direction).sum().item() == pytest.approx(slope, abs=1e-8), name
