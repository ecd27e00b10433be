"""Chat completions: from messages to a prompt, and from tokens to the answer's shape."""

from __future__ import annotations

from typing import Any

import orjson

from api_server.answer import FINISH_REASONS, Identity, usage
from api_server.budget import output_tokens, too_long, truncated
from api_server.errors import BadRequestError
from api_server.logprobs import chat_logprobs, prompt_logprobs
from api_server.mailbox import Sequence
from api_server.prompt import Prompt
from api_server.schemas.chat import ChatRequest
from api_server.served_model import ServedModel
from api_server.sse import event
from common.messages import Ready, unpack_ints

CHUNK = "chat.completion.chunk"


async def prompts_of(body: ChatRequest, served: ServedModel, engine: Ready) -> list[Prompt]:
    """The one prompt that the chat template makes. Raises `BadRequestError`."""
    if served.template is None:
        raise BadRequestError(
            "This model has no chat template, so it takes no messages; start the server with --chat-template.",
            param="messages",
        )
    conversation = body.conversation()
    continued = bool(body.continue_final_message)
    text = served.template.render(
        conversation,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=body.template_variables,
    )
    max_model_len: int = engine.model["max_model_len"]
    field, requested = body.requested_tokens
    at_least = served.tokenizer.at_least(text)
    if at_least > max_model_len and body.truncate_prompt_tokens is None:
        raise too_long(at_least, max_model_len, "messages", at_least=True)
    (ids,) = await served.tokenizer.encode([text], bool(body.add_special_tokens))
    if not ids:
        raise BadRequestError("The chat template makes an empty prompt of these messages.", param="messages")
    ids = truncated(ids, body.truncate_prompt_tokens, max_model_len, requested)
    max_tokens = output_tokens(len(ids), max_model_len, field, requested, None, served.defaults.max_new_tokens)
    last = conversation[-1]
    echo = last["content"] if body.echo and last["role"] == "assistant" else ""
    return [Prompt(ids, max_tokens, echo)]


class ChatForm:
    """The shape of chat answers; of `Form`."""

    def __init__(self, identity: Identity, body: ChatRequest, prompts: list[Prompt]) -> None:
        self._identity = identity
        self._prompt = prompts[0]
        self._count = body.count
        self._top = body.top_logprobs or 0
        self._logprobs = bool(body.logprobs)
        self._ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._usage = body.usage_in_stream
        self._usage_so_far = body.usage_in_chunks
        self._plain = not (self._logprobs or self._ids or self._usage_so_far)
        self._around = [self._split(index) for index in range(self._count)] if body.stream else []

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """An event with only text, as what stands before and after the text."""
        chunk = event(self._chunk({"index": index, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}))
        before, after = chunk.rsplit(b'"content":""', 1)
        return before + b'"content":', after

    def _chunk(self, choice: dict[str, Any], sequence: Sequence | None = None) -> dict[str, Any]:
        chunk = {**self._identity.fields(CHUNK), "choices": [choice]}
        if self._usage_so_far and sequence is not None:
            chunk["usage"] = usage([sequence], 1)
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def opening(self, sequence: Sequence) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk(choice, sequence)
        if self._ids:
            chunk["prompt_token_ids"] = self._prompt.ids
        if not self._prompt.echo:
            return event(chunk)
        echo = {"index": sequence.index, "delta": {"content": self._prompt.echo}, "finish_reason": None}
        return event(chunk) + event(self._chunk({**echo, "logprobs": None}, sequence))

    def delta(self, sequence: Sequence) -> bytes:
        text = sequence.take_text()
        if self._plain:
            if not text:
                return b""
            before, after = self._around[sequence.index]
            return before + orjson.dumps(text) + after
        return self._rich_delta(sequence, text)

    def _rich_delta(self, sequence: Sequence, text: str) -> bytes:
        tokens = sequence.take_logprobs()
        ids = sequence.take_ids() if self._ids else []
        if not (text or tokens or ids):
            return b""
        choice: dict[str, Any] = {
            "index": sequence.index,
            "delta": {"content": text},
            "logprobs": chat_logprobs(tokens, self._top) if tokens else None,
            "finish_reason": None,
        }
        if self._ids:
            choice["token_ids"] = ids
        return event(self._chunk(choice, sequence))

    def closing(self, sequence: Sequence) -> bytes:
        choice = {
            "index": sequence.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": FINISH_REASONS[sequence.finish],
            "stop_reason": sequence.stop,
        }
        return event(self._chunk(choice, sequence))

    def ending(self, sequences: list[Sequence]) -> bytes:
        if not self._usage:
            return b""
        return event({**self._identity.fields(CHUNK), "choices": [], "usage": usage(sequences, self._count)})

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        body = {
            **self._identity.fields("chat.completion"),
            "choices": [self._choice(sequence) for sequence in sequences],
            "usage": usage(sequences, self._count),
        }
        if self._ids:
            body["prompt_token_ids"] = self._prompt.ids
        if self._prompt_logprobs is not None:
            scored = sequences[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(scored, self._prompt.ids, self._prompt_logprobs)
        return body

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": {
                "role": "assistant",
                "content": self._prompt.echo + sequence.take_text(),
                "refusal": None,
                "annotations": [],
            },
            "logprobs": chat_logprobs(sequence.take_logprobs(), self._top) if self._logprobs else None,
            "finish_reason": FINISH_REASONS[sequence.finish],
            "stop_reason": sequence.stop,
        }
        if self._ids:
            choice["token_ids"] = unpack_ints("i", bytes(sequence.emitted))
        return choice
