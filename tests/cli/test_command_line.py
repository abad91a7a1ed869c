"""The command itself: dispatch, help, recipes, and launchers from any folder."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from socket import socket
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import REPOSITORY, run_command, run_module
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils.versions import require_version

from vanilla_transformer import __version__
from vanilla_transformer.cli import main, train_options
from vanilla_transformer.cli.average import AveragingArguments
from vanilla_transformer.cli.parser import CommandParser
from vanilla_transformer.training.folder_lock import locked
from vanilla_transformer.training.recipes import find_recipe, recipe_names, recipe_path

COMMANDS = (
    "train", "plan", "translate", "back-translate", "evaluate", "score", "average", "convert",
    "export", "serve", "demo", "push", "plot", "analyze", "recipes", "info",
)  # fmt: skip


def command_line(*words, cwd, **options):
    return run_module("vanilla_transformer", *words, cwd=cwd, **options)


def test_the_help_has_a_line_for_each_command(tmp_path):
    text = command_line("--help", cwd=tmp_path).stdout
    lines = text.partition("  COMMAND [options]\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS) == list(main.COMMANDS)
    assert all(line.endswith(".") for line in lines)


def test_the_version_is_that_of_the_package(tmp_path):
    printed = command_line("--version", cwd=tmp_path).stdout
    assert printed == f"vanilla-transformer {__version__}\n"


def test_a_missing_extra_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vanilla-transformer", "evaluate"])
    monkeypatch.delitem(sys.modules, "vanilla_transformer.cli.evaluate", raising=False)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.inference.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=r"evaluate: needs the package .*\[train\]"):
        main.main()


@pytest.mark.parametrize("words", [["trian"], []])
def test_an_unknown_command_is_refused_with_the_choices(tmp_path, words):
    process = command_line(*words, cwd=tmp_path, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    error = process.stderr.splitlines()[-1]
    assert error.startswith("vanilla-transformer: error: ")
    if words:
        assert all(command in error for command in ("'trian'", *COMMANDS))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["--config", "phrases"]),
        ("translate", ["--model", "m"]),
        ("average", ["--models", "m", "n"]),
    ],
)
def test_an_unknown_option_is_refused_by_name(tmp_path, command, words):
    words = [*words, "--max_lenght", 3, "--output_dir", "out"]
    process = run_command(command, *words, cwd=tmp_path, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    error = process.stderr.splitlines()[-1]
    assert error.startswith(f"vanilla-transformer {command}: error: ")
    assert "--max_lenght" in error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["last", "steps"])
def test_a_number_of_more_than_64_bits_is_refused_by_name(name, capsys):
    parser = CommandParser(AveragingArguments)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([f"--{name}", str(2**63)])
    refused = f"argument --{name}: {2**63}: expected a number of at most 64 bits"
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("average", ["--output_dir", "out"], "expected one of --models and --checkpoints_of"),
        ("train", ["--config", "fairseq"], "config='fairseq': expected a YAML file, or a recipe: "),
        (
            "train",
            [
                "--config",
                "phrases",
                "--output_dir",
                "out",
                "--config_overrides",
                "norm_position=Pre",
            ],
            "Field 'norm_position' expected one of ('post', 'pre'), got Pre",
        ),
        (
            "plot",
            ["positions", "--d_model", "3", "--output", "positions"],
            "d_model=3: sinusoidal positions come in pairs of sine and cosine, expected",
        ),
        (
            "evaluate",
            ["--predictions", "none.out", "--target", "none.de"],
            "[Errno 2] No such file or directory: 'none.de'",
        ),
        (
            "train",
            ["--config", "phrases", "--output_dir", "out", "--bf16", "--fp16"],
            "At most one of fp16 and bf16 can be True, but not both",
        ),
    ],
)
def test_an_error_about_the_input_is_one_line(tmp_path, command, words, expected):
    process = run_command(command, *words, cwd=tmp_path, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith(f"vanilla-transformer {command}: error: {expected}")
    assert len(process.stderr.splitlines()) == 1


def test_a_second_training_in_the_same_folder_is_refused_in_one_line(tmp_path):
    words = ["--config", "phrases", "--use_cpu", "--output_dir", "out", "--max_steps", 1]
    words += [f"--phrases_{split}_size=4" for split in ("train", "validation", "test")]
    with locked(tmp_path / "out"):
        process = run_command("train", *words, cwd=tmp_path, check=False)
    assert process.returncode == 1
    error = "output_dir=out: expected a folder in which no other training is at work"
    assert process.stderr.startswith(f"vanilla-transformer train: error: {error}")
    assert len(process.stderr.splitlines()) == 1


def test_the_development_mode_of_python_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vanilla-transformer", "average", "--output_dir", "out"])
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_"}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags | {"dev_mode": True}))
    with pytest.raises(ValueError, match=r"^expected one of --models and --checkpoints_of$"):
        main.main()


def bug_here():
    [].index("absent")


def error_elsewhere():
    json.loads("[")


def message_from_here():
    raise ValueError("beams=0: expected a positive number")


def missing_model():
    AutoConfig.from_pretrained("./none")


def impossible_name():
    validate_repo_id("my model")


def missing_package():
    require_version("no-such-package>=1")


def missing_module():
    import_module("no_such_package.core")


def missing_module_of_this_package():
    import_module("vanilla_transformer.no_such_module")


def full_disk():
    save_file({"weight": torch.ones(1)}, "/proc/none/model.safetensors")


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (bug_here, True),
        (error_elsewhere, True),
        (message_from_here, False),
        (missing_model, False),
        (impossible_name, False),
        (missing_package, False),
        (missing_module, False),
        (missing_module_of_this_package, True),
        (full_disk, False),
    ],
)
def test_only_errors_about_the_input_are_shown_without_traceback(monkeypatch, fails, expected):
    monkeypatch.setattr(main, "PACKAGE", Path(__file__).parent)  # as if it contained this file
    with pytest.raises((ValueError, OSError, ImportError, SafetensorError)) as caught:
        fails()
    assert main.needs_traceback(caught.value) is expected


def test_without_a_connection_an_error_names_the_model(tmp_path):
    process = run_command("translate", "--model", "outputs/none", cwd=tmp_path, check=False)
    assert process.returncode == 1
    assert "error: outputs/none is not a folder here. " in process.stderr


def test_an_error_names_the_server_that_cannot_be_reached():
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{unused.getsockname()[1]}"
        client = import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
        with pytest.raises(main.OUTSIDE) as caught:
            client.get(f"http://{server}/a?token=b", trust_env=False)
    assert server not in str(caught.value)
    assert main.full_message(caught.value) == f"{server}: {caught.value}"


def test_a_path_that_cannot_be_a_hub_name_is_reported_as_a_missing_folder(tmp_path):
    name = str(tmp_path / "none")
    with pytest.raises(OSError, match="Repo id must") as caught:
        AutoConfig.from_pretrained(name)
    assert main.full_message(caught.value).startswith(f"{name} is not a folder here. ")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_closes_standard_output_causes_no_error_message(tmp_path, buffering):
    source, sink = os.pipe()
    os.close(source)
    process = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer", "recipes"], stdout=sink,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": buffering}, cwd=tmp_path,
    )  # fmt: skip
    os.close(sink)
    assert (process.returncode, process.stderr) == (1, b"")


def test_a_command_works_with_closed_standard_streams(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vanilla-transformer", "recipes", "phrases"])
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    main.main()
    with sys.stdin, sys.stdout:
        assert sys.stdin.read() == ""
        assert sys.stdout.name == os.devnull


def test_any_other_broken_pipe_is_an_error(monkeypatch):
    def fail():
        raise BrokenPipeError("a worker has stopped")

    monkeypatch.setattr(sys, "argv", ["vanilla-transformer", "recipes"])
    monkeypatch.setattr("vanilla_transformer.cli.recipes.main", fail)
    with pytest.raises(SystemExit, match="error: a worker has stopped"):
        main.main()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_starts_with_its_purpose_and_examples(tmp_path, command):
    text = run_command(command, "--help", cwd=tmp_path).stdout
    usage, purpose, examples, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: vanilla-transformer {command} ")
    assert purpose.endswith(".")
    for example in re.sub(r"\\\n *", "", examples).splitlines():
        assert re.search(rf"vanilla[-_]transformer {command}\b|{command} --path", example), example
    assert "scripts/" not in text
    assert "default: None" not in text


def titles(text):
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


def test_a_plan_shows_its_own_options_before_those_of_training(tmp_path):
    text = run_command("plan", "--help", cwd=tmp_path).stdout
    assert titles(text)[:3] == ["help", "measurement", "data"]
    assert {"--measured_steps", "--speeds", "--preset"} <= {*re.findall(r"--\w+", text)}
    assert "[]" not in text


def test_training_shows_its_own_options_in_groups(tmp_path):
    short = run_command("train", "--help", cwd=tmp_path).stdout
    own = ["help", "data", "tokenizer", "model", "training", "decoding"]
    assert titles(short) == own
    text = run_command("train", "--help_all", cwd=tmp_path).stdout
    assert titles(text)[:6] == own
    assert all(title.startswith("transformers: ") for title in titles(text)[6:])
    shown = re.findall(r"^  (?:-h, )?--(\w+)", text, re.MULTILINE)
    assert not train_options.WITHOUT_EFFECT & set(shown)
    assert {"do_train", "do_eval", "do_predict"} <= train_options.WITHOUT_EFFECT
    assert {"train_source", "preset", "max_tokens", "generation_num_beams", "ddp_backend"} <= {
        *shown
    }
    groups = {**train_options.main_groups(), **train_options.more_groups()}
    assert max(map(len, groups.values())) <= 40
    every = [name for names in groups.values() for name in names]
    assert len(every) == len(set(every))


def test_recipes_are_listed_with_their_first_lines(tmp_path):
    lines = run_command("recipes", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert {"phrases", "multi30k_tiny", "accelerate/fsdp2"} < set(recipe_names())
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("name", ["phrases", "accelerate/fsdp2"])
def test_a_recipe_is_printed_and_found(tmp_path, name):
    path = Path(run_command("recipes", "--path", name, cwd=tmp_path).stdout.rstrip("\n"))
    assert path.is_absolute()
    assert run_command("recipes", name, cwd=tmp_path).stdout == path.read_text()
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_output_is_utf_8_in_any_locale(tmp_path, monkeypatch):
    """A recipe that was printed to a file can be read again."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    text = recipe_path("multi30k_tiny").read_text(encoding="utf-8")
    assert "±" in text
    printed = run_command("recipes", "multi30k_tiny", cwd=tmp_path).stdout
    assert printed == text


