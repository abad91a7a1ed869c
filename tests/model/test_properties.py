"""What holds for every input and size, and which matrices stay tied after every operation."""

import copy
import math
import pickle
from itertools import accumulate

import pytest
import torch
from conftest import random_ids, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.model.modeling_vanilla_transformer import SinusoidalPositions

EXAMPLES = settings(deadline=None, max_examples=15, derandomize=True)
SEEDS = st.integers(0, 2**31)
VOCABULARY = 20

CONFIGURATIONS = st.builds(
    lambda stacks, **fields: small_config(vocab_size=VOCABULARY, dropout=0.0, **stacks, **fields),
    stacks=st.fixed_dictionaries(
        {f"{stack}_layers": st.integers(1, 2) for stack in ("encoder", "decoder")}
        | {
            f"{stack}_attention_heads": st.sampled_from([1, 2, 3])
            for stack in ("encoder", "decoder")
        }
    ),
    d_model=st.sampled_from([6, 12]),
    norm_position=st.sampled_from(["post", "pre"]),
    position_encoding=st.sampled_from(["sinusoidal", "learned"]),
    attention_bias=st.booleans(),
    value_head_dim=st.sampled_from([None, 5]),
    tie_word_embeddings=st.booleans(),
    attn_implementation=st.sampled_from(["eager", "sdpa"]),
)


def random_model(model_class, config, seed):
    """A model in float64, with biases and gains that are not 0 and 1."""
    torch.manual_seed(seed)
    model = model_class(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens(*shape):
    """Under the seed that `random_model` has set."""
    return torch.randint(VOCABULARY, shape)


def padded(rows, lefts, length):
    """Rows of tokens, each after its number of padding tokens, as (ids, mask). Padding can be any
    token, because only the mask says what is padding."""
    ids, mask = tokens(len(rows), length), torch.zeros(len(rows), length, dtype=torch.long)
    for row, (content, left) in enumerate(zip(rows, lefts, strict=True)):
        ids[row, left : left + len(content)] = content
        mask[row, left : left + len(content)] = 1
    return ids, mask


@st.composite
def batches(draw, rows, longest=6, right=True):
    """Lengths of rows, the padding before each, and the width of the batch that holds them."""
    if draw(st.booleans()):
        width = draw(st.integers(1, longest))
        return [width] * rows, [0] * rows, width
    lengths = draw(st.lists(st.integers(1, longest), min_size=rows, max_size=rows))
    width = max(lengths) + draw(st.integers(0, 4))
    lefts = [draw(st.integers(0, width - n)) if right else width - n for n in lengths]
    return lengths, lefts, width


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-8)


# ---------------------------------------------------------------- causality


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, st.integers(1, 7), st.data())
def test_later_target_tokens_change_no_earlier_prediction(config, seed, length, data):
    keep = data.draw(st.integers(0, length - 1))
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    source, target = tokens(2, 4), tokens(2, length)
    changed = torch.cat([target[:, :keep], (target[:, keep:] + 1) % VOCABULARY], dim=1)
    first = model(input_ids=source, decoder_input_ids=target).logits
    second = model(input_ids=source, decoder_input_ids=changed).logits
    assert_same(second[:, :keep], first[:, :keep])
    assert (second[:, keep] != first[:, keep]).any()


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(2), st.data())
def test_later_tokens_change_no_earlier_prediction_of_a_language_model(config, seed, batch, data):
    lengths, lefts, width = batch
    keep = data.draw(st.integers(0, width - 1))
    model = random_model(VanillaTransformerForCausalLM, config, seed)
    ids, mask = padded([tokens(n) for n in lengths], lefts, width)
    changed = torch.cat([ids[:, :keep], (ids[:, keep:] + 1) % VOCABULARY], dim=1)
    first = model(ids, attention_mask=mask).logits
    second = model(changed, attention_mask=mask).logits
    real = mask.bool()
    earlier = real & (torch.arange(width) < keep)
    assert_same(second[earlier], first[earlier])
    assert (second[real[:, keep], keep] != first[real[:, keep], keep]).any(-1).all()


def mask_if_needed(mask):
    """The mask, or None if nothing is masked."""
    return None if mask.all() else mask


