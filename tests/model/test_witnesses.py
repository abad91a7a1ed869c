"""Three independent implementations, given our weights, predict the same: `torch.nn.Transformer`,
and Marian and FSMT of transformers. Weights are copied by name, exactly, there and back."""

import pytest
import torch
from conftest import SMALL, random_ids, small_config
from test_modeling import pad, variant_name
from test_reference import randomize
from torch import nn
from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianConfig, MarianMTModel
from transformers.models.fsmt import modeling_fsmt

from vanilla_transformer import VanillaTransformerForConditionalGeneration

D_MODEL = SMALL["d_model"]
# The witnesses have biases in attention and torch's epsilon.
FIELDS = {"attention_bias": True, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0}
STACKS = {name: size for name, size in SMALL.items() if name.startswith(("encoder", "decoder"))}
THEIR_FIELDS = {
    **STACKS,
    "d_model": D_MODEL,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
}
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
any_side = pytest.mark.parametrize("side", ["left", "right"])


def our_model(**fields):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_config(**FIELDS, **fields))
    return randomize(model).double().eval()


def padded_batch(model, source_side="right", target_side="right"):
    sources = [random_ids(1, n, seed=n)[0] for n in (3, 9, 5)]
    targets = [random_ids(1, n, model.config.target_vocab_size, seed=n)[0] for n in (6, 2, 7)]
    source_ids, source_mask = pad(sources, source_side, value=1)
    target_ids, target_mask = pad(targets, target_side, value=1)
    return {
        "input_ids": source_ids,
        "attention_mask": source_mask,
        "decoder_input_ids": target_ids,
        "decoder_attention_mask": target_mask,
    }


def assert_same_logits(ours, theirs, batch, tolerance):
    """Of every target token; padding does not count."""
    tokens = batch["decoder_attention_mask"].bool()
    torch.testing.assert_close(theirs[tokens], ours[tokens], rtol=0, atol=tolerance)


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


def rename(state, names):
    """Replace parts of names, old by new, in the order of the pairs."""
    renamed = {}
    for name, weight in state.items():
        for old, new in names:
            name = name.replace(old, new)
        renamed[name] = weight
    return renamed


def reverse(names):
    return [(new, old) for old, new in reversed(names)]


def our_positions(model, count):
    positions = model.get_encoder().embed_positions
    return positions(torch.arange(count)[None], model.dtype)[0]


# ---------------------------------------------------------------- torch.nn.Transformer

TORCH_NAMES = {
    "encoder": [
        ("model.encoder.", "encoder."),
        (".self_attn_layer_norm.", ".norm1."),
        (".ffn_layer_norm.", ".norm2."),
        (".layer_norm.", ".norm."),
        (".ffn.fc", ".linear"),
    ],
    "decoder": [
        ("model.decoder.", "decoder."),
        (".self_attn_layer_norm.", ".norm1."),
        (".encoder_attn_layer_norm.", ".norm2."),
        (".ffn_layer_norm.", ".norm3."),
        (".layer_norm.", ".norm."),
        (".ffn.fc", ".linear"),
        (".encoder_attn.", ".multihead_attn."),
    ],
}


def layers_of(state, prefix=""):
    """torch's part of a stack: its layers and its last norm, but not its embedding."""
    return {
        name: weight
        for name, weight in state.items()
        if name.startswith(prefix) and (".layers." in name or ".layer_norm." in name)
    }


