"""One HTTP/1.1 connection that reads streamed answers at a few microseconds a token.

The client shares two cores with the server that it measures, so nothing is parsed but what is counted: events are found
by scanning bytes, and JSON is never decoded.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

_EVENT = b"\ndata: {"  # JSON escapes line feeds, so this is no text of an answer
_END = b"\r\n0\r\n\r\n"  # the last chunk of a chunked body
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_TAIL = 2048  # bytes kept of what was read: enough for the usage event and the end


class StreamError(Exception):
    """An answer that is not a whole stream: another status than 200, or a connection that closed."""


@dataclass(slots=True)
class Timing:
    """One streamed answer. Times in seconds of `time.perf_counter`."""

    sent: float
    first: float = 0.0  # arrival of the first token's event
    last: float = 0.0  # arrival of the last event
    events: int = 0
    gaps: list[float] = field(default_factory=list)  # between reads that brought events, from the first token on
    tokens: int = 0  # as the server's usage says


class StreamConnection(asyncio.Protocol):
    """A keep-alive connection, one request at a time. Owner: the event loop."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Timing] | None = None
        self._timing = Timing(0.0)
        self._leading = 0
        self._head: bytes | None = b""  # until it is complete
        self._status = 0
        self._length: int | None = None  # of a body that is not chunked
        self._tail = b""

    @classmethod
    async def open(cls, host: str, port: int) -> StreamConnection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    async def request(self, data: bytes, leading_events: int = 0) -> Timing:
        """Sends a whole request and reads its answer. Raises StreamError; then the connection is of no more use.

        `leading_events` come before the first token: a chat answer begins with one that names the role.
        """
        if self._transport is None or self._transport.is_closing():
            raise StreamError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._length, self._tail = b"", None, b""
        self._timing, self._leading = Timing(perf_counter()), leading_events
        self._transport.write(data)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self._head is not None:
            data = self._read_head(data)
            if self._head is not None:
                return
        if self._status != 200:
            self._read_refusal(data)
            return
        events = (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if events:
            timing = self._timing
            timing.events += events
            if timing.first:
                timing.gaps.append(now - timing.last)
            elif timing.events > self._leading:
                timing.first = now
            timing.last = now
        self._tail = (self._tail + data)[-_TAIL:]
        if self._tail.endswith(_END):
            self._finish()

    def _read_head(self, data: bytes) -> bytes:
        """Takes in the head; returns what of the body came with it, its last line's end included."""
        head, found, body = ((self._head or b"") + data).partition(b"\r\n\r\n")
        if not found:
            self._head = head
            return b""
        self._head = None
        self._status = int(head[9:12])
        length = _CONTENT_LENGTH.search(head)
        self._length = int(length[1]) if length else None
        return b"\r\n" + body

    def _read_refusal(self, data: bytes) -> None:
        self._tail += data
        if self._length is None or len(self._tail) >= self._length + 2:
            self._fail(f"status {self._status}: {self._tail[:300].decode('utf-8', 'replace').strip()}")
            self.close()

    def _finish(self) -> None:
        usage = _COMPLETION_TOKENS.findall(self._tail)
        if not usage or b"data: [DONE]" not in self._tail:
            self._fail(f"the stream ended early: {self._tail[-300:].decode('utf-8', 'replace')}")
            return
        self._timing.tokens = int(usage[-1])
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._timing)

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StreamError(reason))
