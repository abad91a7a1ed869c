"""The web application: LibreTranslate's interface to a translation service."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security.utils import get_authorization_scheme_param
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as AnyHTTPException

from .. import __version__
from .arguments import ServingArguments, key_digest
from .batching import Translator
from .languages import Pair, language_name
from .observation import CHARACTERS, RequestMiddleware
from .requests import (
    DetectedLanguage,
    DetectRequest,
    Error,
    Language,
    TranslateRequest,
    TranslateResponse,
    read_request,
    request_schema,
)
from .service import TranslationService

logger = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": description}
    for status, description in {
        400: "Not a valid request",
        403: "No valid API key",
        408: "The request took too long to arrive",
        413: "Too long a request",
        429: "Too many requests under way",
        500: "The translation failed",
        503: "The translation took too long",
    }.items()
}


def make_app(translators: Mapping[Pair, Translator], arguments: ServingArguments) -> FastAPI:
    """The application.

    Args:
        translators: The translator of each language pair.
        arguments: The options of the server.
    """
    app = FastAPI(
        title="vanilla_transformer",
        version=__version__,
        description="Translation with LibreTranslate's interface.",
        openapi_url="/spec",
        redoc_url=None,
    )
    app.add_middleware(RequestMiddleware, arguments=arguments)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    app.add_exception_handler(AnyHTTPException, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    service = TranslationService(translators, arguments)
    _add_translation(app, service, arguments)
    _add_information(app, service, arguments)
    return app


def _add_translation(
    app: FastAPI, service: TranslationService, arguments: ServingArguments
) -> None:
    async def read(request: Request, kind: Any) -> Any:
        async with _until(request.state.end, 408):
            body = await read_request(request, kind, arguments.max_body)
        known = arguments.key_digests
        if known and key_digest(body.api_key or _bearer(request)) not in known:
            raise HTTPException(403, "api_key: expected a valid API key")
        return body

    @app.post(
        "/translate",
        response_model=TranslateResponse,
        responses=ERRORS,
        openapi_extra=request_schema(TranslateRequest),
    )
    async def translate(request: Request) -> Response:
        body: TranslateRequest = await read(request, TranslateRequest)
        service.check_limits(body.texts, body.alternatives)
        # In a thread, because detection runs in Python, and loads its model first.
        pair, detected = await asyncio.to_thread(service.find_pair, body)
        characters = sum(map(len, body.texts))
        request.state.work = f"{'-'.join(pair)} {characters} characters"
        CHARACTERS.labels("-".join(pair)).inc(characters)
        if body.stream:
            pieces = service.stream(body, pair)
            async with _until(request.state.end, 503):  # an error before the first has a status
                first = await _while_connected(request, anext(pieces, None))
            lines = _json_lines(first, pieces, request.state.end)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        async with _until(request.state.end, 503):
            work = service.translate(body, pair, detected)
            return JSONResponse(await _while_connected(request, work))

    @app.post(
        "/detect",
        response_model=list[DetectedLanguage],
        responses=ERRORS,
        openapi_extra=request_schema(DetectRequest),
    )
    async def detect(request: Request) -> list[DetectedLanguage]:
        body: DetectRequest = await read(request, DetectRequest)
        service.check_limits([body.q])
        return await asyncio.to_thread(service.detect, body.q)


def _add_information(
    app: FastAPI, service: TranslationService, arguments: ServingArguments
) -> None:
    @app.get("/languages")
    async def languages() -> list[Language]:
        return service.languages()

    @app.head("/health", include_in_schema=False)  # for services that monitor a server
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/frontend/settings")
    async def settings() -> dict[str, Any]:
        first = service.languages()[0]
        return {
            "apiKeys": bool(arguments.key_digests),
            "charLimit": arguments.max_characters,
            "filesTranslation": False,
            "frontendTimeout": 500,
            "keyRequired": bool(arguments.key_digests),
            "language": {
                "source": {"code": first.code, "name": first.name},
                "target": {"code": first.targets[0], "name": language_name(first.targets[0])},
            },
            "suggestions": False,
            "supportedFilesFormat": [],
        }

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _bearer(request: Request) -> str:
    scheme, key = get_authorization_scheme_param(request.headers.get("authorization"))
    return key if scheme.lower() == "bearer" else ""


@asynccontextmanager
async def _until(end: float, status: int) -> AsyncIterator[None]:
    """Raise an HTTPException with the status at the given time of the event loop."""
    try:
        async with asyncio.timeout_at(end):
            yield
    except TimeoutError:
        raise HTTPException(status, ERRORS[status]["description"]) from None


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of the work, which is cancelled if the client disconnects."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():  # after a complete request, only the end follows
            raise HTTPException(499, "The client closed the connection")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _json_lines(
    piece: str | None, pieces: AsyncIterator[str], end: float
) -> AsyncIterator[str]:
    """The first piece and the others. An error comes after the pieces translated before it."""
    try:
        async with _until(end, 503):
            while piece is not None:
                yield json.dumps({"translatedText": piece}, ensure_ascii=False) + "\n"
                piece = await anext(pieces, None)
    except HTTPException as error:
        logger.warning("The rest of a stream is missing: %s", error.detail)
        yield json.dumps({"error": error.detail}) + "\n"
    except Exception:
        logger.exception("The translation failed")
        yield json.dumps({"error": ERRORS[500]["description"]}) + "\n"


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, AnyHTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    # This response does not pass through the middleware that allows all origins.
    headers = {"Access-Control-Allow-Origin": "*"}
    return JSONResponse({"error": ERRORS[500]["description"]}, 500, headers)
