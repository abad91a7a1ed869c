"""The scripts as a user runs them: one small training run, then everything that follows from it."""

import json
import select
import subprocess
import sys
import tomllib
from importlib.metadata import version
from subprocess import PIPE
from zipfile import ZipFile

import pytest
import yaml
from conftest import REPOSITORY, random_ids, run_command, run_module, run_ranks

from scripts.benchmarks.speed import with_setting
from scripts.overlay import make_overlay

SHAPE = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=16,decoder_ffn_dim=16"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripts")


TRAIN = [
    "--config", REPOSITORY / "vanilla_transformer/recipes/phrases.yaml", "--output_dir", "model",
    "--config_overrides", SHAPE, "--vocab_size", 320, "--phrases_train_size", 200,
    "--phrases_validation_size", 8, "--phrases_test_size", 8, "--per_device_train_batch_size", 8,
    "--eval_strategy", "steps", "--eval_steps", 2, "--save_strategy", "steps", "--save_steps", 2,
    "--max_steps", 4, "--warmup_steps", 1, "--logging_steps", 1, "--use_cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder):
    process = run_command("train", *TRAIN, cwd=folder, fresh=True)
    return folder / "model", process


def test_training_leaves_a_whole_folder(trained):
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
    assert "tok:13a" in json.loads(lines[-1])["bleu_signature"]


def test_a_log_holds_no_escape_sequences(trained):
    """As bars within bars are made of: of evaluations with generation in a training."""
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
    assert "scripts/train.py --config" in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["phrases_train_size"] == 200
    assert recipe["config_overrides"] == SHAPE
    assert "| test | " in card


def test_two_processes_find_the_scores_of_one(trained, folder):
    """At the end of a training there is nothing left but to score its model."""
    flags = ["--resume_from_checkpoint", "auto", "--ddp_backend", "gloo"]
    train = ("-m", "vanilla_transformer", "train")
    failed, output = run_ranks(2, *train, *TRAIN, *flags, cwd=folder)
    assert not failed, output
    scores, expected = (
        [line for line in text.splitlines() if line.startswith('{"bleu"')]
        for text in (output, trained[1].stdout)
    )
    assert scores == expected


def test_a_second_run_does_not_overwrite_and_can_go_on(trained, folder):
    refused = run_command("train", *TRAIN, cwd=folder, check=False)
    assert refused.returncode != 0
    assert "already holds a model: choose another folder" in refused.stderr.splitlines()[-1]
    run_command("train", *TRAIN, "--max_steps", 6, "--resume_from_checkpoint", "true", cwd=folder)
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
            "max_steps=-1: expected a positive number, since a stream does not tell its length",
        ),
    ],
    ids=str,
)
def test_missing_data_is_named_before_work_starts(tmp_path, options, message):
    (tmp_path / "lines").write_text("a house\nthe lake\n")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/validation.csv").write_text("source,target\na house,ein Haus\n")
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = run_command(
        "train", "--output_dir", "model", "--use_cpu", *flags, cwd=tmp_path, check=False
    )
    error = process.stderr.splitlines()[-1]
    assert error.startswith("ValueError: ")
    assert message in error
    assert "Training a tokenizer" not in process.stderr
    assert not (tmp_path / "model").exists()


def test_files_and_streams_are_translated_alike(trained, folder):
    lines = "On March 5, 2024\n\nthree hundred\r\n"
    (folder / "in.txt").write_bytes(lines.encode())
    flags = ["--model", trained[0], "--num_beams", 2, "--max_new_tokens", 5]
    run_command("translate", *flags, "--input", "in.txt", "--output", "out.txt", cwd=folder)
    written = (folder / "out.txt").read_text(encoding="utf-8")
    assert written.count("\n") == 3
    assert written.split("\n")[1] == ""
    assert run_command("translate", *flags, cwd=folder, stdin=lines).stdout == written
    assert run_command("translate", *flags, "--input", "in.txt", cwd=folder).stdout == written


