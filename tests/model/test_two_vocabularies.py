"""A tokenizer with a vocabulary for each side: which side is used when, from a saved folder too."""

import copy
import json
import pickle
import shutil
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import in_new_process, run_command, seq2seq, small_trainer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast, pipeline

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.model.moses import Moses

SOURCE = ["<pad>", "<unk>", "ein", "haus", "am", "see", "der", "ist", "tief", "zug"]
TARGET = ["<pad>", "<unk>", "<s>", "</s>", "lake", "the", "a", "house", "is", "deep", "train"]
NAMES = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def word_backend(tokens, template):
    """A `tokenizers.Tokenizer` that looks words up."""
    ids = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(token, ids[token]) for token in template.split() if token in ids]
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=around)
    backend.add_special_tokens([token for token in tokens if token.startswith("<")])
    return backend


def make_pair(source=SOURCE, target=TARGET, **options):
    return VanillaTransformerTokenizer(
        tokenizer_object=word_backend(source, "$A"),
        target_tokenizer_object=word_backend(target, "$A </s>"),
        **{**NAMES, **options},
    )


@pytest.fixture
def two_sided():
    return make_pair()


# ---------------------------------------------------------------- Moses


def test_moses_splits_each_side_in_its_language(tmp_path):
    pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    source, target = [*SOURCE[:2], "l&apos;", "eau", "."], [*TARGET[:4], "it", "&apos;s", "."]
    languages = {"source_lang": "fr", "target_lang": "en"}
    for tokenizer in (make_pair(source, target, moses=languages), None):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(tmp_path)
        both = tokenizer(["l'eau."], text_target=["it's."])
        assert (both["input_ids"], both["labels"]) == ([[2, 3, 4]], [[4, 5, 6, 3]])
        assert tokenizer.decode([4, 5, 6, 3], skip_special_tokens=True) == "it's."
        assert tokenizer.decode([2, 3, 4], use_source_tokenizer=True) == "l'eau."
        assert tokenizer.tokenize("l'eau.") == source[2:]
        assert tokenizer(["l&apos;", "eau"], is_split_into_words=True)["input_ids"] == [2, 3]
        tokenizer.save_pretrained(tmp_path)


def test_words_with_full_stops_are_split_as_by_sacremoses_without_its_slow_search(monkeypatch):
    sacremoses = pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    text = "i.e. a.m. 3.4. the U.S. ... x.. 5.5.5. Dr. 1. it's."
    expected = sacremoses.MosesTokenizer("en").tokenize(text, return_str=True)
    monkeypatch.delattr(sacremoses.MosesTokenizer, "isanyalpha")
    assert Moses("en", None, aggressive_dash_splits=False).split(text, "source") == expected


def test_moses_can_be_turned_off_for_a_side():
    pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    tokenizer = make_pair([*SOURCE, "it's"], moses={"source_lang": None, "target_lang": "en"})
    assert tokenizer("it's")["input_ids"] == [len(SOURCE)]


def test_without_sacremoses_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ImportError, match=r"vanilla-transformer\[moses\]"):
        make_pair(moses={"source_lang": "de", "target_lang": "en"})


# ---------------------------------------------------------------- which side is used


def test_text_is_read_with_the_source_vocabulary_and_text_target_with_the_targets(two_sided):
    assert two_sided("ein haus")["input_ids"] == [2, 3]
    assert two_sided(text_target="a house")["input_ids"] == [6, 7, 3]
    both = two_sided("ein haus", text_target="a house")
    assert (both["input_ids"], both["labels"]) == ([2, 3], [6, 7, 3])


def test_decoding_uses_the_target_vocabulary_by_default(two_sided):
    assert two_sided.decode([6, 7, 3], skip_special_tokens=True) == "a house"
    assert two_sided.batch_decode([[6, 7], [5, 4]]) == ["a house", "the lake"]
    assert two_sided.batch_decode(torch.tensor([[6, 7]])) == ["a house"]
    assert two_sided.decode([2, 3], use_source_tokenizer=True) == "ein haus"


