"""What holds for every request, whatever its path: an id, a time, an answer even when we fail."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.body import REQUEST_ID, new_request_id, sane_request_id
from api_server.errors import InternalError
from api_server.state import ServerState

log = logging.getLogger(__name__)


class Edge:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        generates = scope["method"] == "POST"
        self._state.open_requests += generates
        try:
            await self._answer(scope, receive, send)
        finally:
            self._state.open_requests -= generates

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_ns = time.monotonic_ns()
        request_id = sane_request_id(Headers(scope=scope).get("x-request-id")) or new_request_id()
        scope[REQUEST_ID] = request_id
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(message["status"])
                message["headers"] = [*message.get("headers", ()), *self._headers(request_id, received_ns)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            log.debug("%s: the client went away while it sent", request_id)
        except Exception:
            log.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            if not started:
                await InternalError().response()(scope, receive, send_with_headers)

    def _headers(self, request_id: str, received_ns: int) -> list[tuple[bytes, bytes]]:
        milliseconds = (time.monotonic_ns() - received_ns) // 1_000_000
        headers = [
            (b"x-request-id", request_id.encode("ascii")),
            (b"openai-processing-ms", str(milliseconds).encode("ascii")),
        ]
        if self._state.draining:
            headers.append((b"connection", b"close"))
        return headers

    def _count(self, status: int) -> None:
        if status >= 400:
            self._state.errors[status] = self._state.errors.get(status, 0) + 1
