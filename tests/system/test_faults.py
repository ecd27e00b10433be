"""Faults that other servers had in public, tried on this one. The names in brackets are their issues."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from common.sampling import SamplingParams
from tests.system.server import Server, serving, wait_until

ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


def post(server: Server, path: str, **options: Any) -> httpx.Response:
    return server.client.post(path, **options)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    return error


def still_serves(server: Server) -> None:
    server.complete("again", max_tokens=2)


def test_readiness_follows_a_stream_that_is_never_read(tiny_server: Server) -> None:
    """A client that opens streams and reads nothing harms no other."""
    with tiny_server.client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}):
        still_serves(tiny_server)
    wait_until(lambda: tiny_server.metric("vllm:num_requests_running") == 0)


def test_sigterm_in_mid_stream_lets_the_stream_end_whole(tiny_folder: Any) -> None:
    """[vllm 24885]"""
    with serving(tiny_folder) as server:
        body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            wait_until(lambda: "draining" in server.log, what="the drain")
            try:
                refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            except httpx.ConnectError:
                pass
            else:
                error_of(refused, 503)
                assert refused.headers["connection"] == "close"
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows_within_a_second(tiny_server: Server, stream: bool) -> None:
    """[vllm 54947]"""
    url = f"{tiny_server.url}/v1/completions"
    if stream:
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(10):
                next(lines)
    else:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(url, json=ENDLESS, timeout=0.5)
    wait_until(lambda: tiny_server.metric("vllm:num_requests_running") == 0, 2, what="the rows")


def test_a_client_that_goes_away_while_queued_or_in_prefill_leaves_nothing(tiny_folder: Any) -> None:
    with serving(tiny_folder, "--max-num-seqs", "1", "--max-num-batched-tokens", "64") as server:
        long = {"prompt": [5] * 7000, "max_tokens": 100, "ignore_eos": True}

        def give_up() -> None:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{server.url}/v1/completions", json=long, timeout=0.4)

        threads = [threading.Thread(target=give_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0, 5)
        wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, 5)
        still_serves(server)


def test_two_requests_with_one_request_id_are_both_answered(tiny_server: Server) -> None:
    """[vllm 10583]"""
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "request_id": "same"}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: post(tiny_server, "/v1/completions", json=body), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("key", ["191222", "AI", "-1", "1.5", "07"])
def test_a_logit_bias_for_no_token_is_named(tiny_server: Server, key: str) -> None:
    """[vllm 16529]"""
    error = error_of(post(tiny_server, "/v1/completions", json={"prompt": "x", "logit_bias": {key: -100}}), 400)
    assert "logit_bias" in error["message"] + str(error["param"])
    still_serves(tiny_server)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tiny_server: Server, value: str) -> None:
    """[vllm 45116]"""
    body = f'{{"prompt": "x", "temperature": {value}}}'.encode()
    error_of(post(tiny_server, "/v1/completions", content=body), 400)
    still_serves(tiny_server)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "repetition_penalty": 1.3},
        {"seed": 7, "temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"seed": 8, "temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"100": 5}},
    ],
)
def test_steps_ahead_change_no_output(tiny_server: Server, single_server: Server, sampling: dict[str, Any]) -> None:
    """[vllm 27878] Split with plans of 8 steps, against one process with the synchronous schedule."""
    texts = [
        server.complete("Once upon a time", max_tokens=64, min_tokens=20, ignore_eos=True, **sampling)["choices"][0]
        for server in (tiny_server, single_server)
    ]
    assert texts[0]["text"] == texts[1]["text"]


def test_logprobs_of_impossible_tokens_are_json(tiny_server: Server) -> None:
    """[vllm 42426]"""
    bias = {str(token): -100 for token in range(1000)}
    answer = tiny_server.complete("x", max_tokens=3, logprobs=5, logit_bias=bias, allowed_token_ids=[3000, 3001])
    text = json.dumps(answer, allow_nan=False)
    assert "NaN" not in text


def test_a_body_that_is_not_utf_8_is_refused(tiny_server: Server) -> None:
    """[vllm 12390]"""
    error_of(post(tiny_server, "/v1/completions", content=b'{"prompt": "\xff\xfe"}'), 400)
    still_serves(tiny_server)


def test_the_request_that_is_one_too_many_is_answered(tiny_folder: Any) -> None:
    """[sglang 33940]"""
    with serving(tiny_folder, "--max-num-seqs", "1", "--max-num-queued-reqs", "2") as server:
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
            answers = list(pool.map(lambda _: post(server, "/v1/completions", json=body), range(8)))
        statuses = sorted(answer.status_code for answer in answers)
        assert set(statuses) == {200, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert int(refused.headers["retry-after"]) >= 1
        error_of(refused, 503)
        still_serves(server)


def test_a_queue_full_of_tokens_refuses_too(tiny_folder: Any) -> None:
    """One that is alone may be larger than the bound: it would never fit otherwise."""
    with serving(tiny_folder, "--max-num-seqs", "1", "--max-num-queued-tokens", "1000") as server:
        body = {"prompt": [5] * 600, "max_tokens": 300, "ignore_eos": True}
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: post(server, "/v1/completions", json=body), range(6)))
        assert {answer.status_code for answer in answers} == {200, 503}
        server.complete([5] * 1001, max_tokens=1)


def stream_text(server: Server, **body: Any) -> tuple[str, list[str]]:
    """The joined text, and the pieces."""
    pieces = []
    with server.client.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return "".join(pieces), pieces


def test_nothing_of_a_stop_string_leaks_however_tokens_cut_it(tiny_server: Server) -> None:
    """[sglang 6997]"""
    body = {"prompt": "The weather", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    whole = tiny_server.complete(**body)["choices"][0]["text"]
    for begin in range(5, len(whole) - 12, 17):
        stop = whole[begin : begin + 7]
        expected = whole[: whole.index(stop)]
        assert stream_text(tiny_server, **body, stop=[stop])[0] == expected
        answer = tiny_server.complete(**body, stop=stop)["choices"][0]
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (expected, "stop", stop)


def test_a_prompt_longer_than_the_context_names_both_figures(tiny_server: Server) -> None:
    error = error_of(post(tiny_server, "/v1/completions", json={"prompt": [5] * 9000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"]
    assert "8192" in error["message"]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_joined_stream_equals_the_whole_text_for_every_script(tiny_server: Server, temperature: float) -> None:
    """[vllm 931] The tiny model's text is a mix of scripts, broken characters included."""
    for seed in range(8):
        body = {"prompt": "日本語 🙂 é", "max_tokens": 80, "ignore_eos": True, "temperature": temperature, "seed": seed}
        whole = tiny_server.complete(**body)["choices"][0]["text"]
        joined, pieces = stream_text(tiny_server, **body)
        assert joined == whole
        assert sum(piece.count("�") for piece in pieces) == whole.count("�")