def test_a_pipe_is_answered_line_by_line_until_its_reader_leaves(trained, folder):
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
        process.wait(timeout=120)  # though standard input is still open
        assert b"Error" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_best", 3], "n_best=3 with num_beams=2: expected"),
        (["--batch_size", 0], "batch_size=0: expected a positive integer"),
        (["--max_new_tokens", 0], "max_new_tokens=0: expected a positive integer"),
        (["--num_beams", -1], "num_beams=-1: expected a positive integer"),
    ],
)
def test_options_are_checked_before_the_output_is_touched(trained, folder, flags, message):
    (folder / "source").write_text("three hundred\n")
    (folder / "kept").write_text("of an earlier job\n")
    files = ["--output", "kept"]
    for where in (files, [*files, "--input", "source"]):
        flags = ["--model", "model", "--num_beams", 2, *flags, *where]
        process = run_command("translate", *flags, cwd=folder, stdin="one\n", check=False)
        assert message in process.stderr.splitlines()[-1]
        assert (folder / "kept").read_text() == "of an earlier job\n"
        assert not (folder / "kept.parts").exists()


def test_the_best_hypotheses_come_with_scores(trained, folder):
    options = ("--model", "model", "--num_beams", 3, "--n_best", 2, "--max_new_tokens", 5)
    lines = run_command("translate", *options, cwd=folder, stdin="one\n\ntwo\n").stdout.splitlines()
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
    assert "source has 2 lines and target 1: expected as many" in process.stderr.splitlines()[-1]


def test_evaluation_needs_something_to_score(folder):
    process = run_command("evaluate", "--target", "target", cwd=folder, check=False)
    message = "expected either --predictions, or --model and --source"
    assert message in process.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_phrases_recipe_reaches_97_percent_exact_match(folder):
    recipe = REPOSITORY / "vanilla_transformer/recipes/phrases.yaml"
    process = run_command("train", "--config", recipe, "--output_dir", "phrases", cwd=folder)
    scores = json.loads(process.stdout.splitlines()[-1])
    assert scores["exact_match"] >= 97