def assert_same_in_chunks(read, ids, mask, widths, expected):
    """`read(ids, mask, cache)` gives, chunk by chunk, the logits that are expected for the
    whole."""
    past, ends = None, list(accumulate(widths))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        outputs = read(ids[:, start:end], mask_if_needed(mask[:, :end]), past)
        past = outputs.past_key_values
        real = mask[:, start:end].bool()
        assert_same(outputs.logits[real], expected[:, start:end][real])


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(2), batches(2, right=False), st.lists(st.integers(1, 3)))
def test_decoding_in_any_chunks_with_a_cache_equals_decoding_at_once(
    config, seed, sources, prompts, pieces
):
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    source, source_mask = padded([tokens(n) for n in sources[0]], *sources[1:])
    lengths, lefts, width = prompts
    total = width + sum(pieces)
    target, mask = padded([tokens(n + sum(pieces)) for n in lengths], lefts, total)
    expected = model(
        input_ids=source,
        attention_mask=source_mask,
        decoder_input_ids=target,
        decoder_attention_mask=mask,
    ).logits
    encoded = model.get_encoder()(source, attention_mask=source_mask)

    def read(ids, known, past):
        return model(
            attention_mask=source_mask,
            encoder_outputs=encoded,
            decoder_input_ids=ids,
            decoder_attention_mask=known,
            past_key_values=past,
            use_cache=True,
        )

    assert_same_in_chunks(read, target, mask, [width, *pieces], expected)


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(2, right=False), st.lists(st.integers(1, 3)))
def test_a_language_model_predicts_the_same_in_chunks_with_a_cache(config, seed, prompts, pieces):
    model = random_model(VanillaTransformerForCausalLM, config, seed)
    lengths, lefts, width = prompts
    total = width + sum(pieces)
    ids, mask = padded([tokens(n + sum(pieces)) for n in lengths], lefts, total)
    expected = model(ids, attention_mask=mask).logits

    def read(ids, known, past):
        return model(ids, attention_mask=known, past_key_values=past, use_cache=True)

    assert_same_in_chunks(read, ids, mask, [width, *pieces], expected)


# ---------------------------------------------------------------- padding and order


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(3), batches(3), st.permutations(range(3)))
def test_padding_on_both_sides_and_the_order_of_rows_change_no_prediction(
    config, seed, source_batch, target_batch, order
):
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    sources, targets = ([tokens(n) for n in batch[0]] for batch in (source_batch, target_batch))
    alone = [
        model(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, targets, strict=True)
    ]
    source, source_mask = padded(sources, *source_batch[1:])
    target, target_mask = padded(targets, *target_batch[1:])
    order = list(order)
    together = model(
        input_ids=source[order],
        attention_mask=source_mask[order],
        decoder_input_ids=target[order],
        decoder_attention_mask=target_mask[order],
    ).logits
    for place, row in enumerate(order):
        assert_same(together[place][target_mask[row].bool()], alone[row])


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(3), st.permutations(range(3)))
def test_padding_and_order_change_nothing_in_one_stack(config, seed, batch, order):
    for model_class in (VanillaTransformerEncoderModel, VanillaTransformerForCausalLM):
        model = random_model(model_class, config, seed)
        rows = [tokens(n) for n in batch[0]]
        ids, mask = padded(rows, *batch[1:])
        together = model(ids[list(order)], attention_mask=mask[list(order)])[0]
        for place, row in enumerate(order):
            alone = model(rows[row][None])[0][0]
            assert_same(together[place][mask[row].bool()], alone)


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(3), st.permutations(range(3)))
def test_the_loss_is_the_mean_over_tokens_whatever_the_padding(config, seed, batch, order):
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    lengths, order = batch[0], list(order)
    source, rows = tokens(3, 4), [tokens(n) for n in lengths]
    labels = torch.full((3, batch[2]), -100)
    for row, content in enumerate(rows):
        labels[row, : len(content)] = content
    losses = [
        model(input_ids=source[[row]], labels=content[None]).loss
        for row, content in enumerate(rows)
    ]
    expected = sum(loss * n for loss, n in zip(losses, lengths, strict=True)) / sum(lengths)
    assert_same(model(input_ids=source[order], labels=labels[order]).loss, expected)


# ---------------------------------------------------------------- positions

D_MODELS = st.integers(1, 40).map(lambda half: 2 * half)
POSITIONS = st.lists(st.integers(0, 10_000), min_size=2, max_size=8)


def encode(positions, d_model):
    config = small_config(d_model=d_model, head_dim=4)
    return SinusoidalPositions(config)(torch.tensor(positions), torch.float64)


