"""Run transformers' own model tests on our classes; see `scripts/conformance --help`.

The tests come from the source distribution of the tested version of transformers, and stay in the
build folder. Some modules that its tests import (generation, exporters, pipelines) are only in a
checkout of the repository of transformers.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from scripts.overlay import make_overlay

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
BUILD = REPOSITORY / "build" / "conformance"
# Imports of the tests, and packages without which they are skipped, in addition to our own extras.
REQUIREMENTS = ["parameterized", "pytest-timeout", "httpx", "scikit-learn"]
OPTIONAL = ["onnx", "onnxscript", "onnxruntime", "executorch", "torchao", "optimum-quanto"]


def main() -> int:
    args, pytest_options = parse_arguments()
    folder = BUILD / args.transformers
    wanted = [f"transformers=={args.transformers}", *REQUIREMENTS, *OPTIONAL]
    python = str(make_overlay(folder / "venv", *wanted) / "python")
    tree = assemble(folder, args.transformers, args.checkout)
    environment = os.environ | {
        "CONFORMANCE_SUBJECT": args.subject,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RUN_SLOW": str(int(args.checkout is not None and not args.no_exporters)),
        "PYTHONPATH": str(REPOSITORY),
    }
    if args.checkout:
        models = tree / "tiny_models"
        subprocess.run([python, HERE / "tiny_models.py", models], check=True)
        environment["TRANSFORMERS_TINY_MODEL_PATH"] = str(models)
    command = [python, "-m", "pytest", "test_conformance.py", "-n", str(os.cpu_count())]
    command += ["-p", "totals"]
    return subprocess.run([*command, *pytest_options], cwd=tree, env=environment).returncode


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/conformance",
        description="Run transformers' own model tests on our classes. Prints failures, each skip "
        "with its reason, and a line of totals. Other options go to pytest, such as -k EXPRESSION.",
    )
    parser.add_argument(
        "--transformers",
        metavar="VERSION",
        default=version("transformers"),
        help="the version to test with (default: the installed one, %(default)s)",
    )
    parser.add_argument(
        "--subject",
        choices=["vanilla_transformer", "marian"],
        default="vanilla_transformer",
        help="whose classes to test: ours, or Marian's for comparison",
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        metavar="FOLDER",
        help="a clone of the transformers repository at that version: adds the tests of "
        "generation, exporters and pipelines, which are not in the source distribution",
    )
    parser.add_argument(
        "--no_exporters", action="store_true", help="skip the slow tests of exporters"
    )
    args, pytest_options = parser.parse_known_args()
    if args.checkout and not (args.checkout / "tests" / "generation").is_dir():
        parser.error(f"--checkout {args.checkout}: expected a folder that holds tests/generation")
    return args, pytest_options


def assemble(folder: Path, transformers: str, checkout: Path | None) -> Path:
    """Create a tree with the tests of transformers, and `suite.py` as `test_conformance.py`."""
    sources = folder / f"transformers-{transformers}"
    if not sources.exists():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--no-binary", ":all:", "--no-build-isolation", "--dest", folder]
        subprocess.run([*download, f"transformers=={transformers}"], check=True)
        with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    if checkout:
        shutil.copytree(checkout / "tests", tree / "tests")
        shutil.copytree(checkout / "utils", tree / "utils")
    shutil.copytree(sources / "tests", tree / "tests", dirs_exist_ok=True)
    (tree / "src").symlink_to(sources / "src")
    processes = HERE / "distributed_testing_utils.py"
    stand_in(tree / "tests" / processes.name, processes.read_text())
    stand_in(tree / "tests" / "utils" / "tiny_model_summary.json", "{}")
    for module in ("configuration_common", "modeling_common", "pipeline_mixin"):
        for path, names in relative_imports(tree / "tests" / f"test_{module}.py"):
            stand_in(tree / "tests" / path, "".join(map(empty, names)))
    for package in {path.parent for path in (tree / "tests").rglob("*.py")}:
        (package / "__init__.py").touch()
    shutil.copy(HERE / "suite.py", tree / "test_conformance.py")
    for module in ("tiny_models.py", "totals.py"):
        shutil.copy(HERE / module, tree)
    options = "-q -ra --timeout=1000 -p no:cacheprovider"
    warnings = ["ignore", "default:.*past_key_values:FutureWarning"]  # a test looks for the latter
    lines = ["[pytest]", f"addopts = {options}", "filterwarnings =", *(f" {w}" for w in warnings)]
    (tree / "pytest.ini").write_text("\n".join(lines) + "\n")
    return tree


def stand_in(file: Path, content: str) -> None:
    """Write a file that the tests import, unless it exists."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def relative_imports(module: Path) -> list[tuple[str, list[str]]]:
    """The files that a module imports relatively, and the imported names of each."""
    statements = ast.walk(ast.parse(module.read_text()))
    return [
        (statement.module.replace(".", "/") + ".py", [alias.name for alias in statement.names])
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module
    ]


def empty(name: str) -> str:
    """A class without tests, or an empty table."""
    return f"class {name}: pass\n" if name[0].isupper() else f"{name} = {{}}\n"


if __name__ == "__main__":
    sys.exit(main())