def to_torch(state):
    theirs = {}
    for stack, names in TORCH_NAMES.items():
        theirs |= rename(layers_of(state, f"model.{stack}."), names)
    for query in [name for name in theirs if ".q_proj." in name]:
        parts = [theirs.pop(query.replace(".q_", f".{part}_")) for part in "qkv"]
        theirs[query.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    return theirs


def from_torch(state):
    state, ours = dict(state), {}
    for fused in [name for name in state if ".in_proj_" in name]:
        for part, weight in zip("qkv", state.pop(fused).chunk(3), strict=True):
            state[fused.replace(".in_proj_", f".{part}_proj.")] = weight
    for stack, names in TORCH_NAMES.items():
        part = {name: weight for name, weight in state.items() if name.startswith(stack)}
        ours |= rename(part, reverse(names))
    return ours


def torch_witness(config):
    witness = nn.Transformer(
        config.d_model,
        config.encoder_attention_heads,
        config.encoder_layers,
        config.decoder_layers,
        config.encoder_ffn_dim,
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=config.norm_position == "pre",
        dtype=torch.float64,
    ).eval()
    if config.norm_position == "post":
        witness.encoder.norm = witness.decoder.norm = None
    return witness


def torch_logits(witness, model, batch):
    """torch has no embedding or projection, so ours are used."""
    source_mask, target_mask = batch["attention_mask"], batch["decoder_attention_mask"]
    length = target_mask.shape[1]
    states = witness(
        model.get_encoder().embed(batch["input_ids"], None, None, source_mask),
        model.get_decoder().embed(batch["decoder_input_ids"], None, None, target_mask),
        tgt_mask=torch.ones(length, length).triu(1).bool(),
        src_key_padding_mask=source_mask == 0,
        tgt_key_padding_mask=target_mask == 0,
        memory_key_padding_mask=source_mask == 0,
    )
    return model.lm_head(states)


@pytest.fixture(params=["post", "pre"])
def torch_pair(request):
    sizes = {"decoder_attention_heads": 2, "decoder_ffn_dim": SMALL["encoder_ffn_dim"]}
    model = our_model(norm_position=request.param, **sizes)
    return model, torch_witness(model.config)


@any_side
def test_torchs_transformer_predicts_the_same(torch_pair, side):
    model, witness = torch_pair
    witness.load_state_dict(to_torch(model.state_dict()))
    batch = padded_batch(model, side)  # a target padded on the left is NaN in torch
    theirs = torch_logits(witness, model, batch)
    assert_same_logits(model(**batch).logits, theirs, batch, 1e-10)


def test_weights_are_unchanged_after_conversion_to_torchs_transformer_and_back(torch_pair):
    model, witness = torch_pair
    ours, theirs = model.state_dict(), randomize(witness, seed=1).state_dict()
    assert_same_weights(from_torch(to_torch(ours)), layers_of(ours))
    assert_same_weights(to_torch(from_torch(theirs)), theirs)


# ---------------------------------------------------------------- Marian

MARIAN_NAMES = [(".ffn.fc", ".fc"), (".ffn_layer_norm.", ".final_layer_norm.")]
MARIANS_OWN = {
    "final_logits_bias",
    "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight",
}
# All sines, then all cosines; the paper interleaves them.
HALVES = torch.cat([torch.arange(0, D_MODEL, 2), torch.arange(1, D_MODEL, 2)])
D_MODEL_AXIS = {
    "embed_tokens.weight": 1,
    "shared.weight": 1,
    "lm_head.weight": 1,
    "q_proj.weight": 1,
    "q_proj.bias": None,
    "k_proj.weight": 1,
    "k_proj.bias": None,
    "v_proj.weight": 1,
    "v_proj.bias": None,
    "out_proj.weight": 0,
    "out_proj.bias": 0,
    "fc1.weight": 1,
    "fc1.bias": None,
    "fc2.weight": 0,
    "fc2.bias": 0,
    "layer_norm.weight": 0,
    "layer_norm.bias": 0,
}


def permute_d_model(state, order):
    permuted = {}
    for name, weight in state.items():
        axis = next(axis for ending, axis in D_MODEL_AXIS.items() if name.endswith(ending))
        permuted[name] = weight if axis is None else weight.index_select(axis, order)
    return permuted


def to_marian(state):
    return rename(permute_d_model(state, HALVES), MARIAN_NAMES)


def from_marian(state):
    assert not state["final_logits_bias"].any()
    state = {name: weight for name, weight in state.items() if name not in MARIANS_OWN}
    return permute_d_model(rename(state, reverse(MARIAN_NAMES)), HALVES.argsort())


def marian_witness(config):
    witness = MarianMTModel(
        MarianConfig(
            **THEIR_FIELDS,
            vocab_size=config.vocab_size,
            decoder_vocab_size=config.decoder_vocab_size,
            share_encoder_decoder_embeddings=config.shares_embeddings,
            decoder_start_token_id=1,
        )
    )
    return witness.double().eval()


@pytest.fixture(params=[{}, {"decoder_vocab_size": 60}], ids=variant_name)
def marian_pair(request):
    model = our_model(**request.param)
    witness = marian_witness(model.config)
    copied = witness.load_state_dict(to_marian(model.state_dict()), strict=False)
    assert set(copied.missing_keys) == MARIANS_OWN
    assert not copied.unexpected_keys
    return model, witness


def test_marians_positions_are_the_papers_in_a_different_order(marian_pair):
    model, witness = marian_pair
    for stack in (witness.model.encoder, witness.model.decoder):
        theirs = stack.embed_positions.weight
        torch.testing.assert_close(theirs, our_positions(model, 16)[:, HALVES], rtol=0, atol=1e-7)


def test_marian_predicts_the_same(marian_pair):
    model, witness = marian_pair
    batch = padded_batch(model)  # Marian's positions start at a row's first column, token or not
    ours = model(**batch).logits
    # as it is, its positions in single precision
    assert_same_logits(ours, witness(**batch).logits, batch, 1e-5)
    for stack in (witness.model.encoder, witness.model.decoder):
        stack.embed_positions.weight.data = our_positions(model, 16)[:, HALVES]
    assert_same_logits(ours, witness(**batch).logits, batch, 1e-10)


def test_weights_are_unchanged_after_conversion_to_marian_and_back(marian_pair):
    model, witness = marian_pair
    ours = model.state_dict()
    assert_same_weights(from_marian({**witness.state_dict(), **to_marian(ours)}), ours)
    theirs = randomize(witness, seed=1).state_dict()
    model.load_state_dict(from_marian(theirs))
    expected = {name: theirs[name] for name in theirs if name not in MARIANS_OWN}
    assert_same_weights(to_marian(model.state_dict()), expected)


# ---------------------------------------------------------------- FSMT

FSMT_NAMES = [*MARIAN_NAMES, ("lm_head.", "model.decoder.output_projection.")]


def to_fsmt(state):
    """FSMT has no name for a shared matrix: it is listed under each of its uses."""
    return rename({k: weight for k, weight in state.items() if "shared" not in k}, FSMT_NAMES)


def from_fsmt(state, shares_embeddings):
    state = {name: weight for name, weight in state.items() if "positions" not in name}
    ours = rename(state, reverse(FSMT_NAMES))
    if shares_embeddings:
        ours["model.shared.weight"] = ours["model.decoder.embed_tokens.weight"]
    return ours


@pytest.fixture(
    params=[{}, {"decoder_vocab_size": 60, "tie_word_embeddings": False}], ids=variant_name
)
def fsmt_pair(request):
    """The paper's sinusoids, from row 2 on, replace its own, which are tensor2tensor's."""
    model = our_model(**request.param)
    config = model.config
    witness = FSMTForConditionalGeneration(
        FSMTConfig(
            **THEIR_FIELDS,
            src_vocab_size=config.vocab_size,
            tgt_vocab_size=config.target_vocab_size,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    witness = witness.double().eval()
    copied = witness.load_state_dict(to_fsmt(model.state_dict()), strict=False)
    assert all("embed_positions" in name for name in copied.missing_keys)
    assert not copied.unexpected_keys
    for stack in (witness.model.encoder, witness.model.decoder):
        stack.embed_positions.weight.data[2:] = our_positions(model, 16)
    return model, witness


@any_side
def test_fsmt_predicts_the_same(fsmt_pair, side, monkeypatch):
    # FSMT's own version converts a double precision number to single precision, and overflows
    monkeypatch.setattr(
        modeling_fsmt, "fill_with_neg_inf", lambda t: t.fill_(torch.finfo(t.dtype).min)
    )
    model, witness = fsmt_pair
    batch = padded_batch(model, side, side)
    theirs = witness(**batch, use_cache=False).logits
    assert_same_logits(model(**batch).logits, theirs, batch, 1e-10)


def test_weights_are_unchanged_after_conversion_to_fsmt_and_back(fsmt_pair):
    model, witness = fsmt_pair
    shares_embeddings = model.config.shares_embeddings
    ours = model.state_dict()
    assert_same_weights(from_fsmt(to_fsmt(ours), shares_embeddings), ours)
    theirs = randomize(witness, seed=1).state_dict()
    model.load_state_dict(from_fsmt(theirs, shares_embeddings))
    expected = {name: weight for name, weight in theirs.items() if "positions" not in name}
    assert_same_weights(to_fsmt(model.state_dict()), expected)
