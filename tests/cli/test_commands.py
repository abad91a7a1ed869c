"""The commands as a user runs them: one small training, then the commands that use its model."""

import json
import logging
import re
import runpy
import select
import subprocess
import sys
from subprocess import PIPE
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from conftest import lines_of, run_command, run_ranks
from transformers import Seq2SeqTrainingArguments, Trainer, TrainerState, TrainingArguments

from vanilla_transformer.cli.evaluate import EvaluateArguments
from vanilla_transformer.cli.plan import WARMUP, measure, measured_with, report, total_updates
from vanilla_transformer.cli.train import log_to_stderr

SHAPE = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=16,decoder_ffn_dim=16"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("commands")


TRAIN = [
    "--config", "phrases", "--output_dir", "model",
    "--config_overrides", SHAPE, "--vocab_size", 320, "--phrases_train_size", 200,
    "--phrases_validation_size", 8, "--phrases_test_size", 8, "--per_device_train_batch_size", 8,
    "--eval_strategy", "steps", "--eval_steps", 2, "--save_strategy", "steps", "--save_steps", 2,
    "--max_steps", 4, "--warmup_steps", 1, "--logging_steps", 1, "--use_cpu",
    "--bleu_tokenize", "intl",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder):
    process = run_command("train", *TRAIN, cwd=folder, fresh=True)
    return folder / "model", process


def test_training_leaves_a_complete_folder(trained):
    model, _ = trained
    files = {path.name for path in model.iterdir()}
    assert {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "curves.png", "README.md", "runs", "checkpoint-4",
        "modeling_vanilla_transformer.py", "pipelines.py",
    } <= files  # fmt: skip


def test_training_prints_scores_for_each_split(trained):
    lines = [line for line in trained[1].stdout.splitlines() if line.startswith('{"bleu"')]
    assert len(lines) == 2
    assert "tok:intl" in json.loads(lines[-1])["bleu_signature"]


def test_a_log_contains_no_escape_sequences(trained):
    """Nested progress bars use them: those of evaluations with generation within a training."""
    _, process = trained
    assert "eval_bleu" in process.stdout
    assert "\x1b" not in process.stdout + process.stderr


