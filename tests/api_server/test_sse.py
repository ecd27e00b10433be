"""Streams over real sockets: what is on the wire, slow clients, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api_server.sse import KEEP_ALIVE
from api_server.state import ServerState
from common.messages import Extra, Finish
from tests.api_server.fake_engine import FakeEngine, Reply
from tests.api_server.reading import CHAT, COMPLETIONS, error_of, events, joined_text, say

HELD_BACK = 2_000_000  # characters: more than the sockets' buffers hold


async def until(condition: Callable[[], object]) -> None:
    """Waits for what another task will do; the test's own timeout is the bound."""
    while not condition():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def raw_request(base_url: str, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """The answer's bytes as they come; the connection is closed in the end."""
    host, port = base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    data = json.dumps(body).encode()
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    try:
        yield reader
    finally:
        writer.close()


@pytest.fixture
def held(engine: FakeEngine) -> FakeEngine:
    """An engine that moves only when it is told to."""
    engine.automatic = False
    engine.reply = lambda submit: Reply(["token "] * 100)
    return engine


@pytest.mark.parametrize("patient", [False, True])
async def test_a_client_that_goes_away_ends_its_request(
    base_url: str, held: FakeEngine, state: ServerState, patient: bool
) -> None:
    async with raw_request(base_url, CHAT, say(stream=not patient, n=2)) as reader:
        await until(lambda: len(held.submits) == 2)
        held.step()
        if not patient:
            await reader.readuntil(b"token ")
    await until(lambda: len(held.aborts) == 2)
    await until(lambda: state.open_requests == 0)
    assert state.engines.totals.finished[Finish.ABORT] == 2
    assert state.engines.admission.requests == 0
    assert held.open == {}


async def test_a_client_that_goes_away_before_the_first_token_leaves_the_queue(
    base_url: str, held: FakeEngine, state: ServerState
) -> None:
    async with raw_request(base_url, CHAT, say(stream=True)):
        await until(lambda: held.submits)
        assert state.engines.admission.requests == 1
    await until(lambda: held.aborts)
    await until(lambda: state.engines.admission.requests == 0)


async def test_each_token_is_sent_when_it_arrives(base_url: str, held: FakeEngine) -> None:
    async with raw_request(base_url, COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 3}) as reader:
        await until(lambda: held.submits)
        for _ in range(3):
            held.step()
            assert b"token " in await reader.readuntil(b"\n\n")
        assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")


async def test_a_slow_client_gets_everything_and_costs_no_object_per_token(
    base_url: str, held: FakeEngine, state: ServerState
) -> None:
    async with raw_request(base_url, COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 100}) as reader:
        await until(lambda: held.submits)
        handle = held.submits[0].handle
        sequence = state.engines.engines[0].open[handle]
        piece = "x" * (HELD_BACK // 100)
        for _ in range(200):  # nobody reads
            held.deliver([(handle, [5], piece, Finish.NONE, None)])
            await asyncio.sleep(0)
        for _ in range(1_000):
            held.deliver([(handle, [5], "y", Finish.NONE, None)])
        assert len(sequence.mailbox.news) <= 1
        held.deliver([(handle, [5], "z", Finish.LENGTH, Extra(usage=(1, 1_201, 0)))])
        answer = await reader.readuntil(b"\r\n\r\n")
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await reader.read(2**20)
    assert (answer.count(b"x" * 100), answer.count(b"y")) >= (2 * HELD_BACK // 100, 1_000)
    assert answer.count(b"data: ") < 300


async def test_a_slow_client_slows_nobody_else(base_url: str, held: FakeEngine) -> None:
    async with raw_request(base_url, COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 100}):
        await until(lambda: held.submits)
        slow = held.submits[0].handle
        for _ in range(200):
            held.deliver([(slow, [5], "x" * (HELD_BACK // 100), Finish.NONE, None)])
            await asyncio.sleep(0)
        del held.open[slow]
        held.automatic = True
        async with httpx.AsyncClient(base_url=base_url) as other:
            answer = await other.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "token token token "


async def test_an_engine_that_is_lost_in_mid_stream_ends_it_with_an_error_event(
    base_url: str, held: FakeEngine, state: ServerState
) -> None:
    async with raw_request(base_url, CHAT, say(stream=True)) as reader:
        await until(lambda: held.submits)
        held.step()
        await reader.readuntil(b"token ")
        state.engines.disconnect(0, 1, "test")
        rest = await reader.readuntil(b"0\r\n\r\n")
    data = rest.partition(b"data: ")[2].partition(b"\n\n")[0]
    error = json.loads(data)["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert b"[DONE]" not in rest


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_lost_before_the_first_token_is_a_503(
    base_url: str, held: FakeEngine, state: ServerState, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=base_url) as client:
        task = asyncio.create_task(client.post(CHAT, json=say(stream=stream)))
        await until(lambda: held.submits)
        state.engines.disconnect(0, 1, "test")
        answer = await task
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_unavailable"
    assert int(answer.headers["retry-after"]) > 0


async def test_comment_lines_are_sent_while_a_stream_waits_and_clients_do_not_see_them(
    base_url: str, held: FakeEngine, state: ServerState
) -> None:
    state.config = replace(state.config, server=replace(state.config.server, sse_keep_alive_interval=0.02))
    async with raw_request(base_url, COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 2}) as reader:
        await reader.readuntil(KEEP_ALIVE)  # before the first token
        held.step()
        await reader.readuntil(b"token ")
        await reader.readuntil(KEEP_ALIVE)  # and between two
        held.step()
        assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")


async def test_an_error_after_a_comment_line_is_an_event(base_url: str, held: FakeEngine, state: ServerState) -> None:
    state.config = replace(state.config, server=replace(state.config.server, sse_keep_alive_interval=0.02))
    held.reply = lambda submit: Reply([], error="no room")
    async with raw_request(base_url, COMPLETIONS, {"prompt": "a", "stream": True}) as reader:
        head = await reader.readuntil(KEEP_ALIVE)
        held.step()
        assert b" 200 " in head
        assert b'"message":"no room"' in await reader.readuntil(b"0\r\n\r\n")


async def test_two_requests_with_the_same_id_at_once_are_both_answered(base_url: str, held: FakeEngine) -> None:
    async with httpx.AsyncClient(base_url=base_url) as client:
        body = say(request_id="same", stream=True, max_tokens=3)
        tasks = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(2)]
        await until(lambda: len(held.submits) == 2)
        held.run()
        answers = [events(await task) for task in tasks]
    assert [joined_text(chunks) for chunks in answers] == ["token token token "] * 2
    assert all(chunks[0]["id"] == "chatcmpl-same" for chunks in answers)


async def test_many_streams_of_which_a_third_is_closed_half_way(
    base_url: str, held: FakeEngine, state: ServerState
) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 20}

    async def one(number: int) -> bytes:
        async with raw_request(base_url, COMPLETIONS, body) as reader:
            await reader.readuntil(b"token ")
            return b"" if number % 3 == 0 else await reader.readuntil(b"0\r\n\r\n")

    tasks = [asyncio.create_task(one(number)) for number in range(60)]
    await until(lambda: len(held.submits) == 60)
    held.step()
    await until(lambda: len(held.aborts) == 20)
    while held.step():
        await asyncio.sleep(0)
    answers = await asyncio.gather(*tasks)
    assert sum(b"[DONE]" in answer for answer in answers) == 40
    await until(lambda: state.open_requests == 0)
    assert (state.engines.admission.requests, state.engines.admission.tokens) == (0, 0)
    assert state.engines.engines[0].open == {}
