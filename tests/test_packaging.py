"""The wheel and the sdist: their files, their metadata, and that the wheel works on its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from email.parser import BytesParser
from importlib.resources import files
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from conftest import REPOSITORY
from packaging.requirements import Requirement

import vanilla_transformer

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SMALL = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=16,decoder_ffn_dim=16"
)
LOAD = """
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
import vanilla_transformer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForSeq2SeqLM.from_pretrained("model")
assert isinstance(model, vanilla_transformer.VanillaTransformerForConditionalGeneration)
ids = model.generate(**tokenizer("three hundred", return_tensors="pt"), max_new_tokens=5)
assert ids.shape[0] == 1
(output,) = pipeline("translation", model="model")("three hundred", max_new_tokens=5)
assert isinstance(output["translation_text"], str)
print(vanilla_transformer.__file__, *sys.path, sep="\\n")
"""


# ---------------------------------------------------------------- Metadata


def test_the_version_is_the_same_everywhere():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == vanilla_transformer.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    newest = next(
        line
        for line in (REPOSITORY / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ") and line != "## Unreleased"
    )
    assert newest.split()[1].rstrip(",") == vanilla_transformer.__version__


def test_the_links_lead_to_the_repository():
    expected = {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    assert PROJECT["urls"].keys() == expected
    assert all(url.startswith(PROJECT["urls"]["Repository"]) for url in PROJECT["urls"].values())


def test_the_constraints_pin_every_direct_dependency_within_its_bounds():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    extras = PROJECT["optional-dependencies"]
    (ours,) = (each for each in map(Requirement, extras["dev"]) if each.name == PROJECT["name"])
    assert ours.extras == extras.keys() - {"dev", "analysis", "ray"}
    wanted = [each for extra in ("dev", *ours.extras) for each in extras[extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *wanted]):
        name = requirement.name.lower().replace("_", "-")
        if name != PROJECT["name"]:
            assert pins[name] in requirement.specifier, requirement


def test_the_hooks_run_the_checks_of_the_tests_script():
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0][
        "hooks"
    ]
    script = (REPOSITORY / "scripts/test").read_text()
    for hook in hooks:
        assert hook["language"] == "system"
        assert f"    {hook['entry'].removesuffix(' --force-exclude')}" in script


def test_recipes_are_found_in_the_package():
    assert (files(vanilla_transformer) / "recipes/phrases.yaml").is_file()


# ---------------------------------------------------------------- Wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built from a copy without caches and earlier builds."""
    folder = tmp_path_factory.mktemp("packaging")
    leftovers = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "outputs", "runs"
    )
    shutil.copytree(REPOSITORY, folder / "source", ignore=leftovers)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "..", cwd=folder / "source")
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def run(*command, cwd, stdin=None):
    """The output of a command, in an environment without this repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(Path(cwd) / "huggingface"), "COLUMNS": "80"}
    process = subprocess.run(
        [*map(str, command)],
        cwd=cwd, input=stdin, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process.stdout


def test_pypi_accepts_the_wheel_and_the_sdist(built):
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=REPOSITORY)


def test_the_wheel_contains_the_package_and_nothing_else(built):
    with ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (path,) = (name for name in names if name.endswith("/METADATA"))
        metadata = BytesParser().parsebytes(wheel.read(path))
    info = path.split("/")[0]
    package = REPOSITORY / "vanilla_transformer"
    expected = {
        f"vanilla_transformer/{file.relative_to(package).as_posix()}"
        for pattern in (
            "**/*.py",
            "py.typed",
            "export/page/*",
            "recipes/**/*.yaml",
            "recipes/**/*.json",
        )
        for file in package.glob(pattern)
    }
    assert {name for name in names if not name.startswith(info)} == expected
    assert metadata["Version"] == vanilla_transformer.__version__
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == PROJECT["optional-dependencies"].keys()
    assert len(metadata.get_all("Project-URL")) == len(PROJECT["urls"])


def test_the_sdist_contains_what_a_build_needs_and_no_tests(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert "vanilla_transformer/recipes/phrases.yaml" in names
    assert not [name for name in names if name.startswith(("tests", "scripts"))]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment with the wheel in it and, of the current environment, the
    installed packages but not this repository."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    below = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "below.pth").write_text("".join(f"{path}\n" for path in below))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    run(*pip, "install", "--no-deps", "--ignore-installed", built[0], cwd=folder)
    return folder / "bin"


@pytest.mark.slow
def test_an_installed_wheel_trains_translates_and_loads(installed, tmp_path):
    command = installed / "vanilla-transformer"
    assert vanilla_transformer.__version__ in run(command, "--version", cwd=tmp_path)
    assert "phrases" in run(command, "recipes", cwd=tmp_path)
    run(
        command, "train", "--config", "phrases", "--output_dir", "model", "--use_cpu",
        "--config_overrides", SMALL, "--vocab_size", 320, "--max_steps", 10,
        "--phrases_train_size", 200, "--phrases_validation_size", 8, "--phrases_test_size", 8,
        "--per_device_train_batch_size", 8,
        cwd=tmp_path,
    )  # fmt: skip
    options = ["--model", "model", "--max_new_tokens", 5]
    translations = run(command, "translate", *options, cwd=tmp_path, stdin="three hundred\nfour\n")
    assert translations.count("\n") == 2
    loaded, *path = run(installed / "python", "-c", LOAD, cwd=tmp_path).splitlines()
    assert Path(loaded).is_relative_to(installed.parent)
    assert str(REPOSITORY) not in path
