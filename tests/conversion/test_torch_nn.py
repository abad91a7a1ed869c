"""State dicts of torch.nn.Transformer and of The Annotated Transformer."""

import json
import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Payload, ragged, random_ids
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from conversion.models import expect_training_to_go_on, random_model, split_state
from conversion.reference import CHECKPOINTS, checkpoint_folder, expect_reference, load_reference
from vanilla_transformer.conversion import ConversionOptions, convert, positions, torch_nn
from vanilla_transformer.conversion.check import Converted, largest_difference, of_targets

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested_tensor|nested tensors)")

D, HEADS, SOURCE, TARGET = 24, 4, 30, 26
TUTORIAL = ["<unk>", "<pad>", "<bos>", "<eos>"]
ANNOTATED = ["<s>", "</s>", "<blank>", "<unk>"]


class Tutorial(nn.Module):
    """A torch.nn.Transformer with the names of PyTorch's tutorial on translation."""

    def __init__(self, table=None, scale=True, tied=False, **options):
        super().__init__()
        self.scale = D**0.5 if scale else 1.0
        self.transformer = nn.Transformer(
            D, HEADS, 2, 3, 40, dropout=0.0, batch_first=True, **options
        )
        self.generator = nn.Linear(D, TARGET, bias=options.get("bias", True))
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(SOURCE, D)})
        self.tgt_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(TARGET, D)})
        if tied:
            self.generator.weight = self.tgt_tok_emb["embedding"].weight
        self.positional_encoding = nn.Module()
        table = positions.sinusoids(50, D, "paper", "interleaved") if table is None else table
        self.positional_encoding.register_buffer("pos_embedding", table[:, None].float())
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.eval()

    def forward(self, source, mask, target):
        table = self.positional_encoding.pos_embedding[:, 0].double()
        hidden = self.transformer(
            self.src_tok_emb["embedding"](source) * self.scale + table[: source.shape[1]],
            self.tgt_tok_emb["embedding"](target) * self.scale + table[: target.shape[1]],
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]).double(),
            src_key_padding_mask=mask == 0,
            memory_key_padding_mask=mask == 0,
        )
        return self.generator(hidden)


def save(folder, state, specials=TUTORIAL, sizes=(SOURCE, TARGET)):
    """Save a state dict and its vocabularies."""
    folder.mkdir()
    torch.save(state, folder / "model.pt")
    for side, size in zip(("src", "tgt"), sizes, strict=True):
        tokens = [*specials, *(f"{side}{number}" for number in range(size - 4))]
        (folder / f"vocab.{side}.txt").write_text("\n".join(tokens) + "\n")
    return folder / "model.pt"


def convert_state(tmp_path, state, names=None, **options):
    """The folder of the converted model."""
    file = save(tmp_path / "torch", state)
    if names is not None:
        options["names"] = str(tmp_path / "names.yaml")
        (tmp_path / "names.yaml").write_text(json.dumps(names))
    options = ConversionOptions(**{"heads": HEADS, **options})
    return convert(file, tmp_path / "ours", options=options)


@torch.no_grad()
def expect_same(folder, model):
    """The converted model has the same log-probabilities as torch's in double precision."""
    sources, mask = ragged(7, 4)
    sources, targets = sources % SOURCE, random_ids(2, 6, TARGET)
    ours = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    found = ours(input_ids=sources, attention_mask=mask, decoder_input_ids=targets).logits
    # torch's fast path for inference computes in a different order
    expected = model.double()(sources, mask, targets)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-6)


