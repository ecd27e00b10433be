"""The load client counts what a server sends, however its bytes are cut into reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stream import StreamConnection, StreamError, Timing

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = [
    b'data: {"text":"data: {"}\n\n',
    b'data: {"text":"\\ndata: {"}\n\n',
    b": keep-alive\n\n",
    b'data: {"text":"a"}\n\n',
]


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport whose other end says nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def exchange(reads: Sequence[bytes], leading: int = 0) -> Timing:
    """One request on a fresh connection, answered by these reads."""

    async def go() -> Timing:
        connection = StreamConnection()
        connection.connection_made(Wire())
        answer = asyncio.ensure_future(connection.request(b"POST", leading))
        await asyncio.sleep(0)
        for read in reads:
            connection.data_received(read)
        return await answer

    return asyncio.run(go())


@settings(max_examples=200)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=6),
    together=st.integers(1, 3),
    cuts=st.sets(st.integers(1, 600), max_size=12),
)
def test_events_are_counted_once_wherever_the_reads_are_cut(events: list[bytes], together: int, cuts: set[int]) -> None:
    parts = [b"".join(events[i : i + together]) for i in range(0, len(events), together)]
    data = HEAD + chunked([*parts, USAGE, DONE])
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    timing = exchange([data[a:b] for a, b in pairwise(bounds)])
    assert timing.events == 1 + sum(event.startswith(b"data") for event in events)
    assert timing.tokens == 7
    assert timing.sent <= timing.first <= timing.last
    assert sum(timing.gaps) == pytest.approx(timing.last - timing.first)


def test_the_first_token_of_a_chat_comes_after_the_event_that_names_the_role() -> None:
    role, *rest = (chunk for chunk in (b'data: {"role":1}\n\n', b'data: {"a":1}\n\n', USAGE, DONE))
    whole = chunked([role, *rest])
    cut = whole.index(b"\r\n", 5) + 2
    assert len(exchange([HEAD, whole[:cut], whole[cut:]], leading=1).gaps) == 0
    assert len(exchange([HEAD, whole[:cut], whole[cut:]], leading=0).gaps) == 1


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        ([b'HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\n{"a"'], 'status 503: {"a"'),
        ([b"HTTP/1.1 404 No\r\n\r\n", b"gone"], "status 404"),
        ([HEAD, chunked([b'data: {"error":{}}\n\n'])], "ended early"),
        ([HEAD, chunked([USAGE])], "ended early"),
    ],
    ids=["refused", "refused, no length", "error in the stream", "no DONE"],
)
def test_an_answer_that_is_no_whole_stream_is_an_error(reads: list[bytes], reason: str) -> None:
    with pytest.raises(StreamError, match=reason):
        exchange(reads)


def test_a_connection_that_closes_in_the_middle_is_an_error_and_of_no_more_use() -> None:
    async def go() -> None:
        connection, wire = StreamConnection(), Wire()
        connection.connection_made(wire)
        answer = asyncio.ensure_future(connection.request(b"POST"))
        await asyncio.sleep(0)
        connection.data_received(HEAD)
        wire.close()
        connection.connection_lost(None)
        with pytest.raises(StreamError, match="closed the connection"):
            await answer
        with pytest.raises(StreamError, match="is closed"):
            await connection.request(b"POST")

    asyncio.run(go())


def test_a_connection_serves_one_request_after_another() -> None:
    async def go() -> list[int]:
        connection, wire = StreamConnection(), Wire()
        connection.connection_made(wire)
        events = []
        for count in (1, 3):
            answer = asyncio.ensure_future(connection.request(b"POST"))
            await asyncio.sleep(0)
            connection.data_received(HEAD + chunked([EVENTS[3]] * count + [USAGE, DONE]))
            events.append((await answer).events)
        assert wire.sent == b"POSTPOST"
        return events

    assert asyncio.run(go()) == [2, 4]
