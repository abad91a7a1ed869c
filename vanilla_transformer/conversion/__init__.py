"""Checkpoints of other toolkits: one module for each format, with a table of its names."""

from pathlib import Path
from types import ModuleType

from ..data.paths import expect_unused, staged
from ..data.vocabularies import with_moses
from . import (
    fairseq,
    fsmt,
    hf_marian,
    joeynmt,
    marian,
    opennmt_py,
    sockeye,
    tensor2tensor,
    torch_nn,
)
from .core import Conversion, ConversionOptions
from .saving import read_record, save
from .unpickling import load_torch

# In the order in which they are tried: formats with their own file names first, state dicts last.
FORMATS: list[ModuleType] = [
    marian, fsmt, hf_marian, sockeye, tensor2tensor, fairseq, opennmt_py, joeynmt, torch_nn,
]  # fmt: skip
# Files written by `torch.save`.
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")


def find_format(path: Path, name: str | None = None) -> ModuleType:
    """The module for a checkpoint: the named one, or the first that recognizes it.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: No format has this name, or none recognizes the checkpoint.
    """
    names = ", ".join(module.NAME for module in FORMATS)
    prefix = Path(f"{path}.index")  # a TensorFlow checkpoint's index
    if not path.exists() and not prefix.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint, a file or a folder")
    for module in FORMATS:
        if name == module.NAME or (name is None and module.recognizes(path)):
            return module
    if name is not None:
        raise ValueError(f"format={name!r}: expected one of {names}")
    files = [path] if path.is_file() else sorted(path.glob("*"))
    files = [file for file in files if file.suffix in TORCH_SUFFIXES]
    for file in files:
        load_torch(file, inert=["*"])  # raises if it is incomplete
    one = f", or one of {', '.join(file.name for file in files)}" if len(files) > 1 else ""
    raise ValueError(
        f"{path}: not recognized, expected a checkpoint of {names}{one}; with --format, the error "
        "says what is missing"
    )


def read(path: str | Path, options: ConversionOptions | None = None) -> Conversion:
    """Read another toolkit's checkpoint into memory; see `convert`."""
    options = options or ConversionOptions()
    module = find_format(Path(path), options.format)
    options.expect_only(module.READS, module.NAME)
    try:
        conversion = module.read(Path(path), options)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:  # an odd option
        message = f"{path}: expected a checkpoint of {module.NAME}, but {error!r}"
        raise ValueError(message) from error
    if options.moses is not None:
        if own := conversion.tokenizer.init_kwargs.get("moses"):
            raise ValueError(
                f"moses={options.moses}: expected no such option, as {path} has its own: {own}"
            )
        conversion.tokenizer = with_moses(conversion.tokenizer, *options.moses)
        conversion.languages = options.moses
    conversion.record["format"] = module.NAME
    if options.license:
        conversion.origin["license"] = options.license
    return conversion


def convert(
    path: str | Path,
    output_dir: str | Path,
    *,
    options: ConversionOptions | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Convert another toolkit's checkpoint to a model folder for `from_pretrained`. A failure
    leaves nothing behind.

    Args:
        path: The checkpoint, a file or a folder.
        output_dir: A new or empty folder.
        options: Information that is not in the checkpoint.
        max_shard_size: The largest size of a file of weights.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: A file is missing.
        FileExistsError: The output folder is in use.
        ValueError: The checkpoint can't be converted; the message names the tensor, the option or
            the file.
    """
    expect_unused(output_dir)
    return save(read(path, options), output_dir, max_shard_size)


def convert_back(model_folder: str | Path, output_dir: str | Path, to: str | None = None) -> Path:
    """Convert a model that `convert` made to a checkpoint of the toolkit that it came from. Without
    training in between, the tensors are the original ones, bit for bit. A failure leaves nothing
    behind.

    Args:
        model_folder: The converted model.
        output_dir: A new or empty folder.
        to: The format, which must be the one that the model came from.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: The model was not converted.
        FileExistsError: The output folder is in use.
        ValueError: There is no way back to this format.
    """
    output = expect_unused(output_dir)
    origin = read_record(Path(model_folder))["format"]
    module = next(module for module in FORMATS if origin == module.NAME)
    if not hasattr(module, "write"):
        names = ", ".join(module.NAME for module in FORMATS if hasattr(module, "write"))
        raise ValueError(
            f"{model_folder} comes from {origin}: expected a model from one of {names}, as others "
            "do not convert back"
        )
    if to not in (None, origin):
        raise ValueError(f"to={to!r}: {model_folder} comes from {origin}, expected {origin!r}")
    with staged(output) as written:
        module.write(Path(model_folder), written)
    return output
