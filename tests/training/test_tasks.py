"""Tasks other than translation, as docs/data.md shows them: each trains, and its saved folder reads
what training read."""

import json
import logging
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import run_command
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from vanilla_transformer.cli import back_translate
from vanilla_transformer.data.noise import MASK_TOKEN, add_noise

SHAPE = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=16,decoder_ffn_dim=16"
)
QUICK = ["--config_overrides", SHAPE, "--max_steps", 2, "--save_strategy", "no", "--use_cpu"]
QUICK += ["--report_to", "none", "--vocab_size", 300]


def written(folder, **files):
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def trained(folder, train_here, *flags):
    train_here(*QUICK, "--output_dir", folder / "model", *flags)
    loaded = folder / "model"
    return AutoTokenizer.from_pretrained(loaded), AutoModelForSeq2SeqLM.from_pretrained(loaded)


def words_to_digits(folder, train_here, *flags):
    written(folder, source=["one two", "six"] * 4, target=["1 2", "6"] * 4)
    files = {f"--{split}_{side}": folder / side for split in ("train", "validation")
             for side in ("source", "target")}  # fmt: skip
    return trained(folder, train_here, *(part for pair in files.items() for part in pair), *flags)


OURS, FACTOR = ["--config_overrides", f"{SHAPE},label_smoothing=0.3"], "--label_smoothing_factor"


@pytest.mark.parametrize(
    ("recipe", "flags", "eps"),
    [
        ("", [], 0.1),
        ("", [FACTOR, 0], 0.0),
        ("", [FACTOR, 0.2], 0.2),
        ("", [*OURS, FACTOR, 0.2], 0.2),
        ("config_overrides: label_smoothing=0.3", [FACTOR, 0.2], 0.2),
        ("label_smoothing_factor: 0.2", [], 0.2),
        ("label_smoothing_factor: 0.2", OURS, 0.3),
        ("label_smoothing_factor: 0.2", [FACTOR, 0.4], 0.4),
    ],
)
def test_label_smoothing_can_be_set_with_transformers_option_too(
    tmp_path, train_here, recipe, flags, eps
):
    (tmp_path / "recipe.yaml").write_text(f"tokenizer_type: word\n{recipe}\n")
    flags = ["--config", tmp_path / "recipe.yaml", *flags]
    _, model = words_to_digits(tmp_path, train_here, *flags)
    assert model.config.label_smoothing == eps
    used = (tmp_path / "model/README.md").read_text().partition("```yaml")[2]
    assert "label_smoothing_factor" not in used
    if eps != 0.1:
        assert f"label_smoothing: {eps}" in used or f"smoothing={eps}" in used


def test_bleu_cannot_select_the_best_if_targets_are_too_short_for_it(tmp_path, train_here):
    flags = ["--predict_with_generate", "--eval_strategy", "steps", "--eval_steps", 1]
    flags += ["--metric_for_best_model", "bleu"]
    with pytest.raises(ValueError, match=r"metric_for_best_model=bleu: no validation target has 4"):
        words_to_digits(tmp_path, train_here, *flags)
    words_to_digits(tmp_path, train_here, *flags, "--metric_for_best_model", "chrf")


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_inflection_with_tags(tmp_path, train_here):
    """Characters, and grammatical tags that are tokens."""
    sources, targets = ["<V> <PST> geben", "<N> <PL> Haus"], ["gab", "Häuser"]
    written(tmp_path, source=sources * 4, target=targets * 4)
    tokenizer, _ = trained(
        tmp_path, train_here,
        "--train_source", tmp_path / "source", "--train_target", tmp_path / "target",
        "--tokenizer_type", "char", "--user_tokens", "<V>", "<PST>", "<N>", "<PL>",
    )  # fmt: skip
    assert pieces(tokenizer, "<N> <PST> gab") == ["<N>", " ", "<PST>", " ", *"gab", "</s>"]


def test_reactions_of_molecules_in_two_vocabularies(tmp_path, train_here, caplog):
    """SMILES, split into tokens by spaces."""
    caplog.set_level(logging.INFO)
    written(tmp_path, source=["C C ( = O ) O", "N # C Br"] * 4, target=["C C O", "Cl C"] * 4)
    tokenizer, model = trained(
        tmp_path, train_here,
        "--train_source", tmp_path / "source", "--train_target", tmp_path / "target",
        "--tokenizer_type", "word", "--separate_vocabularies",
    )  # fmt: skip
    assert pieces(tokenizer, "Br ( C )") == ["Br", "(", "C", ")", "</s>"]
    assert model.config.vocab_size == 4 + 8
    assert model.config.decoder_vocab_size == tokenizer.target_vocab_size == 4 + 3
    assert "Source: 12 tokens in the vocabulary, 6.5 in a sentence" in caplog.text
    translate = pipeline("text2text-generation", model=model, tokenizer=tokenizer)
    assert isinstance(translate("C C O")[0]["generated_text"], str)


