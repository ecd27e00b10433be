"""The paths for whoever watches over the server: health, load, version, metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from api_server.json_response import JsonResponse
from api_server.metrics import registry
from api_server.state import ServerState
from api_server.version import VERSION


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(tags=["Operations"])
    metrics = registry(state)

    @routes.get("/health/live")
    async def live() -> Response:
        """200 while the process serves HTTP at all."""
        return JsonResponse({"status": "ok"})

    @routes.get("/health", responses={503: {"description": "Loading, draining, or no engine answers."}})
    @routes.get("/health/ready", responses={503: {"description": "Loading, draining, or no engine answers."}})
    @routes.get("/ping", responses={503: {"description": "Loading, draining, or no engine answers."}})
    async def ready() -> Response:
        """200 when a request would be served now; else 503 with how far start-up has come."""
        if state.is_ready:
            return JsonResponse({"status": "ok", **state.status()})
        return JsonResponse({"status": "unavailable", **state.status()}, 503)

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
