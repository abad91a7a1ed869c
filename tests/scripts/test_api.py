"""docs/api.md describes the Python interface as it is; docstrings name parameters that exist."""

import re

import griffe

from scripts.api import DOCUMENT, FORWARD, REPOSITORY, reference

PACKAGE = griffe.load("vanilla_transformer", search_paths=[REPOSITORY], docstring_parser="google")
TEXT = DOCUMENT.read_text(encoding="utf-8")
# griffe does not find their fields and the arguments of a base class as parameters.
INHERITS = {"VanillaTransformerConfig", "BPEDropoutDataset"}


def functions(found):
    for member in found.members.values():
        if member.is_alias:
            continue
        if member.docstring and (member.is_function or member.is_class):
            yield member
        if member.is_module or member.is_class:
            yield from functions(member)


def test_the_page_is_up_to_date_with_the_code():
    assert reference() == TEXT, "run `python -m scripts.api --write`"


def test_every_name_can_be_imported_as_the_page_says():
    for block in re.findall(r"```py\n(from .*)", TEXT):
        exec(block)


def test_descriptions_only_refer_to_names_on_the_page():
    names = set(re.findall(r"^### `(?:\w+\.)?(\w+)`", TEXT, re.MULTILINE))
    referred = re.findall(r"\b(?:As|Same as|as for) (?:for |in )?`(\w+)`", TEXT)
    assert len(referred) > 5
    assert set(referred) <= names


def test_docstrings_name_parameters_that_exist():
    described = 0
    for found in functions(PACKAGE):
        if found.name in INHERITS or FORWARD in found.docstring.value:
            continue
        names = {parameter.name.lstrip("*") for parameter in found.parameters}
        for section in found.docstring.parse("google", warnings=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                told = {name for item in section.value for name in item.name.split(", ")}
                assert told <= names, found.path
                described += len(told)
    assert described > 300


def test_every_input_of_the_model_is_described():
    model = PACKAGE["model.modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"]
    listed = TEXT.partition("**Parameters of `forward`**")[2].partition("\n\nReturns")[0]
    told = set(", ".join(re.findall(r"^- `([\w, ]+)`", listed, re.MULTILINE)).split(", "))
    read = {parameter.name for parameter in model["forward"].parameters}
    assert read - {"self", "kwargs"} == told - {"position_ids"}  # passed on to the encoder
