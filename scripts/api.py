"""Write the reference of the Python interface, docs/api.md, from docstrings.

python -m scripts.api            # prints it
python -m scripts.api --write    # updates docs/api.md
"""

import dataclasses
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

import griffe
from griffe import DocstringSectionKind, ParameterKind

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "vanilla_transformer"
DOCUMENT = REPOSITORY / "docs" / "api.md"
WIDTH = 100
FORWARD = "Args of `forward`:"
ONE_VALUE = {"returns_multiple_items": False, "returns_named_value": False}

INTRODUCTION = """<!-- Made from docstrings by `python -m scripts.api --write` -->

# Python API

The classes and functions for your own Python code; other names may change without notice. Models,
tokenizers and pipelines have [transformers' interface](https://huggingface.co/docs/transformers)
as well, such as `from_pretrained` and `save_pretrained`.
"""

# The contents of each section, by the module to import them from.
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Models": {
        "": [
            "VanillaTransformerConfig",
            "VanillaTransformerConfig.from_preset",
            "VanillaTransformerForConditionalGeneration",
            "VanillaTransformerForConditionalGeneration.generate",
            "VanillaTransformerForConditionalGeneration.resize_decoder_token_embeddings",
            "VanillaTransformerForConditionalGeneration.resize_position_embeddings",
            "VanillaTransformerModel",
            "VanillaTransformerEncoderModel",
            "VanillaTransformerForCausalLM",
            "VanillaTransformerTokenizer",
        ]
    },
    "Pipelines": {"": ["TranslationPipeline", "Text2TextGenerationPipeline"]},
    "Data": {
        "data.phrases": ["load_phrases"],
        "data.data_options": ["DataArguments"],
        "data.parallel_text": ["load_parallel_dataset", "iter_texts", "tokenize_dataset"],
        "data.tokenization": ["train_tokenizer"],
        "data.collation": ["PairCollator"],
        "data.token_batches": ["TokenBudgetSampler"],
    },
    "Training": {
        "training.token_batches": ["TokenBudgetArguments", "TokenBudgetTrainer"],
        "training.languages": ["set_languages", "start_in_target_language"],
        "training.averaging": ["average_checkpoints"],
        "training.distributed": ["end_training"],
    },
    "Translation": {
        "inference.translation": ["translate", "translate_n_best", "Hypothesis"],
        "inference.alignment": ["add_alignments"],
        "inference.scoring": ["add_token_scores", "score_pairs", "PairScore"],
        "inference.reranking": ["rerank_by_utility", "rerank_by_reverse_model"],
        "inference.ensemble": ["VanillaTransformerEnsemble"],
        "inference.engines": ["load"],
    },
    "Evaluation": {
        "inference.metrics": ["make_metrics", "score_translations", "compare_systems"],
    },
    "Conversion and export": {
        "conversion": ["convert", "convert_back"],
        "conversion.core": ["ConversionOptions"],
        "export": ["export"],
    },
    "Analysis": {
        "analysis.attention": ["read_batches", "attention_maps"],
        "analysis.heads": ["analyze_heads", "HeadReport", "most_important", "prune_heads"],
        "analysis.alignment_error": ["read_gold_alignments", "score_alignments"],
        "analysis.positions": ["position_encodings", "attention_reach"],
        "analysis.embeddings": ["analyze_embeddings", "EmbeddingReport", "nearest_tokens"],
    },
}


def reference() -> str:
    """The complete document."""
    package = griffe.load(PACKAGE, search_paths=[REPOSITORY])
    lines = [INTRODUCTION, *contents(), ""]
    for title, modules in SECTIONS.items():
        lines += [f"## {title}", ""]
        for module, names in modules.items():
            path = ".".join(filter(None, (PACKAGE, module)))
            for name in names:
                lines += [*entry(package, path, name), ""]
    return "\n".join(lines)


