"""Makes old toolkits importable with current Python and torch, without their optional packages.

fairseq 0.12 has dataclasses as defaults of dataclasses, which Python 3.11 rejects unless they are
hashable. OpenNMT-py 3.5 imports packages for unused transforms. Both open their own checkpoints
with the loader that torch 2.6 replaced.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

OPTIONAL = (
    "spacy", "ahocorasick", "rapidfuzz", "fasttext", "bitarray", "waitress", "flask", "sklearn",
    "sklearn.metrics", "scipy", "scipy.stats",
)  # fmt: skip
# Modules that a comparison needs.
MODULES = {
    "fairseq": ("fairseq.tasks", "fairseq.sequence_generator", "fairseq.criterions.cross_entropy"),
    "opennmt_py": ("onmt.model_builder", "onmt.translate.translator", "onmt.transforms"),
}


def import_toolkit(modules: Sequence[str]) -> None:
    """Import modules with a different `dataclass` for fairseq's classes, and with mocks in place of
    optional packages that are not installed."""
    original = dataclasses.dataclass

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        def apply(cls: Any) -> Any:
            if cls.__module__.startswith("fairseq"):
                options["unsafe_hash"] = True
            return original(cls, **options)

        return apply if cls is None else apply(cls)

    absent = [name for name in OPTIONAL if importlib.util.find_spec(name.split(".")[0]) is None]
    mocks = {name: mock.MagicMock(__spec__=None) for name in absent}
    sys.modules.update(mocks)
    dataclasses.dataclass = dataclass  # type: ignore[assignment]
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        dataclasses.dataclass = original
        for name in mocks:  # transformers checks what is installed
            del sys.modules[name]


def run(program: str, arguments: list[str]) -> None:
    """Run a program, given as "module:function". A C++ program gets its arguments and returns its
    exit status."""
    module, _, function = program.partition(":")
    import_toolkit([module])
    torch.serialization.add_safe_globals([argparse.Namespace])
    sys.argv = [module, *arguments]
    main = getattr(sys.modules[module], function)
    if inspect.isbuiltin(main):
        sys.exit(main(arguments))
    main()
