"""Text to token ids and back."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from api_server.body import read_body
from api_server.errors import BadRequestError
from api_server.json_response import JsonResponse
from api_server.openapi import generation
from api_server.schemas.chat import ChatRequest
from api_server.schemas.faults import bad_request
from api_server.schemas.sampling import check_vocabulary
from api_server.schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from api_server.served_model import ServedModel
from api_server.state import ServerState

M = TypeVar("M", bound=BaseModel)


async def _parse(state: ServerState, request: Request, schema: type[M]) -> M:
    """The body. Raises `BadRequestError` naming the field."""
    data = await read_body(request, state.config.server.max_body_bytes)
    try:
        return schema.model_validate_json(data)
    except ValidationError as e:
        raise bad_request(schema, e) from None


def _text(body: TokenizeRequest, served: ServedModel) -> str:
    """What is to be encoded. Raises `BadRequestError`."""
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("Either prompt or messages is required, and not both.", param="prompt")
    if body.messages is None:
        return body.prompt or ""
    if served.template is None:
        raise BadRequestError("This model has no chat template, so it takes no messages.", param="messages")
    continued = bool(body.continue_final_message)
    chat = ChatRequest.model_validate({"messages": body.messages, "chat_template_kwargs": body.chat_template_kwargs})
    return served.template.render(
        chat.conversation(),
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=chat.template_variables,
    )


def router(state: ServerState) -> APIRouter:
    """The routes, bound to `state`."""
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/tokenize", openapi_extra=generation(TokenizeRequest, TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of rendered messages."""
        body = await _parse(state, request, TokenizeRequest)
        served, engine = state.require_ready()
        served.check_name(body.model)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        (ids,) = await served.tokenizer.encode([_text(body, served)], special)
        names = [served.tokenizer.name(token) for token in ids] if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": engine.model["max_model_len"], "tokens": ids, "token_strs": names}
        return JsonResponse(found)

    @routes.post("/detokenize", openapi_extra=generation(DetokenizeRequest, DetokenizeAnswer))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await _parse(state, request, DetokenizeRequest)
        served, engine = state.require_ready()
        served.check_name(body.model)
        check_vocabulary("tokens", body.tokens, engine.model["vocab_size"])
        return JsonResponse({"prompt": await asyncio.to_thread(served.tokenizer.decode, body.tokens)})

    return routes
