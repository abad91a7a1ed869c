import os

import pytest

from conversion.reference import checkpoint_folder
from vanilla_transformer import conversion


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """The converted model of a variant, such as "fairseq/post"; created once for all tests, which
    must not change it."""
    folders = {}

    def convert(variant):
        folder = checkpoint_folder(variant)
        if variant not in folders:
            output = tmp_path_factory.mktemp(variant.replace(os.sep, "-")) / "converted"
            folders[variant] = conversion.convert(folder, output)
        return folders[variant]

    return convert
