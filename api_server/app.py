"""The ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api_server.errors import ApiError, HttpError, InternalError
from api_server.middleware import Edge
from api_server.openapi import describe
from api_server.routes import openai, operations, pages, plain, tokens
from api_server.state import ServerState
from api_server.version import VERSION


def create_app(state: ServerState) -> FastAPI:
    """Everything that this process serves, bound to `state`."""
    app = FastAPI(
        title="Stepahead",
        version=VERSION,
        description="Language models over the OpenAI API.",
        redirect_slashes=False,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
    )
    app.add_middleware(Edge, state=state)
    for routes in (openai, tokens, operations, pages, plain):
        app.include_router(routes.router(state))
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(app)
    return app.openapi_schema


async def _api_error(request: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, ApiError) else InternalError().response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What routing found."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    messages = {
        404: f"There is no {request.url.path} here; /docs lists what there is.",
        405: f"{request.method} is not allowed for {request.url.path}.",
    }
    return HttpError(status, messages.get(status, "The request cannot be served."), headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    """Only for what goes wrong outside `Edge`, which logs and answers everything else."""
    return InternalError().response()
