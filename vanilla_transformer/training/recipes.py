"""Finds the packaged recipes: options of a training run, and `accelerate launch` configurations."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The names of all packaged files: `phrases`, ..., and `accelerate/fsdp2`, ..."""
    paths = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.yaml"))
    return sorted((path.as_posix() for path in paths), key=lambda name: ("/" in name, name))


def recipe_path(name: str) -> Path:
    """The file of a packaged recipe.

    Raises:
        FileNotFoundError: No recipe has this name.
    """
    if name not in recipe_names():
        raise FileNotFoundError(f"recipe {name!r}: expected one of {', '.join(recipe_names())}")
    return FOLDER / f"{name}.yaml"


def find_recipe(config: str) -> Path:
    """The file that `--config` names: by its path, or by the name of a packaged recipe.

    Raises:
        FileNotFoundError: It is neither.
    """
    path = Path(config)
    if path.is_file():
        return path
    names = [name for name in recipe_names() if "/" not in name]
    if config not in names:
        raise FileNotFoundError(
            f"config={config!r}: expected a YAML file, or a recipe: {', '.join(names)}"
        )
    return recipe_path(config)
