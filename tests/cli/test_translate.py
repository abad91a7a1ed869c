"""`translate` as users call it: options of generate(), several models, and its output."""

import copy
import gzip
import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from functools import partial

import pyarrow
import pytest
import torch
from conftest import REPOSITORY, lines_of, run_command, save_fsmt, seq2seq
from pyarrow import parquet
from torch._dynamo.testing import CompileCounter
from transformers import GenerationConfig

from vanilla_transformer.cli import generation_options
from vanilla_transformer.cli.generation_options import (
    NOT_OFFERED,
    encode_forced_words,
    find_method,
    generation_option_names,
    parse_value,
)
from vanilla_transformer.cli.ray_translation import (
    check_call,
    expect_ray_options,
    translate_chunk,
)
from vanilla_transformer.cli.translation_job import TranslateArguments, TranslationJob, one_line
from vanilla_transformer.data.text_files import expect_parallel
from vanilla_transformer.data.vocabularies import Specials
from vanilla_transformer.data.vocabularies import words as words_tokenizer
from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.parallel_translation import LINES_PER_CHUNK
from vanilla_transformer.inference.ray_workers import RayWorkerArguments, RayWorkers

LINES = "a house\n\nthe lake is deep\n"


def run(checkpoint, cwd, *flags, **options):
    flags = ("--model", checkpoint, "--device", "cpu", "--max_new_tokens", 6, *flags)
    options.setdefault("stdin", LINES)
    return run_command("translate", *flags, cwd=cwd, **options)


