"""The files in deploy/ can be parsed, and name options and modules that exist."""

import importlib
import shutil
import subprocess
from configparser import RawConfigParser

import pytest

pytest.importorskip("fastapi", reason="needs vanilla-transformer[serve]")

import yaml
from conftest import REPOSITORY
from transformers import HfArgumentParser

from vanilla_transformer.serving.arguments import RayArguments, ServingArguments

DEPLOY = REPOSITORY / "deploy"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("Dockerfile*")), ids=lambda path: path.name)
def test_a_dockerfile_copies_existing_files_and_passes_the_linter(path):
    lines = path.read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "vanilla_transformer"} <= set(copied)
    assert all((REPOSITORY / name).exists() for name in copied if not name.startswith("--"))
    if linter := shutil.which("hadolint"):
        subprocess.run([linter, "--ignore", "DL3013", path], check=True)


def test_the_compose_file_starts_a_server():
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (service,) = content["services"].values()
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert set(service["secrets"]) == content["secrets"].keys()
    *_, option, keys = service["command"]
    assert (option, keys) == ("--api_keys", f"/run/secrets/{service['secrets'][0]}")
    timeout = ServingArguments.timeout
    assert float(service["stop_grace_period"].removesuffix("s")) > timeout
    # Linux drops signals that the first process of a container does not handle. The server handles
    # them when it is ready.
    assert service["init"] is True


def test_the_systemd_unit_starts_a_server():
    unit = RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "vanilla-transformer.service")
    program, command, model, *options = unit["Service"]["ExecStart"].split()
    assert program.endswith("bin/vanilla-transformer")
    assert (command, model[:6]) == ("serve", "en-de=")
    assert options == ["--api_keys", "${CREDENTIALS_DIRECTORY}/api_keys"]
    assert float(unit["Service"]["TimeoutStopSec"]) > ServingArguments.timeout


def test_the_ray_service_names_options_and_a_function():
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    options = application["args"]
    assert options.pop("models") == ["en-de=/models/en-de"]
    HfArgumentParser([ServingArguments, RayArguments]).parse_dict({**options, "ray": True})
    pytest.importorskip("ray.serve", reason="needs vanilla-transformer[ray]")
    module, _, function = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
