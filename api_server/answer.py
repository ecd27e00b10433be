"""How one HTTP request for generated text is answered, streamed or whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.engines import EngineClient
from api_server.errors import ApiError, InternalError, UnavailableError
from api_server.mailbox import Mailbox, Sequence
from common.messages import Finish

FINISH_REASONS = {int(Finish.STOP): "stop", int(Finish.LENGTH): "length"}


@dataclass(frozen=True, slots=True)
class Identity:
    """What every answer and every chunk of one request repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """`kind` is the value of `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Form(Protocol):
    """The shape of an endpoint's answers."""

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The answer, once every sequence has ended."""
        ...


class StreamedForm(Form, Protocol):
    """The shape of a stream. Each piece is a whole number of server-sent events, or empty."""

    def opening(self, sequence: Sequence) -> bytes:
        """What comes before a choice's first text."""
        ...

    def delta(self, sequence: Sequence) -> bytes:
        """What is new."""
        ...

    def closing(self, sequence: Sequence) -> bytes:
        """What follows a choice's last text, with the reason of its end."""
        ...

    def ending(self, sequences: list[Sequence]) -> bytes:
        """What follows the last choice."""
        ...


def usage(sequences: list[Sequence], choices_per_prompt: int) -> dict[str, Any]:
    """Token counts. A prompt counts once, however many choices were made of it."""
    prompts = sequences[::choices_per_prompt]
    prompt = sum(sequence.prompt_tokens for sequence in prompts)
    completion = sum(sequence.completion_tokens for sequence in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in prompts)},
    }


def failure(sequence: Sequence) -> ApiError | None:
    """What its client must be told, when it ended in no regular way."""
    if sequence.finish == Finish.ERROR:
        if sequence.lost:
            return UnavailableError(sequence.error or "The engine was lost.", code="engine_unavailable")
        return InternalError(sequence.error) if sequence.error else InternalError()
    if sequence.finish == Finish.ABORT:
        return UnavailableError("The server ended this request.", code="aborted")
    return None


class Answer(Response):
    """Submits on being sent, watches for the client's going, and leaves nothing behind however it ends."""

    def __init__(self, engines: EngineClient, mailbox: Mailbox, form: Form) -> None:
        super().__init__()
        self.engines = engines
        self.mailbox = mailbox
        self.form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            for sequence in self.mailbox.sequences:
                self.engines.submit(sequence)
            await self.write(send)
        finally:
            watcher.cancel()
            self.engines.abort(self.mailbox)
            self.mailbox.close()

    async def write(self, send: Send) -> None:
        """Waits for the results and sends them."""
        mailbox = self.mailbox
        while not mailbox.is_due:
            await mailbox.wait()
            if mailbox.gone:
                return
        for sequence in mailbox.sequences:
            error = failure(sequence)
            if error is not None:
                raise error
        body = orjson.dumps(self.form.whole(mailbox.sequences))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.mailbox.leave()