def test_max_new_tokens_replaces_a_saved_max_length(checkpoint, tmp_path):
    """With two limits, transformers warns once per batch."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    saved = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(saved | {"max_length": 4}))
    limited, default = (run(name, tmp_path) for name in (folder, checkpoint))
    assert limited.stdout == default.stdout
    assert "max_length" not in limited.stderr


def test_max_length_replaces_a_saved_max_new_tokens(checkpoint, tmp_path):
    # Converted models have one, and `generate()` prefers it if both are set.
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    saved = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(saved | {"max_new_tokens": 4}))
    flags = ("--max_new_tokens", "null", "--token_scores", "--max_length", 3)
    expected = run(checkpoint, tmp_path, *flags).stdout
    flags = ("--model", folder, "--device", "cpu", *flags[2:])
    limited = run_command("translate", *flags, cwd=tmp_path, stdin=LINES)
    assert limited.stdout == expected


@pytest.mark.parametrize("command", ["translate", "back-translate"])
def test_a_line_beyond_the_positions_has_its_number_in_the_file(command, tokenizer, tmp_path):
    """Also after the first chunk of lines."""
    options = {"position_encoding": "learned", "max_position_embeddings": 12}
    seq2seq(vocab_size=len(tokenizer), **options).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "lines").write_text(LINES_PER_CHUNK * "\n" + 9 * "the lake is deep " + "\n")
    flags = ("--model", "model", "--source", "lines", "--output", "out", "--device", "cpu")
    process = run_command(command, *flags, cwd=tmp_path, check=False)
    assert f"error: line {LINES_PER_CHUNK + 1} has " in process.stderr


def test_null_turns_an_option_of_the_model_off(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    saved = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(saved | {"forced_bos_token_id": 9}))
    flags = ("--forced_bos_token_id", "null", "--num_beams", "null")
    expected, forced = run(checkpoint, tmp_path).stdout, run(folder, tmp_path).stdout
    assert run(folder, tmp_path, *flags).stdout == expected != forced


def test_every_option_of_the_generation_config_is_offered_or_excluded_by_name():
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    offered = set(generation_option_names())
    assert known - NOT_OFFERED <= offered
    assert offered - known <= {"length_penalty_type", "extra_output_tokens", "max_length_factor"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 0.001), ("true", True), ("False", False), ("never", "never"),
     ("[[5, 6]]", [[5, 6]])],
)  # fmt: skip
def test_values_of_options_are_json_or_words(text, value):
    assert parse_value(text) == value


def test_a_flag_is_true_or_false():
    """As with --compile no. Any word would be true in Python."""
    parser = ArgumentParser()
    generation_options.add_generation_options(parser)
    given = vars(parser.parse_args(["--do_sample", "no", "--use_cache", "--low_memory", "null"]))
    assert given == {"do_sample": False, "use_cache": True, "low_memory": None}


def test_an_integer_is_accepted_where_transformers_expects_a_float():
    parser = ArgumentParser()
    generation_options.add_generation_options(parser)
    options = vars(parser.parse_args(["--temperature", "2", "--top_k", "2"]))
    assert {name: type(value) for name, value in options.items()} == {
        "temperature": float, "top_k": int,
    }  # fmt: skip
    assert vars(parser.parse_args(["--temperature", "null"])) == {"temperature": None}


def test_all_options_are_in_the_long_help(tmp_path):
    assert "--epsilon_cutoff" in run_command("translate", "--help", cwd=tmp_path).stdout
    long = run_command("translate", "--help_all", cwd=tmp_path).stdout
    assert all(f"--{name} " in long for name in generation_option_names())


def test_options_of_generate_are_passed_on(checkpoint, tmp_path):
    """The options change the translation."""
    plain = run(checkpoint, tmp_path, "--num_beams", 2, "--early_stopping", "never").stdout
    ids = '[["x"]]'
    refused = run(checkpoint, tmp_path, "--bad_words_ids", ids, check=False)
    assert "bad_words_ids=[['x']]: expected 0 <= id" in refused.stderr.splitlines()[-1]
    repeating = run(checkpoint, tmp_path, "--repetition_penalty", "9.5", "--do_sample", "false")
    assert repeating.stdout != plain


@pytest.mark.parametrize("beams", [1, 3])
def test_a_seed_reproduces_the_sampled_translations(checkpoint, tmp_path, beams):
    flags = ("--do_sample", "--num_beams", beams, "--temperature", 9.5)
    first, again, other = (
        run(checkpoint, tmp_path, *flags, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_an_ensemble_of_a_model_with_itself_equals_the_model(checkpoint, tmp_path):
    flags = ("--num_beams", 3, "--n_best", 2)
    one = run(checkpoint, tmp_path, *flags).stdout
    two = run(checkpoint, tmp_path, "--model", checkpoint, f"{checkpoint}/", *flags).stdout
    fields = [[line.split(" ||| ") for line in lines_of(text)] for text in (one, two)]
    assert [row[:2] for row in fields[0]] == [row[:2] for row in fields[1]]
    scores = [[float(row[2]) for row in side] for side in fields]
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)


def test_files_that_end_in_gz_are_compressed(checkpoint, tmp_path):
    """From file to file, and from a stream to a file."""
    with gzip.open(tmp_path / "in.gz", "wt") as file:
        file.write(LINES)
    expected = run(checkpoint, tmp_path).stdout
    run(checkpoint, tmp_path, "--source", "in.gz", "--output", "out.gz")
    run(checkpoint, tmp_path, "--output", "streamed.gz")
    for name in ("out.gz", "streamed.gz"):
        assert gzip.decompress((tmp_path / name).read_bytes()).decode() == expected


def test_prefixes_scores_and_alignments_from_file_to_file(checkpoint, tmp_path):
    (tmp_path / "in").write_text(LINES)
    (tmp_path / "prefixes").write_text("ein Haus\n\n\n")
    flags = ["--source", "in", "--target_prefix_file", "prefixes", "--n_best", 2, "--num_beams", 2]
    flags += ["--token_scores", "--alignments", "pieces", "--output", "out"]
    process = run(checkpoint, tmp_path, *flags)
    rows = [line.split(" ||| ") for line in lines_of((tmp_path / "out").read_text())]
    assert [row[0] for row in rows] == ["0", "0", "1", "2", "2"]
    assert rows[0][1].startswith("ein Haus")
    assert rows[2] == ["1", "", "0.000000", "", ""]
    for row in (*rows[:2], *rows[3:]):
        tokens = len(row[3].split())
        assert re.fullmatch(r"(\d+-\d+ ?)+", row[4])
        assert max(int(pair.split("-")[1]) for pair in row[4].split()) < tokens
    assert "2 of 3 translations reached their length limit" in process.stderr.splitlines()[-1]


def test_scores_start_where_the_translation_starts(checkpoint, tmp_path):
    (tmp_path / "in").write_text("three\n")
    flags = ["--source", "in", "--output", "out", "--n_best", 2, "--num_beams", 2, "--token_scores"]
    flags += ["--length_penalty", 0, "--max_new_tokens", 5, "--decoder_start_token_id", 7]
    run(checkpoint, tmp_path, *flags)
    for line in lines_of((tmp_path / "out").read_text()):
        *_, score, tokens = line.split(" ||| ")
        assert sum(map(float, tokens.split())) == pytest.approx(float(score), abs=2e-3)


# ---------------------------------------------------------------- Custom searches

METHOD = """
from transformers import GenerationMixin

