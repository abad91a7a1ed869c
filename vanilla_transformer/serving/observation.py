"""The log lines and Prometheus metrics of a server's requests."""

import asyncio
import logging
import time
from urllib.parse import quote

from fastapi.responses import JSONResponse
from prometheus_client import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .arguments import ServingArguments

logger = logging.getLogger(__name__)

PATHS = ("/translate", "/detect")

REQUESTS = Counter("vanilla_transformer_requests", "Requests", ["path", "status"])
SECONDS = Histogram("vanilla_transformer_request_seconds", "Time of a request", ["path"])
CHARACTERS = Counter("vanilla_transformer_characters", "Characters to translate", ["pair"])
UNDER_WAY = Gauge("vanilla_transformer_requests_under_way", "Requests under way")


class RequestMiddleware:
    """Counts, limits and logs requests.

    It sets `end` in the state of a request: the time of the event loop, in seconds, at which the
    request must be finished. A route may set `work`, which is added to the log line.

    Args:
        app: The application.
        arguments: The options of the server.
    """

    def __init__(self, app: ASGIApp, arguments: ServingArguments) -> None:
        self.app, self.arguments = app, arguments
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, unless too many requests are under way."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if self.under_way >= self.arguments.max_requests:
            error = {"error": f"{self.under_way} requests are under way: try again"}
            response = JSONResponse(error, 429, {"Retry-After": "1"})
            await self._observe(response, scope, receive, send)
            return
        self.under_way += 1
        UNDER_WAY.inc()
        try:
            await self._observe(self.app, scope, receive, send)
        finally:
            self.under_way -= 1
            UNDER_WAY.dec()

    async def _observe(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["end"] = asyncio.get_running_loop().time() + self.arguments.timeout
        start, status = time.perf_counter(), 500

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_and_look)
        finally:
            seconds = time.perf_counter() - start
            path = getattr(scope.get("route"), "path", None)  # missing if the request was rejected
            if path is None:  # "other", so that clients can't add labels
                path = scope["path"] if scope["path"] in PATHS else "other"
            REQUESTS.labels(path, status).inc()
            SECONDS.labels(path).observe(seconds)
            logger.info(
                "%s POST %s %d %.0f ms %s",
                (scope.get("client") or ["-"])[0],
                quote(scope["path"][:100]),
                status,
                1000 * seconds,
                state.get("work", ""),
            )
