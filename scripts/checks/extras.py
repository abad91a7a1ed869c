"""Install each extra alone, in a new environment, and use the commands that need it.

python -m scripts.checks.extras
python -m scripts.checks.extras --extras serve export

Every environment gets torch and then the README's `pip install ".[EXTRA]"`, with the versions of
constraints.txt. `--newest` installs the newest versions that the package allows. "none" is the
package without extras, and "train" trains the model for the others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.request import Request, urlopen

from transformers.hf_argparser import HfArg

from scripts.commands import serving
from scripts.reports import expect_known, read_options

REPOSITORY = Path(__file__).parents[2]
LONGEST_START = 120  # seconds
TEXT = "three hundred\nfour minutes past nine\n"


@dataclass
class ExtrasArguments:
    extras: list[str] = HfArg(
        default_factory=lambda: ["none", "export", "serve", "demo", "ray", "moses", "analysis"],
        help="Extras to check, besides train.",
    )
    output_dir: str = HfArg(default="build/extras", help="Folder for environments and results.")
    newest: bool = HfArg(default=False, help="Ignore constraints.txt, except for torch.")


@dataclass
class Environment:
    """The programs of a new environment, and their working directory."""

    programs: Path
    folder: Path

    def run(self, *command: object, stdin: str | None = None) -> str:
        """The output of a command of the package.

        Raises:
            RuntimeError: It fails.
        """
        return run(*self.command(*command), cwd=self.folder, stdin=stdin)

    def command(self, *command: object) -> tuple[object, ...]:
        return self.programs / "vanilla-transformer", *command

    @contextmanager
    def server(self, *command: object, path: str) -> Iterator[str]:
        """The address of a server that answers at `path`."""
        line = [str(word) for word in self.command(*command)]
        options = {"cwd": self.folder, "env": environment()}
        with serving(line, path, LONGEST_START, **options) as (url, _):
            yield url


def environment() -> dict[str, str]:
    """Environment variables without the paths of the current environment."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def run(*command: object, cwd: Path, stdin: str | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd, env=environment(), input=stdin, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


# ---------------------------------------------------------------- what each extra brings


def train(env: Environment) -> None:
    env.run(
        "train", "--config", "phrases", "--output_dir", "model", "--use_cpu", "--max_steps", 20,
        "--phrases_train_size", 2000, "--phrases_validation_size", 20, "--phrases_test_size", 20,
        "--preset", "tiny",
    )  # fmt: skip


def none(env: Environment) -> None:
    found = env.run("translate", "--model", "model", stdin=TEXT)
    assert found.count("\n") == TEXT.count("\n"), found
    env.run("info")


def export(env: Environment) -> None:
    (env.folder / "lines").write_text(TEXT)
    for target in ("ctranslate2", "marian", "onnx", "transformers.js"):
        output = f"{target}_export"
        env.run(
            "export", "model", "--to", target, "--output_dir", output,
            *(["--check", "lines"] if target != "marian" else []),
        )  # fmt: skip
        if target in ("ctranslate2", "onnx"):
            env.run("translate", "--model", output, stdin=TEXT)


def serve(env: Environment, *options: object) -> None:
    with env.server("serve", "en-de=model", *options, path="/health") as url:
        body = json.dumps({"q": ["four", "five"], "source": "en", "target": "de"}).encode()
        request = Request(f"{url}/translate", body, {"content-type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)["translatedText"]) == 2


def demo(env: Environment) -> None:
    env.run("demo", "model", "--space", "space")
    with env.server("demo", "model", path="/config"):
        pass


def ray(env: Environment) -> None:
    (env.folder / "lines").write_text(TEXT)
    env.run("translate", "--model", "model", "--ray", "--source", "lines", "--output", "translated")
    serve(env, "--ray")


def moses(env: Environment) -> None:
    words = "Moses('en', None).split('a, b', 'source')"
    code = f"from vanilla_transformer.model.moses import Moses; print({words})"
    assert run(env.programs / "python", "-c", code, cwd=env.folder) == "a , b\n"


def analysis(env: Environment) -> None:
    env.run("analyze", "attention", "--model", "model", "--text", TEXT, "--output", "view.html")


EXTRAS: dict[str, Callable[[Environment], None]] = {
    one.__name__: one for one in (none, train, export, serve, demo, ray, moses, analysis)
}


# ---------------------------------------------------------------- environments


def install(extra: str, folder: Path, newest: bool) -> Path:
    """The folder of the programs of a new environment with one extra."""
    run(sys.executable, "-m", "venv", "--clear", folder, cwd=REPOSITORY)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    torch = f"torch=={version('torch').split('+')[0]}"
    # torch comes first and alone, as pip may choose a larger build of a dependency.
    run(*pip, "install", torch, cwd=REPOSITORY)
    constraints = [] if newest else ["--constraint", "constraints.txt"]
    package = "." if extra == "none" else f".[{extra}]"
    run(*pip, "install", *constraints, package, torch, cwd=REPOSITORY)
    run(*pip, "check", cwd=REPOSITORY)
    return folder / "bin"


def main() -> None:
    arguments = read_options(ExtrasArguments, __doc__)
    expect_known("extras", arguments.extras, EXTRAS)
    folder = Path(arguments.output_dir).resolve()
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    extras = [one for one in arguments.extras if one != "train"]
    for extra in extras if (work / "model/model.safetensors").exists() else ["train", *extras]:
        EXTRAS[extra](Environment(install(extra, folder / extra, arguments.newest), work))
        print(f"{extra}: installed and used", flush=True)


if __name__ == "__main__":
    main()