VARIANTS = {
    "post": ({}, {}),
    "pre": ({"norm_first": True}, {"norm_first": True}),
    "gelu": ({"activation": "gelu"}, {"activation": "gelu"}),
    "another epsilon": ({"layer_norm_eps": 1e-3}, {"layer_norm_eps": 1e-3}),
    "no biases": ({"bias": False}, {}),
    "no biases, pre": ({"bias": False, "norm_first": True}, {"norm_first": True}),
    "tied": ({"tied": True}, {}),
    "embeddings as they are": ({"scale": False}, {"names": {"scale_embedding": False}}),
    "few learned positions": ({"table": torch.arange(9 * D).view(9, D).sin()}, {}),
    "learned positions": ({"table": torch.arange(50 * D).view(50, D).sin()}, {}),
    "halves": ({"table": positions.sinusoids(50, D, "paper", "halves")}, {}),
    "tensor2tensor": ({"table": positions.sinusoids(50, D, "tensor2tensor", "halves")}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_same_log_probabilities(tmp_path, variant):
    made, given = VARIANTS[variant]
    model = Tutorial(**made)
    expect_same(convert_state(tmp_path, model.state_dict(), **given), model)


def test_a_check_computes_the_activation_function(tmp_path):
    folder = convert_state(tmp_path, Tutorial(activation="gelu").state_dict(), activation="gelu")
    options = ConversionOptions(heads=HEADS, activation="gelu")
    toolkit = torch_nn.load_toolkit(tmp_path / "torch" / "model.pt", options)
    ids = [[2, 7, 9, 3]], [[8, 4, 3]]
    assert largest_difference(toolkit, Converted(folder), *ids) < 1e-5


@pytest.mark.parametrize("has_table", [True, False])
def test_the_card_says_if_the_positions_were_not_in_the_file(tmp_path, has_table):
    state = Tutorial().state_dict()
    if not has_table:
        del state["positional_encoding.pos_embedding"]
    card = (convert_state(tmp_path, state) / "README.md").read_text()
    assert "assumed: heads 4, " in card
    assert ("scale_embedding True, the paper's sinusoids." in card) == (not has_table)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_stack_without_a_table_has_the_papers_sinusoids(tmp_path, side):
    state = Tutorial().state_dict() | {"positions": torch.arange(9 * D).view(9, D).sin()}
    del state["positional_encoding.pos_embedding"]
    folder = convert_state(tmp_path, state, names={f"{side}_positions": "positions"})
    options = ConversionOptions(heads=HEADS, names=str(tmp_path / "names.yaml"))
    toolkit = torch_nn.load_toolkit(tmp_path / "torch" / "model.pt", options)
    ours = Converted(folder)
    assert largest_difference(toolkit, ours, [[2, 7, 9, 3]], [[8, 4, 3]]) < 1e-5
    assert ours.module.config.max_position_embeddings == 9


@pytest.mark.parametrize("side", ["encoder", "decoder", "both"])
def test_the_norm_after_a_stack_can_be_missing(tmp_path, side):
    model = Tutorial()
    for stack in ("encoder", "decoder"):
        if side in (stack, "both"):
            getattr(model.transformer, stack).norm = None
    expect_same(convert_state(tmp_path, model.state_dict()), model)


def test_different_names_are_mapped_by_a_table(tmp_path):
    model = Tutorial()
    renamed = {
        name.replace("src_tok_emb.embedding", "source")
        .replace("tgt_tok_emb.embedding", "target")
        .replace("generator", "out")
        .replace("positional_encoding.pos_embedding", "pe")
        .replace("transformer.encoder", "enc")
        .replace("transformer.decoder", "dec"): tensor
        for name, tensor in model.state_dict().items()
    }
    names = {
        "source_embedding": "source.weight",
        "target_embedding": "target.weight",
        "projection": "out.weight",
        "projection_bias": "out.bias",
        "source_positions": "pe",
        "target_positions": "pe",
        "ignored": ["step"],
    }
    state = renamed | {"step": torch.tensor(3)}
    expect_same(convert_state(tmp_path, state, names=names), model)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "net."])
def test_prefixes_of_wrappers_are_removed(tmp_path, wrapper):
    model = Tutorial()
    state = {f"{wrapper}{name}": tensor for name, tensor in model.state_dict().items()}
    expect_same(convert_state(tmp_path, {"epoch": 3, "state_dict": state}), model)


@pytest.mark.parametrize("variant", ["torch_nn_transformer/post", "annotated_transformer/pre"])
def test_a_converted_model_gives_the_same_as_the_original(tmp_path, variant):
    options = ConversionOptions(heads=4)
    folder = convert(checkpoint_folder(variant), tmp_path / "ours", options=options)
    # The Annotated Transformer adds its epsilon to the standard deviation, not to the variance.
    expect_reference(folder, variant, 1e-5 if "annotated" in variant else None)
    expect_training_to_go_on(folder, variant)
    translate = pipeline("translation", model=str(folder))  # greedy, as the original's loop is
    notes = load_reference(variant)[1]
    found = [each["translation_text"] for each in translate(notes["source_texts"])]
    assert found == notes["greedy"]["texts"]


