"""The raw side of a request: its bytes, within bounds, and its id."""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from api_server.errors import BodyTooLargeError, HttpError

REQUEST_ID = "stepahead.request_id"  # in the ASGI scope, set by the middleware

BODY_SECONDS = 60

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def content_length(request: Request, limit: int) -> int:
    """What the head announces; 0 when it does not say. Raises `BodyTooLargeError`."""
    text = request.headers.get("content-length", "")
    length = int(text) if text.isascii() and text.isdigit() else 0
    if length > limit:
        raise _too_large(limit)
    return length


async def read_body(request: Request, limit: int) -> bytes:
    """All of it. Raises `BodyTooLargeError` at the first byte beyond `limit`, `ClientDisconnect`, and `HttpError` when
    it has not come within `BODY_SECONDS`."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request, limit)
    except TimeoutError:
        raise HttpError(408, f"The body must arrive within {BODY_SECONDS} seconds.") from None


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks) if len(chunks) > 1 else chunks[0]


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body must have at most {limit} bytes (--max-body-bytes).")


def sane_request_id(value: str | None) -> str | None:
    """`value` when it can stand in a header and in a log line: 1 to 128 printable ASCII characters, no spaces."""
    return value if value is not None and _SANE_ID.fullmatch(value) else None


def new_request_id() -> str:
    return uuid.uuid4().hex


def request_id_of(scope: Scope) -> str:
    """The id that this request is answered with."""
    return str(scope.get(REQUEST_ID) or new_request_id())