def test_the_card_names_data_recipe_command_and_scores(trained):
    card = (trained[0] / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["language"] == ["en", "de"]
    assert header["pipeline_tag"] == "translation"
    results = header["model-index"][0]["results"]
    assert {metric["type"] for result in results for metric in result["metrics"]} == {
        "bleu", "chrf", "exact_match",
    }  # fmt: skip
    assert "trained on `phrases`" in card
    assert "4 steps" in card
    assert "vanilla-transformer train --config phrases" in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["phrases_train_size"] == 200
    shape = yaml.safe_load("{" + SHAPE.replace("=", ": ") + "}")
    assert recipe["config_overrides"] == {"dropout": 0.0, "label_smoothing": 0.0, **shape}
    assert "| test | " in card


@pytest.mark.slow
def test_a_compiled_training_learns_the_same_from_batches_of_any_shape(trained, folder):
    command = ["train", *TRAIN, "--output_dir", "compiled", "--torch_compile"]
    run_command(*command, cwd=folder, fresh=True)
    losses = [
        [
            entry["loss"]
            for entry in TrainerState.load_from_json(state).log_history
            if "loss" in entry
        ]
        for state in (folder / name / "trainer_state.json" for name in ("model", "compiled"))
    ]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_processes_compute_the_same_scores_as_one(trained, folder):
    """A training that is resumed at its end only scores its model."""
    flags = ["--resume_from_checkpoint", "auto", "--ddp_backend", "gloo"]
    train = ("-m", "vanilla_transformer", "train")
    failed, output = run_ranks(2, *train, *TRAIN, *flags, cwd=folder)
    assert not failed, output
    assert output.count("The model and its card are in model") == 1
    assert output.count(" parameters, ") == 1  # the second process only warns
    assert "on cpu in 2 processes" in (folder / "model/README.md").read_text()
    scores, expected = (
        [line for line in text.splitlines() if line.startswith('{"bleu"')]
        for text in (output, trained[1].stdout)
    )
    assert scores == expected


@pytest.mark.parametrize(
    ("options", "own", "others"),
    [
        ({}, "INFO", "WARNING"),
        ({"log_level": "debug"}, "DEBUG", "DEBUG"),
        ({"log_level": "error"}, "ERROR", "ERROR"),
    ],
    ids=str,
)
def test_the_level_of_the_log_is_that_of_the_option(train_here, tmp_path, options, own, others):
    """By default, other packages only warn."""
    log_to_stderr(TrainingArguments(str(tmp_path), **options))
    for name, level in ("vanilla_transformer", own), ("train", own), ("transformers", others):
        assert logging.getLevelName(logging.getLogger(name).level) == level


def test_a_second_run_does_not_overwrite_and_can_resume(trained, folder):
    refused = run_command("train", *TRAIN, cwd=folder, check=False)
    assert refused.returncode != 0
    assert "already holds a model: choose another folder" in refused.stderr.splitlines()[-1]
    averaged = ["--average_checkpoints", 2, "--save_total_limit", 2]
    flags = ["--max_steps", 6, "--resume_from_checkpoint", "true", *averaged]
    process = run_command("train", *TRAIN, *flags, cwd=folder)
    assert "The model is the mean of the checkpoints at steps [4, 6]" in process.stderr
    assert "saved to" not in process.stderr  # because of the folder in which the mean is computed
    state = json.loads((folder / "model" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"validation_source": "lines", "validation_target": "lines"},
            "training: expected train data (train_source and train_target, train_file, or that "
            "split of dataset_name), found only validation data",
        ),
        ({"dataset_name": "hub"}, "training: expected train data"),
        ({"dataset_name": "hub", "streaming": True, "max_steps": 4}, "training: expected train"),
        ({"dataset_name": "phrases", "phrases_train_size": 0}, "found only validation, test data"),
        (
            {"train_source": "lines", "train_target": "lines", "eval_strategy": "epoch"},
            "eval_strategy=epoch: expected validation data (validation_source and",
        ),
        (
            {"train_source": "lines", "train_target": "lines", "eval_on_start": True},
            "eval_on_start=True: expected validation data",
        ),
        (
            {"train_source": "lines", "train_target": "lines", "streaming": True},
            "max_steps=-1: expected a positive number, as the length of a stream is unknown",
        ),
    ],
    ids=str,
)
def test_missing_data_is_reported_before_work_starts(tmp_path, options, message):
    (tmp_path / "lines").write_text("a house\nthe lake\n")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/validation.csv").write_text("source,target\na house,ein Haus\n")
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = run_command(
        "train", "--output_dir", "model", "--use_cpu", *flags, cwd=tmp_path, check=False
    )
    error = process.stderr.splitlines()[-1]
    assert error.startswith("vanilla-transformer train: error: ")
    assert message in error
    assert "Training a tokenizer" not in process.stderr
    assert not (tmp_path / "model").exists()


def test_files_and_streams_are_translated_the_same(trained, folder):
    lines = "On March 5, 2024\n\nthree hundred\r\n"
    (folder / "in.txt").write_bytes(lines.encode())
    flags = ["--model", trained[0], "--num_beams", 2, "--max_new_tokens", 5]
    run_command("translate", *flags, "--source", "in.txt", "--output", "out.txt", cwd=folder)
    written = (folder / "out.txt").read_text(encoding="utf-8")
    assert written.count("\n") == 3
    assert written.split("\n")[1] == ""
    assert run_command("translate", *flags, cwd=folder, stdin=lines).stdout == written
    assert run_command("translate", *flags, "--source", "in.txt", cwd=folder).stdout == written


def test_a_pipe_is_translated_line_by_line_until_its_reader_closes_it(trained, folder):
    command = [sys.executable, "-m", "vanilla_transformer", "translate"]
    options = ["--model", "model", "--num_beams", "2", "--n_best", "2", "--max_new_tokens", "5"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=folder, stdin=PIPE, stdout=PIPE, stderr=PIPE, bufsize=0,
    )  # fmt: skip
    try:
        for number in range(3):
            process.stdin.write(b"three hundred\n")
            for _ in range(2):
                assert select.select([process.stdout], [], [], 120)[0], "no translation comes"
                assert process.stdout.readline().startswith(f"{number} ||| ".encode())
        process.stdout.close()
        process.stdin.write(b"four\n")
        process.wait(timeout=120)  # although standard input is still open
        assert b"Error" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_best", 3], "n_best=3 with num_beams=2: expected"),
        (["--batch_size", 0], "batch_size=0: expected a positive integer"),
        (["--max_new_tokens", 0], "max_new_tokens=0: expected a whole number from 1"),
        (["--num_beams", -1], "num_beams=-1: expected a whole number from 1"),
    ],
)
def test_options_are_checked_before_the_output_is_changed(trained, folder, flags, message):
    (folder / "source").write_text("three hundred\n")
    (folder / "kept").write_text("of an earlier job\n")
    files = ["--output", "kept"]
    for where in (files, [*files, "--source", "source"]):
        flags = ["--model", "model", "--num_beams", 2, *flags, *where]
        process = run_command("translate", *flags, cwd=folder, stdin="one\n", check=False)
        assert message in process.stderr.splitlines()[-1]
        assert (folder / "kept").read_text() == "of an earlier job\n"
        assert not (folder / "kept.parts").exists()


