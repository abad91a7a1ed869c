"""Native Marian: its own checkpoints, and random ones of every supported architecture."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import yaml
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianConfig,
    MarianMTModel,
    pipeline,
)

from conversion.reference import (
    CHECKPOINTS,
    checkpoint_folder,
    expect_token_ids,
    load_reference,
    log_probability_difference,
)
from vanilla_transformer import VanillaTransformerForConditionalGeneration, conversion
from vanilla_transformer.conversion import ConversionOptions, core, marian
from vanilla_transformer.conversion.check import Converted, largest_difference, of_targets
from vanilla_transformer.data import vocabulary_files

VARIANTS = pytest.mark.parametrize("variant", ["marian/post", "marian/tied", "marian/spm"])


# ---------------------------------------------------------------- Results of Marian itself


@VARIANTS
def test_log_probabilities_equal_those_of_marian(converted, variant):
    folder = converted(variant)
    tensors, notes = load_reference(variant)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    expect_token_ids(AutoTokenizer.from_pretrained(folder), tensors, notes)
    assert log_probability_difference(model, tensors) < 1e-5  # Marian prints six digits


@VARIANTS
def test_translations_and_their_scores_equal_those_of_marian(converted, variant):
    folder = converted(variant)
    _, notes = load_reference(variant)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(notes["source_texts"], padding=True, return_tensors="pt")
    greedy = model.generate(**batch, num_beams=1)
    assert tokenizer.batch_decode(greedy, skip_special_tokens=True) == notes["greedy"]["texts"]
    for beam in notes["beam_4"].values():
        output = model.generate(
            **batch, num_beams=4, return_dict_in_generate=True, output_scores=True,
            length_penalty=float(beam["settings"]["normalize"]),
        )  # fmt: skip
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        assert texts == beam["texts"]
        torch.testing.assert_close(
            output.sequences_scores, torch.tensor(beam["scores"]), atol=1e-4, rtol=0
        )


@VARIANTS
def test_the_sinusoids_of_transformers_are_different(variant):
    read = marian.read(checkpoint_folder(variant), ConversionOptions(like="transformers"))
    assert read.config.layer_norm_eps == 1e-5
    assert log_probability_difference(model_of(read), load_reference(variant)[0]) > 0.1


@VARIANTS
def test_a_check_runs_marian(converted, variant):
    pytest.importorskip("_pymarian", reason="pymarian is not installed")
    ours = Converted(converted(variant))
    _, notes = load_reference(variant)
    toolkit = marian.load_toolkit(CHECKPOINTS / variant, ConversionOptions())
    sources = ours.tokenizer(notes["source_texts"])["input_ids"]
    assert sources == [toolkit.encode(text) for text in notes["source_texts"]]
    greedy = toolkit.translate(sources, longest=20)
    ended = [[*ids, 0] for ids in ours.translate(sources, longest=20)]
    assert greedy == [ids[: ids.index(0) + 1][:20] for ids in ended]
    assert largest_difference(toolkit, ours, sources, greedy) < 2e-5  # float32, and five decimals
    assert toolkit.translate(sources, longest=3) == [ids[:3] for ids in greedy]
    targets = ours.tokenizer(text_target=notes["target_texts"])["input_ids"]
    loss = toolkit.loss(toolkit.padded(sources), toolkit.padded(targets))
    expected = -torch.cat(of_targets(ours.log_probs(sources, targets), targets)).mean()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=0)


def test_search_options_are_those_of_decoder_yml(converted):
    generation = AutoModelForSeq2SeqLM.from_pretrained(converted("marian/post")).generation_config
    assert (generation.num_beams, generation.length_penalty) == (12, 0.0)
    assert generation.suppress_tokens == [1]  # Marian does not produce <unk>


def test_the_pipeline_translates(converted):
    translate = pipeline("translation", model=str(converted("marian/spm")), num_beams=1)
    assert translate("maus drei neun")[0]["translation_text"] == "nine three"


@VARIANTS
def test_training_continues_from_the_same_loss(converted, variant):
    model = AutoModelForSeq2SeqLM.from_pretrained(converted(variant))
    tensors, _ = load_reference(variant)
    lengths = torch.arange(tensors["target_ids"].shape[1]) < tensors["target_lengths"][:, None]
    batch = {
        "input_ids": tensors["source_ids"],
        "attention_mask": torch.arange(tensors["source_ids"].shape[1])
        < tensors["source_lengths"][:, None],
        "labels": tensors["target_ids"].masked_fill(~lengths, -100),
    }
    expected = -tensors["gold_log_probs"][lengths].mean().item()
    assert model.eval()(**batch).loss.item() == pytest.approx(expected, abs=1e-4)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(torch.stack(losses)).all()
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- Random models

D, HEADS, D_FF = 16, 4, 24
OPTIONS = {
    "type": "transformer",
    "version": "v1.12.42 b7be0e964 2025-05-24 22:34:42 -0700",
    "dim-vocabs": [9, 12],
    "dim-emb": D,
    "enc-depth": 1,
    "dec-depth": 2,
    "transformer-heads": HEADS,
    "transformer-dim-ffn": D_FF,
    "transformer-decoder-dim-ffn": 20,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-tied-layers": [],
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": False,
}
PRE_NORM = {
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
}


def random_arrays(options):
    """The arrays that `marian train` creates for these options, with random values."""
    random = np.random.default_rng(0)
    arrays = {}

    def add(name, *shape):
        arrays[name] = random.normal(0, 0.4, shape).astype(np.float32)

    def add_norm(name, suffix=""):
        add(f"{name}_ln_scale{suffix}", 1, D)
        add(f"{name}_ln_bias{suffix}", 1, D)

    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    sizes = dict(zip(("encoder", "decoder"), options["dim-vocabs"], strict=True))
    after = "_pre" if options["transformer-preprocess"] else ""
    for stack, size in sizes.items():
        add("Wemb" if shared else f"{stack}_Wemb", size, D)
        if "n" in options["transformer-postprocess-emb"]:
            add_norm(f"{stack}_emb", "_pre")
        if options["transformer-postprocess-top"]:
            add_norm(f"{stack}_top")
        decoder = stack == "decoder"
        d_ff = options["transformer-decoder-dim-ffn"] if decoder else D_FF
        numbers = range(1, options["dec-depth" if decoder else "enc-depth"] + 1)
        for number in set((decoder and options["transformer-tied-layers"]) or numbers):
            layer = f"{stack}_l{number}"
            for attention in ("self", "context")[: 1 + decoder]:
                for letter in "qkv" if options.get("transformer-no-projection") else "qkvo":
                    add(f"{layer}_{attention}_W{letter}", D, D)
                    add(f"{layer}_{attention}_b{letter}", 1, D)
                add_norm(f"{layer}_{attention}_Wo", after)
            for index, shape in enumerate(((D, d_ff), (d_ff, D)), start=1):
                add(f"{layer}_ffn_W{index}", *shape)
                add(f"{layer}_ffn_b{index}", 1, shape[1])
            add_norm(f"{layer}_ffn_ffn", after)
    if not (options["tied-embeddings"] or options["tied-embeddings-all"]):
        add("decoder_ff_logit_out_Wt", sizes["decoder"], D)
    if not options.get("output-omit-bias"):
        add("decoder_ff_logit_out_b", 1, sizes["decoder"])
    return arrays


def save_marian(folder, arrays, options, names="ab"):
    """A folder as Marian leaves it."""
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(options).encode() + bytes(3)
    special = {"special:model.yml": np.frombuffer(text, np.int8)}
    np.savez(folder / "model.npz", **arrays, **special)
    for name, size in zip(names, options["dim-vocabs"], strict=False):
        words = ["</s>", "<unk>", *(f"{name}{number}" for number in range(2, size))]
        lines = [f"{word}: {number}\n" for number, word in enumerate(words)]
        (folder / f"vocab.{name}.yml").write_text("".join(lines))
    decoder = {"models": ["model.npz"], "vocabs": [f"vocab.{name}.yml" for name in names]}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder))
    return folder


def save_random(folder, edit=lambda arrays: None, **changes):
    options = {**OPTIONS, **changes}
    arrays = random_arrays(options)
    edit(arrays)
    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    return save_marian(folder, arrays, options, names="aa" if shared else "ab")


def model_of(read):
    """The model that `convert` would save, in float64."""
    read.expect_fit()
    model = VanillaTransformerForConditionalGeneration(read.config)
    model.load_state_dict(read.weights, strict=False)
    model.tie_weights()
    return model.double().eval()


SOURCE, TARGET = [3, 5, 8, 2, 0], [4, 2, 6, 6, 7, 0]


def converted_log_probs(folder, **options):
    read = marian.read(folder, ConversionOptions(**options))
    ids = {"input_ids": torch.tensor([SOURCE]), "labels": torch.tensor([TARGET])}
    with torch.no_grad():
        return model_of(read)(**ids).logits.log_softmax(-1)[0]


def marian_log_probs(arrays, options):
    """Marian's transformer.h in a few lines, for one sentence pair: (target length, vocabulary)."""
    weights = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    activation = {
        "swish": torch.nn.functional.silu,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
    }[options["transformer-ffn-activation"]]

    def process(operations, name, x, previous, suffix=""):
        for operation in operations:
            if operation == "a":
                x = x + previous
            if operation == "n":
                scale, bias = (weights[f"{name}_ln_{kind}{suffix}"] for kind in ("scale", "bias"))
                x = torch.nn.functional.layer_norm(x, [D], scale[0], bias[0], 1e-6)
        return x

    def affine(x, name, letter):
        return x @ weights[f"{name}_W{letter}"] + weights[f"{name}_b{letter}"]

    def sublayer(name, norm, x, inner):
        before = process(options["transformer-preprocess"], norm, x, None, "_pre")
        return process(options["transformer-postprocess"], norm, inner(before), x)

    def attention(name, x, memory, mask):
        def inner(queries):
            keys = queries if memory is None else memory
            q, k, v = (
                affine(states, name, letter).view(len(states), HEADS, -1).transpose(0, 1)
                for letter, states in (("q", queries), ("k", keys), ("v", keys))
            )
            scores = q @ k.mT / (D // HEADS) ** 0.5 + mask
            output = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            return output if options.get("transformer-no-projection") else affine(output, name, "o")

        return sublayer(name, f"{name}_Wo", x, inner)

    def network(name, x):
        return sublayer(
            name, f"{name}_ffn", x, lambda y: affine(activation(affine(y, name, "1")), name, "2")
        )

    def stack(name, x, memory=None):
        if "Wpos" in weights:
            x = x + weights["Wpos"][: len(x)]
        elif not options.get("transformer-disable-position-embeddings"):
            exponents = torch.arange(D // 2, dtype=torch.double) / (D // 2 - 1)
            angles = torch.arange(len(x))[:, None] * 10000**-exponents
            x = x * D**0.5 + torch.cat([angles.sin(), angles.cos()], dim=1)
        bottom = x
        x = process(options["transformer-postprocess-emb"], f"{name}_emb", x, None, "_pre")
        mask = torch.zeros(len(x), len(x)) if memory is None else causal(len(x))
        depth = options["enc-depth" if memory is None else "dec-depth"]
        tied = memory is not None and options["transformer-tied-layers"]
        for number in tied or range(1, depth + 1):
            x = attention(f"{name}_l{number}_self", x, None, mask)
            if memory is not None:
                x = attention(f"{name}_l{number}_context", x, memory, torch.zeros(1))
            x = network(f"{name}_l{number}_ffn", x)
        return process(options["transformer-postprocess-top"], f"{name}_top", x, bottom)

    source, target = (
        weights.get("Wemb", weights.get(f"{name}_Wemb")) for name in ("encoder", "decoder")
    )
    shifted = torch.cat([torch.zeros(1, D), target[TARGET[:-1]]])
    states = stack("decoder", shifted, stack("encoder", source[SOURCE]))
    logits = states @ weights.get("decoder_ff_logit_out_Wt", target).T
    return (logits + weights.get("decoder_ff_logit_out_b", 0)).log_softmax(-1)


def causal(length):
    return torch.full((length, length), -1e9, dtype=torch.double).triu(1)


SHARED = {"dim-vocabs": [12, 12]}
SHAPES = {
    "post-norm, a vocabulary of another size for each side": {},
    "pre-norm": PRE_NORM,
    "pre-norm without a norm on top": {**PRE_NORM, "transformer-postprocess-top": ""},
    "pre-norm, norms on embeddings": {**PRE_NORM, "transformer-postprocess-emb": "nd"},
    "post-norm with a norm on top": {"transformer-postprocess-top": "n"},
    "post-norm, norms on embeddings": {"transformer-postprocess-emb": "dn"},
    "all tied": {**SHARED, "tied-embeddings-all": True},
    "source and target tied": {**SHARED, "tied-embeddings-src": True},
    "target and projection tied": {"tied-embeddings": True},
    "no bias before the softmax": {"output-omit-bias": True},
    "gelu": {"transformer-ffn-activation": "gelu"},
    "relu": {"transformer-ffn-activation": "relu"},
    "attention without a projection": {"transformer-no-projection": True},
    "tied layers": {"dec-depth": 3, "transformer-tied-layers": [1, 2, 1]},
    "options without an effect": {"transformer-no-bias": True, "transformer-no-affine": True},
    "no positions": {"transformer-disable-position-embeddings": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_every_architecture_are_converted(tmp_path, shape):
    options = {**OPTIONS, **SHAPES[shape]}
    folder = save_random(tmp_path / "model", **SHAPES[shape])
    found = converted_log_probs(folder)
    expected = marian_log_probs(random_arrays(options), options)
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-9, rtol=0)
    assert (found[:, expected.shape[1] :] < -1000).all()  # padding and start are not words


@pytest.mark.parametrize("activation", ["swish", "gelu"])
def test_like_transformers_computes_what_its_own_converter_makes_of_the_files(tmp_path, activation):
    """With a padding token of embedding 0 and bias 0, and an exact gelu also for old versions."""
    options = {**OPTIONS, **SHARED, "tied-embeddings-all": True, "version": "v1.9.0 1"}
    options |= {"transformer-ffn-activation": activation, "transformer-decoder-dim-ffn": D_FF}
    arrays = random_arrays(options)
    folder = save_marian(tmp_path / "model", arrays, options, names="aa")
    pad = len(arrays["Wemb"])
    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=pad + 1, d_model=D, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=D_FF,
            decoder_ffn_dim=D_FF, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
            activation_function=activation, scale_embedding=True, pad_token_id=pad, eos_token_id=0,
            decoder_start_token_id=pad,
        )
    ).eval()  # fmt: skip
    read = marian.read(folder, ConversionOptions(like="transformers"))
    with torch.no_grad():
        for name, parameter in theirs.model.named_parameters():
            ours = core.renamed(name, {r"\.fc": ".ffn.fc", r"\.final_layer": ".ffn_layer"})
            if their := marian._their_name(f"model.{ours}", options, read.config):
                parameter.copy_(torch.from_numpy(arrays[their]).T.reshape(parameter.shape))
        rows = torch.from_numpy(arrays["Wemb"])
        theirs.model.shared.weight.copy_(torch.cat([rows, torch.zeros(1, D)]))
        theirs.final_logits_bias[0, :pad] = torch.from_numpy(arrays["decoder_ff_logit_out_b"])
        ids = {"input_ids": torch.tensor([SOURCE]), "labels": torch.tensor([TARGET])}
        expected = theirs.double()(**ids).logits.log_softmax(-1)[0]
    found = converted_log_probs(folder, like="transformers")
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert read.generation["suppress_tokens"] == [1, pad]


def test_learned_positions_are_converted(tmp_path):
    table = np.random.default_rng(1).normal(size=(20, D)).astype(np.float32)
    folder = save_random(tmp_path / "model", lambda arrays: arrays.update(Wpos=table))
    expected = marian_log_probs({**random_arrays(OPTIONS), "Wpos": table}, OPTIONS)
    found = converted_log_probs(folder)[:, : expected.shape[1]]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_the_transposed_projection_of_the_first_versions_is_converted(tmp_path):
    def transpose(arrays):
        arrays["decoder_ff_logit_out_W"] = arrays.pop("decoder_ff_logit_out_Wt").T

    old, new = save_random(tmp_path / "old", transpose), save_random(tmp_path / "new")
    assert torch.equal(converted_log_probs(old), converted_log_probs(new))


@pytest.mark.parametrize(
    ("version", "activation"), [("v1.12.2 1", "quick_gelu"), ("v1.12.3 1", "gelu")]
)
def test_the_variant_of_gelu_depends_on_the_version(tmp_path, version, activation):
    gelu = {"version": version, "transformer-ffn-activation": "gelu"}
    read = marian.read(save_random(tmp_path / "model", **gelu), ConversionOptions())
    assert read.config.activation_function == activation


def test_float16_stays_float16(tmp_path):
    def halve(arrays):
        arrays.update({name: array.astype(np.float16) for name, array in arrays.items()})

    folder = save_random(tmp_path / "model", halve, **{"transformer-no-projection": True})
    model = AutoModelForSeq2SeqLM.from_pretrained(conversion.convert(folder, tmp_path / "ours"))
    assert model.dtype == torch.float16


# ---------------------------------------------------------------- Vocabularies and files


def test_rows_that_pad_to_a_multiple_of_8_need_no_token(tmp_path):
    folder = save_random(tmp_path / "model", **{"dim-vocabs": [16, 16]})
    lines = (folder / "vocab.a.yml").read_text().splitlines(keepends=True)
    (folder / "vocab.a.yml").write_text("".join(lines[:-3]))
    read = marian.read(folder, ConversionOptions())
    assert read.tokenizer("a2 a12 a15 zzz").input_ids == [2, 12, 1, 1, 0]


def test_words_are_only_split_at_spaces(tmp_path):
    tokenizer = marian.read(save_random(tmp_path / "model"), ConversionOptions()).tokenizer
    assert tokenizer("  a2  a3\ta4 ").input_ids == [2, 1, 0]
    assert tokenizer("").input_ids == [0]


def test_special_tokens_of_nematus_are_read(tmp_path):
    folder = save_random(tmp_path / "model")
    for file in folder.glob("vocab.*"):
        file.write_text(file.read_text().replace("</s>", "eos").replace("<unk>", "UNK"))
    tokenizer = marian.read(folder, ConversionOptions()).tokenizer
    assert tokenizer("a2 zzz").input_ids == [2, 1, 0]
    assert tokenizer.decode([2, 0], skip_special_tokens=True) == "b2"


def test_json_vocabularies_of_nematus_are_read(tmp_path):
    folder = save_random(tmp_path / "model")
    for name in "ab":
        vocab = vocabulary_files.read_marian_vocab(folder / f"vocab.{name}.yml")
        names = {"</s>": "eos", "<unk>": "UNK"}
        vocab = {names.get(token, token): number for token, number in vocab.items()}
        (folder / f"vocab.{name}.json").write_text(json.dumps(vocab, indent=1))
    decoder = {"models": ["model.npz"], "vocabs": ["vocab.a.json", "vocab.b.json"]}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder))
    tokenizer = marian.read(folder, ConversionOptions()).tokenizer
    assert tokenizer("a2 zzz").input_ids == [2, 1, 0]
    assert tokenizer(text_target="b11")["input_ids"] == [11, 0]


