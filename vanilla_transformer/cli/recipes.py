r"""List the packaged recipes, print one, or print the path of its file.

    vanilla-transformer recipes
    vanilla-transformer recipes multi30k_tiny > my_recipe.yaml
    accelerate launch --config_file "$(vanilla-transformer recipes --path accelerate/ddp)" \
        -m vanilla_transformer train --config multi30k_tiny --max_tokens 1024 \
        --output_dir outputs/multi30k

A recipe holds options of `train`: `vanilla-transformer train --config NAME`. The recipes in
accelerate/ are for `accelerate launch --config_file FILE`.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from ..training.recipes import recipe_names, recipe_path


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "name", nargs="?", choices=recipe_names(), metavar="NAME", help="The recipe to print."
    )
    parser.add_argument("--path", action="store_true", help="Print the path of its file instead.")
    arguments = parser.parse_args()
    if arguments.name is None:
        if arguments.path:
            parser.error("--path: expected the name of a recipe as well")
        list_recipes()
    elif arguments.path:
        print(recipe_path(arguments.name))
    else:
        print(recipe_path(arguments.name).read_text(encoding="utf-8"), end="")


def list_recipes() -> None:
    """Print each recipe's name and the first line of its comment."""
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        summary = recipe_path(name).read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:{width}}  {summary.removeprefix('# ')}")