def annotated_state(model):
    """A model of ours under the names of The Annotated Transformer."""
    ours, state = split_state(model), {}
    gain = (D / (D - 1)) ** 0.5
    for name, tensor in ours.items():
        name = name.removeprefix("model.").replace("ffn.fc", "feed_forward.w_")
        stack = name.partition(".")[0]
        for number, part in enumerate(("q", "k", "v", "out")):
            name = name.replace(f".{part}_proj.", f".linears.{number}.")
        name = name.replace("encoder_attn.", "src_attn.")
        norms = {"encoder": ("self_attn", "ffn"), "decoder": ("self_attn", "encoder_attn", "ffn")}
        for number, part in enumerate(norms.get(stack, ())):
            name = name.replace(f"{part}_layer_norm.", f"sublayer.{number}.norm.")
        name = name.replace(f"{stack}.layer_norm.", f"{stack}.norm.")
        if "norm." in name:
            tensor = tensor * (gain if name.endswith("weight") else 1)
            name = name.replace("norm.weight", "norm.a_2").replace("norm.bias", "norm.b_2")
        name = name.replace("lm_head", "generator.proj")
        name = name.replace("encoder.embed_tokens", "src_embed.0.lut")
        state[name.replace("decoder.embed_tokens", "tgt_embed.0.lut")] = tensor
    for side in ("src", "tgt"):
        table = positions.sinusoids(50, D, "paper", "interleaved")
        state[f"{side}_embed.1.pe"] = table[None].float()
    return state


def test_unbiased_layer_norms_are_converted(tmp_path):
    model = random_model(
        vocab_size=SOURCE, decoder_vocab_size=TARGET, tie_word_embeddings=False, d_model=D,
        norm_position="pre", attention_bias=True, lm_head_bias=True,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
    )  # fmt: skip
    file = save(tmp_path / "annotated", annotated_state(model), ANNOTATED)
    folder = convert(file, tmp_path / "ours", options=ConversionOptions(heads=HEADS))
    model = model.double()
    converted = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    for name, tensor in converted.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-6, atol=0)


def test_the_converted_layer_norm_equals_that_of_the_annotated_transformer():
    hidden = torch.randn(5, D, dtype=torch.float64)
    a_2, b_2 = torch.randn(2, D, dtype=torch.float64)
    theirs = a_2 * (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, keepdim=True) + b_2
    weights = {"model.encoder.layer_norm.weight": a_2}
    torch_nn._rescale_gains(weights, D)
    ours = F.layer_norm(hidden, (D,), *weights.values(), b_2, eps=0.0)
    torch.testing.assert_close(ours, theirs)


def test_text_gets_the_same_special_tokens_as_in_training(tmp_path):
    folder = convert_state(tmp_path, Tutorial().state_dict(), names={"eos_after_source": False})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("src1 none")["input_ids"] == [2, 5, 0]
    assert tokenizer(text_target="tgt1")["input_ids"] == [5, 3]


def test_the_number_of_heads_is_required(tmp_path):
    with pytest.raises(ValueError, match=r"heads=None.*expected --heads, a divisor of d_model=24"):
        convert_state(tmp_path, Tutorial().state_dict(), heads=None)