def test_a_vocabulary_can_already_contain_pad(tmp_path):
    folder = save_random(tmp_path / "model")
    file = folder / "vocab.b.yml"
    file.write_text(file.read_text().replace("b5:", "<pad>:"))
    file = folder / "vocab.a.yml"
    file.write_text(file.read_text().replace("a5:", "<pad>:"))
    read = marian.read(folder, ConversionOptions())
    assert read.tokenizer("a2 <pad>").input_ids == [2, 5, 0]
    assert read.tokenizer.pad_token_id == read.config.pad_token_id == 12


def test_pieces_of_source_spm_are_looked_up_in_the_vocabulary(tmp_path):
    """As in the archives of OPUS-MT: `decoder.yml`, `.yml` vocabularies, `source.spm`."""
    spm = CHECKPOINTS / "marian/spm/vocab.spm"
    if not spm.is_file():
        pytest.skip(f"{spm} is not there")
    folder = save_random(tmp_path / "model", **SHARED, **{"tied-embeddings-all": True})
    (folder / "model.npz.decoder.yml").rename(folder / "decoder.yml")
    for side in core.SIDES:
        shutil.copyfile(spm, folder / f"{side}.spm")
    tokens = ["</s>", "<unk>", "▁m", "au", "s", ">>de<<", "other", "▁d", "r", "ei", "x", "y"]
    lines = [f'"{token}": {number}\n' for number, token in enumerate(tokens)]
    (folder / "vocab.a.yml").write_text("".join(lines))
    read = marian.read(folder, ConversionOptions())
    assert read.tokenizer("maus drei").input_ids == [2, 3, 4, 7, 8, 9, 0]
    assert read.tokenizer(">>de<< maus").input_ids == [5, 2, 3, 4, 0]
    assert read.tokenizer.decode([2, 3, 4, 0], skip_special_tokens=True) == "maus"
    # "▁haus" has pieces that the vocabulary lacks: they have the embedding of <unk>.
    ids = read.tokenizer("haus").input_ids
    embeddings = read.weights["model.shared.weight"]
    assert (embeddings[[number for number in ids if number > 12]] == embeddings[1]).all()


