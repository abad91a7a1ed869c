"""fairseq's checkpoints: those of the toolkit, and those of older versions and other options."""

import json
import math
import shutil
import typing
from argparse import Namespace
from functools import partial

import pytest
import torch
from conftest import Payload
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from conversion.reference import (
    CHECKPOINTS,
    checkpoint_folder,
    expect_reference,
    expect_token_ids,
    load_reference,
    log_probabilities,
)
from vanilla_transformer.conversion import convert, convert_back, fairseq, find_format, read
from vanilla_transformer.conversion.core import ConversionOptions
from vanilla_transformer.conversion.unpickling import load_torch
from vanilla_transformer.serving.languages import languages_of_card

VARIANTS = ("post", "pre")


def load(folder):
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(folder / "checkpoint_best.pt", weights_only=True)


@pytest.fixture
def edited(tmp_path):
    """A copy of a checkpoint's folder, with options and tensors changed by a function."""

    def edit(variant="post", change=lambda args, state: None, name="edited", **options):
        folder = tmp_path / name
        shutil.copytree(checkpoint_folder(f"fairseq/{variant}"), folder)
        checkpoint = load(folder)
        state = {key: tensor.clone() for key, tensor in checkpoint["model"].items()}
        args = checkpoint["cfg"]["model"]
        vars(args).update(options)
        change(vars(args), state)
        checkpoint["model"] = state
        torch.save(checkpoint, folder / "checkpoint_best.pt")
        return folder

    return edit


def log_probs(folder, variant="post"):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    return log_probabilities(model, load_reference(f"fairseq/{variant}")[0])


def expect_same_tensors(one, other):
    one, other = load(one)["model"], load(other)["model"]
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


