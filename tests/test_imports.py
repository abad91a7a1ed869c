"""Imports run one way, and the model's folder can be used by itself."""

import ast
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import grimp
import pytest
from conftest import REPOSITORY, slow
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.dynamic_module_utils import get_relative_imports

from vanilla_transformer.cli.main import COMMANDS, EXTRAS

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
LINT += ["--no-cache", "--no-logo"]
MODEL = sorted((REPOSITORY / "vanilla_transformer/model").glob("*.py"))


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("model/loss.py", "", None),
        ("data/phrases.py", "from ..training import trainer", "Imports run one way"),
        ("training/trainer.py", "from ..cli import main", "Imports run one way"),
        ("model/loss.py", "from ..data import phrases", "Imports run one way"),
        ("model/loss.py", "import numpy", "The model needs no more"),
        ("attic.py", "", "Imports run one way"),
    ],
)
def test_imports_run_one_way(tmp_path, module, line, broken):
    """`attic.py` represents a new module that is not in the list of layers."""
    shutil.copytree(REPOSITORY / "vanilla_transformer", tmp_path / "vanilla_transformer")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    with open(tmp_path / "vanilla_transformer" / module, "a") as file:
        file.write(f"\n{line}\n")
    process = subprocess.run(LINT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (process.returncode != 0) == (broken is not None), process.stdout
    if broken:
        assert any(broken in text and "BROKEN" in text for text in process.stdout.splitlines())


def test_the_model_only_imports_torch_transformers_and_itself():
    """And huggingface_hub, a dependency of transformers whose decorator checks the
    configuration."""
    graph = grimp.build_graph("vanilla_transformer", include_external_packages=True, cache_dir=None)
    root = "vanilla_transformer.model"
    imported = {
        name
        for module in {root, *graph.find_descendants(root)}
        for name in graph.find_modules_directly_imported_by(module)
        if not name.startswith(f"{root}.")
    }
    assert imported - sys.stdlib_module_names <= {
        "torch", "transformers", "huggingface_hub",
        "sacremoses",  # for tokenizers that use it
        "triton",  # if it is installed
    }  # fmt: skip


@pytest.mark.parametrize("path", MODEL, ids=lambda path: path.name)
def test_transformers_finds_what_a_file_of_the_model_imports(path):
    """It looks for `from .x import Y` with a regular expression, in docstrings too, and copies the
    files that it finds."""
    imports = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert all(node.level == 1 and node.module in {file.stem for file in MODEL} for node in imports)
    assert set(get_relative_imports(path)) == {node.module for node in imports}


def brought_by(requirements):
    """The packages that pip installs for these requirements."""
    found, waiting = set(), list(map(Requirement, requirements))
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found:
            continue
        found.add(name)
        extras = [{"extra": extra} for extra in ("", *one.extras)]
        further = map(Requirement, metadata.requires(name) or ())
        waiting += [r for r in further if r.marker is None or any(map(r.marker.evaluate, extras))]
    return found


RUN_MODELS = {"translate", "back-translate", "score", "convert", "info", "recipes"}


@pytest.mark.parametrize("extra", [None, *slow("train", *EXTRAS.values())])
def test_commands_only_import_packages_of_their_extra(extra):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(optional[extra] if extra else ())]
    brought = brought_by(wanted) | {project["name"]}
    missing = [
        module
        for module, owners in metadata.packages_distributions().items()
        if brought.isdisjoint(map(canonicalize_name, owners))
    ]
    assert "pytest" in missing
    needs = dict.fromkeys(COMMANDS, "train") | dict.fromkeys(RUN_MODELS) | EXTRAS
    commands = [one.replace("-", "_") for one, needed in needs.items() if needed == extra]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    code += "\n".join(f"import vanilla_transformer.cli.{command}" for command in commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