@pytest.mark.parametrize("side", core.SIDES)
def test_codes_next_to_a_vocabulary_that_splits_text_are_refused(tmp_path, side):
    folder = checkpoint_folder("marian/spm")
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nm a\n")
    with pytest.raises(ValueError, match=f"{side}_codes=.*with .*vocab.spm, which splits text"):
        marian.read(folder, ConversionOptions(**{f"{side}_codes": str(codes)}))


@pytest.mark.parametrize("name", ["", "model.npz", "model.npz.decoder.yml"])
def test_a_folder_a_model_or_its_decoder_yml_can_be_converted(tmp_path, name):
    folder = save_random(tmp_path / "model")
    assert marian.recognizes(folder / name)
    assert conversion.convert(folder / name, tmp_path / "ours").is_dir()


def test_vocabularies_can_be_given(tmp_path):
    folder = save_random(tmp_path / "model")
    (folder / "model.npz.decoder.yml").unlink()
    given = {f"{side}_vocabulary": str(folder / f"vocab.{name}.yml") for side, name in
             zip(core.SIDES, "ab", strict=True)}  # fmt: skip
    assert marian.read(folder, ConversionOptions(**given)).config.vocab_size == 13
    with pytest.raises(ValueError, match="expected two vocabularies"):
        marian.read(folder, ConversionOptions())


