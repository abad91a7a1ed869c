"""The server on any number of machines, with Ray Serve: the web application, and replicas of each
model."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from transformers import HfArgumentParser

from ..inference.loading import LoadingArguments
from .app import make_app
from .arguments import RayArguments, ServingArguments
from .batching import load_translator
from .languages import Pair, find_pairs
from .server import bind, make_url

logger = logging.getLogger(__name__)

APPLICATION = "translation"
ATTEMPTS = 4  # for a request whose replica dies
PAUSE = 0.5  # seconds before another attempt


class ModelReplica:
    """A model with its batches, in its own process."""

    def __init__(self, name: str, arguments: ServingArguments, loading: LoadingArguments) -> None:
        self.translator = load_translator(name, arguments, loading)

    async def translate(self, sentences: list[str], n_best: int) -> list[list[str]]:
        """See `Translator`."""
        return await self.translator.translate(sentences, n_best)


class RayTranslator:
    """A `Translator` that calls a replica of a model, and another one if that dies.

    Args:
        pair: The languages.
    """

    def __init__(self, pair: Pair) -> None:
        self.handle = serve.get_deployment_handle("-".join(pair), APPLICATION)

    async def translate(self, sentences: Sequence[str], n_best: int = 1) -> list[list[str]]:
        """See `Translator`.

        Raises:
            RayActorError: Several replicas died in a row.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return await self.handle.translate.remote(list(sentences), n_best)
            except RayActorError:
                logger.warning("A replica died: asking another one")
                await asyncio.sleep(PAUSE)
        return await self.handle.translate.remote(list(sentences), n_best)


def make_deployments(
    pairs: dict[Pair, str],
    arguments: ServingArguments,
    loading: LoadingArguments,
    options: RayArguments,
) -> serve.Application:
    """The application for `serve.run`, under the name `APPLICATION`."""
    models = [
        serve.deployment(name="-".join(pair), **options.deployment_options(arguments))(
            ModelReplica
        ).bind(name, arguments, loading)
        for pair, name in pairs.items()
    ]

    def build() -> FastAPI:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        return make_app({pair: RayTranslator(pair) for pair in pairs}, arguments)

    front = serve.deployment(
        name="front",
        max_ongoing_requests=arguments.max_requests + 1,  # so that the application answers 429
        graceful_shutdown_timeout_s=arguments.timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return front(serve.ingress(build)()).bind(*models)


def build_application(options: dict[str, Any]) -> serve.Application:
    """The application from a Serve configuration file, whose `import_path` names this function.

    Args:
        options: `models`, a list as for `find_pairs`, and options of `vanilla-transformer serve`.

    Raises:
        ValueError: An option is unknown or has a bad value.
        FileNotFoundError: There is no such model.
    """
    parser = HfArgumentParser((ServingArguments, RayArguments, LoadingArguments))
    pairs = find_pairs(options["models"])
    rest = {name: value for name, value in options.items() if name != "models"}
    arguments, ray_arguments, loading = parser.parse_dict({**rest, "ray": True})
    return make_deployments(pairs, arguments, loading, ray_arguments)


def serve_with_ray(
    models: list[str], arguments: ServingArguments, loading: LoadingArguments, options: RayArguments
) -> None:
    """The same as `server.serve`, with Ray Serve."""
    pairs = find_pairs(models)
    with bind(arguments.host, arguments.port) as listener:
        port = listener.getsockname()[1]  # a free one for port 0
    ray.init(options.ray_address)
    serve.start(http_options={"host": arguments.host, "port": port})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        application = make_deployments(pairs, arguments, loading, options)
        serve.run(application, name=APPLICATION, route_prefix="/")
        languages = ", ".join(map("-".join, pairs))
        logger.info("Serving %s at %s", languages, make_url(arguments.host, port))
        signal.pause()
    except KeyboardInterrupt:
        logger.info("Stopping")
    finally:
        serve.delete(APPLICATION)
        ray.shutdown()