def test_get_vocab_is_the_sources_and_the_targets_is_accessible(two_sided):
    assert (len(two_sided), two_sided.vocab_size, two_sided.target_vocab_size) == (10, 10, 11)
    assert two_sided.get_vocab()["see"] == 5
    assert two_sided.convert_ids_to_tokens([2, 3]) == ["ein", "haus"]
    assert two_sided.target_tokenizer.token_to_id("lake") == 4


def test_special_tokens_have_the_ids_that_the_model_uses(two_sided):
    assert two_sided.pad_token_id == 0
    assert two_sided.bos_token_id == 2
    assert two_sided.eos_token_id == 3
    assert "</s>" not in two_sided.get_vocab()  # a missing token is not added to the source


@pytest.mark.parametrize("bad", [5, [["a"], 3]])
def test_after_an_error_it_switches_back_to_the_source(two_sided, bad):
    with pytest.raises((ValueError, TypeError)):
        two_sided(text_target=bad)
    assert two_sided.vocab_size == len(SOURCE)
    assert two_sided.convert_tokens_to_ids("ein") == 2


def test_both_sides_pad_and_truncate(two_sided):
    batch = two_sided(
        ["ein haus am see", "ein"],
        text_target=["a house", "the lake the lake"],
        padding=True,
        truncation=True,
        max_length=3,
        return_tensors="pt",
    )
    assert batch["input_ids"].tolist() == [[2, 3, 4], [2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 3], [5, 4, 3]]


@pytest.mark.parametrize("tensors", [None, "pt", "np"])
def test_symbols_that_the_model_lacks_only_become_unknown_in_targets(tensors):
    tokenizer = make_pair(target_size=6, target_unk_id=1)
    encoded = tokenizer(["ein"], text_target=["a lake"], return_tensors=tensors)
    assert [list(map(int, row)) for row in encoded["labels"]] == [[1, 4, 3]]
    alone = tokenizer(text_target="a lake", text="see")["labels"]
    assert alone == tokenizer(text_target="a lake")["input_ids"] == [1, 4, 3]
    assert tokenizer.decode([6]) == "a"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_switch_between_vocabularies_too(two_sided, copied):
    other = copied(two_sided)
    assert other("ein", text_target="a")["labels"] == [6, 3]
    assert other("ein")["input_ids"] == [2]
    assert other.decode([6]) == "a"


def test_threads_do_not_change_each_others_side(two_sided):
    """As in a server, which encodes sources while it decodes targets."""
    at_target, asked = threading.Event(), threading.Event()

    def decode():
        two_sided._switch_to_target_mode()
        at_target.set()
        asked.wait(10)
        return two_sided.backend_tokenizer.decode([6, 7])

    with ThreadPoolExecutor(1) as pool:
        decoded = pool.submit(decode)
        assert at_target.wait(10)
        assert two_sided("ein haus")["input_ids"] == [2, 3]
        assert two_sided.convert_ids_to_tokens([2]) == ["ein"]
        asked.set()
        assert decoded.result() == "a house"


# ---------------------------------------------------------------- what is refused


def test_different_padding_ids_are_refused():
    with pytest.raises(ValueError, match="pad_token='<pad>' has id 0 in the source and 1"):
        make_pair(target=["<unk>", "<pad>", "<s>", "</s>", "a"])


def test_an_unknown_token_that_a_side_lacks_is_refused():
    with pytest.raises(ValueError, match="unk_token='<oov>' has id None"):
        make_pair(unk_token="<oov>")


def test_a_single_side_is_refused():
    with pytest.raises(ValueError, match="neither target_tokenizer_file nor"):
        VanillaTransformerTokenizer(tokenizer_object=word_backend(SOURCE, "$A"), **NAMES)


def test_a_target_size_without_an_unknown_id_is_refused():
    with pytest.raises(ValueError, match="target_size=6, target_unk_id=None"):
        make_pair(target_size=6)