@EXAMPLES
@given(D_MODELS, POSITIONS, st.integers(-50, 5_000))
def test_an_offset_of_k_positions_is_the_same_rotation_everywhere(d_model, positions, k):
    """The paper's reason for sinusoids (section 3.5)."""
    positions = [position + max(0, -k) for position in positions]
    rotation = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i in range(d_model // 2):
        angle = k / 10000 ** (2 * i / d_model)
        cos, sin = math.cos(angle), math.sin(angle)
        block = slice(2 * i, 2 * i + 2)
        rotation[block, block] = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
    moved = encode([position + k for position in positions], d_model)
    torch.testing.assert_close(moved, encode(positions, d_model) @ rotation.T, atol=1e-9, rtol=0)


@EXAMPLES
@given(D_MODELS, POSITIONS, st.integers(0, 5_000))
def test_the_inner_product_of_two_positions_only_depends_on_their_distance(d_model, positions, k):
    here, there = encode(positions, d_model), encode([p + k for p in positions], d_model)
    frequencies = [10000 ** (-2 * i / d_model) for i in range(d_model // 2)]
    expected = sum(math.cos(k * frequency) for frequency in frequencies)
    products = (here * there).sum(-1)
    torch.testing.assert_close(products, torch.full_like(products, expected), atol=1e-9, rtol=0)


# ---------------------------------------------------------------- attention


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, batches(3), batches(3))
def test_attention_is_a_probability_distribution_over_unmasked_positions(
    config, seed, source_batch, target_batch
):
    config._attn_implementation = "eager"
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    source, source_mask = padded([tokens(n) for n in source_batch[0]], *source_batch[1:])
    target, target_mask = padded([tokens(n) for n in target_batch[0]], *target_batch[1:])
    outputs = model(
        input_ids=source,
        attention_mask=source_mask,
        decoder_input_ids=target,
        decoder_attention_mask=target_mask,
        output_attentions=True,
    )
    length = target.shape[1]
    past = torch.ones(length, length).tril() * target_mask[:, None]
    cases = [
        (outputs.encoder_attentions, config.encoder_layers, source_mask[:, None], source_mask),
        (outputs.decoder_attentions, config.decoder_layers, past, target_mask),
        (outputs.cross_attentions, config.decoder_layers, source_mask[:, None], target_mask),
    ]
    for attentions, layers, visible, queries in cases:
        assert len(attentions) == layers
        for weights in attentions:
            visible_to_all_heads = visible[:, None].bool().expand_as(weights)
            real = queries.bool()[:, None, :].expand(weights.shape[:-1])
            assert (weights[real] >= 0).all()
            assert_same(weights[real].sum(-1), torch.ones_like(weights[real][:, 0]))
            assert not weights[real][~visible_to_all_heads[real]].any()
            assert (weights[real][visible_to_all_heads[real]] > 0).all()


# ---------------------------------------------------------------- the scale of embeddings


@EXAMPLES
@given(CONFIGURATIONS, SEEDS)
def test_logits_are_states_times_the_unscaled_embedding_matrix(config, seed):
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    inputs = {"input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 4)}
    states = model.model(**inputs).last_hidden_state
    matrix = model.model.decoder.embed_tokens if config.tie_word_embeddings else model.lm_head
    assert_same(model(**inputs).logits, states @ matrix.weight.T)


@EXAMPLES
@given(CONFIGURATIONS, SEEDS, st.sampled_from(["encoder", "decoder"]))
def test_embeddings_are_scaled_by_the_root_of_d_model(config, seed, stack):
    model = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    stack = getattr(model.model, stack)
    entered = []
    stack.layers[0].register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    ids = tokens(2, 5)
    embeddings = stack.embed_tokens(ids)
    stack(inputs_embeds=embeddings)
    stack(inputs_embeds=2 * embeddings)
    stack(ids)
    once, twice, from_ids = entered
    assert_same(twice - once, embeddings * math.sqrt(config.d_model))
    assert torch.equal(from_ids, once)


@EXAMPLES
@given(CONFIGURATIONS, SEEDS)
def test_an_unscaled_model_given_scaled_embeddings_predicts_the_same(config, seed):
    scaled = random_model(VanillaTransformerForConditionalGeneration, config, seed)
    source, target = tokens(2, 5), tokens(2, 4)
    unscaled_config = copy.deepcopy(config)
    unscaled_config.scale_embedding = False
    unscaled = VanillaTransformerForConditionalGeneration(unscaled_config).double().eval()
    unscaled.load_state_dict(scaled.state_dict())
    scale = math.sqrt(config.d_model)
    given_embeddings = unscaled(
        inputs_embeds=scaled.model.encoder.embed_tokens(source) * scale,
        decoder_inputs_embeds=scaled.model.decoder.embed_tokens(target) * scale,
    )
    expected = scaled(input_ids=source, decoder_input_ids=target)
    assert_same(given_embeddings.logits, expected.logits)


# ---------------------------------------------------------------- which matrices are tied

SHARED, UNTIED = {}, {"tie_word_embeddings": False}
TWO_VOCABULARIES = {"decoder_vocab_size": 60}
TWO_UNTIED = {**UNTIED, **TWO_VOCABULARIES}
CLASSES = (
    VanillaTransformerModel,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
)
# Which of source embedding, target embedding and projection are tied.
VARIANTS = [
    (SHARED, [{"source", "target", "head"}]),
    (UNTIED, [{"source"}, {"target"}, {"head"}]),
    (TWO_VOCABULARIES, [{"source"}, {"target", "head"}]),
    (TWO_UNTIED, [{"source"}, {"target"}, {"head"}]),
]
MODELS = [(VanillaTransformerForConditionalGeneration, *variant) for variant in VARIANTS] + [
    (VanillaTransformerModel, SHARED, [{"source", "target"}]),
    (VanillaTransformerModel, UNTIED, [{"source"}, {"target"}]),
    (VanillaTransformerModel, TWO_VOCABULARIES, [{"source"}, {"target"}]),
    (VanillaTransformerEncoderModel, SHARED, [{"source"}]),
    (VanillaTransformerForCausalLM, SHARED, [{"target", "head"}]),
    (VanillaTransformerForCausalLM, UNTIED, [{"target"}, {"head"}]),
]


def name_of(value):
    """A part of a test's name."""
    if isinstance(value, dict):
        return ",".join(value) or "shared"
    return value.__name__ if isinstance(value, type) else ""


def new_model(fields=SHARED, model_class=VanillaTransformerForConditionalGeneration):
    torch.manual_seed(0)
    return model_class(small_config(dropout=0.0, **fields))


def matrices(model):
    """Source embedding, target embedding and projection, if the model has them."""
    body = model.base_model
    modules = {
        "source": getattr(body, "encoder", None) and body.encoder.embed_tokens,
        "target": getattr(body, "decoder", None) and body.decoder.embed_tokens,
        "head": model.get_output_embeddings(),
    }
    return {name: module.weight for name, module in modules.items() if module is not None}


def tied_groups(model):
    """Groups of names of the same parameter, which share storage too."""
    found = matrices(model)
    groups = []
    for weight in found.values():
        group = {other for other in found if found[other] is weight}
        assert group == {other for other in found if found[other].data_ptr() == weight.data_ptr()}
        assert group == {other for other in found if torch.equal(found[other], weight)}
        groups += [group] if group not in groups else []
    return groups


def save_and_load(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def load_in_half_precision(model, folder):
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, dtype=torch.float16)
    assert loaded.dtype == torch.float16
    return loaded


def load_state_dict(model, folder):
    torch.manual_seed(1)
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other


def assign_state_dict(model, folder):
    """Assign the weights to a model on the meta device, and then tie them."""
    with torch.device("meta"):
        other = type(model)(model.config)
    other.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    other.tie_weights()
    return other


def materialise(model, folder):
    with torch.device("meta"):
        other = type(model)(model.config)
    other.to_empty(device="cpu")
    other.tie_weights()
    other.load_state_dict(model.state_dict())
    return other


def train(model, folder):
    """Two steps, which change every matrix of the model's."""
    before = {name: weight.detach().clone() for name, weight in matrices(model).items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for seed in (1, 2):
        inputs = {"input_ids": random_ids(2, 6, seed=seed)}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = random_ids(2, 5, seed=seed)
        optimizer.zero_grad()
        outputs = model(**inputs)[0]
        (outputs * torch.randn_like(outputs)).sum().backward()
        optimizer.step()
    for name, weight in matrices(model).items():
        assert not torch.equal(weight, before[name])
    return model


OPERATIONS = {
    "construction": lambda model, _: model,
    "saving and loading": save_and_load,
    "loading in half precision": load_in_half_precision,
    "growing": lambda model, _: model.resize_token_embeddings(66) and model,
    "shrinking": lambda model, _: model.resize_token_embeddings(30) and model,
    "growing to a multiple": lambda model, _: (
        model.resize_token_embeddings(50, pad_to_multiple_of=8) and model
    ),
    "bfloat16": lambda model, _: model.to(torch.bfloat16),
    "double precision": lambda model, _: model.double(),
    "copying": lambda model, _: copy.deepcopy(model),
    "pickling": lambda model, _: pickle.loads(pickle.dumps(model)),
    "loading a state dict": load_state_dict,
    "assigning a state dict": assign_state_dict,
    "materialising": materialise,
    "training": train,
    "sharing memory": lambda model, _: model.share_memory(),
    "initializing again": lambda model, _: model.init_weights() or model,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(("model_class", "fields", "groups"), MODELS, ids=name_of)
def test_matrices_stay_tied_or_untied(model_class, fields, groups, operation, tmp_path):
    model = operation(new_model(fields, model_class), tmp_path)
    found = matrices(model)
    assert tied_groups(model) == groups
    parameters = [id(parameter) for parameter in model.parameters()]
    assert sum(parameters.count(key) for key in set(map(id, found.values()))) == len(groups)
    assert model.get_input_embeddings().weight is next(iter(found.values()))
    if hasattr(model.base_model, "shared"):
        assert model.base_model.shared.weight is next(iter(found.values()))


@pytest.mark.parametrize(("fields", "groups"), VARIANTS, ids=name_of)
def test_tied_matrices_are_tied_on_the_meta_device_too(fields, groups):
    with torch.device("meta"):
        found = matrices(new_model(fields))
    together = [{other for other in found if found[other] is weight} for weight in found.values()]
    assert [group for group in groups if group in together] == groups
    assert all(weight.is_meta for weight in found.values())


# ---------------------------------------------------------------- resizing


@pytest.mark.parametrize(("fields", "groups"), VARIANTS, ids=name_of)
@pytest.mark.parametrize("rows", [66, 45])
def test_resizing_the_vocabulary_keeps_rows_and_the_target_vocabulary(
    fields, groups, rows, tmp_path
):
    model = new_model(fields)
    before = {name: weight.detach().clone() for name, weight in matrices(model).items()}
    returned = model.resize_token_embeddings(rows)
    assert returned is model.get_input_embeddings()
    resized = {"source"} if "decoder_vocab_size" in fields else {"source", "target", "head"}
    for name, weight in matrices(model).items():
        if name not in resized:
            assert torch.equal(weight, before[name])
            continue
        kept = min(rows, 50)
        assert weight.shape == (rows, 24)
        assert torch.equal(weight[:kept], before[name][:kept])
        assert weight.requires_grad
    assert tied_groups(model) == groups
    target_rows = 60 if "decoder_vocab_size" in fields else rows
    assert (model.config.vocab_size, model.config.target_vocab_size) == (rows, target_rows)
    assert (model.lm_head.in_features, model.lm_head.out_features) == (24, target_rows)
    assert_works_and_survives_saving(model, rows, target_rows, tmp_path)


@pytest.mark.parametrize("fields", [TWO_VOCABULARIES, TWO_UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("rows", "multiple", "expected"), [(75, None, 75), (40, None, 40), (61, 8, 64)]
)
def test_resizing_the_target_vocabulary_keeps_rows_and_the_source_vocabulary(
    fields, rows, multiple, expected, tmp_path
):
    model = new_model(fields)
    before = {name: weight.detach().clone() for name, weight in matrices(model).items()}
    groups = tied_groups(model)
    returned = model.resize_decoder_token_embeddings(rows, multiple)
    assert returned is model.get_decoder().embed_tokens
    assert tied_groups(model) == groups
    found = matrices(model)
    assert torch.equal(found["source"], before["source"])
    kept = min(expected, 60)
    for name in ("target", "head"):
        assert found[name].shape == (expected, 24)
        assert torch.equal(found[name][:kept], before[name][:kept])
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (50, expected)
    assert (model.lm_head.in_features, model.lm_head.out_features) == (24, expected)
    assert_works_and_survives_saving(model, 50, expected, tmp_path)


def assert_works_and_survives_saving(model, source_rows, target_rows, folder):
    """The highest id of each vocabulary can be read, predicted, and generated from."""
    source = torch.tensor([[4, source_rows - 1]])
    labels = torch.tensor([[5, target_rows - 1, 2]])
    outputs = model.eval()(input_ids=source, labels=labels)
    assert outputs.logits.shape == (1, 3, target_rows)
    outputs.loss.backward()
    loaded = save_and_load(model, folder)
    assert torch.equal(loaded(input_ids=source, labels=labels).loss, outputs.loss)
    generated = model.generate(source, max_new_tokens=4, num_beams=2)
    assert torch.equal(loaded.generate(source, max_new_tokens=4, num_beams=2), generated)


@pytest.mark.parametrize("fields", [SHARED, UNTIED], ids=["shared", "untied"])
def test_a_shared_vocabulary_cannot_be_resized_for_the_target_only(fields):
    model = new_model(fields)
    with pytest.raises(ValueError, match="source and target share a vocabulary, expected a call"):
        model.resize_decoder_token_embeddings(60)
    assert {len(weight) for weight in matrices(model).values()} == {50}


def learned(model_class=VanillaTransformerForConditionalGeneration, **fields):
    fields = {"position_encoding": "learned", "max_position_embeddings": 12, **fields}
    return new_model(fields, model_class).eval()


def tables(model):
    positions = model.get_position_embeddings()
    return positions if isinstance(positions, tuple) else (positions,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [20, 7])
@pytest.mark.parametrize("model_class", CLASSES)
def test_resizing_learned_positions_keeps_the_old_ones(model_class, rows, dtype):
    model = learned(model_class).to(dtype)
    before = [table.weight.detach().clone() for table in tables(model)]
    model.resize_position_embeddings(rows)
    assert len(tables(model)) == len(before)
    for table, old in zip(tables(model), before, strict=True):
        kept = min(rows, 12)
        assert table.weight.shape == (rows, 24)
        assert table.weight.dtype == dtype
        assert table.weight.requires_grad
        assert torch.equal(table.weight[:kept], old[:kept])
        assert table.weight[kept:].any(-1).all()
    assert {id(table) for table in tables(model)} <= {id(module) for module in model.modules()}
    assert model.config.max_position_embeddings == rows


@pytest.mark.parametrize("rows", [20, 7])
def test_a_model_with_resized_positions_accepts_that_many_tokens(rows, tmp_path):
    model = learned()
    short = {"input_ids": random_ids(1, 5), "decoder_input_ids": random_ids(1, 5)}
    expected = model(**short).logits
    model.resize_position_embeddings(rows)
    for resized in (model, save_and_load(model, tmp_path).eval()):
        assert torch.equal(resized(**short).logits, expected)
        whole = resized(input_ids=random_ids(1, rows), decoder_input_ids=random_ids(1, rows))
        assert whole.logits.shape == (1, rows, 50)
        with pytest.raises(IndexError, match=f"position {rows} is out of range"):
            resized(input_ids=random_ids(1, rows + 1), decoder_input_ids=random_ids(1, 1))
        with pytest.raises(IndexError, match=f"position {rows} is out of range"):
            resized(input_ids=random_ids(1, 1), decoder_input_ids=random_ids(1, rows + 1))


def test_get_position_embeddings_returns_those_of_encoder_and_decoder():
    model = learned()
    assert model.get_position_embeddings() == (
        model.model.encoder.embed_positions,
        model.model.decoder.embed_positions,
    )
    language_model = learned(VanillaTransformerForCausalLM)
    table = language_model.get_position_embeddings()
    assert table is language_model.model.decoder.embed_positions


@pytest.mark.parametrize("model_class", CLASSES)
def test_sinusoids_have_no_table_to_get_or_resize(model_class):
    model = new_model(model_class=model_class)
    for ask in (model.get_position_embeddings, lambda: model.resize_position_embeddings(20)):
        with pytest.raises(ValueError, match="position_encoding='sinusoidal': expected 'learned'"):
            ask()
    assert model.config.max_position_embeddings == 1024


def test_resized_positions_stay_frozen_and_there_is_at_least_one():
    model = VanillaTransformerModel(small_config(position_encoding="learned"))
    model.requires_grad_(False)
    model.resize_position_embeddings(9)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="new_num_position_embeddings=0: expected a positive"):
        model.resize_position_embeddings(0)
    assert model.config.max_position_embeddings == 9