def test_names_of_files_that_are_not_utf_8_can_be_printed(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.de"
    Path(os.fsdecode(name)).write_text("ein Haus am See\n")
    process = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer", "evaluate", "--format", "table",
         "--predictions", name, "--target", name],
        stdout=subprocess.PIPE, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert name in process.stdout


def test_an_unknown_recipe_is_refused_with_the_choices(tmp_path):
    process = run_command("recipes", "wmt", cwd=tmp_path, check=False)
    error = process.stderr.splitlines()[-1]
    assert all(name in error for name in ("'wmt'", *recipe_names()))
    error = run_command("recipes", "--path", cwd=tmp_path, check=False).stderr.splitlines()[-1]
    assert error.endswith("--path: expected the name of a recipe as well")


def test_a_config_is_a_path_or_the_name_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phrases").mkdir()  # a folder such as an output_dir is not a recipe
    assert find_recipe("phrases") == recipe_path("phrases")
    (tmp_path / "multi30k_tiny").write_text("seed: 2")
    assert find_recipe("multi30k_tiny") == Path("multi30k_tiny")
    with pytest.raises(FileNotFoundError, match=r"config='wmt': .*iwslt14_de_en, marian"):
        find_recipe("wmt")
    with pytest.raises(FileNotFoundError, match="config='accelerate/ddp'"):
        find_recipe("accelerate/ddp")


