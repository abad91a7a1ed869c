"""What the README shows works as it stands."""

import re

import pytest
from conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_its_python_runs(code, checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "quickstart").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shorter = code.replace("10_000", "40").replace("max_steps=100", "max_steps=1, use_cpu=True")
    exec(compile(shorter, "README.md", "exec"), {})
    if "print(" in code:
        assert "translation_text" in capsys.readouterr().out


def test_the_tree_names_every_file():
    tree = README.split("## What is where")[1]
    modules = {path.name for path in (REPOSITORY / "vanilla_transformer").glob("[!_]*.py")}
    scripts = {path.name for path in (REPOSITORY / "scripts").iterdir() if path.is_file()}
    assert not [name for name in modules | scripts if name not in tree]


def test_links_lead_somewhere():
    for link in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)\"]+)", README):
        assert (REPOSITORY / link).exists()
