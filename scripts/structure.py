"""Print the packages, which of them import each other, and what each module is for.

python -m scripts.structure            # prints it
python -m scripts.structure --write    # updates CONTRIBUTING.md
"""

import ast
import sys
from itertools import groupby
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "vanilla_transformer"
DOCUMENT = REPOSITORY / "CONTRIBUTING.md"
BEGIN, END = "<!-- structure: begin -->\n", "<!-- structure: end -->\n"


def package_of(module: str) -> str:
    """The package of `vanilla_transformer.data.phrases` is `data`."""
    return module.split(".")[1] if "." in module else module


def arrows(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """Pairs of packages, the first of which imports the second."""
    pairs = {
        (package_of(module), package_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return sorted((one, other) for one, other in pairs if one != other)


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def structure() -> str:
    """A Mermaid diagram of the packages, and a list of the modules in each."""
    package = REPOSITORY / PACKAGE
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    lines = ["```mermaid", "graph TD"]
    lines += [f"    {one} --> {other}" for one, other in arrows(graph)]
    lines += ["```", ""]
    paths = sorted(
        (path.relative_to(package) for path in package.rglob("*.py")),
        key=lambda path: (len(path.parts) > 1, path.parent, path.name),
    )
    for folder, modules in groupby(paths, key=lambda path: path.parent):
        start = package / folder / "__init__.py"
        lines += [f"**{PACKAGE}/{'' if folder == Path() else f'{folder}/'}** {purpose(start)}", ""]
        lines += [
            f"- `{path.name}`: {purpose(package / path)}"
            for path in modules
            if path.name != "__init__.py"
        ]
        lines.append("")
    return "\n".join(lines)


def with_structure(document: str) -> str:
    """The document with an updated structure between its markers."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + structure() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(with_structure(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(structure(), end="")
