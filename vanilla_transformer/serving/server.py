"""Loads the models and runs the web server."""

import logging
import socket

import uvicorn

from ..inference.loading import LoadingArguments
from .app import make_app
from .arguments import ServingArguments
from .batching import load_translator
from .languages import find_pairs

logger = logging.getLogger(__name__)

# Seconds. Clients and proxies close idle connections after 5 to 60. A server that closes them
# earlier may do so while a request arrives.
KEEP_ALIVE = 75


def serve(models: list[str], arguments: ServingArguments, loading: LoadingArguments) -> None:
    """Serve the models until SIGTERM or Ctrl-C. Running requests are finished first.

    Args:
        models: As for `find_pairs`.
        arguments: The options of the server.
        loading: How to load the models.

    Raises:
        ValueError: The port is in use, two models translate the same languages, or one can't
            translate with its generation config and the options.
        FileNotFoundError: There is no such model.
    """
    pairs = find_pairs(models)
    with bind(arguments.host, arguments.port) as listener:
        translators = {
            pair: load_translator(name, arguments, loading) for pair, name in pairs.items()
        }
        config = uvicorn.Config(
            make_app(translators, arguments),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(arguments.timeout) + 1,
        )
        url = make_url(*listener.getsockname()[:2])
        logger.info("Serving %s at %s", ", ".join(map("-".join, pairs)), url)
        uvicorn.Server(config).run([listener])


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. Connections are refused until the server listens.

    Raises:
        ValueError: The address cannot be used.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"host={host!r}, port={port}: expected a free address ({error.strerror})"
        ) from error
    return listener


def make_url(host: str, port: int) -> str:
    """The address for a browser, with IPv6 in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
