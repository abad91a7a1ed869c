r"""Serve models over HTTP, with the interface of LibreTranslate.

    vanilla-transformer serve outputs/multi30k --port 8000
    vanilla-transformer serve en-de=outputs/there de-en=outputs/back --api_keys keys.txt

Translates requests that arrive together in batches. The languages of a model come from the command
line (en-de=MODEL) or from its model card. See docs/serving.md.
"""

import logging

from ..inference.loading import LoadingArguments
from ..serving.arguments import RayArguments, ServingArguments
from ..serving.server import serve
from .parser import CommandParser


def main() -> None:
    parser = CommandParser(
        [ServingArguments, RayArguments, LoadingArguments],
        description=__doc__,
        usage="%(prog)s MODEL [MODEL ...] [options]",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="Folder or Hub name, alone or as SOURCE-TARGET=MODEL.",
    )
    arguments, options, loading, rest = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.ray:
        from ..serving.ray_serving import serve_with_ray

        serve_with_ray(rest.models, arguments, loading, options)
    else:
        serve(rest.models, arguments, loading)
