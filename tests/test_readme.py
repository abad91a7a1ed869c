"""The examples in the documents work as shown."""

import os
import re
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from operator import attrgetter

import pytest
import torch
from conftest import REPOSITORY
from huggingface_hub import ModelCard
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.cli.generation_options import generation_option_names
from vanilla_transformer.training.arguments import ModelArguments

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {
    os.path.relpath(path, REPOSITORY): path.read_text(encoding="utf-8")
    for pattern in ("[!C]*.md", "CONTRIBUTING.md", "docs/**/*.md", "scripts/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
}


def python_blocks():
    for name, text in DOCUMENTS.items():
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if name == "docs/paper.md":  # a notebook: each cell uses names of earlier ones
            blocks = ["".join([*blocks, *reversed(blocks)])]  # and can be run again
        for number, code in enumerate(blocks):
            yield pytest.param(code, id=f"{name}-{number}")


every_document = pytest.mark.parametrize("name", DOCUMENTS)


def sources(folder):
    return {
        os.path.relpath(path, REPOSITORY): path.read_text(encoding="utf-8")
        for path in (REPOSITORY / folder).rglob("*.py")
    }


def commands(text):
    """The program, the command and its options of each command line, in blocks and within text."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    starts = r"(vanilla-transformer |-m vanilla_transformer |python -m |^scripts/)(\w[\w.-]*)"
    for line in [*lines.splitlines(), *(" ".join(span.split()) for span in spans)]:
        if match := re.search(starts, line.partition("#")[0]):
            yield *match.groups(), re.findall(r'[ "=]--(\w+)', line[match.end() :])


def headings(text):
    """The anchors of a document's headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.+)", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("code", python_blocks())
def test_python_examples_run(code, checkpoint, tmp_path, monkeypatch, capsys):
    if "import inseq" in code:
        pytest.importorskip("inseq")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "quickstart").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shorter = code.replace("10_000", "40").replace("max_steps=100", "max_steps=1, use_cpu=True")
    shorter = shorter.replace("range(500)", "range(2)")
    with torch.enable_grad():  # and after it as before, whatever the code sets
        exec(compile(shorter, "document", "exec"), {})
    if "print(translate" in code:
        assert "translation_text" in capsys.readouterr().out
    elif "print(" in code:
        assert capsys.readouterr().out


def test_the_readme_is_short_and_shows_a_translation():
    assert len(README.splitlines()) <= 120
    assert "print(translate" in README


@every_document
def test_links_have_an_existing_target(name):
    for link in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)\"]+)", DOCUMENTS[name]):
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        assert (REPOSITORY / target).exists(), link
        assert not anchor or anchor in headings(DOCUMENTS[target]), link


def test_help_texts_and_messages_name_documents_that_exist():
    text = "".join(sources("vanilla_transformer").values())
    named = set(re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", text))
    assert len(named) > 10
    for path, anchor in named:
        assert path in DOCUMENTS, path
        assert not anchor or anchor in headings(DOCUMENTS[path]), anchor


@every_document
def test_tables_have_a_header(name):
    for before, line in pairwise(DOCUMENTS[name].splitlines()):
        if re.fullmatch(r"\|( ?-+ ?\|)+", line):
            assert before.count("|") == line.count("|"), line


@every_document
def test_mentioned_files_exist(name):
    for path in re.findall(r"`((?:tests|scripts|vanilla_transformer)/[\w./-]+)`", DOCUMENTS[name]):
        assert (REPOSITORY / path).exists(), path


@every_document
def test_commands_and_their_options_exist(name):
    package, scripts = sources("vanilla_transformer"), sources("scripts")
    inherited = {field.name for field in fields(Seq2SeqTrainingArguments)} | {"config"}
    of_train = ("/data/", "/training/")
    training = [text for path, text in package.items() if any(map(path.count, of_train))]
    for program, target, options in commands(DOCUMENTS[name]):
        if program == "scripts/":
            assert os.access(REPOSITORY / "scripts" / target, os.X_OK), target
            continue
        if program == "python -m " and not target.startswith("scripts."):
            assert find_spec(target), target
            continue
        if program == "python -m ":
            path = target.replace(".", "/")
            assert {f"{path}.py", f"{path}/__main__.py"} & scripts.keys(), target
            texts, known = list(scripts.values()), set()
            if "options" in options:  # the rest is passed to `train`
                texts, known = texts + training, inherited
        else:
            target = target.replace("-", "_")
            own = f"vanilla_transformer/cli/{target}.py"
            assert find_spec(f"vanilla_transformer.cli.{target}"), target
            shared = {
                "train": of_train,
                "plan": of_train,
                "convert": ("/conversion/core.py",),
                "serve": ("/serving/", "/loading.py", "/ray_workers.py"),
                "translate": ("/cli/translation_job.py", "/loading.py", "/ray_workers.py"),
            }.get(target, ("/inference/loading.py",))
            texts = [text for path, text in package.items() if any(map(path.count, (own, *shared)))]
            more = dict.fromkeys(("train", "plan"), inherited)
            more["translate"] = set(generation_option_names())
            known = {"help", "help_all"} | more.get(target, set())
        for option in options:
            defined = re.compile(rf'^    {option}: |"--{option}"', re.MULTILINE)
            assert option in known or any(map(defined.search, texts)), f"{target} --{option}"


def test_each_section_of_the_paper_is_implemented_where_the_fidelity_page_says():
    text, _, _ = DOCUMENTS["docs/fidelity.md"].partition("Where the paper leaves a choice")
    rows = re.findall(r"^\| \d\.\d.*\| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 12
    for cell in rows:
        file = re.search(r"\((\.\./[\w/]+)\.py\)", cell)
        path = file[1] if file else "../vanilla_transformer/model/modeling_vanilla_transformer"
        module = import_module(path.removeprefix("../").replace("/", "."))
        for name in re.findall(r"`([\w.]+)`", cell):
            assert attrgetter(name)(module)


@every_document
def test_recipes_exist(name):
    recipes = {path.stem for path in (REPOSITORY / "vanilla_transformer/recipes").glob("*.yaml")}
    for recipe in re.findall(r"--config ([\w./]+)", DOCUMENTS[name]):
        assert recipe in recipes or recipe.endswith(".yaml"), recipe


def test_documented_changes_of_the_configuration_are_possible():
    changes = re.findall(r"`--config_overrides ([^`]+)` \|", DOCUMENTS["docs/paper.md"])
    assert len(changes) == 7
    recipe = "encoder_layers=2,decoder_layers=2,dropout=0.0,label_smoothing=0.0"
    assert recipe in (REPOSITORY / "vanilla_transformer/recipes/phrases.yaml").read_text()
    configurations = set()
    for change in ["", *changes]:
        arguments = ModelArguments(preset="tiny", config_overrides=f"{recipe},{change}")
        config = VanillaTransformerConfig.from_preset("tiny", **arguments.overrides())
        configurations.add(config.to_json_string())
    assert len(configurations) == 8


def test_the_index_lists_every_page():
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in DOCUMENTS["docs/README.md"]


def test_every_packaged_recipe_is_documented():
    for path in (REPOSITORY / "vanilla_transformer/recipes").glob("*.yaml"):
        assert f"`{path.stem}`" in DOCUMENTS["docs/training.md"], path.stem


def test_the_model_card_has_the_hubs_metadata():
    data = ModelCard(DOCUMENTS["model_card.md"]).data
    assert data.license == "apache-2.0"
    assert data.language == ["en", "de"]
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "translation"
    assert data.datasets
    assert {"bleu", "chrf"} <= set(data.metrics)
    assert "vanilla_transformer" in data.tags