def test_a_real_characters_bytes_are_never_shown_apart(tiny_server: Server) -> None:
    """Forced to the bytes of an emoji one by one, the stream shows it once and whole."""
    tokens = tiny_server.complete("🙂🙂🙂", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert tokens["text"] == "🙂🙂🙂"


@pytest.mark.slow
def test_fifty_thousand_tokens_in_one_request(tiny_long_folder: Any) -> None:
    """[vllm 24174] All of them arrive, none twice."""
    with serving(tiny_long_folder) as server:
        body = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        with httpx.Client(timeout=600) as client:
            answer = client.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 50_000
        assert len(answer["choices"][0]["token_ids"]) == 50_000


def test_defaults_that_the_engine_and_the_api_share() -> None:
    """A seedless request's parameters differ in their seed alone, so both ends agree on the rest."""
    assert SamplingParams.from_wire(SamplingParams(seed=3).to_wire()) == SamplingParams(seed=3)


def test_a_body_that_never_comes_keeps_nobody_out(tiny_server: Server) -> None:
    """Clients that announce large bodies and send one byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 33554432\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(20):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", tiny_server.port)))
            slow.sendall(head)
        still_serves(tiny_server)


def test_other_requests_are_served_while_a_huge_prompt_is_tokenized(tiny_server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(post, tiny_server, "/v1/completions", json={"prompt": "a b " * 300_000, "max_tokens": 1})
        while not huge.done():
            assert tiny_server.status("/health") == 200
        error_of(huge.result(), 400)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
def test_health_answers_head_too(tiny_server: Server, path: str) -> None:
    assert tiny_server.client.head(path).status_code == 200


def raw(server: Server, data: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to bytes on a connection of their own, up to its end."""
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port or 80), timeout=20) as s:
        s.sendall(data)
        answer = b""
        while more := s.recv(65536):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def test_a_client_that_offers_http_2_is_served_with_its_body(tiny_server: Server) -> None:
    """What Java's client sends by default."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    head, answer = raw(
        tiny_server,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\n"
        b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body),
    )
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(answer)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /generate HTTP/1.1\r\ncontent-length: -1\r\n\r\n"]
)
def test_what_is_not_http_is_answered_in_the_shape_of_all_errors(tiny_server: Server, data: bytes) -> None:
    head, body = raw(tiny_server, data)
    assert head.startswith(b"HTTP/1.1 400")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"].keys() >= {"message", "type", "param", "code"}
    still_serves(tiny_server)