from .forcing import Forced


def search(model, input_ids, logits_processor, generation_config, **rest):
    words = [token for word in generation_config.force_words_ids for token in word]
    logits_processor.append(Forced(words, input_ids.shape[1]))
    return model._sample(
        input_ids, logits_processor=logits_processor, generation_config=generation_config, **rest
    )


def generate(model, *args, **kwargs):
    return GenerationMixin.generate(model, *args, custom_generate=search, **kwargs)
"""
FORCING = """
from dataclasses import dataclass

from transformers import LogitsProcessor


@dataclass
class Forced(LogitsProcessor):
    words: list
    start: int

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - self.start
        if step < len(self.words):
            scores = scores.fill_(float("-inf"))
            scores[:, self.words[step]] = 0
        return scores
"""


@pytest.fixture
def method(tmp_path):
    """The name of a folder with a custom search whose translations start with the forced words."""
    folder = tmp_path / "begin/custom_generate"
    folder.mkdir(parents=True)
    (folder / "generate.py").write_text(METHOD)
    (folder / "forcing.py").write_text(FORCING)
    return "begin"


def test_a_custom_search_can_force_words(checkpoint, tokenizer, tmp_path, method):
    """A translation that starts with forced words equals one with a prefix."""
    (tmp_path / "in").write_text(LINES)
    (tmp_path / "prefixes").write_text("ein Haus\n\nein Haus\n")
    files = ("--source", "in", "--output", "out")
    run(checkpoint, tmp_path, *files, "--target_prefix_file", "prefixes")
    expected = (tmp_path / "out").read_text()
    flags = [*files, "--custom_generate", f"./{method}/", "--trust_remote_code"]
    flags += ["--force_words", "ein", "Haus"]
    forced = sum(map(len, encode_forced_words(["ein", "Haus"], tokenizer)))
    flags += ["--max_new_tokens", 6 + forced]
    run(checkpoint, tmp_path, *flags)
    assert (tmp_path / "out").read_text() == expected
    assert expected.startswith("ein Haus")


def test_the_settings_of_a_job_include_the_code_of_its_custom_search(
    checkpoint, tmp_path, method, monkeypatch
):
    """So that it is not resumed with different code."""
    monkeypatch.chdir(tmp_path)
    arguments = TranslateArguments([str(checkpoint)], custom_generate=method)
    loading = LoadingArguments(device="cpu", trust_remote_code=True)

    def settings():
        return TranslationJob(arguments, loading, {}).settings()["custom_generate"]

    before = settings()
    assert before == settings()
    (tmp_path / method / "custom_generate/forcing.py").write_text(FORCING + "# other code")
    assert before != settings()


@pytest.fixture
def job_with_prefixes(checkpoint, tmp_path):
    """Makes a job for lines with these prefixes, and with a reverse model."""
    reverse = shutil.copytree(checkpoint, tmp_path / "reverse")

    def make(*prefixes, **options):
        for name in ("in", "prefixes"):
            (tmp_path / name).write_text("".join(f"{prefix}\n" for prefix in prefixes))
        arguments = TranslateArguments(
            [str(checkpoint)], source=str(tmp_path / "in"), reverse_model=str(reverse),
            target_prefix_file=str(tmp_path / "prefixes"),
        )  # fmt: skip
        return TranslationJob(arguments, LoadingArguments(device="cpu"), options)

    return make


def test_the_settings_of_a_job_include_its_prefixes_and_its_reverse_model(job_with_prefixes):
    job = job_with_prefixes("ein", "")
    before = job.settings()
    assert job_with_prefixes("ein", "").settings() == before
    after = job_with_prefixes("kein", "").settings()
    assert {name for name in before if before[name] != after[name]} == {"target_prefix_file"}
    with torch.no_grad():
        next(job.reverse[0].parameters()).add_(1)
    after = job.settings()
    assert {name for name in before if before[name] != after[name]} == {"reverse_model"}


def test_each_line_has_its_own_prefix_in_later_chunks_too(job_with_prefixes):
    job = job_with_prefixes("See", "ein Haus", num_beams=2, max_new_tokens=3)
    (found,) = job.translate(["a house"], first=1)
    assert found.startswith("ein Haus")


def test_a_prefix_that_leaves_no_room_is_reported_before_work_starts(job_with_prefixes):
    job = job_with_prefixes("", "ein Haus am See", num_beams=2, max_length=3)
    with pytest.raises(ValueError, match="target prefix 2 has"):
        job.check()


def test_a_custom_search_on_the_hub_is_only_looked_up_once(tmp_path, method, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return tmp_path / method

    monkeypatch.setattr(generation_options, "snapshot_download", download)
    assert find_method("someone/begin", trust_remote_code=True) == str(tmp_path / method)
    assert asked == [("someone/begin", "custom_generate/*")]


def test_forced_words_are_encoded_with_the_target_vocabulary(tokenizer):
    assert encode_forced_words(["See", "ein Haus"], tokenizer) == [
        tokenizer(text_target=text)["input_ids"][:-1] for text in ("See", "ein Haus")
    ]
    with pytest.raises(ValueError, match="force_words='': expected text in the target's vocabul"):
        encode_forced_words(["See", ""], tokenizer)
    stock = copy.deepcopy(tokenizer)
    stock.split_special_tokens = False  # as transformers' own tokenizers
    for word in ("</s>", "See<pad>"):
        assert encode_forced_words([word], tokenizer)
        with pytest.raises(ValueError, match=f"force_words='{word}': expected text in the target"):
            encode_forced_words([word], stock)
    names = ["<pad>", "<s>", "</s>", "<unk>", "See"]
    printing = words_tokenizer(dict(zip(names, range(5), strict=True)), Specials())
    with pytest.raises(ValueError, match="force_words='Meer': expected text in the target's voca"):
        encode_forced_words(["See", "Meer"], printing)


@pytest.mark.parametrize("flags", [
    ["--mbr", "chrf", "--do_sample", "--candidates", 4, "--top_p", 0.9],
    ["--mbr", "bleu", "--num_beams", 3],
    ["--reverse_model", "{checkpoint}", "--num_beams", 3, "--length_weight", 0.2],
], ids=str)  # fmt: skip
def test_reranking_gives_the_same_from_a_file_in_chunks_as_from_a_stream(
    checkpoint, tmp_path, flags
):
    flags = [str(flag).format(checkpoint=checkpoint) for flag in (*flags, "--n_best", 2)]
    streamed = run(checkpoint, tmp_path, *flags).stdout
    (tmp_path / "in").write_text(LINES)
    run(checkpoint, tmp_path, *flags, "--source", "in", "--output", "out")
    assert (tmp_path / "out").read_text() == streamed
    scores = [float(line.split(" ||| ")[2]) for line in lines_of(streamed)]
    assert scores[0] >= scores[1]


@pytest.mark.parametrize("beams", [1, 4])
def test_samples_are_distinct_and_scored_by_log_probability(checkpoint, beams):
    """Neither temperature nor length affects the score."""
    arguments = TranslateArguments([str(checkpoint)], n_best=4, token_scores=True)
    options = {"do_sample": True, "num_beams": beams, "temperature": 3.0, "max_new_tokens": 3}
    job = TranslationJob(arguments, LoadingArguments(device="cpu"), options)
    found = list(job.hypotheses(["a house"] * 8, 0))
    for hypotheses in found:
        assert len({h.text for h in hypotheses}) == len(hypotheses)
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([sum(h.token_scores) for h in hypotheses])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no_such_option", 3], "unrecognized arguments: --no_such_option 3"),
        (["--top_p", "much"], "top_p='much': expected a finite number"),
        (["--max_time", "long"], "max_time='long': expected a finite number"),
        (["--top_p", 2], "top_p=2.0: expected a number from 0 to 1"),
        (["--repetition_penalty", 0], "repetition_penalty=0.0: expected a number above 0"),
        (["--do_sample", "--temperature", 0], "temperature=0.0: expected a number above 0"),
        (["--do_sample", "maybe"], "argument --do_sample: Truthy value expected: got maybe but"),
        (["--early_stopping", "maybe"], "early_stopping='maybe': expected True, False or 'never'"),
        (["--suppress_tokens", 5], "suppress_tokens=5: expected a list"),
        (["--length_penalty_type", "long"], "length_penalty_type='long': expected one of"),
        (["--mbr", "chrf"], "candidates=1: expected at least 2"),
        (["--mbr", "chrf", "--num_beams", 2, "--candidates", 3], "candidates=3 with num_beams=2"),
        (["--mbr", "ter", "--num_beams", 2], "mbr='ter': expected one of chrf"),
        (["--candidates", 3], "candidates=3: expected --mbr or --reverse_model"),
        (["--reverse_weight", 3], "reverse_weight=3.0: expected --reverse_model as well"),
        (["--length_weight", 1], "length_weight=1.0: expected --reverse_model as well"),
        (["--reverse_weight", "nan"], "reverse_weight=nan: expected a finite number"),
        (["--length_weight", "inf"], "length_weight=inf: expected a finite number"),
        (["--alignment_layer", 1], "alignment_layer=1: expected --alignments or --replace_unknow"),
        (["--source", "none"], "source='none': expected a file that exists"),
        (["--source", "in", "--output", "out.xz"], "output='out.xz': expected a plain text file"),
        (["--source", "in", "--output", "./in"], "output='./in': expected another file than sour"),
        (["--source", "in", "--target_prefix_file", "in", "--output", "in"], "expected another"),
        (["--stop_strings", "a"], "unrecognized arguments: --stop_strings a"),
        (["--use_mtp", "true"], "unrecognized arguments: --use_mtp true"),
        (["--alignments", "letters"], "alignments='letters': expected one of words, pieces"),
        (["--target_prefix_file", "in"], "target_prefix_file='in': expected --source"),
        (["--source", "in", "--target_prefix_file", "one"], "in has 3 lines and one 1: expected"),
        (["--source", "in", "--target_prefix_file", "in", "--max_new_tokens", "null",
          "--max_length", 2],
         "target prefix 1 has"),
        (["--mbr", "chrf", "--do_sample", "--candidates", 3, "--n_best", 4],
         "candidates=3: expected at least 2, and as many as n_best"),
        (["--custom_generate", "begin"], "expected --trust_remote_code as well"),
        (["--custom_generate", "none/such", "--trust_remote_code"],
         "custom_generate='none/such': expected a folder, or a repository on the Hub, with cust"),
        (["--force_words", "See"], "expected --custom_generate transformers-community/constrained"),
        (["--num_beam_groups", 2], "expected --custom_generate transformers-community/group-beam"),
        (["--max_tokens", 0], "max_tokens=0: expected a positive integer"),
        (["--model", "{checkpoint}", "{checkpoint}", "--compile"], "compile=True with 2 models"),
        (["--model", "{checkpoint}", "{checkpoint}", "--custom_generate", "begin"],
         "custom_generate=begin with 2 models"),
        (["--ray"], "ray=True without source: expected both --source and --output"),
        (["--num_gpus", 1], "num_gpus=1.0: expected --ray"),
        (["--ray", "--source", "in", "--num_cpus", 0], "num_cpus=0.0, num_gpus=0.0: expected a"),
        (["--source_column", "en", "--source", "in"], "source_column='en': expected a parquet"),
        (["--source", "in.parquet", "--n_best", 2, "--output", "o.parquet"],
         "n_best=2 with output='o.parquet': expected a text file"),
        (["--source", "in.parquet", "--token_scores", "--output", "o.parquet"],
         "token_scores=True with output='o.parquet': expected a text file"),
        (["--source", "in.parquet", "--source_column", "de"], "expected a column of text in"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)  # fmt: skip
def test_invalid_options_are_reported_before_work_starts(checkpoint, tmp_path, flags, message):
    (tmp_path / "in").write_text(LINES)
    (tmp_path / "one").write_text("x\n")
    (tmp_path / "kept").write_text("of an earlier job\n")
    parquet.write_table(pyarrow.table({"en": ["x"]}), tmp_path / "in.parquet")
    flags = [str(flag).format(checkpoint=checkpoint) for flag in flags]
    process = run(checkpoint, tmp_path, "--output", "kept", *flags, check=False)
    assert process.returncode != 0
    assert message in process.stderr.splitlines()[-1]
    assert (tmp_path / "kept").read_text() == "of an earlier job\n"


def test_a_reverse_model_that_reads_no_targets_is_refused_before_work_starts(checkpoint, tmp_path):
    save_fsmt(tmp_path, targets="cba")
    arguments = TranslateArguments(model=[str(checkpoint)], reverse_model=str(tmp_path))
    with pytest.raises(ValueError, match=f"^{tmp_path}: FSMT's tokenizer reads targets"):
        TranslationJob(arguments, LoadingArguments(device="cpu"), {})


# ---------------------------------------------------------------- Compiled models

OF_ALL_LENGTHS = [" ".join(["the lake is deep"] * n) for n in (5, 4, 3, 3, 2, 2, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_compiling_changes_no_translation_and_ends_after_two_lengths(
    checkpoint, monkeypatch, beams
):
    """One graph for the first step and one for all others; both again for the second length, and
    then they work for any length."""
    torch._dynamo.reset()  # what other tests have compiled
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    loading, found, graphs = LoadingArguments(device="cpu"), [], []
    for compiled in (False, True):
        arguments = TranslateArguments([str(checkpoint)], batch_size=2, compile=compiled)
        job = TranslationJob(arguments, loading, {"num_beams": beams})
        found.append(list(job.translate(OF_ALL_LENGTHS)))
        graphs.append(counter.frame_count)
    assert found[0] == found[1]
    assert graphs == [0, 4]


@pytest.mark.slow
def test_the_default_compiler_changes_no_translation(checkpoint, tmp_path):
    stdin = "".join(f"{line}\n" for line in OF_ALL_LENGTHS[-3:])
    flags = ("--batch_size", 1, "--num_beams", 2)
    expected = run(checkpoint, tmp_path, *flags, stdin=stdin).stdout
    # A forked process would wait for the compiler's threads.
    compiled = run(checkpoint, tmp_path, *flags, "--compile", stdin=stdin, fresh=True)
    assert compiled.stdout == expected


# ---------------------------------------------------------------- Columns, workers and terminals
def test_a_column_of_a_parquet_file_is_translated_like_lines(checkpoint, tmp_path):
    table = pyarrow.table({"id": [1, 2, 3], "en": LINES.splitlines()})
    parquet.write_table(table, tmp_path / "in.parquet")
    run(checkpoint, tmp_path, "--source", "in.parquet", "--output", "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.drop_columns("translation").equals(table)
    assert found["translation"].to_pylist() == lines_of(run(checkpoint, tmp_path).stdout)


def test_prefixes_can_be_combined_with_one_of_several_columns(checkpoint, tmp_path):
    table = pyarrow.table({"note": ["a", "b", "c"], "en": LINES.splitlines()})
    parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "prefixes").write_text("ein Haus\n\n\n")
    files = ["--source", "in.parquet", "--output", "out", "--target_prefix_file", "prefixes"]
    run(checkpoint, tmp_path, *files, "--source_column", "en")
    assert (tmp_path / "out").read_text().startswith("ein Haus")


@pytest.fixture
def call(checkpoint):
    """A call of the command as workers receive it."""
    arguments = TranslateArguments([str(checkpoint)], n_best=1)
    return pickle.dumps(
        (arguments, LoadingArguments(device="cpu"), {"num_beams": 2, "max_new_tokens": 2})
    )


def test_a_worker_translates_a_chunk(call, checkpoint, tmp_path):
    lines, counts = translate_chunk(call, check_call(call), LINES.splitlines(), 2048)
    flags = ["--n_best", 1, "--num_beams", 2, "--max_new_tokens", 2]
    plain = run(checkpoint, tmp_path, *flags, stdin="\n" * 2048 + LINES)
    assert lines == lines_of(plain.stdout)[2048:]
    assert counts == [3, 2]


def test_a_worker_with_a_different_model_is_refused(call):
    settings = {**check_call(call), "weights": "others"}
    with pytest.raises(ValueError, match=r"^weights='\w{16}' on .*: expected 'others', as on"):
        translate_chunk(call, settings, ["a house"], 0)


def test_ray_cannot_be_combined_with_a_device_or_a_launcher(tmp_path):
    (tmp_path / "in").touch()
    arguments = TranslateArguments(["model"], source=str(tmp_path / "in"), output="out")
    loading, workers = LoadingArguments(device="cpu"), RayWorkerArguments(ray=True, num_gpus=1)
    with pytest.raises(ValueError, match="ray=True in 2 processes: expected one"):
        expect_ray_options(arguments, loading, workers, num_processes=2)
    loading.device = "cuda:1"
    with pytest.raises(ValueError, match="device='cuda:1' with ray=True: expected --num_gpus"):
        expect_ray_options(arguments, loading, workers, num_processes=1)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    needed = "ray=True needs the package ray: pip install 'vanilla-transformer[ray]'"
    with pytest.raises(ImportError, match=re.escape(needed)):
        RayWorkers(RayWorkerArguments(ray=True))


@pytest.mark.slow
def test_there_is_a_prompt_on_a_terminal(checkpoint, tmp_path):
    keyboard, stdin = pty.openpty()
    os.write(keyboard, b"a house\n\x04")
    process = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer", "translate", "--model", str(checkpoint),
         "--max_new_tokens", "4"],
        stdin=stdin, capture_output=True, text=True, check=True, cwd=REPOSITORY,
    )  # fmt: skip
    for descriptor in (keyboard, stdin):
        os.close(descriptor)
    assert process.stdout.count("\n") == 1
    assert "Ctrl-D" in process.stderr
    assert process.stderr.count("> ") == 2


def test_only_line_breaks_are_removed_from_a_translation():
    assert one_line("a\u2028b\r\nc\nd\x85\re") == "a\u2028b c d\x85 e"


def test_files_that_are_read_twice_cannot_be_pipes(tmp_path):
    (tmp_path / "file").write_text("one\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: expected a file, not a pipe, as it is read twice"):
        expect_parallel(tmp_path / "file", tmp_path / "pipe")