def test_the_best_hypotheses_are_printed_with_scores(trained, folder):
    options = ("--model", "model", "--num_beams", 3, "--n_best", 2, "--max_new_tokens", 5)
    process = run_command("translate", *options, cwd=folder, stdin="one\n\ntwo\n")
    lines = lines_of(process.stdout)
    fields = [line.split(" ||| ") for line in lines]
    assert [number for number, _, _ in fields] == ["0", "0", "1", "2", "2"]
    assert float(fields[0][2]) >= float(fields[1][2])


def test_models_and_translations_are_scored(trained, folder):
    (folder / "source").write_text("three hundred\nfour\n")
    (folder / "target").write_text("dreihundert\nvier\n")
    flags = ["--source", "source", "--target", "target"]
    process = run_command("evaluate", "--model", trained[0], *flags, cwd=folder)
    scores = json.loads(process.stdout)
    assert set(scores) == {"bleu", "chrf", "exact_match", "bleu_signature", "chrf_signature"}
    process = run_command(
        "evaluate", "--predictions", "target", "--target", "target", "--tokenize", "none",
        cwd=folder,
    )  # fmt: skip
    assert json.loads(process.stdout)["exact_match"] == 100
    (folder / "target").write_text("dreihundert\n")
    process = run_command("evaluate", "--model", trained[0], *flags, cwd=folder, check=False)
    error = process.stderr.splitlines()[-1]
    assert "source has 2 lines and target 1: expected the same number" in error


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": "a"},
        {"model": ["m"]},
        {"model": ["m"], "predictions": ["b"]},
        {"model": ["m"], "predictions": ["b"], "source": "a"},
    ],
)
def test_evaluation_scores_either_translations_or_a_model(options):
    message = "^expected either --predictions, or --model and --source"
    with pytest.raises(ValueError, match=message):
        EvaluateArguments(["target"], **options)


def test_evaluation_of_translations_refuses_num_beams():
    message = "num_beams=4: expected --model in place of --predictions"
    with pytest.raises(ValueError, match=message):
        EvaluateArguments(["target"], predictions=["output"], num_beams=4)


@pytest.mark.slow
def test_the_phrases_recipe_reaches_97_percent_exact_match(folder):
    process = run_command("train", "--config", "phrases", "--output_dir", "phrases", cwd=folder)
    scores = json.loads(process.stdout.splitlines()[-1])
    assert scores["exact_match"] >= 97


def test_a_plan_estimates_how_long_a_training_takes(folder):
    """It trains for a few updates, saves the measurement in the file, and leaves nothing else."""
    options = [
        "--preset", "tiny", "--config_overrides", SHAPE, "--dataset_name", "phrases",
        "--phrases_train_size", 200, "--vocab_size", 320, "--use_cpu", "--measured_steps", 2,
        "--speeds", "plan/speeds.json", "--eval_strategy", "steps", "--save_strategy", "steps",
        "--load_best_model_at_end", "--early_stopping_patience", 3,
    ]  # fmt: skip
    process = run_command("plan", *options, cwd=folder)
    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    rows = dict(line.strip("| ").split(" | ") for line in table[2:])
    assert rows["text"].startswith("200 pairs, ")
    assert rows["updates"] == "3,000"
    assert "measured with" not in rows
    assert "learning_rate=" in process.stderr
    (measured,) = json.loads((folder / "plan/speeds.json").read_text())
    speed = measured["target_tokens_per_second"]
    assert speed > 0
    assert rows["speed"] == f"{speed:,.0f} target tokens per second and device"
    epochs = float(rows["epochs"].split(",")[0])
    tokens = epochs * int(rows["text"].split(", ")[1].split()[0].replace(",", ""))
    assert rows["epochs"].endswith(f", {tokens / 1e6:,.1f} million target tokens")
    duration, unit = rows["duration"].split()
    assert unit == "minutes"
    assert float(duration) == pytest.approx(tokens / speed / 60, abs=0.06)
    again = run_command("plan", *options, cwd=folder)
    assert again.stdout.split() == process.stdout.split()  # not measured again
    assert not (folder / "trainer_output").exists()


