"""Streamed answers: server-sent events, written as bytes straight to the connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Send

from api_server.answer import Answer, StreamedForm, failure
from api_server.engines import EngineClient
from api_server.errors import ApiError, InternalError
from api_server.mailbox import Mailbox, Sequence

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON object."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class StreamedAnswer(Answer):
    """Nothing is sent before the first result, so an error known by then has its own status."""

    def __init__(self, engines: EngineClient, mailbox: Mailbox, form: StreamedForm, keep_alive_s: float) -> None:
        super().__init__(engines, mailbox, form)
        self._form = form
        self._keep_alive_s = keep_alive_s
        self._opened: set[int] = set()

    async def write(self, send: Send) -> None:
        mailbox = self.mailbox
        silence = _Silence(self._keep_alive_s, mailbox.wake)
        begun = False
        try:
            while True:
                await mailbox.wait()
                if mailbox.gone:
                    return
                news = mailbox.take_news()
                body, over = self._events(news, begun)
                if not news and silence.is_over:
                    body = KEEP_ALIVE
                if not body:
                    continue
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await send({"type": "http.response.body", "body": body, "more_body": not over})
                if over:
                    return
                silence.broken()
        except ApiError:
            raise  # before the first byte: a status of its own
        except Exception:
            if not begun:
                raise
            log.exception("a stream failed")
            last = b"data: " + InternalError().body() + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            silence.close()

    def _events(self, news: list[Sequence], begun: bool) -> tuple[bytes, bool]:
        """What to send for `news`, and whether it is the last. Raises `ApiError` for a failure before the first."""
        form = self._form
        parts = []
        for sequence in news:
            error = failure(sequence) if sequence.finish else None
            if error is not None and not begun:
                raise error
            if error is not None:
                parts.append(b"data: " + error.body() + b"\n\n")
                return b"".join(parts), True
            if sequence.index not in self._opened:
                self._opened.add(sequence.index)
                parts.append(form.opening(sequence))
            parts.append(form.delta(sequence))
            if sequence.finish:
                parts.append(form.closing(sequence))
        over = self.mailbox.open == 0
        if over:
            parts += (form.ending(self.mailbox.sequences), DONE)
        return b"".join(parts), over


class _Silence:
    """Notices that nothing has been sent for `after` seconds; 0 never does."""

    def __init__(self, after: float, wake: Callable[[], None]) -> None:
        self._after = after
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(after, self._look) if after > 0 else None

    @property
    def is_over(self) -> bool:
        return self._timer is not None and self._loop.time() - self._since >= self._after

    def broken(self) -> None:
        """Something has been sent."""
        self._since = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        rest = self._since + self._after - self._loop.time()
        self._timer = self._loop.call_later(rest if rest > 0 else self._after, self._look)
        if rest <= 0:
            self._wake()
