"""From an HTTP request to its sequences: what both endpoints for generated text do, in order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from api_server import chat, completions
from api_server.answer import Answer, Form, Identity, StreamedForm
from api_server.body import content_length, read_body, request_id_of, sane_request_id
from api_server.grammar import grammar_of
from api_server.mailbox import Mailbox, Sequence
from api_server.prompt import Prompt
from api_server.schemas.chat import ChatRequest
from api_server.schemas.completion import CompletionRequest
from api_server.schemas.faults import bad_request
from api_server.schemas.sampling import INT64, GenerationRequest
from api_server.schemas.unsupported import refuse_unsupported
from api_server.served_model import ServedModel
from api_server.sse import StreamedAnswer
from api_server.state import ServerState
from api_server.version import VERSION
from common.messages import Ready, pack_ints

FINGERPRINT = f"stepahead-{VERSION}"

M = TypeVar("M", bound=BaseModel)
B = TypeVar("B", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    """What tells the endpoints apart."""

    parse: Callable[[bytes], B]
    id_prefix: str
    prompts: Callable[[B, ServedModel, Ready], Awaitable[list[Prompt]]]
    form: Callable[[Identity, B, list[Prompt], ServedModel], Form]
    logprobs: Callable[[B], dict[str, int | None]]


def _chat_logprobs(body: ChatRequest) -> dict[str, int | None]:
    return {"logprobs": (body.top_logprobs or 0) if body.logprobs else None, "prompt_logprobs": body.prompt_logprobs}


def _completion_logprobs(body: CompletionRequest) -> dict[str, int | None]:
    """With echo the prompt's are wanted too."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return {"logprobs": body.logprobs, "prompt_logprobs": max((n for n in wanted if n is not None), default=None)}


CHAT = Endpoint(
    lambda data: parse(ChatRequest, data),
    "chatcmpl",
    chat.prompts_of,
    lambda identity, body, prompts, served: chat.ChatForm(identity, body, prompts),
    _chat_logprobs,
)
COMPLETIONS = Endpoint(
    lambda data: parse(CompletionRequest, data),
    "cmpl",
    completions.prompts_of,
    lambda identity, body, prompts, served: completions.CompletionForm(identity, body, prompts, served.tokenizer),
    _completion_logprobs,
)


def parse(schema: type[M], data: bytes) -> M:
    """The body, validated. Raises `BadRequestError` naming the field."""
    try:
        body = schema.model_validate_json(data)
    except ValidationError as e:
        raise bad_request(schema, e) from None
    refuse_unsupported(body.model_extra or {})
    return body


async def answer(state: ServerState, request: Request, endpoint: Endpoint[B]) -> Answer:
    """An answer that is ready to be sent. Raises `ApiError`, and then holds no place in the queue."""
    state.require_ready()
    limit, admission = state.config.server.max_body_bytes, state.engines.admission
    admission.check(content_length(request, limit))
    data = await read_body(request, limit)
    place = admission.enter(len(data))
    try:
        body = endpoint.parse(data)
        return await _prepare(state, body, endpoint, Mailbox(place), request)
    except BaseException:
        place.leave()
        raise


async def _prepare(state: ServerState, body: B, endpoint: Endpoint[B], mailbox: Mailbox, request: Request) -> Answer:
    """The answer to a valid body. Raises `ApiError`."""
    served, engine = state.require_ready()
    identity = Identity(
        f"{endpoint.id_prefix}-{sane_request_id(body.request_id) or request_id_of(request.scope)}",
        int(time.time()),
        served.check_name(body.model),
        FINGERPRINT,
    )
    body.check(engine.model["vocab_size"])
    grammar = await grammar_of(body, served, engine)
    prompts = await endpoint.prompts(body, served, engine)
    state.engines.admission.check_fan_out(len(prompts) * body.count)
    tokens = sum(len(prompt.ids) for prompt in prompts) * body.count
    mailbox.place.resize(len(prompts) * body.count, tokens)
    logprobs: dict[str, Any] = endpoint.logprobs(body)
    for prompt in prompts:
        ids = pack_ints("i", prompt.ids)
        seed = state.seeds.randrange(INT64)
        for choice in range(body.count):
            params = body.sampling(served.defaults, prompt.max_tokens, seed, choice, grammar, **logprobs)
            index, priority, salt = len(mailbox.sequences), body.priority or 0, body.cache_salt or ""
            mailbox.add(Sequence(mailbox, index, ids, params, priority, identity.id, salt))
    form = endpoint.form(identity, body, prompts, served)
    if body.stream:
        streamed = cast(StreamedForm, form)  # only schemas of streaming endpoints have `stream`
        return StreamedAnswer(state.engines, mailbox, streamed, state.config.server.sse_keep_alive_interval)
    mailbox.patient = True
    return Answer(state.engines, mailbox, form)