def test_the_number_of_heads_must_divide_d_model(tmp_path):
    with pytest.raises(ValueError, match=r"heads=5: .* a divisor of d_model=24"):
        convert_state(tmp_path, Tutorial().state_dict(), heads=5)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"nheads": 4}, r"names.yaml: nheads: expected keys among heads, norm_first"),
        ({"norm_first": "yes"}, r"norm_first='yes': expected <class 'bool'>"),
        ({"pad": "<none>"}, r"there is no '<none>': expected the pad token"),
        ({"projection": "out.weight"}, r"expected a tensor 'out.weight'"),
    ],
)
def test_an_unknown_option_is_reported(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        convert_state(tmp_path, Tutorial().state_dict(), names=names)


def test_an_unknown_activation_is_reported(tmp_path):
    with pytest.raises(ValueError, match="activation='softplus': expected one of gelu"):
        convert_state(tmp_path, Tutorial().state_dict(), activation="softplus")


def test_an_unknown_tensor_is_reported(tmp_path):
    state = Tutorial().state_dict() | {"copy.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"does not know: copy.weight"):
        convert_state(tmp_path, state)


@pytest.mark.parametrize(
    "name", ["transformer.decoder.layers.1.norm3.bias", "transformer.encoder.layers.0.linear2.bias"]
)
def test_a_missing_tensor_is_reported(tmp_path, name):
    state = Tutorial().state_dict()
    del state[name]
    with pytest.raises(ValueError, match=f"expected a tensor '{name}'"):
        convert_state(tmp_path, state)


def test_a_wrong_shape_is_reported(tmp_path):
    state = Tutorial().state_dict() | {"tgt_tok_emb.embedding.weight": torch.zeros(TARGET, 12)}
    with pytest.raises(
        ValueError, match=r"tgt_tok_emb.embedding.weight'.*\(26, 12\), .*\(26, 24\)"
    ):
        convert_state(tmp_path, state)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (3 * D, 1)])
def test_a_wrong_shape_of_a_fused_projection_is_reported(tmp_path, shape):
    name = "transformer.decoder.layers.1.multihead_attn.in_proj_weight"
    state = Tutorial().state_dict() | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"'{name}\[q\]' has shape .*, expected \(24, 24\)"):
        convert_state(tmp_path, state)


def test_a_wrong_shape_of_a_gain_is_reported(tmp_path):
    model = random_model(
        vocab_size=SOURCE, decoder_vocab_size=TARGET, tie_word_embeddings=False, d_model=D,
        norm_position="pre", attention_bias=True, lm_head_bias=True,
    )  # fmt: skip
    name = "encoder.layers.0.sublayer.0.norm.a_2"
    state = annotated_state(model) | {name: torch.zeros(0)}
    file = save(tmp_path / "annotated", state, ANNOTATED)
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(0\), expected \(24\)"):
        convert(file, tmp_path / "ours", options=ConversionOptions(heads=HEADS))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_language_model_is_refused(tmp_path, stack):
    state = Tutorial().state_dict()
    state = {name: t for name, t in state.items() if f"transformer.{stack}" not in name}
    if stack == "encoder":
        state = {n.replace("transformer.decoder", "net"): t for n, t in state.items()}
    with pytest.raises(ValueError, match="a language model is no translation model"):
        convert_state(tmp_path, state)


def test_rows_without_a_token_give_a_warning(tmp_path, caplog):
    file = save(tmp_path / "torch", Tutorial().state_dict(), sizes=(SOURCE, TARGET - 8))
    convert(file, tmp_path / "ours", options=ConversionOptions(heads=HEADS))
    expected = f"target_vocabulary: {TARGET - 8} tokens for {TARGET} rows of the embedding"
    assert expected in caplog.text


@pytest.mark.parametrize("found", [TARGET - 9, TARGET + 1])
def test_a_vocabulary_that_does_not_match_is_refused(tmp_path, found):
    file = save(tmp_path / "torch", Tutorial().state_dict(), sizes=(SOURCE, found))
    message = f"target_vocabulary: {found} tokens: expected {TARGET}, the rows of the embedding"
    with pytest.raises(ValueError, match=message):
        convert(file, tmp_path / "ours", options=ConversionOptions(heads=HEADS))


def test_an_embedding_of_a_single_token_does_not_match(tmp_path):
    state = Tutorial().state_dict()
    name = "src_tok_emb.embedding.weight"
    with pytest.raises(ValueError, match="source_vocabulary: 30 tokens: expected 1"):
        convert_state(tmp_path, state | {name: state[name][:1]})


def test_one_vocabulary_can_be_used_for_both_sides(tmp_path):
    state = Tutorial().state_dict()
    state["src_tok_emb.embedding.weight"] = state["src_tok_emb.embedding.weight"][:TARGET]
    file = save(tmp_path / "torch", state, sizes=(TARGET, TARGET))
    tokens = (file.parent / "vocab.src.txt").read_text().splitlines()
    (file.parent / "vocab.tgt.txt").unlink()
    (tmp_path / "both").write_text("\n".join(tokens) + "\n")
    options = ConversionOptions(heads=HEADS, source_vocabulary=str(tmp_path / "both"))
    tokenizer = AutoTokenizer.from_pretrained(convert(file, tmp_path / "ours", options=options))
    batch = tokenizer("src1", text_target="src1")
    assert (batch["input_ids"], batch["labels"]) == ([2, 5, 3], [5, 3])