def plan_and_train(folder, output, *options):
    """The printed plan, and the trainer state, text size and model card of the training."""
    options = [
        "--preset", "tiny", "--config_overrides", SHAPE, "--dataset_name", "phrases",
        "--phrases_train_size", 200, "--vocab_size", 320, *options,
        "--save_strategy", "no", "--report_to", "none", "--use_cpu",
    ]  # fmt: skip
    table = run_command("plan", *options, "--measured_steps", 1, cwd=folder).stdout
    run_command("train", *options, "--output_dir", output, cwd=folder)
    state = TrainerState.load_from_json(folder / output / "trainer_state.json")
    text = state.stateful_callbacks["OptionsCallback"]["args"]["text"]
    return table, state, text, (folder / output / "README.md").read_text()


def test_a_plan_counts_the_epochs_of_the_training(folder):
    """Batches contain padding, so that an epoch has more of them than its tokens would fill."""
    sizes = ["--phrases_validation_size", 5, "--phrases_test_size", 5]
    options = ["--max_tokens", 60, "--max_steps", 50, *sizes]
    table, state, text, card = plan_and_train(folder, "planned", *options)
    tokens = state.epoch * text["target_tokens"]
    assert f"| epochs | {state.epoch:.1f}, {round(tokens):,} target tokens |" in table
    assert state.epoch < 0.97 * 50 / (max(text["source_tokens"], text["target_tokens"]) / 60)
    line = f"50 steps, {state.epoch:.2f} epochs, {round(tokens):,} target tokens, on cpu, with"
    assert line in card


def test_a_plan_ignores_dropped_pairs_and_rounds_updates(folder):
    sizes = ["--phrases_validation_size", 0, "--phrases_test_size", 0]
    options = ["--max_tokens", 24, "--oversized", "drop", "--gradient_accumulation_steps", 4]
    table, state, text, card = plan_and_train(
        folder, "dropped", *options, "--num_train_epochs", 2, *sizes
    )
    assert f"| updates | {state.global_step:,} |" in table
    (counted,) = re.findall(r"2.0 epochs, ([\d,]+) target tokens", card)
    assert 0 < int(counted.replace(",", "")) < 1.9 * text["target_tokens"]


