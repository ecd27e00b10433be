"""The paths for people with curl: text in, text out."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api_server.answer import Form, Identity
from api_server.budget import output_tokens, too_long
from api_server.errors import BadRequestError
from api_server.generate import Endpoint, answer, parse
from api_server.json_response import JsonResponse
from api_server.mailbox import Sequence
from api_server.openapi import generation
from api_server.prompt import Prompt
from api_server.schemas.sampling import GenerationRequest
from api_server.served_model import ServedModel
from api_server.state import ServerState
from common.messages import Ready

MAX_NEW_TOKENS = 200


class PlainRequest(BaseModel):
    """One user message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str = Field(min_length=1)


class PlainAnswer(BaseModel):
    """What the model says to it."""

    generated_text: str
    request_time: float = Field(description="Seconds.")


class _Message(GenerationRequest):
    """A plain request with everything else left at its default."""

    text: str


def _parse(data: bytes) -> _Message:
    return _Message.model_validate({"text": parse(PlainRequest, data).text})


async def _prompts_of(body: _Message, served: ServedModel, engine: Ready) -> list[Prompt]:
    """The chat template's prompt for one user message; a model without a template goes on with the text itself."""
    text = body.text
    if served.template is not None:
        text = served.template.render([{"role": "user", "content": body.text}])
    max_model_len: int = engine.model["max_model_len"]
    at_least = served.tokenizer.at_least(text)
    if at_least > max_model_len:
        raise too_long(at_least, max_model_len, "text", at_least=True)
    (ids,) = await served.tokenizer.encode([text], served.template is None)
    if not ids:
        raise BadRequestError("text makes an empty prompt.", param="text")
    cap = served.defaults.max_new_tokens
    return [Prompt(ids, output_tokens(len(ids), max_model_len, "text", None, MAX_NEW_TOKENS, cap))]


class _PlainForm:
    def __init__(self, began: float) -> None:
        self._began = began

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {"generated_text": sequences[0].take_text(), "request_time": round(time.monotonic() - self._began, 6)}


def _endpoint(began: float) -> Endpoint[_Message]:
    def form(identity: Identity, body: _Message, prompts: list[Prompt], served: ServedModel) -> Form:
        return _PlainForm(began)

    return Endpoint(_parse, "plain", _prompts_of, form, lambda body: {})


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(tags=["Plain"])

    @routes.get("/")
    async def root() -> Response:
        """Whether anybody is there."""
        return JsonResponse({"status": "ok"})

    @routes.post("/generate", openapi_extra=generation(PlainRequest, PlainAnswer))
    @routes.post("/predict", openapi_extra=generation(PlainRequest, PlainAnswer))
    async def generate(request: Request) -> Response:
        """Answers one message, in at most 200 tokens."""
        return await answer(state, request, _endpoint(time.monotonic()))

    return routes