def test_training_and_search_options_are_kept(tmp_path):
    folder = save_random(tmp_path / "model")
    training = {"transformer-dropout": 0.2, "label-smoothing": 0.1, "beam-size": 6}
    (folder / "model.npz.yml").write_text(yaml.safe_dump(training))
    decoder = yaml.safe_load((folder / "model.npz.decoder.yml").read_text())
    decoder |= {"beam-size": 4, "normalize": 0.6, "allow-unk": True, "max-length-factor": 2}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder))
    read = marian.read(folder, ConversionOptions())
    assert (read.config.dropout, read.config.label_smoothing) == (0.2, 0.1)
    expected = {"num_beams": 4, "length_penalty": 0.6, "max_length_factor": 2}
    assert read.generation == expected


def test_search_options_that_are_left_out_are_reported(tmp_path, caplog):
    folder = save_random(tmp_path / "model")
    marian.read(folder, ConversionOptions())
    assert not caplog.messages
    decoder = yaml.safe_load((folder / "model.npz.decoder.yml").read_text())
    decoder |= {"word-penalty": 0.2, "shortlist": ["lex.s2t", 50, 50]}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder))
    marian.read(folder, ConversionOptions())
    assert [text.partition("=")[0] for text in caplog.messages] == ["word-penalty", "shortlist"]


