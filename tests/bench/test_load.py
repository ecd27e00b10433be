"""The closed loop sends what it says, keeps as many streams open as asked, and reports what came back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.load import Load, Spread, main, measure, numbers, request_bytes
from bench.prompts import prompt
from tests.bench.test_stream import HEAD, chunked


class Server:
    """Answers every request with `tokens` events and a usage that says `claimed`."""

    def __init__(self, tokens: int = 4, claimed: int = 4, refuse_every: int = 0) -> None:
        self.tokens, self.claimed, self.refuse_every = tokens, claimed, refuse_every
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.partition(b"content-length: ")[2].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                await asyncio.sleep(0)
                if self.refuse_every and len(self.bodies) % self.refuse_every == 0:
                    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}")
                else:
                    usage = b'data: {"usage":{"completion_tokens":%d}}\n\n' % self.claimed
                    writer.write(
                        HEAD + chunked([b'data: {"text":"a"}\n\n'] * self.tokens + [usage, b"data: [DONE]\n\n"])
                    )
                self.open -= 1
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield Load(f"http://127.0.0.1:{port}", "m", requests_per_stream=3, output_len=4)


async def test_every_request_is_sent_once_and_every_token_counted() -> None:
    server = Server()
    async with server.running() as load:
        report = await measure(load, 5)
    assert (report.requests, report.output_tokens, report.errors) == (15, 60, ())
    assert len({body["prompt"] for body in server.bodies}) == 15
    assert all(body["max_tokens"] == 4 and body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert server.most_open <= 5
    assert report.tokens_per_second == pytest.approx(60 / report.seconds)


async def test_a_refused_request_is_an_error_and_the_stream_goes_on() -> None:
    async with Server(refuse_every=3).running() as load:
        report = await measure(load, 1)
    assert report.output_tokens == 8
    assert len(report.errors) == 1
    assert "status 503" in report.errors[0]


async def test_an_answer_of_the_wrong_length_is_an_error() -> None:
    async with Server(claimed=3).running() as load:
        report = await measure(load, 1)
    assert report.errors == ("3 tokens instead of 4",) * 3


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with Server().running() as load:
        pass
    report = await measure(load, 2)
    assert report.output_tokens == 0
    assert len(report.errors) == 6


def test_a_chat_is_asked_with_messages() -> None:
    data = request_bytes(Load("http://host:1", "m", endpoint="chat"), 7)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: host:1\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["messages"] == [{"role": "user", "content": prompt(7)}]


def test_prompts_have_the_number_of_words_and_are_the_same_on_every_run() -> None:
    assert len(prompt(3, 100).split()) == 100
    assert prompt(3) == prompt(3) != prompt(4)


def test_a_spread_is_in_milliseconds() -> None:
    spread = Spread.of([i / 1000 for i in range(100, 0, -1)])
    assert (spread.p50, spread.p99, spread.mean) == pytest.approx((51.0, 100.0, 50.5))
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["0", "1,-2", "", "x"])
def test_numbers_of_streams_must_be_positive(text: str) -> None:
    with pytest.raises(ValueError, match=r"positive|invalid literal"):
        numbers(text)


def test_the_command_line_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--concurrency", "0"])
    assert "--concurrency" in capsys.readouterr().err
