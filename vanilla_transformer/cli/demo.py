r"""Try a model in the browser: translations, scores, search and attention.

    vanilla-transformer demo outputs/phrases --examples test.en
    vanilla-transformer demo outputs/phrases --examples test.en --space space

The page is served on this machine and loads nothing from the web. With --space, the command instead
writes a folder to upload as a Hugging Face Space. See docs/demo.md.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers.hf_argparser import HfArg

from ..data.paths import expect_unused
from ..inference.loading import LoadingArguments
from ..serving.demo import launch, make_demo, write_space
from .parser import CommandParser


@dataclass
class DemoArguments:
    examples: str | None = HfArg(
        default=None, help="Text file with an example source on each line."
    )
    host: str = HfArg(default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
    port: int | None = HfArg(
        default=None, help="Port to listen on. Default: the first free one from 7860."
    )
    space: str | None = HfArg(
        default=None, help="Write a Space into this new folder, and serve nothing."
    )

    def __post_init__(self) -> None:
        if ":" in self.host:  # IPv6, which Gradio expects in brackets
            self.host = f"[{self.host.strip('[]')}]"
        if self.examples is not None and not Path(self.examples).is_file():
            raise FileNotFoundError(f"examples={self.examples!r}: expected a file")
        if self.space is not None:
            expect_unused(self.space, "space")


def main() -> None:
    parser = CommandParser(
        (DemoArguments, LoadingArguments), description=__doc__, usage="%(prog)s MODEL [options]"
    )
    parser.add_argument("model", metavar="MODEL", help="Folder or Hub name of the model.")
    arguments, loading, rest = parser.parse_args_into_dataclasses()
    demo = make_demo(rest.model, arguments.examples, loading)
    if arguments.space is not None:
        folder = write_space(arguments.space, rest.model, demo, arguments.examples, loading)
        print(f"Upload {folder} as a Space: docs/demo.md says how")
        return
    launch(demo, server_name=arguments.host, server_port=arguments.port)
