"""What reaches the Hub, over HTTP: a model that loads from there, our card, and no secret."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY, run_command, small_config
from local_hub import TOKEN, serving

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.checkpoints import find_defect
from vanilla_transformer.training.hub import push_folder

LOAD = """
import json, sys
from transformers import pipeline

name, revision = sys.argv[1:]
translate = pipeline("translation", model=name, revision=revision, trust_remote_code=True)
code = type(translate.model).__module__
print(json.dumps([code, translate("the lake", max_new_tokens=5)[0]["translation_text"]]))
"""


@pytest.fixture
def hub():
    with serving() as running:
        yield running


def run_with(hub, tmp_path, *command, token=TOKEN, check=True):
    """A new process, for which the stand-in is the Hub, away from this package's folder."""
    environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path / "home")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": token}
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        env={name: value for name, value in environment.items() if value is not None},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if check:
        assert process.returncode == 0, process.stderr[-4000:]
    return process


def push(hub, tmp_path, *flags, **options):
    return run_with(hub, tmp_path, "-m", "vanilla_transformer", "push", *flags, **options)


def header_of(files):
    return yaml.safe_load(files["README.md"].decode().split("---")[1])


@pytest.fixture
def finished(checkpoint, tmp_path):
    """A folder as training leaves it, with all that must not leave it."""
    folder = tmp_path / "finished"
    shutil.copytree(checkpoint, folder)
    for name in ("training_args.bin", "optimizer.pt", "checkpoint-4/model.safetensors", ".env"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOKEN)
    (folder / "curves.png").write_bytes(b"a picture")
    return folder


def test_a_pushed_folder_loads_from_the_hub_at_any_commit(hub, finished, tmp_path):
    first = push(hub, tmp_path, "finished", "mine", "--private").stdout
    assert hub.visibility == {"me/mine": "private"}
    commit = hub.branches["me/mine"]["main"]
    assert f'revision="{commit}"' in first
    files = hub.files("me/mine")
    assert {"config.json", "model.safetensors", "tokenizer.json", "curves.png"} <= files.keys()
    assert "modeling_vanilla_transformer.py" in files
    assert not any(TOKEN.encode() in content for content in files.values())
    assert b'model="me/mine"' in files["README.md"]
    # A later commit ruins the code: who has pinned the one before never runs it.
    (finished / "modeling_vanilla_transformer.py").write_text("raise SystemExit('ruined')")
    push(hub, tmp_path, finished, "me/mine", "--commit_message", "ruin")
    assert hub.log("me/mine") == ["initial commit", "Upload model", "ruin"]
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    loaded = run_with(hub, tmp_path, script, "me/mine", commit, token=TOKEN).stdout
    module, text = json.loads(loaded.splitlines()[-1])
    assert module.startswith("transformers_modules.")
    assert isinstance(text, str)
    assert "ruined" in run_with(hub, tmp_path, script, "me/mine", "main", check=False).stderr
