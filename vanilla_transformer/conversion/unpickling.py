"""Opens torch checkpoints of other toolkits without executing anything in them."""

import pickle
import pickletools
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile, is_zipfile

import torch
from torch.serialization import safe_globals

# The size of a pickle without its tensors. A larger one is not from a checkpoint.
MOST_BYTES = 2**28
# Types with their names in Python 2, which pickles may have but torch does not accept.
OLD_TYPES = {"__builtin__.long": "builtins.int", "__builtin__.unicode": "builtins.str"}
# Needed by torch and pickle for plain values; torch itself allows them.
PLAIN = ("torch.*", "collections.OrderedDict", "collections.Counter", "builtins.*", "__builtin__.*")
# Saved by training scripts with the weights: scores and options, which no converter needs.
BESIDE = ("numpy.*", "_codecs.encode", "argparse.Namespace", "pathlib.*")


class Inert:
    """Replaces a class of another toolkit: it stores the values in the file and does nothing.

    Attributes:
        arguments: What the class would have been called with.
        state: What would have become its attributes.
    """

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Inert":
        self = super().__new__(cls)
        self.arguments, self.state = arguments, {}
        return self

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Called by a pickle to fill classes that are dictionaries, such as `defaultdict`."""
        self.state[key] = value


def load_torch(path: str | Path, *, allowed: Sequence[type] = (), inert: Sequence[str] = ()) -> Any:
    """The content of a file written by `torch.save`, memory-mapped if its format allows that.

    Args:
        path: The file.
        allowed: Classes that it may contain, besides tensors and plain containers.
        inert: Full names, such as "torchtext.vocab.Vocab" or "omegaconf.*", of other classes that
            it may contain. Each of their objects becomes an `Inert`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is incomplete, is not a torch checkpoint, or contains other classes.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file")
    _, wanted = contents(path)
    named = {f"{each.__module__}.{each.__qualname__}" for each in allowed}
    harmless = {name for name in wanted - named if _matches(name, (*BESIDE, *inert))}
    modern = {OLD_TYPES.get(name, name).replace("__builtin__.", "builtins.") for name in harmless}
    stand_ins = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in modern]
    with safe_globals([*allowed, *stand_ins]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except Exception as error:  # torch raises many types for a broken file
            refused = sorted(
                name for name in wanted - named - harmless if not _matches(name, PLAIN)
            )
            if isinstance(error, pickle.UnpicklingError) and refused:
                raise ValueError(
                    f"{path}: holds objects of {', '.join(refused)}, and none of them is executed; "
                    "expected tensors, plain containers and the toolkit's known classes"
                ) from error
            reason = str(error).partition("\n")[0][:200] or type(error).__name__
            raise ValueError(f"{path}: expected a complete torch checkpoint ({reason})") from error


def contents(path: Path) -> tuple[set[str], set[str]]:
    """The strings in a file of `torch.save`, such as keys and names of tensors, and the full names
    of classes and functions that it uses. Nothing is executed. Both are empty for other files."""
    strings: set[str] = set()
    names: set[str] = set()
    with suppress(Exception):  # a broken file is not recognized
        if is_zipfile(path):
            with ZipFile(path) as archive:
                for entry in archive.infolist():
                    if entry.filename.endswith("/data.pkl") and entry.file_size < MOST_BYTES:
                        _scan(BytesIO(archive.read(entry)), strings, names)
        else:
            with path.open("rb") as file:
                for _ in range(4):  # before torch 1.6: number, version, system, then the object
                    _scan(file, strings, names)
    return strings, names


def _scan(file: IO[bytes], strings: set[str], names: set[str]) -> None:
    recent: list[str] = []
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            names.add(".".join(recent[-2:]))
        elif isinstance(argument, str):
            recent.append(argument)
    strings.update(recent)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