# ---------------------------------------------------------------- genuine checkpoints


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_model_gives_the_same_as_fairseq(converted, variant):
    expect_reference(converted(f"fairseq/{variant}"), f"fairseq/{variant}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_converted_back_bit_for_bit(converted, tmp_path, variant):
    output = convert_back(converted(f"fairseq/{variant}"), tmp_path / "back", "fairseq")
    original = CHECKPOINTS / "fairseq" / variant
    expect_same_tensors(output, original)
    for name in ("dict.de.txt", "dict.en.txt"):
        assert (output / name).read_bytes() == (original / name).read_bytes()
    again = convert(output, tmp_path / "again")
    assert torch.equal(log_probs(again), log_probs(converted(f"fairseq/{variant}")))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(
    converted, tmp_path, monkeypatch, is_there
):
    """As on a full disk, and in either direction."""

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    model, output = converted("fairseq/post"), tmp_path / "output"
    for start in (
        partial(convert, CHECKPOINTS / "fairseq/post", output),
        partial(convert_back, model, output),
    ):
        if is_there:
            output.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", fail)
            with pytest.raises(OSError, match="No space left"):
                start()
        assert [*tmp_path.rglob("*")] == [output] * is_there
        start()
        assert (output / "dict.de.txt").is_file() or (output / "original/dict.de.txt").is_file()
        shutil.rmtree(output)


def test_a_strangers_record_can_not_write_outside_the_output(converted, tmp_path):
    folder = shutil.copytree(converted("fairseq/post"), tmp_path / "model")
    record = folder / "original" / "conversion.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    content["checkpoint"] = str(tmp_path / "elsewhere.pt")
    record.write_text(json.dumps(content), encoding="utf-8")
    convert_back(folder, tmp_path / "back")
    assert (tmp_path / "back" / "elsewhere.pt").is_file()
    assert not (tmp_path / "elsewhere.pt").exists()


def test_dictionaries_of_one_name_are_an_error_as_only_one_could_be_kept(edited):
    folder = edited()
    given = {}
    for side, language in (("source", "de"), ("target", "en")):
        place = folder / language / "dict.txt"
        place.parent.mkdir()
        (folder / f"dict.{language}.txt").rename(place)
        given[f"{side}_vocabulary"] = str(place)
    with pytest.raises(ValueError, match=r"de/dict\.txt and .*en/dict\.txt: expected files with"):
        convert(folder, folder / "converted", options=ConversionOptions(**given, format="fairseq"))
    assert not (folder / "converted").exists()


def test_the_checkpoint_is_not_changed(edited, tmp_path):
    folder = edited()
    before = (folder / "checkpoint_best.pt").read_bytes()
    convert(folder / "checkpoint_best.pt", tmp_path / "converted")
    assert (folder / "checkpoint_best.pt").read_bytes() == before


def test_it_works_in_a_pipeline_with_the_search_of_fairseq(converted):
    folder = converted("fairseq/post")
    notes = load_reference("fairseq/post")[1]
    translate = pipeline("translation", model=str(folder))
    outputs = translate(notes["source_texts"], num_beams=4)
    texts = [output["translation_text"] for output in outputs]
    assert texts == notes["beam_4"]["default"]["texts"]
    generation = translate.model.generation_config
    assert (generation.num_beams, generation.length_penalty) == (5, 1.0)
    assert (generation.max_new_tokens, generation.min_new_tokens) == (200, 1)


def test_training_continues_from_fairseqs_loss(converted):
    folder = converted("fairseq/post")
    tensors, notes = load_reference("fairseq/post")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dropout=0.0, label_smoothing=0.0).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(notes["source_texts"], padding=True, return_tensors="pt")
    labels = tensors["target_ids"].clone()
    is_target = torch.arange(labels.shape[1]) < tensors["target_lengths"][:, None]
    labels[~is_target] = -100
    gold = tensors["log_probs"].gather(-1, tensors["target_ids"][..., None])[..., 0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(5):
        loss = model(**batch, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(-gold[is_target].mean().item(), abs=1e-5)
    assert losses[-1] < losses[0] - 0.01


# ---------------------------------------------------------------- other versions


def fuse(args, state):
    for name in [name for name in state if ".q_proj." in name]:
        q, k, v = (state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv")
        module, kind = name.split(".q_proj.")
        state[f"{module}.in_proj_{kind}"] = torch.cat([q, k, v])


def number_layer_norms(args, state):
    numbers = {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    }
    for name in list(state):
        stack, _, rest = name.partition(".")
        module = rest.split(".")[-2] if "." in rest else ""
        if ".layers." in name and module in numbers[stack]:
            new = name.replace(module, f"layer_norms.{numbers[stack].index(module)}")
            state[new] = state.pop(name)


def old_projection(args, state):
    state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
    state["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    state["decoder.embed_positions.weights"] = torch.zeros(30, 32)


def all_of_them(args, state):
    for change in (fuse, number_layer_norms, old_projection):
        change(args, state)


@pytest.mark.parametrize("change", [fuse, number_layer_norms, old_projection, all_of_them])
def test_names_of_older_versions_are_equivalent(edited, converted, tmp_path, change):
    folder = edited(change=change)
    output = convert(folder, tmp_path / "converted")
    assert torch.equal(log_probs(output), log_probs(converted("fairseq/post")))
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


def test_options_can_be_a_namespace_next_to_the_model(edited, converted, tmp_path):
    folder = edited()
    checkpoint = load(folder)
    args = checkpoint.pop("cfg")["model"]
    torch.save(
        {"args": args, "model": checkpoint["model"]},
        folder / "checkpoint_best.pt",
        _use_new_zipfile_serialization=False,
    )
    output = convert(folder, tmp_path / "converted")
    assert torch.equal(log_probs(output), log_probs(converted("fairseq/post")))


def test_options_can_be_an_omegaconf_configuration(edited, converted, tmp_path):
    """fairseq saves one if it was started with hydra."""
    omegaconf = pytest.importorskip("omegaconf")
    folder = edited()
    checkpoint = load(folder)
    model = vars(checkpoint["cfg"]["model"])
    stacks = {stack: {name.removeprefix(f"{stack}_"): model.pop(name) for name in [*model]
              if name.startswith(f"{stack}_")} for stack in ("encoder", "decoder")}  # fmt: skip
    cfg = {"_name": None, "task": checkpoint["cfg"]["task"], "model": {**model, **stacks}}
    checkpoint |= {"cfg": omegaconf.OmegaConf.create(cfg, flags={"allow_objects": True})}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    output = convert(folder, tmp_path / "converted")
    assert torch.equal(log_probs(output), log_probs(converted("fairseq/post")))


def test_types_in_saved_options_are_ignored(tmp_path):
    """omegaconf 2.4 saves them for each container."""
    torch.save({"ref_type": typing.Tuple[int, str], "n": 1}, tmp_path / "model.pt")  # noqa: UP006
    assert load_torch(tmp_path / "model.pt", inert=fairseq.INERT)["n"] == 1


def test_label_smoothing_can_be_an_option_of_the_criterion(edited, tmp_path):
    folder = edited()
    checkpoint = load(folder)
    model = vars(checkpoint["cfg"]["model"])
    del model["label_smoothing"]
    criterion = {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.2}
    checkpoint["cfg"] |= {"model": model, "criterion": criterion}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    assert read(folder).config.label_smoothing == 0.2


def test_the_old_name_of_a_dropout_is_used_if_the_new_one_is_0(edited):
    folder = edited(activation_dropout=0.0, relu_dropout=0.3)
    assert read(folder).config.activation_dropout == 0.3


def forget_languages(args, state):
    for name in ("source_lang", "target_lang"):
        args[name] = None


def test_languages_can_be_those_of_the_data(edited, tmp_path):
    """Without --source-lang, fairseq-train takes them from the names of its data."""
    folder = edited(change=forget_languages)
    checkpoint = load(folder)
    checkpoint["cfg"]["task"] = {"data": "binary", "source_lang": None, "target_lang": None}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    with pytest.raises(FileNotFoundError, match=r"expected the dictionary dict.txt beside"):
        convert(folder, tmp_path / "unknown")
    (folder / "train.de-en.de.idx").touch()
    converted = convert(folder, tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(converted)
    tensors, notes = load_reference("fairseq/post")
    expect_token_ids(tokenizer, tensors, notes)
    assert languages_of_card(converted / "README.md") == ("de", "en")


def test_a_folder_of_checkpoints_alone_is_recognized(edited, tmp_path):
    """fairseq-train writes no dictionaries: they stay where fairseq-preprocess wrote them."""
    data = tmp_path / "data-bin"
    data.mkdir()
    folder = edited(data=str(data))
    for dictionary in folder.glob("dict.*.txt"):
        shutil.move(dictionary, data)
    assert find_format(folder) is fairseq
    assert len(read(folder).tokenizer) == 24
    (data / "dict.de.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"dict.de.txt .* fairseq-preprocess .* source_voc"):
        read(folder)


def test_the_first_versions_have_no_layer_norm_after_the_stacks(edited, tmp_path):
    def change(args, state):
        for stack in ("encoder", "decoder"):
            state[f"{stack}.version"] = torch.tensor([1.0])
            for kind in ("weight", "bias"):
                del state[f"{stack}.layer_norm.{kind}"]

    conversion = read(edited("pre", change))
    assert conversion.config.final_layer_norm == "none"
    conversion = read(edited("pre", lambda args, state: None, name="other"))
    assert conversion.config.final_layer_norm == "both"


def test_no_decoder_final_norm(edited):
    def change(args, state):
        for kind in ("weight", "bias"):
            del state[f"decoder.layer_norm.{kind}"]

    conversion = read(edited("pre", change, no_decoder_final_norm=True))
    assert conversion.config.final_layer_norm == "encoder"


def test_half_precision_is_kept(edited, tmp_path):
    def change(args, state):
        for name in state:
            state[name] = state[name].half()

    folder = edited("pre", change)
    output = convert(folder, tmp_path / "converted")
    assert AutoModelForSeq2SeqLM.from_pretrained(output, dtype="auto").dtype == torch.float16
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


# ---------------------------------------------------------------- other options


def tie_all(args, state):
    state["encoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"]
    state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]


@pytest.mark.parametrize("drop_projection", [False, True])
def test_one_matrix_can_be_shared_by_all(edited, tmp_path, drop_projection):
    def change(args, state):
        tie_all(args, state)
        if drop_projection:
            del state["decoder.output_projection.weight"]

    folder = edited("post", change, share_all_embeddings=True)
    shutil.copy(folder / "dict.en.txt", folder / "dict.de.txt")
    output = convert(folder, tmp_path / "converted")
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.config.shares_embeddings
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


def table(count, d_model, offset):
    """fairseq's sinusoids, in the order of its rows."""
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(count + offset)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@pytest.mark.parametrize("stacks", [("encoder", "decoder"), ("encoder",), ("decoder",)])
def test_learned_positions_that_hold_sinusoids_compute_the_same(
    edited, converted, tmp_path, stacks
):
    def change(args, state):
        for stack, count in (("encoder", 40), ("decoder", 30)):
            args[f"max_{'source' if stack == 'encoder' else 'target'}_positions"] = count
            if stack in stacks:
                args[f"{stack}_learned_pos"] = True
                state[f"{stack}.embed_positions.weight"] = table(count, 32, 2)

    folder = edited("post", change)
    output = convert(folder, tmp_path / "converted")
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.config.position_encoding == "learned"
    assert model.config.max_position_embeddings == 40
    difference = log_probs(output) - log_probs(converted("fairseq/post"))
    assert difference.abs().max() < 1e-5
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


def test_positions_can_be_turned_off(edited, tmp_path):
    output = convert(edited(no_token_positional_embeddings=True), tmp_path / "converted")
    model = AutoModelForSeq2SeqLM.from_pretrained(output, dtype="float64").eval()
    one, other = torch.tensor([[4, 5, 6, 2]]), torch.tensor([[6, 4, 5, 2]])
    start = torch.tensor([[2]])
    logits = [model(input_ids=ids, decoder_input_ids=start).logits for ids in (one, other)]
    assert torch.allclose(*logits)  # the order does not matter


def test_embeddings_can_be_unscaled(edited, converted, tmp_path):
    def change(args, state):
        for stack in ("encoder", "decoder"):
            state[f"{stack}.embed_tokens.weight"] *= math.sqrt(32)

    output = convert(edited("post", change, no_scale_embedding=True), tmp_path / "converted")
    difference = log_probs(output) - log_probs(converted("fairseq/post"))
    assert difference.abs().max() < 1e-5


def test_embeddings_can_have_a_layer_norm(edited, tmp_path):
    def change(args, state):
        for stack in ("encoder", "decoder"):
            state[f"{stack}.layernorm_embedding.weight"] = torch.linspace(0.5, 1.5, 32)
            state[f"{stack}.layernorm_embedding.bias"] = torch.linspace(-1, 1, 32)

    folder = edited("post", change, layernorm_embedding=True)
    output = convert(folder, tmp_path / "converted")
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.config.embedding_layer_norm
    order = torch.arange(32).view(2, 16).T.flatten()
    gain = torch.linspace(0.5, 1.5, 32)[order]
    assert torch.equal(model.model.encoder.embed_layer_norm.weight, gain)
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


def test_embeddings_of_a_different_width_are_projected_into_one_matrix(edited, converted, tmp_path):
    def change(args, state):
        torch.manual_seed(0)
        into, out = (torch.linalg.qr(torch.randn(32, 32))[0] for _ in range(2))
        state["decoder.project_in_dim.weight"] = into
        state["decoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"] @ into
        state["decoder.project_out_dim.weight"] = out
        projection = state["decoder.output_projection.weight"]
        state["decoder.output_projection.weight"] = projection @ out.T

    output = convert(edited("post", change), tmp_path / "converted")
    difference = log_probs(output) - log_probs(converted("fairseq/post"))
    assert difference.abs().max() < 1e-5
    with pytest.raises(ValueError, match="can't be restored"):
        convert_back(output, tmp_path / "back")


def test_texts_of_mbart_end_with_their_language_token(edited, tmp_path):
    """Its sources end with `</s> [de]`; its decoder starts with `[en]`, and ends with `</s>
    [en]`."""
    folder = edited(task="translation_from_pretrained_bart")
    for language in ("de", "en"):
        lines = (folder / f"dict.{language}.txt").read_text().splitlines()
        lines[-1] = f"[{language}] 1"
        (folder / f"dict.{language}.txt").write_text("\n".join(lines) + "\n")
    output = convert(folder, tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(output)
    config = AutoModelForSeq2SeqLM.from_pretrained(output).config
    assert (config.decoder_start_token_id, config.eos_token_id, config.pad_token_id) == (23, 23, 1)
    plain = read(edited(name="plain")).tokenizer
    source, target = "maus drei", "three mouse"
    assert tokenizer(source)["input_ids"] == [*plain(source)["input_ids"], 23]
    labels = tokenizer(text_target=target)["input_ids"]
    assert labels == [*plain(text_target=target)["input_ids"], 23]
    assert tokenizer.decode(labels, skip_special_tokens=True) == target
    (folder / "dict.en.txt").write_text((folder / "dict.en.txt").read_text().replace("[en]", "en"))
    with pytest.raises(ValueError, match=r"dict.en.txt: task='trans.*expected the token '\[en\]'"):
        read(folder)


def test_byte_pair_codes_next_to_the_checkpoint_are_used(edited, tmp_path):
    folder = edited()
    (folder / "bpecodes").write_text("#version: 0.2\nm a\nma u\nmau s</w>\nz z\n")
    output = convert(folder, tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    maus = tokenizer("maus")["input_ids"]
    words = AutoTokenizer.from_pretrained(convert(edited(name="plain"), tmp_path / "words"))
    assert maus == words("maus")["input_ids"]
    clone = tokenizer("zzz")["input_ids"][0]
    assert clone >= 24  # a symbol that the dictionary lacks is <unk> to the model
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(embeddings[clone], embeddings[3])
    expect_same_tensors(convert_back(output, tmp_path / "back"), folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"bpe": "gpt2"}, "(gpt2)"), ({"bpe": "bytes", "tokenizer": "moses"}, "(moses, bytes)"),
     ({"bpe": "sentencepiece"}, "")],
)  # fmt: skip
def test_splitting_that_the_tokenizer_lacks_is_noted(edited, options, named):
    notes = read(edited(**options)).origin["notes"]
    expected = f"texts are tokenized {named} before they reach this model's tokenizer"
    assert notes == (expected if named else "")


def test_generation_follows_the_saved_options(edited):
    folder = edited()
    checkpoint = load(folder)
    checkpoint["cfg"]["generation"] |= {
        "beam": 7, "lenpen": 0.6, "max_len_b": 50, "no_repeat_ngram_size": 3, "unkpen": 2.0,
    }  # fmt: skip
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    generation = read(folder).generation
    assert generation["num_beams"] == 7
    assert generation["length_penalty"] == 0.6
    assert generation["max_new_tokens"] == 50
    assert generation["no_repeat_ngram_size"] == 3
    assert generation["sequence_bias"] == [[[3], -2.0]]


def test_options_of_the_search_without_an_equivalent_are_reported(edited, caplog):
    folder = edited()
    assert read(folder)
    assert not caplog.text
    checkpoint = load(folder)
    checkpoint["cfg"]["generation"] |= {"temperature": 0.5, "diverse_beam_groups": 4}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    assert read(folder)
    for option in ("generation.temperature=0.5", "generation.diverse_beam_groups=4"):
        assert f"{option} has no equivalent here" in caplog.text


@pytest.mark.parametrize(
    ("factor", "more", "limit"),
    [
        (0, 50, {"max_new_tokens": 50}),
        (1, 10, {"extra_output_tokens": 10}),
        (1.5, 0, {"max_length_factor": 1.5}),
        (1.2, 10, {"max_new_tokens": 1023}),
    ],
)
def test_the_maximum_output_length_can_depend_on_the_source(edited, caplog, factor, more, limit):
    folder = edited()
    checkpoint = load(folder)
    checkpoint["cfg"]["generation"] |= {"max_len_a": factor, "max_len_b": more}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    generation = read(folder).generation
    limits = {"max_new_tokens", "extra_output_tokens", "max_length_factor"}
    assert {name: generation[name] for name in limits & generation.keys()} == limit
    assert ("max_len_a=1.2 with max_len_b=10 has no" in caplog.text) == (factor == 1.2)


# ---------------------------------------------------------------- what is refused


def drop(name):
    return lambda args, state: state.pop(name)


def add(name, *shape):
    return lambda args, state: state.update({name: torch.zeros(*shape)})


def drop_encoder(args, state):
    for name in [name for name in state if name.startswith("encoder.")]:
        del state[name]


def drop_layer(args, state):
    for name in [name for name in state if name.startswith("decoder.layers.1.")]:
        del state[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("encoder.layers.1.fc1.bias"), r"'encoder.layers.1.fc1.bias' of shape \(48\)"),
        (drop("decoder.output_projection.weight"), "decoder.output_projection.weight"),
        (add("encoder.layers.0.fc1.weight", 48, 31), r"shape \(48, 31\), expected \(48, 32\)"),
        (add("decoder.layers.0.moe_layer.gate", 3), "decoder.layers.0.moe_layer.gate"),
        (add("encoder.layers.0.self_attn.bias_k", 32), "encoder.layers.0.self_attn.bias_k"),
        (add("decoder.adaptive_softmax.head.weight", 3), "decoder.adaptive_softmax.head.weight"),
        (drop_encoder, "has no encoder, as language models"),
        (drop_layer, "decoder.layers has 1 layers, expected decoder_layers=2"),
    ],
)
def test_tensors_that_do_not_fit_are_reported(edited, change, message):
    with pytest.raises(ValueError, match=message):
        read(edited("post", change))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("adaptive_softmax_cutoff", [10, 20]),
        ("cross_self_attention", True),
        ("no_cross_attention", True),
        ("quant_noise_pq", 0.1),
        ("moe_freq", 2),
        ("base_layers", 1),
        ("scale_heads", True),
        ("activation_fn", "mish"),
        ("prepend_bos", True),
        ("langtoks", {"main": ("src", "tgt")}),
        ("task", "denoising"),
        ("arch", "transformer_unidirectional_iwslt_de_en"),  # its encoder has a causal mask
        ("task", "translation_lev"),  # adds <s> before sources, like prepend_bos
    ],
)
def test_unsupported_options_are_reported(edited, option, value):
    with pytest.raises(ValueError, match=option):
        read(edited(**{option: value}))