@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_a_missing_python_is_said_in_one_line(script, tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("setup", script):
        (tmp_path / "scripts" / name).write_bytes((REPOSITORY / "scripts" / name).read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "basename"):
        path = subprocess.run(["which", tool], capture_output=True, text=True, check=True)
        (tools / tool).symlink_to(path.stdout.strip())
    process = subprocess.run(
        ["bash", str(tmp_path / "scripts" / script)],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert (
        process.stderr
        == f"{script}: needs Python 3.11 or newer with venv; set PYTHON to its path\n"
    )


# ---------------------------------------------------------------- versions


def test_the_workflow_tests_the_oldest_versions_that_are_promised():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    bounds = (dependency.split(",")[0] for dependency in project["dependencies"])
    oldest = dict(bound.split(">=") for bound in bounds)
    workflow = (REPOSITORY / ".github/workflows/test.yml").read_text()
    options = f"--transformers {oldest['transformers']}.0 --torch {oldest['torch']}.0"
    assert f"scripts/test {options}\n" in workflow


def test_an_overlay_has_its_own_versions_and_else_those_below(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "tabulate-99.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        record = {"METADATA": "Metadata-Version: 2.1\nName: tabulate\nVersion: 99.0\n"}
        record["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        record["RECORD"] = ""
        for name, text in record.items():
            archive.writestr(f"tabulate-99.0.dist-info/{name}", text)
    programs = make_overlay(tmp_path / "overlay", str(wheel))
    report = "from importlib.metadata import version as v; print(v('tabulate'), v('torch'))"
    found = subprocess.check_output([programs / "python", "-c", report], text=True)
    assert found.split() == ["99.0", version("torch")]


# ---------------------------------------------------------------- benchmark


@pytest.mark.parametrize("workloads", [["G3"], pytest.param(["T1", "G3"], marks=pytest.mark.slow)])
def test_the_benchmark_writes_ratios_a_table_and_a_chart(folder, workloads):
    flags = ["--quick", "--workloads", *workloads, "--peers", "vanilla_transformer", "torch"]
    process = run_module("scripts.benchmarks.speed", *flags, "--output_dir", "speed", cwd=folder)
    results = json.loads((folder / "speed/benchmark.json").read_text())
    assert [result["workload"] for result in results] == workloads
    ours = {"vanilla_transformer", "vanilla_transformer, best setting", "marian"}
    for result in results:
        trained_alone = {"torch"} if result["workload"] == "T1" else set()
        assert set(result["ratios"]) == ours | trained_alone
        assert result["ratios"]["marian"] == 1
        assert all(len(seconds) == 2 for seconds in result["seconds"].values())
    table = (folder / "speed/benchmark.md").read_text()
    assert f"|  | {' | '.join(f'{name} tiny' for name in workloads)} |" in table
    assert f"| marian |{' 1.00 |' * len(workloads)}" in table
    assert table.strip() in process.stdout
    assert (folder / "speed/benchmark.png").stat().st_size > 0


@pytest.mark.slow
def test_all_starts_of_a_race_count(folder):
    flags = ["--sizes", "tiny", "--workloads", "G1", "--peers", "marian", "--starts", "2"]
    run_module(
        "scripts.benchmarks.speed", *flags, "--rounds", "3", "--output_dir", "starts", cwd=folder
    )
    (result,) = json.loads((folder / "starts/benchmark.json").read_text())
    assert all(len(seconds) == 6 for seconds in result["seconds"].values())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_weights_of_8_bits_change_a_model_little(model):
    inputs = {"input_ids": random_ids(2, 5), "decoder_input_ids": random_ids(2, 4)}
    expected = model(**inputs).logits
    rounded = with_setting(model, {"int8": True})(**inputs).logits
    assert 0 < (rounded - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.slow
def test_a_model_compiled_for_a_race_generates_the_same(model):
    prompts = random_ids(1, 5)
    tokens = model.generate(prompts, max_new_tokens=4)
    compiled = with_setting(model, {"compiled": {}})
    assert compiled.generate(prompts, max_new_tokens=4).tolist() == tokens.tolist()


def test_the_profile_shares_out_the_time_of_a_run(folder):
    flags = ["--sizes", "tiny", "--workloads", "G3", "--runs", "1", "--output_dir", "profile"]
    process = run_module("scripts.benchmarks.profile_steps", *flags, cwd=folder)
    (shares,) = json.loads((folder / "profile/profile.json").read_text()).values()
    assert min(shares.values()) >= 0
    assert shares["matrix products"] > 0 == shares["optimizer"]
    table = (folder / "profile/profile.md").read_text()
    assert "|  | G3 tiny |" in table
    assert table.strip() in process.stdout


def test_the_benchmark_races_ctranslate2_where_it_is_installed(folder):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    flags = ["--quick", "--workloads", "G2", "--peers", "ctranslate2", "ctranslate2, int8"]
    run_module("scripts.benchmarks.speed", *flags, "--output_dir", "compiled", cwd=folder)
    (result,) = json.loads((folder / "compiled/benchmark.json").read_text())
    assert {"ctranslate2", "ctranslate2, int8"} < set(result["ratios"])
    assert min(result["ratios"].values()) > 0


@pytest.mark.slow
def test_the_benchmark_of_memory_compares_peaks(folder):
    flags = ["--size", "tiny", "--peers", "vanilla_transformer", "--output_dir", "memory"]
    process = run_module("scripts.benchmarks.memory", *flags, cwd=folder)
    results = json.loads((folder / "memory/memory.json").read_text())
    assert [result["workload"] for result in results] == ["train", "beam"]
    for result in results:
        assert set(result["ratios"]) == {"vanilla_transformer", "marian"}
        assert 0 < result["ratios"]["vanilla_transformer"] < result["ratios"]["marian"] == 1
    assert (folder / "memory/memory.md").read_text().strip() in process.stdout


@pytest.mark.slow
def test_the_benchmark_of_lengths_writes_tables_and_a_plot(folder):
    flags = ["--longest", "32", "--largest", "2", "--runs", "1", "--output_dir", "lengths"]
    process = run_module("scripts.benchmarks.lengths", *flags, cwd=folder)
    series = json.loads((folder / "lengths/lengths.json").read_text())
    assert [(entry["workload"], entry["axis"]) for entry in series] == [
        (workload, axis) for workload in ("train", "generate") for axis in ("length", "batch")
    ]
    for entry in series:
        (point,) = entry["points"]
        assert (point["length"], point["batch"]) == (32, 2)
        assert point["seconds"] > 0
        assert point["mebibytes"] > 0
    table = (folder / "lengths/lengths.md").read_text()
    assert "| tokens | 32 |" in table
    assert "| generate, memory | 1.00 |" in table
    assert table.strip() in process.stdout
    assert (folder / "lengths/lengths.png").stat().st_size > 0


def test_the_benchmark_of_programs_finds_shares_and_ratios(folder):
    sources = [f"a man in a red shirt sees dog number {count}" for count in range(20)]
    for split in ("train", "val", "test_2016_flickr"):
        for suffix in ("en", "de"):
            (folder / f"{split}.{suffix}").write_text("\n".join(sources) + "\n")
    flags = ["--programs", "train", "translate", "--max_steps", "2", "--rounds", "1"]
    run_module(
        "scripts.benchmarks.programs", "--data", ".", "--output_dir", "programs", *flags, cwd=folder
    )
    results = json.loads((folder / "programs/programs.json").read_text())
    assert set(results) == {"train", "translate"}
    shares = results["train"]
    assert 0 < shares["forward, backward, optimizer, of all steps"] <= 1
    assert sum(share for name, share in shares.items() if name.endswith(", of all")) <= 1
    assert results["translate"]["same"] > 0


def test_ablations_are_trained_once_and_tabled(folder):
    flags = ["--output_dir", "ablations", "--steps", 2, "--train_size", 40, "--test_size", 4]
    flags += ["--seeds", 1, 2, "--rows", "h = 1", "averaged"]
    table = run_module("scripts.benchmarks.ablations", *flags, cwd=folder).stdout
    assert table.count("±") == 4
    results = folder / "ablations/results.json"
    runs = json.loads(results.read_text())["runs"]
    assert {(run["row"], run["seed"]) for run in runs} == {
        (row, seed)
        for row in ("h = 1, d_k = d_v = 128", "last 5 checkpoints averaged")
        for seed in (1, 2)
    }
    assert runs[0]["parameters"] > 100_000
    written = results.stat().st_mtime_ns
    assert run_module("scripts.benchmarks.ablations", *flags, cwd=folder).stdout == table
    assert results.stat().st_mtime_ns == written
    refused = run_module(
        "scripts.benchmarks.ablations", *flags, "--steps", 3, cwd=folder, check=False
    )
    assert "results.json is of --steps 2, not 3: choose another --output_dir" in refused.stderr


@pytest.mark.slow
def test_broken_trainings_lose_nothing(folder):
    run_module("scripts.checks.faults", "--times", 10, "--output_dir", "faults", cwd=folder)
    results = json.loads((folder / "faults/faults.json").read_text())
    assert {"kill", "terminate", "truncated", "full", "nan", "rank_stalled"} < set(results)
    assert all(result["tried"] >= 2 and result["lost"] == 0 for result in results.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "fairseq"], "--peers fairseq: expected of vanilla_transformer; marian"),
        (["--rounds", "0"], "--rounds 0: expected a positive number"),
        (["--starts", "0"], "--starts 0: expected a positive number"),
        (["--sizes", "huge"], "--sizes huge: expected of tiny; base"),
    ],
)
def test_a_benchmark_that_cannot_be_is_refused(folder, flags, message):
    process = run_module("scripts.benchmarks.speed", *flags, cwd=folder, check=False)
    assert process.returncode != 0
    assert message in process.stderr