def test_info_names_versions_devices_and_auto_classes(tmp_path):
    lines = run_command("info", cwd=tmp_path).stdout.splitlines()
    found = dict(line.split(": ", 1) for line in lines)
    assert found["vanilla_transformer"] == __version__
    assert {"Python", "Platform", "torch", "transformers", "accelerate", "deepspeed"} < found.keys()
    assert "cpu" in found["Devices"]
    assert found["AutoModelForSeq2SeqLM"] == "VanillaTransformerForConditionalGeneration"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_start_the_module_in_any_folder(tmp_path, launcher):
    start = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
        "accelerate": [
            "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
            "--config_file", str(recipe_path("accelerate/ddp")),
        ],
    }[launcher]  # fmt: skip
    shape = "d_model=16,encoder_layers=1,decoder_layers=1"
    train = [
        "-m", "vanilla_transformer", "train", "--config", "phrases", "--output_dir", "model",
        "--config_overrides", shape, "--vocab_size", "320", "--phrases_train_size", "100",
        "--phrases_validation_size", "4", "--phrases_test_size", "4", "--max_steps", "2",
        "--eval_strategy", "no", "--save_strategy", "no", "--use_cpu",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = str(tmp_path / "huggingface")
    process = subprocess.run(
        [sys.executable, "-m", *start, *train],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    assert (tmp_path / "model/model.safetensors").is_file()
    assert (
        "vanilla-transformer train --config phrases" in (tmp_path / "model/README.md").read_text()
    )
