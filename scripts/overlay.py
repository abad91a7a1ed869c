"""Create a virtual environment on top of the current one, with different versions of some packages,
and print the folder of its programs.

    PATH="$(python scripts/overlay.py transformers==5.17.0):$PATH" python -m pytest
"""

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

OVERLAYS = Path(__file__).parents[1] / "build" / "overlays"


def make_overlay(folder: Path, *requirements: str) -> Path:
    """The folder of the programs of a new environment. It has the requirements and their
    dependencies; all other packages come from the current environment. So does torch, unless it is
    among the requirements, because pip might choose a larger build. It is recreated for a different
    Python."""
    python, complete = folder / "bin" / "python", folder / "complete"
    below = f"Python {sys.version} in {sys.prefix}"
    if not complete.exists() or complete.read_text(encoding="utf-8") != below:
        print(f"Setting up {folder} (once) ...", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True
        )
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        packages = sysconfig.get_path("purelib")
        (site / "below.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        kept = folder / "constraints.txt"
        own_torch = any(one.startswith("torch==") for one in requirements)
        kept.write_text("" if own_torch else f"torch=={version('torch').split('+')[0]}\n")
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        install += ["--disable-pip-version-check", "--constraint", kept, *requirements]
        subprocess.run(install, check=True, stdout=sys.stderr)
        complete.write_text(below, encoding="utf-8")
    return python.parent


if __name__ == "__main__":
    print(make_overlay(OVERLAYS / "_".join(sys.argv[1:]), *sys.argv[1:]))