def contents() -> Iterator[str]:
    """Links to the names of each section."""
    for title, modules in SECTIONS.items():
        listed = [name for names in modules.values() for name in names if "." not in name]
        links = [link(f"`{name}`") for name in listed]
        yield from wrapped(f"- **{link(title)}**: {', '.join(links)}")


def link(heading: str) -> str:
    """A link to a heading of the page."""
    anchor = re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
    return f"[{heading}](#{anchor})"


def entry(package: Any, module: str, name: str) -> Iterator[str]:
    """The lines about a class, a method or a function."""
    name_in_module, _, method = name.partition(".")
    found = package[module.partition(".")[2]] if "." in module else package
    found = found[name_in_module]
    if method:
        found = found.all_members[method]
    yield from (f"### `{name}`", "", "```py", f"from {module} import {name_in_module}")
    if found.is_function:
        yield from ("", *signature(name, found))
    yield "```"
    docstring = found.docstring
    has_forward = FORWARD in docstring.value
    docstring.value = docstring.value.replace(FORWARD, "Args:")
    for section in docstring.parse("google", warnings=False, **ONE_VALUE):
        yield ""
        if section.kind is DocstringSectionKind.text:
            yield section.value
            continue
        yield f"**{section.kind.value.capitalize()}{' of `forward`' if has_forward else ''}**"
        yield ""
        if section.kind is DocstringSectionKind.returns:  # its type is in the signature
            yield section.value[0].description
            continue
        yield from (line for item in section.value for line in listed(item, found))
    yield from options(getattr(import_module(module), name_in_module))


def options(described: Any) -> Iterator[str]:
    """The command-line options that are fields of a dataclass."""
    fields = dataclasses.fields(described) if dataclasses.is_dataclass(described) else ()
    if helped := [field for field in fields if "help" in field.metadata]:
        yield from ("", "**Fields**", "")
        for field in helped:
            make: Any = field.default_factory
            value = field.default if make is dataclasses.MISSING else make()
            told = re.sub(r"</?\w+>", r"`\g<0>`", field.metadata["help"])  # tags in Markdown
            yield from wrapped(f"- `{field.name}` (`{value}`): {told}")


def signature(name: str, function: Any) -> Iterator[str]:
    """The call of a function, on one line or a line for each parameter."""
    parameters: list[str] = []
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        has_star = any(text.startswith("*") for text in parameters)
        if parameter.kind is ParameterKind.keyword_only and not has_star:
            parameters.append("*")
        stars = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}
        text = f"{stars.get(parameter.kind, '')}{parameter.name}: {parameter.annotation}"
        has_default = parameter.default is not None and parameter.kind not in stars
        parameters.append(f"{text} = {constant(parameter, function)}" if has_default else text)
    line = f"{name}({', '.join(parameters)}) -> {function.returns}"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{name}("
    yield from (f"    {parameter}," for parameter in parameters)
    yield f") -> {function.returns}"


def constant(parameter: Any, function: Any) -> str:
    """The default of a parameter, even if it has a name in the function's module."""
    text = str(parameter.default)
    module = import_module(function.module.path)
    return repr(getattr(module, text)) if hasattr(module, text) else text


def listed(item: Any, found: Any) -> list[str]:
    """A parameter, an attribute, a result or an error as a list item."""
    name = getattr(item, "name", "") or str(item.annotation).strip("()")
    return wrapped(f"- `{name}`{default(name, found)}: {item.description}")


def wrapped(item: str) -> list[str]:
    return wrap(item, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def default(name: str, found: Any) -> str:
    """The defaults of a configuration's fields."""
    if not found.is_class:
        return ""
    fields = [found.members.get(each) for each in name.split(", ")]
    values = [
        f"`{field.value}`"
        for field in fields
        if field is not None and "class-attribute" in field.labels
    ]
    return f" ({', '.join(values)})" if values else ""


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(reference(), encoding="utf-8")
    else:
        print(reference(), end="")