def test_several_target_languages_in_one_model(tmp_path, train_here):
    """A tag says which one to translate to (Johnson et al., 2017)."""
    written(tmp_path, en=["the lake", "a house"] * 4, fr=["le lac", "une maison"] * 4)
    written(tmp_path, de=["der See", "ein Haus"] * 4)
    files = {"source": ["en", "en"], "target": ["fr", "de"]}
    flags = [
        flag
        for split in ("train", "validation")
        for side, names in files.items()
        for flag in (f"--{split}_{side}", *(tmp_path / name for name in names))
    ]
    tokenizer, _ = trained(
        tmp_path, train_here, *flags,
        "--corpus_tags", "<2fr>", "<2de>", "--corpus_weights", 1, 2,
    )  # fmt: skip
    for tag in ("<2fr>", "<2de>"):
        assert pieces(tokenizer, f"{tag} the lake")[0] == tag
    card = (tmp_path / "model/README.md").read_text()
    assert "corpus_tags" in card


def test_training_stops_early(tmp_path, train_here):
    written(tmp_path, source=["a b", "b c"] * 4, target=["b a", "c b"] * 4)
    files = [
        flag
        for split in ("train", "validation")
        for side in ("source", "target")
        for flag in (f"--{split}_{side}", tmp_path / side)
    ]
    train_here(
        *QUICK, "--output_dir", tmp_path / "model", *files, "--max_steps", 9,
        "--learning_rate", 1e-12, "--eval_strategy", "steps", "--eval_steps", 1,
        "--save_strategy", "steps", "--save_steps", 1, "--save_total_limit", 1,
        "--load_best_model_at_end", "--metric_for_best_model", "exact_match",
        "--predict_with_generate", "--early_stopping_patience", 2,
    )  # fmt: skip
    assert json.loads((tmp_path / "model/trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.parametrize(
    ("metric", "changed", "difference", "best"),
    [
        ("loss", ["--validation_target", "source"], "the validation text", 2),  # evaluated again
        ("loss", ["--generation_num_beams", 2], "generation_num_beams", 1),
        ("chrf", ["--generation_num_beams", 2], "generation_num_beams", 3),
        ("chrf", ["--generation_max_length", 9], "generation_max_length", 3),
        ("chrf", ["--bleu_tokenize", "char"], "bleu_tokenize", 1),
        ("bleu", ["--bleu_tokenize", "char"], "bleu_tokenize", 3),
    ],
)
def test_a_resumed_training_compares_no_scores_of_different_evaluations(
    tmp_path, train_here, monkeypatch, caplog, metric, changed, difference, best
):
    """The weights do not change, so that the first of equal scores is the best."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, source=["a b", "b c"] * 4, target=["b a a b", "c b"] * 4)
    flags = [
        *QUICK, "--output_dir", "model", "--learning_rate", 1e-12, "--predict_with_generate",
        "--train_source", "source", "--train_target", "target", "--validation_source", "source",
        "--validation_target", "target", "--eval_strategy", "steps", "--eval_steps", 1,
        "--save_strategy", "steps", "--save_steps", 1, "--load_best_model_at_end",
        "--metric_for_best_model", metric,
    ]  # fmt: skip
    train_here(*flags, "--max_steps", 2)
    train_here(*flags, "--max_steps", 4, "--resume_from_checkpoint", "true", *changed)
    state = json.loads(Path("model/trainer_state.json").read_text())
    assert state["best_global_step"] == best
    steps = [log["step"] for log in state["log_history"] if f"eval_{metric}" in log]
    assert steps == list(range(best, 5))
    told = [message for message in caplog.messages if "choose no best checkpoint" in message]
    assert [message.rpartition(": ")[2] for message in told] == [difference]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--early_stopping_patience", "0"], "early_stopping_patience=0: expected 1 or more"),
        (["--early_stopping_patience", "2"], "expected load_best_model_at_end"),
    ],
)
def test_an_invalid_patience_is_reported(flags, message, tmp_path, train_here):
    with pytest.raises(ValueError, match=message):
        train_here(*QUICK, "--output_dir", tmp_path, "--dataset_name", "phrases", *flags)


# Back-translation


def back_translated(folder, checkpoint, name, *flags):
    options = ["--model", checkpoint, "--source", folder / "mono", "--output", folder / name]
    run_command("back-translate", *options, "--lines_per_chunk", 2, *flags, cwd=folder)
    return (folder / name).read_text().splitlines()


def test_back_translation_has_a_line_for_each_line(tmp_path, checkpoint):
    written(tmp_path, mono=["der See", "", "ein Haus am See", "tief"])
    once, again, other = (
        back_translated(tmp_path, checkpoint, name, "--seed", seed)
        for name, seed in (("once", 1), ("again", 1), ("other", 2))
    )
    assert len(once) == 4
    assert once[1] == ""
    assert once == again != other
    greedy = back_translated(tmp_path, checkpoint, "greedy", "--method", "greedy")
    assert greedy not in (once, other)


def test_truncated_back_translations_are_counted(tmp_path, checkpoint):
    written(tmp_path, mono=["der See", "", "ein Haus am See"])
    shutil.copytree(checkpoint, tmp_path / "model")
    GenerationConfig.from_pretrained(checkpoint, max_new_tokens=1).save_pretrained(
        tmp_path / "model"
    )
    options = ["--model", "model", "--source", "mono", "--output", "synthetic"]
    process = run_command("back-translate", *options, "--method", "greedy", cwd=tmp_path)
    assert "2 of 3 translations reached their length limit and are cut" in process.stderr


@pytest.mark.slow
def test_a_killed_back_translation_ends_in_the_same_text(tmp_path, checkpoint):
    """Samples and noise included."""
    written(tmp_path, mono=["der See ist tief", "ein Haus am See"] * 10)
    expected = back_translated(tmp_path, checkpoint, "whole", "--noise")
    command = [sys.executable, "-m", "vanilla_transformer", "back-translate", "--noise"]
    command += ["--model", checkpoint, "--source", tmp_path / "mono"]
    command += ["--output", tmp_path / "killed", "--lines_per_chunk", "2"]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path)
    parts = tmp_path / "killed.parts"
    while not (parts / "2").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed").exists()
    assert (parts / "0").read_text().splitlines() == expected[:2]
    (parts / "0").write_text("kept\n\n")  # a finished chunk is not translated again
    resumed = back_translated(tmp_path, checkpoint, "killed", "--noise")
    assert resumed == ["kept", "", *expected[2:]]


def test_noise_drops_masks_and_moves_words_a_little():
    words = [f"w{number}" for number in range(2000)]
    noisy = add_noise(" ".join(words), random.Random(0)).split()
    assert len(noisy) == pytest.approx(1800, abs=60)
    assert noisy.count(MASK_TOKEN) == pytest.approx(180, abs=50)
    kept = [word for word in words if word in set(noisy)]
    places = {word: place for place, word in enumerate(noisy)}
    without_masks = sorted(kept, key=places.__getitem__)
    moves = [abs(kept.index(word) - place) for place, word in enumerate(without_masks)]
    assert max(moves) == 3
    assert {add_noise("one", random.Random(seed)) for seed in range(50)} == {"one", MASK_TOKEN}
    zeros = SimpleNamespace(random=lambda: 0.0, uniform=lambda *_: 0.0)
    assert add_noise("one two", zeros) == MASK_TOKEN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method='best': expected one of sampling,"),
        ({"source": "mono.csv"}, "mono.csv: expected text, a sentence a line, or parquet"),
        ({"source": "mono", "output": "new.tsv"}, "new.tsv: expected text, a sentence a line"),
        ({"method": "top_k", "top_k": 0}, "top_k=0: expected a positive"),
        ({"method": "beam", "num_beams": 0}, "num_beams=0: expected a positive"),
        ({"temperature": 0.0}, "temperature=0.0: expected a positive"),
        ({"top_k": 5}, "top_k=5 with method='sampling': expected top_k"),
        ({"method": "greedy", "num_beams": 2}, "num_beams=2 with method='greedy': expected beam"),
        (
            {"method": "beam", "temperature": 0.5},
            "temperature=0.5 with method='beam': expected sampling or top_k",
        ),
    ],
)
def test_invalid_options_of_back_translation_are_reported(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, **{"mono.csv": ["a,b"], "mono": ["a"]})
    options = {"source": "source", "output": "output", **options}
    with pytest.raises(ValueError, match=message):
        back_translate.BackTranslateArguments("model", **options)


UNCUT = {
    "top_p": 1.0, "top_h": None, "min_p": None, "typical_p": None, "epsilon_cutoff": None,
    "eta_cutoff": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"method": "sampling", "temperature": 0.5},
            {"do_sample": True, "num_beams": 1, "top_k": 0, "temperature": 0.5, **UNCUT},
        ),
        (
            {"method": "top_k"},
            {"do_sample": True, "num_beams": 1, "top_k": 10, "temperature": 1.0, **UNCUT},
        ),
        ({"method": "beam", "num_beams": 3}, {"do_sample": False, "num_beams": 3}),
        ({"method": "greedy"}, {"do_sample": False, "num_beams": 1}),
    ],
)
def test_each_method_of_back_translation_sets_its_own_options(tmp_path, options, expected):
    written(tmp_path, mono=["der See"])
    files = str(tmp_path / "mono"), str(tmp_path / "synthetic")
    arguments = back_translate.BackTranslateArguments("model", *files, **options)
    assert arguments.generate_options() == expected