# ---------------------------------------------------------------- What is refused

REFUSED_OPTIONS = {
    "type='s2s'": {"type": "s2s"},
    "type='amun'": {"type": "amun"},
    "type='lm-transformer'": {"type": "lm-transformer"},
    "transformer-decoder-autoreg='rnn'": {"transformer-decoder-autoreg": "rnn"},
    "transformer-decoder-autoreg='average-attention'": {
        "transformer-decoder-autoreg": "average-attention"
    },
    "transformer-ffn-depth=3": {"transformer-ffn-depth": 3},
    "transformer-ffn-activation='glu'": {"transformer-ffn-activation": "glu"},
    "lemma-dim-emb=8": {"lemma-dim-emb": 8},
    "right-left=True": {"right-left": True},
    "transformer-attention-mask='alibi'": {"transformer-attention-mask": "alibi"},
    "input-types=['class', 'sequence']": {"input-types": ["class", "sequence"]},
    "dim-vocabs=[9, 12, 12]": {"dim-vocabs": [9, 12, 12]},
    "brand-new-option=1": {"brand-new-option": 1},
    "transformer-preprocess='n' and transformer-postprocess='dan'": {"transformer-preprocess": "n"},
    "transformer-postprocess='dar'": {"transformer-postprocess": "dar"},
    "transformer-postprocess-emb='r'": {"transformer-postprocess-emb": "r"},
    "version='v1.10.9 1' with transformer-preprocess='n'": {"version": "v1.10.9 1", **PRE_NORM},
    "transformer-tied-layers=[1]": {"transformer-tied-layers": [1]},
}


