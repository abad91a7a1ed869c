"""Print the rooms of the package, which imports lead where, and what each module is for.

python -m scripts.house            # prints it
python -m scripts.house --write    # updates CONTRIBUTING.md
"""

import ast
import sys
from itertools import groupby
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "vanilla_transformer"
DOCUMENT = REPOSITORY / "CONTRIBUTING.md"
BEGIN, END = "<!-- house: begin -->\n", "<!-- house: end -->\n"


def room_of(module: str) -> str:
    """The room of `vanilla_transformer.data.phrases` is `data`."""
    return module.split(".")[1] if "." in module else module


def arrows(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """Pairs of rooms, the first of which imports the second."""
    pairs = {
        (room_of(module), room_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return sorted((one, other) for one, other in pairs if one != other)


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def house() -> str:
    """A Mermaid diagram of the rooms, and a list of the modules in each."""
    package = REPOSITORY / PACKAGE
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    lines = ["```mermaid", "graph TD"]
    lines += [f"    {one} --> {other}" for one, other in arrows(graph)]
    lines += ["```", ""]
    paths = sorted(
        (path.relative_to(package) for path in package.rglob("*.py")),
        key=lambda path: (len(path.parts) > 1, path.parent, path.name),
    )
    for room, modules in groupby(paths, key=lambda path: path.parent):
        start = package / room / "__init__.py"
        lines += [f"**{PACKAGE}/{'' if room == Path() else f'{room}/'}** {purpose(start)}", ""]
        lines += [
            f"- `{path.name}`: {purpose(package / path)}"
            for path in modules
            if path.name != "__init__.py"
        ]
        lines.append("")
    return "\n".join(lines)


def with_house(document: str) -> str:
    """The document with the house between its markers brought up to date."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + house() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(with_house(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(house(), end="")
