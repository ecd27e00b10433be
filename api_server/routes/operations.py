"""The paths for whoever watches over the server: health, load, version, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from api_server.json_response import JsonResponse
from api_server.metrics import registry
from api_server.state import ServerState
from api_server.version import VERSION

_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "Loading, draining, or no engine answers."}}


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(tags=["Operations"])
    metrics = registry(state)

    @routes.head("/health/live", include_in_schema=False)
    @routes.get("/health/live")
    async def live() -> Response:
        """200 while the process serves HTTP at all."""
        return JsonResponse({"status": "ok"})

    async def ready() -> Response:
        """200 when a request would be served now; else 503 with how far start-up has come."""
        if state.is_ready:
            return JsonResponse({"status": "ok", **state.status()})
        return JsonResponse({"status": "unavailable", **state.status()}, 503)

    for path in ("/health", "/health/ready", "/ping"):
        routes.get(path, responses=_NOT_READY)(ready)
        routes.head(path, include_in_schema=False)(ready)

    @routes.get("/version")
    async def version() -> Response:
        """The server's version."""
        return JsonResponse({"version": VERSION})

    @routes.get("/load")
    async def load() -> Response:
        """Requests for generation that are open in this process."""
        return JsonResponse({"server_load": state.open_requests})

    @routes.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    return routes