def test_a_missing_vocabulary_is_reported(tmp_path):
    file = save(tmp_path / "torch", Tutorial().state_dict())
    (file.parent / "vocab.tgt.txt").unlink()
    with pytest.raises(FileNotFoundError, match="expected --target_vocabulary"):
        convert(file, tmp_path / "ours", options=ConversionOptions(heads=HEADS))


def test_a_truncated_file_is_refused(tmp_path):
    file = save(tmp_path / "torch", Tutorial().state_dict())
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"model.pt: expected a complete torch checkpoint"):
        convert(file, tmp_path / "ours", options=ConversionOptions(format="torch_nn", heads=HEADS))


@pytest.mark.parametrize("new_format", [True, False])
def test_scores_and_options_next_to_the_weights_are_ignored(tmp_path, new_format):
    model = Tutorial()
    state = {
        "state_dict": model.state_dict(), "loss": np.float64(1.5), "losses": np.zeros(3),
        "args": Namespace(rate=1e-3, folder=Path("data")),
    }  # fmt: skip
    file = save(tmp_path / "torch", state)
    torch.save(state, file, _use_new_zipfile_serialization=new_format)
    options = ConversionOptions(heads=HEADS)
    expect_same(convert(file, tmp_path / "ours", options=options), model)


def test_a_payload_is_not_executed(tmp_path, mark):
    state = {"model": Tutorial().state_dict(), "args": Payload(mark)}
    file = save(tmp_path / "torch", state)
    assert not torch_nn.recognizes(file)
    with pytest.raises(ValueError, match=r"model.pt: holds objects of posix.mkdir"):
        convert(file, tmp_path / "ours", options=ConversionOptions(format="torch_nn", heads=HEADS))


def test_other_state_dicts_are_not_recognized(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    assert not torch_nn.recognizes(tmp_path / "other.pt")
    assert not torch_nn.recognizes(tmp_path / "absent.pt")


def test_the_definitions_of_a_notebook_are_compiled_without_its_examples(tmp_path, monkeypatch):
    file = tmp_path / "notebook.py"
    file.write_text("import altair\nclass A(nn.Module): pass\ndef f(): return A()\nraise OSError\n")
    monkeypatch.setenv("ANNOTATED_TRANSFORMER", str(file))
    assert isinstance(torch_nn.annotated_transformer().f(), nn.Module)


def test_a_check_of_the_annotated_transformer_requires_its_code(monkeypatch):
    monkeypatch.delenv("ANNOTATED_TRANSFORMER", raising=False)
    with pytest.raises(ImportError, match=r"expected the file the_annotated_transformer\.py"):
        torch_nn.annotated_transformer()


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="the checkpoints are not there")
@pytest.mark.skipif("ANNOTATED_TRANSFORMER" not in os.environ, reason="its code is not there")
def test_a_check_runs_the_annotated_transformer(tmp_path):
    variant, options = "annotated_transformer/pre", ConversionOptions(heads=4)
    ours = Converted(convert(CHECKPOINTS / variant, tmp_path / "ours", options=options))
    _, notes = load_reference(variant)
    toolkit = torch_nn.load_toolkit(CHECKPOINTS / variant, options)
    sources = ours.tokenizer(notes["source_texts"])["input_ids"]
    assert sources == [toolkit.encode(text) for text in notes["source_texts"]]
    greedy = toolkit.translate(sources, longest=20)
    assert [ours.text(ids) for ids in greedy] == notes["greedy"]["texts"]
    assert largest_difference(toolkit, ours, sources, greedy) < 2e-5  # float32, and the epsilon
    targets = ours.tokenizer(text_target=notes["target_texts"])["input_ids"]
    loss = toolkit.loss(toolkit.padded(sources), toolkit.padded(targets))
    expected = -torch.cat(of_targets(ours.log_probs(sources, targets), targets)).mean()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