@pytest.mark.parametrize("message", REFUSED_OPTIONS)
def test_unsupported_options_are_reported(tmp_path, message):
    options = {**OPTIONS, **REFUSED_OPTIONS[message]}
    folder = save_marian(tmp_path / "model", random_arrays(OPTIONS), options)
    with pytest.raises(ValueError, match="expected") as error:
        conversion.convert(folder, tmp_path / "ours")
    assert message in str(error.value)
    assert not (tmp_path / "ours").exists()


W1 = "encoder_l1_ffn_W1"
REFUSED_ARRAYS = {
    "does not know: encoder_l1_gate": lambda arrays: arrays.update(encoder_l1_gate=np.zeros(1)),
    f"expected a tensor '{W1}' of shape (16, 24)": lambda arrays: arrays.pop(W1),
    f"'{W1}' has shape (24, 16), expected (16, 24)": lambda arrays: arrays.update(
        {W1: arrays[W1].T}
    ),
    f"{W1} is of type int8: expected floats, as quantized": lambda arrays: arrays.update(
        {W1: arrays[W1].astype(np.int8)}
    ),
}


@pytest.mark.parametrize("message", REFUSED_ARRAYS)
def test_unsupported_arrays_are_reported(tmp_path, message):
    folder = save_random(tmp_path / "model", REFUSED_ARRAYS[message])
    with pytest.raises(ValueError, match=r"expected|know") as error:
        conversion.convert(folder, tmp_path / "ours")
    assert message in str(error.value)