class Line(torch.nn.Linear):
    """The smallest model that a trainer accepts."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, labels):
        return {"loss": super().forward(labels[:, None]).square().mean()}


@pytest.mark.parametrize(
    ("options", "updates"),
    [({"num_train_epochs": 3.3}, 93), ({"num_train_epochs": 3.0}, 84), ({"max_steps": 92}, 92)],
    ids=str,
)
def test_a_plan_has_as_many_updates_as_a_trainer(options, updates, tmp_path):
    """With 28 updates in an epoch, 3.3 epochs are 92.4 updates."""
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=1, save_strategy="no",
        report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(Line(), arguments, train_dataset=[{"labels": 1.0}] * 28)
    trainer.train()
    assert trainer.state.global_step == updates == total_updates(arguments, 28)


H200 = {
    "device": "NVIDIA H200",
    "shape": "d_model 16, 1+1 layers, d_ff 16",
    "layer_weights": 4320,
    "heads": [2, 2],
    "vocabulary": 320,
    "precision": "fp32",
    "batch": 500,
    "accumulation": 1,
    "processes": 1,
    "source_ratio": 0.9,
    "target_length": 32,
    "attention": "sdpa",
    "options": [],
    "target_tokens_per_second": 1e-3,
    "gib": 7.0,
}


def test_a_plan_excludes_the_first_updates_from_its_measurement(monkeypatch):
    """Three slow updates, then two that take 1 and 2 seconds."""
    now, durations = [100.0], [10.0, 20.0, 30.0, 1.0, 2.0]
    assert WARMUP == 3
    monkeypatch.setattr("vanilla_transformer.cli.plan.time.perf_counter", lambda: now[0])
    callbacks = []

    def train():
        for seconds in durations[: trainer.args.max_steps]:
            now[0] += seconds
            callbacks[0].on_step_end(None, None, None)
        now[0] += 50.0  # what comes after the last update

    trainer = SimpleNamespace(
        args=SimpleNamespace(), add_callback=callbacks.append, train=train,
        remove_callback=callbacks.remove,
    )  # fmt: skip
    assert measure(trainer, 2) == 1.5
    assert trainer.args.max_steps == 5
    assert not callbacks


def test_a_plan_divides_the_tokens_among_the_devices():
    """Here 5 epochs of 1.8 million, 9 million. A quarter at 1,000 per second and the rest at 500
    take 0.25 / 1000 + 0.75 / 500 seconds each: 15,750 seconds on one device, 2.19 hours on two."""
    size = SimpleNamespace(pairs=70_000, target_tokens=2_000_000)
    model = SimpleNamespace(num_parameters=lambda: 12_345)
    prepared = SimpleNamespace(size=size, target_tokens=1_800_000, model=model)
    args = SimpleNamespace(max_steps=500, world_size=2)
    fast = {**H200, "target_tokens_per_second": 1000.0, "gib": 2.0}
    slow = {**H200, "target_tokens_per_second": 500.0, "gib": 3.0}
    lines = report(prepared, args, H200, [(fast, 0.25), (slow, 0.75)], 100).splitlines()
    assert dict(line.strip("| ").split(" | ") for line in lines[2:]) == {
        "model": "d_model 16, 1+1 layers, d_ff 16, 12,345 weights",
        "text": "70,000 pairs, 2,000,000 target tokens",
        "hardware": "2 x NVIDIA H200, fp32",
        "updates": "500",
        "epochs": "5.0, 9.0 million target tokens",
        "speed": "571 target tokens per second and device",
        "duration": "2.19 hours",
        "memory": "3.0 GiB per device",
        "recipe for a text of this size": "iwslt14_de_en",  # 2.3 times as much, not 2.4 times less
    }


def test_a_plan_says_how_its_measurement_differs_from_the_training():
    """And what a file of an older version does not contain."""
    new = (
        "layer_weights", "heads", "accumulation", "processes", "source_ratio", "target_length",
    )  # fmt: skip
    old = {name: value for name, value in H200.items() if name not in new}
    unknown = ", ".join(f"{name} not recorded" for name in new)
    other = {**H200, "vocabulary": 5000, "batch": 8000, "accumulation": 2, "processes": 8}
    differing = "vocabulary 5,000, batch 8,000 tokens, accumulation 2, processes 8"
    assert measured_with([H200, H200], H200) == {}
    assert measured_with([other, other], H200) == {"measured with": differing}
    assert measured_with([H200, old], H200) == {"measured with": unknown}
    assert measured_with([other, old], H200) == {"measured with": f"{differing}; {unknown}"}
    longer = {**H200, "source_ratio": 2.5}
    assert measured_with([longer], H200) == {"measured with": "source_ratio 2.5"}
    pairs = [{**H200, "batch": -64}], {**H200, "batch": -32}
    assert measured_with(*pairs) == {"measured with": "batch 64 pairs"}


def test_a_plan_measures_memory_without_the_module_resource(monkeypatch):
    """As on Windows."""
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=3 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(psutil, "Process", lambda: used)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.cli.plan")
    plan = runpy.run_module("vanilla_transformer.cli.plan")
    assert plan["peak_gib"]() == 3.0
    monkeypatch.undo()
    assert 0.1 < plan["peak_gib"]() < 100


def test_a_plan_adds_the_times_of_updates_without_and_with_r_drop(folder):
    (folder / "phases.json").write_text(
        json.dumps([H200, {**H200, "options": ["R-Drop"], "target_tokens_per_second": 2.5e-4}])
    )
    options = [
        "--preset", "tiny", "--config_overrides", SHAPE, "--dataset_name", "phrases",
        "--phrases_train_size", 200, "--vocab_size", 320, "--use_cpu", "--max_tokens", 500,
        "--max_steps", 40, "--speeds", "phases.json", "--hardware", "NVIDIA H200",
        "--r_drop_alpha", 5,
    ]  # fmt: skip
    hours = {}
    for start in (0, 10, 30, 50):
        table = run_command("plan", *options, "--r_drop_start", start, cwd=folder).stdout
        hours[start] = float(re.search(r"([\d.]+) hours", table).group(1))
    found = [hours[start] / hours[50] for start in hours]
    assert found == pytest.approx([4.0, 3.25, 1.75, 1.0], rel=1e-3)


def test_a_plan_for_two_processes_is_printed_once(folder):
    (folder / "two.json").write_text(json.dumps([H200]))
    plan = (
        "-m", "vanilla_transformer", "plan", "--preset", "tiny", "--config_overrides", SHAPE,
        "--dataset_name", "phrases", "--phrases_train_size", 200, "--vocab_size", 320, "--use_cpu",
        "--ddp_backend", "gloo", "--max_tokens", 500, "--max_steps", 40,
        "--speeds", "two.json", "--hardware", "NVIDIA H200",
    )  # fmt: skip
    failed, output = run_ranks(2, *plan, cwd=folder)
    assert not failed, output
    assert output.count("learning_rate=") == 1
    assert output.count("| hardware | 2 x NVIDIA H200, fp32 |") == 1
    assert output.count("| measured with | processes 1 |") == 1


PLAN = """
import os
from vanilla_transformer.cli import plan