def test_a_folder_without_the_targets_file_is_refused(two_sided, tmp_path):
    two_sided.save_pretrained(tmp_path)
    (tmp_path / "target_tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"target_tokenizer_file nor .*: a saved folder holds"):
        AutoTokenizer.from_pretrained(tmp_path)


# ---------------------------------------------------------------- saved folders

LOAD = """
    import json, sys
    from transformers import AutoTokenizer, pipeline

    folder, again = sys.argv[1:3]
    trust = {"trust_remote_code": True} if sys.argv[3] else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    tokenizer.save_pretrained(again)
    translate = pipeline("translation", model=folder, **trust)
    print(json.dumps({
        "module": type(tokenizer).__module__,
        "encoded": tokenizer("ein haus foo", text_target="a house bar").data,
        "decoded": tokenizer.decode([6, 7, 3], skip_special_tokens=True),
        "ids": [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id],
        "limits": [tokenizer.model_max_length, tokenizer.target_vocab_size],
        "translated": translate(["ein haus", ""], max_new_tokens=5),
    }))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as training leaves it: a small random model and a two-sided tokenizer."""
    folder = tmp_path_factory.mktemp("two_sided")
    model = seq2seq(
        vocab_size=len(SOURCE), decoder_vocab_size=len(TARGET), bos_token_id=2, eos_token_id=3
    )
    model.save_pretrained(folder)
    make_pair(model_max_length=7, target_size=7, target_unk_id=1).save_pretrained(folder)
    return folder


def test_a_saved_folder_loads_with_the_package_and_without(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(tmp_path / "True"), ""])
    exec(textwrap.dedent(LOAD))  # here is the package
    found = {True: json.loads(capsys.readouterr().out)}
    cache = tmp_path / "cache"
    cache.mkdir()
    found[False] = in_new_process(LOAD, False, cache, folder, tmp_path / "False")
    ours = found[True].pop("module")
    assert ours == "vanilla_transformer.model.tokenization_vanilla_transformer"
    assert found[False].pop("module").startswith("transformers_modules.")
    assert found[False] == found[True]
    assert found[True]["encoded"]["input_ids"] == [2, 3, 1]
    assert found[True]["encoded"]["labels"] == [6, 1, 1, 3]
    assert found[True]["decoded"] == "a house"
    assert found[True]["ids"] == [0, 2, 3]
    assert found[True]["limits"] == [7, 11]
    for saved in (folder, tmp_path / "True", tmp_path / "False"):  # each contains all of it
        names = {file.name for file in saved.iterdir() if "token" in file.name}
        assert names == {
            "tokenization_vanilla_transformer.py",
            "tokenizer.json",
            "target_tokenizer.json",
            "tokenizer_config.json",
        }


def test_special_tokens_that_are_added_are_the_same_after_loading(two_sided, tmp_path):
    two_sided.add_special_tokens({"additional_special_tokens": ["<X>"]})
    before = two_sided("ein <X> haus", text_target="a <X>")
    assert before["input_ids"] == [2, len(SOURCE), 3]
    assert before["labels"] == [6, len(TARGET), 3]
    two_sided.save_pretrained(tmp_path)
    after = AutoTokenizer.from_pretrained(tmp_path)
    assert after("ein <X> haus", text_target="a <X>").data == before.data
    assert after.target_vocab_size == two_sided.target_vocab_size == len(TARGET) + 1


@pytest.mark.parametrize("decoder_vocab_size", [31, 17])
def test_an_assistant_model_with_two_vocabularies_changes_no_token(decoder_vocab_size):
    sizes = {"vocab_size": 24, "decoder_vocab_size": decoder_vocab_size}
    model, assistant = seq2seq(**sizes).eval(), seq2seq(**sizes, decoder_layers=1).eval()
    ids = torch.tensor([[5, 23, 9, 2]])
    expected = model.generate(ids, max_new_tokens=9)
    assert model.generate(ids, max_new_tokens=9, assistant_model=assistant).equal(expected)


