r"""Upload a finished model to the Hugging Face Hub.

    vanilla-transformer push outputs/phrases phrases-en-de --private
    vanilla-transformer push outputs/phrases my-team/phrases-en-de --revision v2

Sign in with `hf auth login` first, or set HF_TOKEN. Uploads weights, tokenizer, code, curves and
card in one commit; the card's example names the repository. Does not upload checkpoints, the
optimizer or the options of the training. See docs/hub.md.
"""

from dataclasses import dataclass

from huggingface_hub import get_token
from transformers.hf_argparser import HfArg

from ..training.hub import push_folder
from .parser import CommandParser


@dataclass
class PushArguments:
    private: bool = HfArg(
        default=False, help="Make a new repository private. Has no effect on an existing one."
    )
    revision: str | None = HfArg(default=None, help="Branch to upload to. Default: the main one.")
    commit_message: str = HfArg(default="Upload model", help="Message of the commit.")


def main() -> None:
    parser = CommandParser(
        PushArguments, description=__doc__, usage="%(prog)s MODEL REPOSITORY [options]"
    )
    parser.add_argument("model", metavar="MODEL", help="Folder of the model.")
    parser.add_argument(
        "repository",
        metavar="REPOSITORY",
        help="NAME/MODEL on the Hub, or MODEL in your own account.",
    )
    arguments, rest = parser.parse_args_into_dataclasses()
    if get_token() is None:
        parser.error("no access token: run `hf auth login`, or set HF_TOKEN")
    commit = push_folder(
        rest.model,
        rest.repository,
        private=arguments.private or None,
        revision=arguments.revision,
        commit_message=arguments.commit_message,
    )
    print(f"{rest.model} is in {commit.repo_url}, as commit {commit.oid}")
    print(f'To load this version only: revision="{commit.oid}"')
