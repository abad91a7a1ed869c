"""JoeyNMT's checkpoints, and those of the same model with other versions and options."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Payload
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from conversion.reference import (
    checkpoint_folder,
    expect_reference,
    expect_to_train_on,
    load_reference,
    log_probabilities,
    log_probability_difference,
)
from vanilla_transformer import conversion
from vanilla_transformer.conversion import joeynmt
from vanilla_transformer.serving.languages import languages_of_card


class Checkpoint:
    """A copy of a variant's folder, to be changed."""

    def __init__(self, variant, folder):
        source = checkpoint_folder(f"joeynmt/{variant}")
        self.variant, self.folder = variant, folder / variant
        shutil.copytree(source, self.folder, copy_function=shutil.copyfile)
        self.folder.chmod(0o755)
        self.cfg = yaml.safe_load((self.folder / "config.yaml").read_text())
        self.state = torch.load(self.folder / "best.ckpt", weights_only=True)
        self.model = self.state["model_state"]

    def stack(self, name):
        return self.cfg["model"][name]

    def convert(self, **options):
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.cfg))
        torch.save(self.state, self.folder / "best.ckpt")
        options = conversion.ConversionOptions(**options)
        return conversion.convert(self.folder, self.folder / "converted", options=options)

    def expect_the_same(self, folder, tolerance=2e-6):
        tensors, _ = load_reference(f"joeynmt/{self.variant}")
        assert log_probability_difference(load(folder), tensors) < tolerance


@pytest.fixture
def post(tmp_path):
    return Checkpoint("post", tmp_path)


@pytest.fixture
def pre(tmp_path):
    return Checkpoint("pre", tmp_path)