def test_an_unknown_array_is_reported_where_it_is_the_first(tmp_path):
    arrays = {"gate": np.zeros(1, np.float32), **random_arrays(OPTIONS)}
    with pytest.raises(ValueError, match="does not know: gate"):
        conversion.convert(save_marian(tmp_path / "model", arrays, OPTIONS), tmp_path / "ours")


def test_a_planted_pickle_is_not_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    pickle.loads(pickle.dumps(Payload())).close()
    (tmp_path / "executed").unlink()  # it works
    planted = np.array([Payload()], dtype=object)
    folder = save_random(tmp_path / "model", lambda arrays: arrays.update({W1: planted}))
    with pytest.raises(ValueError, match=f"{W1} is of type object"):
        conversion.convert(folder, tmp_path / "ours")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_model_is_reported(tmp_path, share):
    file = save_random(tmp_path / "model") / "model.npz"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"model\.npz: expected a complete \.npz file"):
        conversion.convert(file.parent, tmp_path / "ours")


def test_a_damaged_array_is_reported(tmp_path):
    file = save_random(tmp_path / "model") / "model.npz"
    content = file.read_bytes()
    place = content.index(W1.encode()) + 300
    file.write_bytes(content[:place] + b"damaged" + content[place + 7 :])
    with pytest.raises(ValueError, match=f"{W1} is damaged"):
        conversion.convert(file.parent, tmp_path / "ours")


def test_a_vocabulary_of_a_different_model_is_reported(tmp_path):
    folder = save_random(tmp_path / "model")
    file = folder / "vocab.b.yml"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="11 tokens: expected 12, the rows"):
        conversion.convert(folder, tmp_path / "ours")


def test_words_after_dim_vocabs_are_unknown(tmp_path, caplog):
    """Marian reads no more of a vocabulary than `--dim-vocabs` says."""
    folder = save_random(tmp_path / "model")
    file, size = folder / "vocab.a.yml", OPTIONS["dim-vocabs"][0]
    file.write_text(f"{file.read_text()}more: {size}\nmost: {size + 1}\n")
    tokenizer = marian.read(folder, ConversionOptions()).tokenizer
    assert tokenizer(f"a2 more most a{size - 1}").input_ids == [2, 1, 1, size - 1, 0]
    assert f"vocab.a.yml: 2 of {size + 2} tokens are unknown to the model" in caplog.text


@pytest.mark.parametrize("models", [["one.npz", "two.npz"], ["model.intgemm8.bin"]])
def test_ensembles_and_packed_models_are_refused(tmp_path, models):
    folder = save_random(tmp_path / "model")
    (folder / "model.npz.decoder.yml").write_text(json.dumps({"models": models}))
    with pytest.raises(ValueError, match=r"models=\[.*expected one \.npz file"):
        conversion.convert(folder, tmp_path / "ours")