@pytest.mark.parametrize("stop", ["x", "a"])
def test_a_stop_string_is_matched_in_the_target_vocabulary(stop):
    options = {"tokenizer_type": "char", "show_progress": False}
    source = train_tokenizer(["abcdef fed"] * 5, 300, **options)
    target = train_tokenizer(["abcdef wax xyz"] * 5, 300, **options)
    both = VanillaTransformerTokenizer(
        tokenizer_object=source.backend_tokenizer,
        target_tokenizer_object=target.backend_tokenizer,
        **{name: getattr(target, name) for name in NAMES},
    )
    said = target("wax xyz", add_special_tokens=False)["input_ids"]

    def say(ids, scores):
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor(said[ids.shape[1] - 1]), 0)

    model = seq2seq(vocab_size=len(source), decoder_vocab_size=len(target)).eval()
    (found,) = model.generate(
        both("fed", return_tensors="pt")["input_ids"], max_new_tokens=len(said),
        stop_strings=[stop], tokenizer=both, logits_processor=[say],
    )  # fmt: skip
    text = both.decode(found, skip_special_tokens=True)
    assert text == "wax xyz"[: "wax xyz".index(stop) + 1]


def test_a_folder_without_a_tokenizer_config_loads_a_stock_tokenizer(folder, tokenizer, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is PreTrainedTokenizerFast


def test_saving_twice_gives_the_same_files(two_sided, tmp_path):
    two_sided(["ein", "haus"], text_target=["a", "a house"], truncation=True, max_length=2)
    two_sided.save_pretrained(tmp_path / "first")
    files = AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert {file.rpartition("/")[2] for file in files} == {
        "tokenizer_config.json",
        "tokenizer.json",
        "target_tokenizer.json",
    }
    for name in ("tokenizer.json", "target_tokenizer.json"):
        first, second = (
            Tokenizer.from_file(str(tmp_path / run / name)) for run in ("first", "second")
        )
        for backend in (first, second):
            backend.no_truncation()
        assert first.to_str() == second.to_str()


# ---------------------------------------------------------------- with collator, trainer, pipeline
# and commands


def test_a_collator_pads_both_sides(two_sided):
    collate = DataCollatorForSeq2Seq(two_sided)
    batch = collate(
        [
            dict(two_sided("ein haus", text_target="a")),
            dict(two_sided("see", text_target="the lake")),
        ]
    )
    assert batch["input_ids"].tolist() == [[2, 3], [5, 0]]
    assert batch["labels"].tolist() == [[6, 3, -100], [5, 4, 3]]


def test_a_trainer_trains_and_saves_it(two_sided, tmp_path):
    config = {"decoder_vocab_size": len(TARGET), "bos_token_id": 2, "eos_token_id": 3}
    trainer = small_trainer(tmp_path, two_sided, config=config, max_steps=2)
    trainer.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "checkpoint-2")
    assert saved("ein", text_target="a")["labels"] == [6, 3]


def test_a_pipeline_decodes_what_the_model_generates(folder):
    translate = pipeline("translation", model=str(folder))
    ids = translate(["ein haus am see"], max_new_tokens=5, return_tensors=True)
    text = translate(["ein haus am see"], max_new_tokens=5)[0]["translation_text"]
    tokens = [TARGET[number] for number in ids[0]["translation_token_ids"].tolist()]
    assert text == " ".join(token for token in tokens if not token.startswith("<"))


def test_the_commands_train_translate_and_evaluate(two_sided, tmp_path, train_here):
    two_sided.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "train.de").write_text("ein haus\nam see\n" * 4)
    (tmp_path / "train.en").write_text("a house\nthe lake\n" * 4)
    files = ["--train_source", tmp_path / "train.de", "--train_target", tmp_path / "train.en"]
    shape = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=16,decoder_ffn_dim=16,"
    shape += "encoder_attention_heads=2,decoder_attention_heads=2"
    output = tmp_path / "model"
    steps = ["--max_steps", 2, "--report_to", "none", "--use_cpu", "--disable_tqdm", "True"]
    scratch = ["--tokenizer_name", tmp_path / "tokenizer", "--config_overrides", shape]
    train_here(*files, *scratch, *steps, "--output_dir", output)
    train_here(*files, "--model_name_or_path", output, *steps, "--output_dir", tmp_path / "more")
    folder = tmp_path / "more"
    lines = run_command("translate", "--model", folder, cwd=tmp_path, stdin="ein haus\n\nsee\n")
    assert len(lines.stdout.splitlines()) == 3
    scored = run_command(
        "evaluate",
        "--model",
        folder,
        "--source",
        "train.de",
        "--target",
        "train.en",
        cwd=tmp_path,
    )
    assert "bleu" in scored.stdout.lower()