def load(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()


@pytest.mark.parametrize("variant", ["post", "pre"])
def test_a_converted_model_gives_the_same_as_joeynmt(converted, variant):
    expect_reference(converted(f"joeynmt/{variant}"), f"joeynmt/{variant}")


@pytest.mark.parametrize("variant", ["post", "pre"])
def test_beam_search_finds_what_joeynmt_found(converted, variant):
    folder = converted(f"joeynmt/{variant}")
    _, notes = load_reference(f"joeynmt/{variant}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(notes["source_texts"], padding=True, return_tensors="pt")
    output = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(**batch, num_beams=4)
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    assert texts == notes["beam_4"]["length_penalty"]["texts"]


def test_a_pipeline_translates(converted):
    folder = converted("joeynmt/pre")
    translate = pipeline("translation", model=str(folder))
    assert translate("maus drei neun")[0]["translation_text"] == "nine three mouse"
    assert languages_of_card(folder / "README.md") == ("de", "en")


# ---------------------------------------------------------------- Versions and options


def as_version_1(checkpoint):
    """Convert the options to those of version 1: one set for the text of both sides."""
    cfg = checkpoint.cfg
    del cfg["joeynmt_version"]
    cfg["data"] = {"src": "de", "trg": "en", "level": "word", "lowercase": False}
    cfg["training"]["max_output_length"] = cfg["testing"].pop("max_output_length")
    cfg["testing"]["alpha"] = cfg["testing"].pop("beam_alpha")
    for stack in ("encoder", "decoder"):
        del checkpoint.stack(stack)["layer_norm"]
    checkpoint.state = {"model_state": checkpoint.model, "steps": 880, "amp_state": None}


def test_version_1_is_pre_norm_with_relu(pre):
    for stack in ("encoder", "decoder"):
        pre.stack(stack)["activation"] = "relu"
    newer = pre.convert().rename(pre.folder / "newer")
    as_version_1(pre)
    for stack in ("encoder", "decoder"):
        pre.stack(stack)["activation"] = "gelu"  # which it does not read
    folder = pre.convert()
    tensors, _ = load_reference("joeynmt/pre")
    same = (log_probabilities(load(each), tensors) for each in (folder, newer))
    torch.testing.assert_close(*same)
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.length_penalty, generation.length_penalty_type) == (1.0, "gnmt")
    assert generation.max_new_tokens == 20
    assert languages_of_card(folder / "README.md") == ("de", "en")


def test_versions_2_0_to_2_2_are_post_norm_by_default(post):
    post.cfg["joeynmt_version"] = "2.0.0"
    for stack in ("encoder", "decoder"):
        del post.stack(stack)["layer_norm"]
    post.expect_the_same(post.convert())


def test_the_older_name_of_the_length_penalty_wins(post):
    """As in JoeyNMT, which says that it is obsolete."""
    post.cfg["testing"] |= {"alpha": 0.5, "beam_alpha": 2.0}
    assert GenerationConfig.from_pretrained(post.convert()).length_penalty == 0.5


def test_versions_before_2_3_read_no_activation(post):
    post.cfg["joeynmt_version"] = "2.2.1"
    for stack in ("encoder", "decoder"):
        post.stack(stack)["activation"] = "tanh"
    post.expect_the_same(post.convert())


def test_the_encoder_of_version_2_3_lacks_a_last_layer_norm_by_default(pre):
    del pre.stack("encoder")["layer_norm"]
    for part in ("weight", "bias"):
        del pre.model[f"encoder.layer_norm.{part}"]
    config = load(pre.convert()).config
    assert (config.norm_position, config.final_layer_norm) == ("pre", "decoder")


def test_version_2_3_is_pre_norm_only_in_the_encoder_by_default(post):
    post.cfg["joeynmt_version"] = "2.3.0"
    for stack in ("encoder", "decoder"):
        del post.stack(stack)["layer_norm"]
    config = load(post.convert()).config
    assert (config.norm_position, config.decoder_norm_position) == ("pre", "post")
    assert config.final_layer_norm == "none"


def test_the_version_can_be_unknown(post):
    del post.cfg["joeynmt_version"]
    post.expect_the_same(post.convert())


def test_without_a_version_a_missing_layer_norm_option_is_an_error(post):
    del post.cfg["joeynmt_version"]
    del post.stack("encoder")["layer_norm"]
    with pytest.raises(ValueError, match=r"neither model\.encoder\.layer_norm nor joeynmt_version"):
        post.convert()


@pytest.mark.parametrize("alphas", [(2.0, 2.0), (1.5, 3.0)])
def test_the_weight_of_residual_connections_is_folded_into_layer_norm(post, alphas):
    """To a layer norm, alpha x + alpha f is the same as x + f, except for epsilon."""
    for stack, alpha in zip(("encoder", "decoder"), alphas, strict=True):
        post.stack(stack)["alpha"] = alpha
        for name, tensor in post.model.items():
            if re.match(rf"{stack}\.layers\..*(att\.output_layer|pwff_layer\.3)\.", name):
                post.model[name] = tensor * alpha
    folder = post.convert()
    post.expect_the_same(folder, 1e-5)
    assert load(folder).config.layer_norm_eps == pytest.approx(1e-6 / alphas[1] ** 2)


@pytest.mark.parametrize("scaled", ["encoder", "decoder"])
def test_only_one_stack_can_scale_its_embeddings(post, scaled):
    for stack, name in (("encoder", "src"), ("decoder", "trg")):
        if stack != scaled:
            post.stack(stack)["embeddings"]["scale"] = False
            matrix = post.model[f"{name}_embed.lut.weight"]
            post.model[f"{name}_embed.lut.weight"] = matrix * 32**0.5  # the projection is unchanged
    post.expect_the_same(post.convert())


def test_one_matrix_can_be_shared_by_all(post):
    matrix = post.model["decoder.output_layer.weight"]
    post.cfg["model"]["tied_embeddings"] = True
    post.stack("decoder")["embeddings"]["scale"] = False  # the encoder's option applies
    post.model["src_embed.lut.weight"] = matrix
    shutil.copyfile(post.folder / "trg_vocab.txt", post.folder / "src_vocab.txt")
    model = load(post.convert())
    assert (model.config.decoder_vocab_size, model.config.scale_embedding) == (None, True)
    assert torch.equal(model.model.shared.weight, matrix.double())
    assert model.lm_head.weight is model.model.shared.weight


def test_generation_options_are_those_of_the_configuration(post):
    post.cfg["testing"] |= {"beam_size": 7, "beam_alpha": -1, "max_output_length": -1}
    post.cfg["testing"] |= {"generate_unk": False, "min_output_length": 2}
    post.cfg["data"]["special_symbols"] = {"lang_tags": ["<de>", "<en>"]}
    for side in ("src", "trg"):
        as_vocabulary(post, ["<de>", "<en>"], side)
    generation = GenerationConfig.from_pretrained(post.convert())
    assert (generation.num_beams, generation.length_penalty) == (7, 0.0)
    assert (generation.min_new_tokens, generation.max_new_tokens) == (2, None)
    assert generation.max_length_factor == 1.5
    assert generation.suppress_tokens == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("given", [{}, {"beam_size": 0}])
def test_a_search_with_one_beam_is_kept(post, caplog, given):
    """JoeyNMT's default, or in version 1 also 0. transformers saves no length penalty with it."""
    post.cfg["testing"] = {"beam_alpha": 0.6, **given}
    generation = GenerationConfig.from_pretrained(post.convert())
    assert (generation.num_beams, generation.length_penalty) == (1, None)
    assert "also set length_penalty=0.6, length_penalty_type='gnmt'" in caplog.text


def test_search_options_that_are_left_out_are_reported(post, caplog):
    post.cfg["testing"] |= {"repetition_penalty": 1.5, "no_repeat_ngram_size": -1}
    post.convert()
    assert "testing.repetition_penalty=1.5 has no equivalent here" in caplog.text
    assert "no_repeat_ngram_size" not in caplog.text


def test_the_latest_checkpoint_is_used_if_there_is_no_best_one(post):
    post.convert()
    shutil.rmtree(post.folder / "converted")
    (post.folder / "90.ckpt").touch()
    (post.folder / "best.ckpt").rename(post.folder / "880.ckpt")
    post.expect_the_same(conversion.convert(post.folder, post.folder / "converted"))


# ---------------------------------------------------------------- Text


def encode(folder, *texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(list(texts))["input_ids"]]


def as_vocabulary(checkpoint, tokens, side="src"):
    """Rename the first rows of an embedding."""
    path = checkpoint.folder / f"{side}_vocab.txt"
    first = path.read_text().splitlines()[:4]
    rest = [f"unused{number}" for number in range(20 - len(tokens))]
    path.write_text("\n".join([*first, *tokens, *rest]) + "\n")


def test_an_additional_space_is_an_unknown_word(post):
    """JoeyNMT's words are those of `text.split(" ")`, with any other white space as part of a
    word."""
    as_vocabulary(post, ["a", "b", "a\u00a0b"])
    a, b, fixed, unk, end = "a", "b", "a\u00a0b", "<unk>", "</s>"
    found = encode(post.convert(), "a b", "  a  b ", " ", "a\u00a0b", "a\tb")
    assert found == [
        [a, b, end], [unk, unk, a, unk, b, unk, end], [unk, unk, end], [fixed, end], [unk, end],
    ]  # fmt: skip


def test_texts_can_be_split_into_characters(post):
    post.cfg["data"]["src"]["level"] = "char"
    post.cfg["data"]["trg"]["level"] = "char"
    for side in ("src", "trg"):
        as_vocabulary(post, ["a", "b", "▁", "ä"], side)
    folder = post.convert()
    assert encode(folder, "ab ä", "c") == [["a", "b", "▁", "ä", "</s>"], ["<unk>", "</s>"]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([4, 5, 6, 7, 3], skip_special_tokens=True) == "ab ä"


def test_version_1_splits_words_at_all_white_space(pre):
    as_version_1(pre)
    as_vocabulary(pre, ["a", "b"])
    assert encode(pre.convert(), "  a \u00a0 b\t") == [["a", "b", "</s>"]]


def test_version_1_has_a_token_for_a_space_between_characters(pre):
    as_version_1(pre)
    pre.cfg["data"]["level"] = "char"
    for side in ("src", "trg"):
        as_vocabulary(pre, ["a", "b", " "], side)
    folder = pre.convert()
    assert encode(folder, " ab a ", "▁") == [["a", "b", " ", "a", "</s>"], ["<unk>", "</s>"]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([4, 5, 6, 4, 3], skip_special_tokens=True) == "ab a"


def test_version_1_does_not_pass_its_vocabulary_to_subword_nmt(pre):
    """Its users split texts themselves: "maus" is one piece, which the vocabulary lacks."""
    as_version_1(pre)
    pre.cfg["data"]["level"] = "bpe"
    codes = pre.folder / "codes"
    codes.write_text("#version: 0.2\nm a\nu s</w>\nma us</w>\n")
    as_vocabulary(pre, ["ma@@", "us"])
    folder = pre.convert(source_codes=str(codes))
    (ids,) = AutoTokenizer.from_pretrained(folder)(["maus"])["input_ids"]
    assert len(ids) == 2
    assert ids[0] >= len((pre.folder / "src_vocab.txt").read_text().split())
    matrix = load(folder).get_encoder().embed_tokens.weight
    assert matrix[ids[0]].equal(matrix[0])


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("level", ["word", "char"])
def test_codes_for_text_that_joeynmt_does_not_split_into_pieces_are_refused(post, side, level):
    codes = post.folder / "codes"
    codes.write_text("#version: 0.2\nm a\n")
    short = {"source": "src", "target": "trg"}[side]
    post.cfg["data"][short]["level"] = level
    with pytest.raises(ValueError, match=f"{side}_codes=.*data.{short}.level='{level}'"):
        post.convert(**{f"{side}_codes": str(codes)})


def test_text_is_preprocessed_as_in_the_configuration(post):
    for side in ("src", "trg"):
        post.cfg["data"][side] |= {"normalize": True, "lowercase": True}
        as_vocabulary(post, ["haus!", "maus", "ein", "."], side)
    folder = post.convert()
    assert encode(folder, "  Ein　 HAUS !\u200b") == [["ein", "haus!", "</s>"]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([6, 5, 7, 3], skip_special_tokens=True) == "ein maus."


def test_subword_nmt_only_splits_into_tokens_of_the_vocabulary(post):
    """JoeyNMT passes the vocabulary to subword-nmt: "ma" is listed, "maus" is not."""
    post.cfg["data"]["src"] |= {
        "level": "bpe",
        "tokenizer_type": "subword-nmt",
        "tokenizer_cfg": {"codes": "elsewhere/bpe.codes", "separator": "@@"},
    }
    merges = ["m a", "u s</w>", "ma us</w>", "e i", "ei n</w>"]
    (post.folder / "bpe.codes").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    as_vocabulary(post, ["ma@@", "us", "ein", "e@@", "i@@", "n"])
    folder = post.convert()
    assert encode(folder, "maus ein") == [["ma", "us</w>", "ein</w>", "</s>"]]
    ids = AutoTokenizer.from_pretrained(folder)("maus ein")["input_ids"]
    assert ids == [4, 5, 6, 3]
    post.expect_the_same(folder)


def test_a_piece_that_the_target_lacks_is_unknown_in_labels(post):
    """The codes produce "maus", for which the model's output has no row."""
    post.cfg["data"]["trg"] |= {
        "level": "bpe",
        "tokenizer_type": "subword-nmt",
        "tokenizer_cfg": {"codes": "bpe.codes", "separator": "@@"},
    }
    (post.folder / "bpe.codes").write_text("#version: 0.2\nm a\nu s</w>\nma us</w>\n")
    as_vocabulary(post, ["ma@@", "us"], "trg")
    tokenizer = AutoTokenizer.from_pretrained(post.convert())
    labels = tokenizer(text_target=["us", "x"])["input_ids"]
    size = len((post.folder / "trg_vocab.txt").read_text().split())
    assert max(max(row) for row in labels) < size
    assert labels[1][0] == tokenizer.target_unk_id


def test_sentencepiece_only_splits_into_pieces_of_the_vocabulary(post):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = post.folder / "text"
    text.write_text("ein haus ein baum\nzwei hunde drei autos\neine maus\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(post.folder / "sp"), vocab_size=24, minloglevel=2
    )
    model = sentencepiece.SentencePieceProcessor(str(post.folder / "sp.model"))
    scores = {model.id_to_piece(number): model.get_score(number) for number in range(3, 24)}
    listed = [piece for piece in scores if piece not in ("▁ein", "us")]
    for side in ("src", "trg"):
        post.cfg["data"][side] |= {"level": "bpe", "tokenizer_cfg": {"model_file": "sp.model"}}
        as_vocabulary(post, listed, side)
    folder = post.convert()
    scores = {piece: score for piece, score in scores.items() if piece in listed}
    for line in ("ein haus", "zwei autos drei", "eine maus"):
        assert encode(folder, line) == [
            [*best_pieces(f"▁{line}".replace(" ", "▁"), scores), "</s>"]
        ]
    post.expect_the_same(folder)


def best_pieces(text, scores):
    """The most probable segmentation of a text."""
    best = {0: (0.0, [])}
    for end in range(1, len(text) + 1):
        ways = [(start, text[start:end]) for start in best if text[start:end] in scores]
        if ways:
            best[end] = max(
                (best[start][0] + scores[piece], [*best[start][1], piece]) for start, piece in ways
            )
    return best[len(text)][1]


def test_missing_files_are_reported(post):
    post.cfg["data"]["src"] |= {"level": "bpe", "tokenizer_cfg": {"model_file": "sp.model"}}
    with pytest.raises(FileNotFoundError, match=r"sp\.model: expected a file"):
        post.convert()
    (post.folder / "src_vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"src_vocab\.txt: expected a file"):
        post.convert()
    (post.folder / "config.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.yaml: expected the configuration"):
        joeynmt.read(post.folder, conversion.ConversionOptions())


# ---------------------------------------------------------------- Training


def test_training_continues(converted):
    folder = converted("joeynmt/post")
    tensors, _ = load_reference("joeynmt/post")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.config.label_smoothing == 0.1
    model.config.label_smoothing = 0.0
    source, labels = tensors["source_ids"], tensors["target_ids"]
    batch = {
        "input_ids": source,
        "attention_mask": (source != 1).long(),
        "labels": labels.masked_fill(labels == 1, -100),
    }
    gold = tensors["log_probs"].gather(2, labels[..., None])[..., 0]
    expected = -gold[labels != 1].mean()
    expect_to_train_on(model, batch, expected)


# ---------------------------------------------------------------- Refusals


def change_alpha(checkpoint):
    checkpoint.stack("encoder")["alpha"] = 0


def change_type(checkpoint):
    checkpoint.stack("encoder")["type"] = "recurrent"


def change_activation(checkpoint):
    checkpoint.stack("decoder")["activation"] = "gelu"


def change_norm(checkpoint):
    checkpoint.stack("encoder")["layer_norm"] = "Pre"


def change_to_unknown_activation(checkpoint):
    checkpoint.stack("decoder")["activation"] = "mish"


def change_prompt(checkpoint):
    checkpoint.cfg["data"]["trg"]["has_prompt"] = True


def add_tensor(checkpoint):
    checkpoint.model["extra"] = torch.zeros(1)


def remove_tensor(checkpoint):
    del checkpoint.model["decoder.layers.1.src_trg_att.k_layer.bias"]


def reshape_tensor(checkpoint):
    checkpoint.model["encoder.layers.0.feed_forward.pwff_layer.3.bias"] = torch.zeros(31)


def shorten_vocabulary(checkpoint):
    (checkpoint.folder / "src_vocab.txt").write_text("<unk>\n<pad>\n<s>\n</s>\n")


def remove_model(checkpoint):
    del checkpoint.cfg["model"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_alpha, "alpha=0.0 and 1.0, expected numbers above 0"),
        (change_type, r"model\.encoder\.type='recurrent', expected 'transformer'"),
        (change_activation, "activation is 'relu' in the encoder and 'gelu' in the decoder"),
        (change_to_unknown_activation, r"model\.decoder\.activation='mish', expected 'relu' or"),
        (change_norm, r"model\.encoder\.layer_norm='Pre', expected None or 'pre' or 'post'"),
        (change_prompt, r"data\.trg\.has_prompt=True, expected False"),
        (add_tensor, "does not know: extra$"),
        (remove_tensor, r"src_trg_att\.k_layer\.bias' of shape \(32\)"),
        (reshape_tensor, r"pwff_layer\.3\.bias' has shape \(31\), expected \(32\)"),
        (shorten_vocabulary, r"src_embed\.lut\.weight' has shape \(24, 32\), expected \(4, any\)"),
        (remove_model, "expected a configuration of JoeyNMT, but KeyError"),
    ],
)
def test_unsupported_models_and_options_are_reported(post, change, message):
    change(post)
    with pytest.raises(ValueError, match=message):
        post.convert()


def test_a_residual_weight_in_pre_norm_is_refused(pre):
    pre.stack("decoder")["alpha"] = 2.0
    with pytest.raises(ValueError, match=r"alpha=1\.0 and 2\.0, expected 1 with layer_norm='pre'"):
        pre.convert()


def test_a_truncated_file_is_refused(post):
    path = Path(post.folder / "best.ckpt")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="expected a complete torch checkpoint"):
        joeynmt.read(path, conversion.ConversionOptions())


def test_code_in_a_checkpoint_is_not_executed(post, mark):
    post.state["scheduler_state"] = Payload(mark)
    with pytest.raises(ValueError, match=r"mkdir.* none of them is executed"):
        post.convert()