if os.environ["RANK"] == "1":
    plan.peak_gib = lambda: 512.0
    complete, seen = plan.read_speeds, []
    plan.read_speeds = lambda path: seen.append(path) or complete("half" if seen[1:] else path)
plan.main()
"""


def test_a_plan_has_the_memory_of_the_largest_process_and_reads_speeds_in_the_first(folder):
    """The second may see a file that the first is still writing."""
    (folder / "plan.py").write_text(PLAN)
    (folder / "half").write_text("[{")
    options = [
        "--preset", "tiny", "--config_overrides", SHAPE, "--dataset_name", "phrases",
        "--phrases_train_size", 50, "--vocab_size", 320, "--use_cpu", "--max_tokens", 500,
        "--max_steps", 4, "--r_drop_alpha", 5, "--r_drop_start", 2, "--measured_steps", 1,
        "--speeds", "of_two.json",
    ]  # fmt: skip
    failed, output = run_ranks(2, folder / "plan.py", *options, cwd=folder)
    assert not failed, output
    assert output.count("| memory | 512.0 GiB per device |") == 1
    assert [row["processes"] for row in json.loads((folder / "of_two.json").read_text())] == [2, 2]


def test_a_plan_can_be_for_a_device_that_this_machine_lacks(folder):
    """It uses the speed from a file that was written on a different machine, and measures
    nothing."""
    (folder / "elsewhere.json").write_text(json.dumps([H200]))
    options = [
        "--preset", "tiny", "--config_overrides", SHAPE, "--dataset_name", "phrases",
        "--phrases_train_size", 200, "--vocab_size", 320, "--use_cpu", "--num_train_epochs", 1,
        "--speeds", "elsewhere.json", "--hardware", "NVIDIA H200",
    ]  # fmt: skip
    process = run_command("plan", *options, "--max_tokens", 500, cwd=folder)
    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    rows = dict(line.strip("| ").split(" | ") for line in table[2:])
    assert rows["hardware"] == "1 x NVIDIA H200, fp32"
    assert rows["memory"] == "7.0 GiB per device"
    tokens = int(rows["text"].split(", ")[1].split()[0].replace(",", ""))
    assert float(rows["duration"].split()[0]) == pytest.approx(tokens / 1e-3 / 3600, rel=1e-3)
    assert "measured with" not in rows
    process = run_command(
        "plan", *options, "--per_device_train_batch_size", 8, cwd=folder, check=False
    )
    message = (
        "elsewhere.json has no measurement of NVIDIA H200 with d_model 16, 1+1 layers, d_ff 16"
    )
    assert message in process.stderr.splitlines()[-1]
    process = run_command(
        "plan", *options, "--max_tokens", 500, "--r_drop_alpha", 5, cwd=folder, check=False
    )
    message = "d_ff 16, 2+2 heads, R-Drop in fp32, 4,320 weights in the layers"
    assert message in process.stderr.splitlines()[-1]
    process = run_command("plan", *options, "--hardware", "A100", cwd=folder, check=False)
    message = "hardware='A100': expected a device that speeds=elsewhere.json has measured: NVIDIA"
    assert message in process.stderr.splitlines()[-1]
