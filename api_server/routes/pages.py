"""A page to try the server with. It brings everything along and asks nothing of other hosts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from api_server.state import ServerState

_FOLDER = Path(__file__).parent.parent / "pages"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _file(name: str) -> Response:
    return Response(_content(name), media_type=_TYPES[Path(name).suffix], headers=_HEADERS)


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/chat")
    async def chat() -> Response:
        return _file("chat.html")

    @routes.get("/chat/chat.css")
    async def style() -> Response:
        return _file("chat.css")

    @routes.get("/chat/chat.js")
    async def script() -> Response:
        return _file("chat.js")

    return routes