def test_each_stack_has_its_norm_position(edited):
    """Without the option, it is post-norm."""

    def change(args, state):
        del args["decoder_normalize_before"]
        for part in ("weight", "bias"):
            del state[f"decoder.layer_norm.{part}"]

    config = read(edited("pre", change)).config
    assert (config.norm_position, config.decoder_norm_position) == ("pre", "post")
    assert config.final_layer_norm == "encoder"


def test_a_vocabulary_that_does_not_match_is_reported(edited):
    folder = edited()
    lines = (folder / "dict.en.txt").read_text().splitlines(keepends=True)
    (folder / "dict.en.txt").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"dict.en.txt: holds 23 tokens, expected 24"):
        read(folder)
    (folder / "dict.en.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"dict.en.txt .* target_vocabulary"):
        read(folder)
    (folder / "words.txt").write_text("".join(lines))
    options = ConversionOptions(target_vocabulary=str(folder / "words.txt"))
    assert len(read(folder, options).tokenizer) == 24


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_truncated_file_is_reported(edited, size):
    file = edited() / "checkpoint_best.pt"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"checkpoint_best.pt: expected a complete torch"):
        read(file.parent)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_payload_is_not_executed(edited, mark, new_format):
    file = edited() / "checkpoint_best.pt"
    checkpoint = load(file.parent)
    checkpoint["extra_state"] = Payload(mark)
    torch.save(checkpoint, file, _use_new_zipfile_serialization=new_format)
    assert find_format(file).NAME == "fairseq"
    with pytest.raises(ValueError, match=r"checkpoint_best.pt: holds objects of posix.mkdir"):
        read(file)
