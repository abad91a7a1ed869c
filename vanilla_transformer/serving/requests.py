"""Requests and responses of LibreTranslate's interface, and how to read them safely."""

from collections import Counter
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request
from pydantic import BaseModel, Field, ValidationError, model_validator
from python_multipart.exceptions import FormParserError
from starlette.requests import ClientDisconnect

URL_ENCODED, MULTIPART = FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
MOST_FIELDS = 1000  # of a form, as in Starlette


class DetectRequest(BaseModel):
    q: str = Field(description="The text whose language is asked for.")
    api_key: str | None = None


class TranslateRequest(BaseModel):
    # Without `fail_fast`, the answer to a long list of numbers has an error for each.
    q: str | Annotated[list[str], Field(fail_fast=True)] = Field(
        description="A text, or in JSON a list of texts."
    )
    source: str = Field(description='Language of the text, such as "en", or "auto".')
    target: str = Field(description="Language of the translation.")
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(default=0, ge=0, description="Number of other translations wanted.")
    stream: bool = Field(
        default=False,
        description="Answer with JSON lines, one for each sentence as soon as it is translated. "
        "The texts in them add up to the translation. For one text, without alternatives.",
    )
    api_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_empty(cls, fields: Any) -> Any:
        optional = ("format", "alternatives", "stream")
        if not isinstance(fields, dict):
            return fields
        return {k: v for k, v in fields.items() if k not in optional or v not in (None, "")}

    @model_validator(mode="after")
    def _expect_one_text_to_stream(self) -> Self:
        if self.stream and (self.alternatives or isinstance(self.q, list)):
            raise ValueError("stream: expected q to be one text, and no alternatives")
        return self

    @property
    def texts(self) -> list[str]:
        return [self.q] if isinstance(self.q, str) else self.q


class DetectedLanguage(BaseModel):
    confidence: float = Field(description="Probability of the language, in percent.")
    language: str


class TranslateResponse(BaseModel):
    translatedText: str | list[str]  # noqa: N815
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = None  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None


class Language(BaseModel):
    code: str
    name: str
    targets: list[str]


class Error(BaseModel):
    error: str


Body = TypeVar("Body", bound=BaseModel)


async def read_request(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """The body of a request, in JSON or as a form, or the fields in its URL if it has no body.

    Raises:
        HTTPException: The body is too long (413), or is invalid (400).
    """
    content, size = bytearray(), 0
    try:
        async for chunk in request.stream():  # to its end, or the client does not read the response
            size += len(chunk)
            content += chunk if size <= max_bytes else b""
    except ClientDisconnect:
        raise HTTPException(400, "the connection closed before the end of the request") from None
    if size > max_bytes:
        raise HTTPException(413, f"request of {size} bytes: expected at most {max_bytes}")
    try:
        content_type = request.headers.get("content-type", "").lower()
        if content_type.startswith(URL_ENCODED):
            return kind.model_validate(_fields(_read_url_encoded(bytes(content))))
        if content_type.startswith(MULTIPART):
            return kind.model_validate(_fields(await _read_multipart(request, bytes(content))))
        if not content and request.query_params:  # as from deep-translator
            return kind.model_validate(_fields(_read_url_encoded(request.scope["query_string"])))
        return kind.model_validate_json(bytes(content))
    except ValidationError as error:
        found = []
        for one in error.errors(include_input=False, include_url=False):
            field = ".".join(map(str, one["loc"]))
            message = one["msg"].removeprefix("Value error, ")  # pydantic adds this to our errors
            found.append(f"{field}: {message}" if field else message)
        raise HTTPException(400, "; ".join(found)) from None


def _read_url_encoded(content: bytes) -> list[tuple[str, Any]]:
    """Form data as in HTML: UTF-8 with or without percent signs. Starlette reads Latin-1."""
    try:
        text = content.decode()
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise HTTPException(400, f"not a form: {error}") from None


async def _read_multipart(request: Request, content: bytes) -> list[tuple[str, Any]]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    try:
        content.decode()  # Starlette would read other bytes as Latin-1
        # `content` is within the server's own limit; Starlette's is 1 MB per part.
        form = await Request(request.scope, receive).form(max_part_size=len(content))
        return form.multi_items()
    except (FormParserError, UnicodeError) as error:  # a charset may have errors of its own
        raise HTTPException(400, f"not a form: {error}") from None


def _fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, number in Counter(name for name, _ in items).items():
        if number > 1:
            raise HTTPException(400, f"{name}: expected one, not {number}")
    return dict(items)


def request_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a request body in OpenAPI."""
    schema = {"schema": kind.model_json_schema()}
    content = {"application/json": schema, **dict.fromkeys(FORMS, schema)}
    return {"requestBody": {"required": True, "content": content}}
