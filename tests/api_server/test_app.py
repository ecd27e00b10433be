"""What holds on every path: errors, ids, loading, overload and draining."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from api_server.app import create_app
from api_server.state import ServerState
from tests.api_server.conftest import Client, asgi_client
from tests.api_server.fake_engine import FakeEngine, Reply
from tests.api_server.reading import CHAT, COMPLETIONS, error_of, say

POSTS = [CHAT, COMPLETIONS, "/generate", "/predict"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"a": "\xff"}', b'{"messages": "\\ud800"}', b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)
async def test_a_body_that_is_not_a_json_object_is_a_bad_request(client: Client, path: str, body: bytes) -> None:
    answer = await client.post(path, content=body)
    assert answer.status_code == 400
    error_of(answer)
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/v1/models/nobody", "/v1/chat", "/v1/chat/completions/"])
async def test_unknown_paths_are_not_found_in_the_usual_shape(client: Client, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    error_of(answer)


async def test_a_wrong_method_is_told_which_one_is_right(client: Client) -> None:
    answer = await client.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error_of(answer)


async def test_a_body_that_is_too_large_is_refused(make_state: Callable[..., ServerState]) -> None:
    state = make_state(max_body_bytes=1_000)
    FakeEngine().attach(state.engines)

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with asgi_client(create_app(state)) as client:
        for content in (b" " * 1_001, pieces()):
            answer = await client.post(CHAT, content=content)
            assert answer.status_code == 413
            assert "1000" in error_of(answer)["message"]
    assert state.engines.admission.requests == 0


async def test_every_answer_has_an_id_and_a_sane_one_is_kept(client: Client) -> None:
    for path in ("/", "/health", "/nowhere", "/metrics"):
        answer = await client.get(path)
        assert answer.headers["x-request-id"]
        assert int(answer.headers["openai-processing-ms"]) >= 0
    answer = await client.post(CHAT, json=say(), headers={"x-request-id": "my/id:1"})
    assert answer.headers["x-request-id"] == "my/id:1"
    assert answer.json()["id"] == "chatcmpl-my/id:1"
    for wrong in ("a b", "x" * 129, "é", ""):
        answer = await client.get("/", headers={b"x-request-id": wrong.encode()})
        assert answer.headers["x-request-id"] != wrong


@pytest.mark.parametrize("authorization", [None, "Bearer anything", "nonsense"])
async def test_without_a_configured_key_any_authorization_passes(client: Client, authorization: str | None) -> None:
    headers = {"authorization": authorization} if authorization else {}
    assert (await client.post(CHAT, json=say(), headers=headers)).status_code == 200


async def test_a_fault_of_ours_is_a_500_without_internals_and_with_a_traceback_in_the_log(
    client: Client, engine: FakeEngine, state: ServerState, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: object) -> bool:
        raise ZeroDivisionError("secret")

    engine.send = broken  # type: ignore[method-assign]
    answer = await client.post(CHAT, json=say())
    assert answer.status_code == 500
    assert "secret" not in error_of(answer)["message"]
    assert "ZeroDivisionError: secret" in caplog.text
    assert state.engines.admission.requests == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_while_an_answer_is_written_leaves_nothing_behind(
    client: Client, engine: FakeEngine, state: ServerState, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("api_server.chat.ChatForm.closing", broken)
    monkeypatch.setattr("api_server.chat.ChatForm.whole", broken)
    engine.reply = lambda submit: Reply(["a"] * 20)
    answer = await client.post(CHAT, json=say(stream=stream))
    assert "secret" not in answer.text
    assert '"error"' in answer.text
    assert state.open_requests == state.engines.admission.requests == 0


async def test_while_the_model_loads_only_liveness_answers(make_state: Callable[..., ServerState]) -> None:
    state = make_state()
    state.phase, state.progress = "converting", 0.4
    async with asgi_client(create_app(state)) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/")).status_code == 200
        for path in ("/health", "/health/ready", "/ping"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert answer.json().items() >= {"phase": "converting", "progress": 0.4}.items()
        answers = [await client.get("/v1/models"), *[await client.post(path, json=say()) for path in POSTS]]
    for answer in answers:
        assert answer.status_code == 503
        assert error_of(answer).items() >= {"phase": "converting", "progress": 0.4, "code": "not_ready"}.items()
        assert answer.headers["retry-after"]


async def test_an_engine_that_is_away_is_seen_and_its_return_too(client: Client, state: ServerState) -> None:
    assert (await client.get("/health")).status_code == 200
    state.engines.disconnect(0, 1, "test")
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["phase"]) == (503, "waiting for an engine")
    assert (await client.post(CHAT, json=say())).status_code == 503
    assert (await client.get("/v1/models")).status_code == 200
    FakeEngine(epoch=2).attach(state.engines)
    assert (await client.get("/health")).status_code == 200
    assert (await client.post(CHAT, json=say())).status_code == 200


async def test_the_request_that_is_one_too_many_is_answered_with_503(make_state: Callable[..., ServerState]) -> None:
    state = make_state(max_num_queued_reqs=2)
    engine = FakeEngine(automatic=False).attach(state.engines)
    async with asgi_client(create_app(state)) as client:
        waiting = [asyncio.create_task(client.post(CHAT, json=say())) for _ in range(2)]
        while len(engine.submits) < 2:
            await asyncio.sleep(0)
        answer = await client.post(CHAT, json=say())
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) > 0
        engine.step()  # both have begun: they wait no more
        extra = asyncio.create_task(client.post(CHAT, json=say()))
        while len(engine.submits) < 3:
            await asyncio.sleep(0)
        engine.run()
        assert [(await task).status_code for task in (*waiting, extra)] == [200] * 3
    assert (state.engines.admission.requests, state.engines.admission.rejected) == (0, 1)


async def test_too_many_waiting_tokens_are_refused(make_state: Callable[..., ServerState]) -> None:
    state = make_state(max_num_queued_tokens=100)
    engine = FakeEngine(automatic=False).attach(state.engines)
    async with asgi_client(create_app(state)) as client:
        waiting = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x" * 90}))
        while not engine.submits:
            await asyncio.sleep(0)
        assert (await client.post(COMPLETIONS, json={"prompt": "x" * 20})).status_code == 503
        engine.run()
        assert (await waiting).status_code == 200


async def test_more_sequences_than_the_queue_holds_are_a_bad_request(make_state: Callable[..., ServerState]) -> None:
    state = make_state(max_num_queued_reqs=8)
    FakeEngine().attach(state.engines)
    async with asgi_client(create_app(state)) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "n": 3})
    assert answer.status_code == 400
    assert "at most 8" in error_of(answer)["message"]


async def test_a_draining_server_refuses_what_is_new_and_finishes_what_is_open(
    client: Client, engine: FakeEngine, state: ServerState
) -> None:
    engine.automatic = False
    task = asyncio.create_task(client.post(CHAT, json=say(stream=True)))
    while not engine.submits:
        await asyncio.sleep(0)
    state.draining = True
    assert (await client.get("/health/ready")).status_code == 503
    assert (await client.get("/health/live")).status_code == 200
    answer = await client.post(CHAT, json=say())
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    assert error_of(answer)["code"] == "draining"
    engine.run()
    assert "[DONE]" in (await task).text
