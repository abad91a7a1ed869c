# PYTHON_ARGCOMPLETE_OK
"""The program `vanilla-transformer`, which runs the command that its first argument names."""

import importlib
import os
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from safetensors import SafetensorError

from ..data.paths import is_no_longer_read

COMMANDS = {
    "train": "Train a model from scratch, or fine-tune one.",
    "plan": "Estimate the time and memory of a training.",
    "translate": "Translate a file or standard input.",
    "back-translate": "Translate monolingual text into sources for training.",
    "evaluate": "Score translations, and compare systems.",
    "score": "Print the log-probability of given translations.",
    "average": "Average the weights of checkpoints.",
    "convert": "Convert a checkpoint of another toolkit, or back.",
    "export": "Export a model for another engine.",
    "serve": "Serve models over HTTP, as LibreTranslate does.",
    "demo": "Try a model in the browser, or write a Space.",
    "push": "Upload a model to the Hugging Face Hub.",
    "plot": "Plot training curves, learning rates and attention.",
    "analyze": "Look inside a model: heads, positions, embeddings.",
    "recipes": "List the packaged recipes, or print one.",
    "info": "Print versions and devices, for a bug report.",
}

# The extras that commands need; the others need "train".
EXTRAS = {"serve": "serve", "demo": "demo"}

# Errors about a file, also of weights, a name on the Hub, or a connection to it. The bases are from
# the Hub's HTTP client, which depends on its version.
OUTSIDE = (OSError, SafetensorError, HFValidationError, *HfHubHTTPError.__bases__)

PACKAGE = Path(__file__).parents[1]

EPILOG = """examples:
  vanilla-transformer train --config phrases --output_dir outputs/phrases
  echo "The train leaves at 3:30 PM." | vanilla-transformer translate --model outputs/phrases

`vanilla-transformer COMMAND --help` describes a command.
"""


def main() -> None:
    """Run the command that the first argument names. Each imports only what it needs.

    An error about the user's input is printed in one line; `python -X dev` shows its traceback.
    """
    open_closed_streams()
    # Output may become a file, such as a recipe, so it is UTF-8 in any locale. Names of files may
    # be any bytes, which Python reads as surrogates.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    parser = make_parser()
    complete_words(parser)
    command = parser.parse_args(sys.argv[1:2]).command
    sys.argv[:2] = [f"vanilla-transformer {command}"]  # the name in the command's help and errors
    try:
        module = importlib.import_module(f"vanilla_transformer.cli.{command.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vanilla_transformer"):
            raise
        extra = EXTRAS.get(command, "train")
        sys.exit(
            f"vanilla-transformer {command}: needs the package {error.name}; "
            f"pip install 'vanilla-transformer[{extra}]' brings all that it needs"
        )
    try:
        module.main()
        sys.stdout.flush()
    except Exception as raised:
        if isinstance(raised, BrokenPipeError) and is_no_longer_read(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at exit
            sys.exit(1)
        cause = explanation(raised)
        is_field = isinstance(raised, StrictDataclassFieldValidationError)
        if sys.flags.dev_mode or (needs_traceback(cause) and not is_field):
            raise
        sys.exit(f"vanilla-transformer {command}: error: {full_message(cause)}")


def open_closed_streams() -> None:
    """Open the null device in place of standard input or output that the caller has closed, as some
    schedulers do. transformers does this for standard error."""
    for name, mode in (("stdin", "r"), ("stdout", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def explanation(error: Exception) -> Exception:
    """The error that tells what is wrong: for a configuration, the cause of another one."""
    is_wrapped = isinstance(error, StrictDataclassError)
    return error.__cause__ if is_wrapped and isinstance(error.__cause__, Exception) else error


def full_message(error: Exception) -> str:
    """The error's message, and which folder is missing. transformers omits a model's name if there
    is no connection, and mentions only the Hub if a path can't be a name there. The Hub's client
    omits the server that it can't reach."""
    is_impossible = isinstance(error.__cause__ or error, HFValidationError)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_locals.get("path_or_repo_id", ""))
        if name and (is_impossible or name not in str(error)) and not Path(name).is_dir():
            return f"{name} is not a folder here. {error}"
    with suppress(AttributeError, RuntimeError):  # not about a request
        server = urlsplit(str(error.request.url)).netloc  # type: ignore[attr-defined]
        return str(error) if server in str(error) else f"{server}: {error}"
    return str(error)


def needs_traceback(error: Exception) -> bool:
    """Whether to print the traceback too: for errors that are not in `OUTSIDE`, not about a missing
    package, and not raised by this package."""
    if isinstance(error, ModuleNotFoundError):
        return str(error.name).startswith("vanilla_transformer")
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_explained = isinstance(error, ImportError) or Path(place.filename).is_relative_to(PACKAGE)
    is_raised = str(place.line).startswith("raise ")
    return not (isinstance(error, OUTSIDE) or (is_explained and is_raised))


def make_parser() -> ArgumentParser:
    """The parser of the first argument. Each command parses the others itself."""
    from .. import __version__

    parser = ArgumentParser(
        prog="vanilla-transformer",
        description="The original 2017 Transformer: training, translation and evaluation.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND [options]", title="commands", required=True
    )
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def complete_words(parser: ArgumentParser) -> None:
    """Complete words in a shell, if the package argcomplete is installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
