"""The paths of the OpenAI API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api_server.generate import CHAT, COMPLETIONS, answer
from api_server.json_response import JsonResponse
from api_server.openapi import failures, generation
from api_server.schemas.chat import ChatRequest
from api_server.schemas.completion import CompletionRequest
from api_server.schemas.responses import ChatCompletion, Completion, Model, ModelList
from api_server.served_model import ServedModel
from api_server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", openapi_extra=generation(ChatRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        """Continues a conversation."""
        return await answer(state, request, CHAT)

    @routes.post("/v1/completions", openapi_extra=generation(CompletionRequest, Completion))
    async def create_completion(request: Request) -> Response:
        """Continues text or token ids."""
        return await answer(state, request, COMPLETIONS)

    @routes.get("/v1/models", response_model=ModelList, responses=failures("503"))
    async def list_models() -> Response:
        """The names that this server answers to."""
        served = state.require_model()
        return JsonResponse({"object": "list", "data": [_model(state, served, name) for name in served.names]})

    @routes.get("/v1/models/{model:path}", response_model=Model, responses=failures("404", "503"))
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        served = state.require_model()
        return JsonResponse(_model(state, served, served.check_name(model)))

    return routes


def _model(state: ServerState, served: ServedModel, name: str) -> dict[str, Any]:
    engine = state.engines.model
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "stepahead",
        "root": served.root,
        "parent": None,
        "max_model_len": engine.model["max_model_len"] if engine else None,
    }
