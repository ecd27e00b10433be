"""A conversation's second turn computes only what is new, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.system.server import Server, serving

QUESTION = "Tell me about the river that runs through the town where you were born, and about its bridges."


def chat(server: Server, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    response = server.client.post(
        "/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 40, **body}
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def two_turns(server: Server, **body: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Usage and text of both turns of one conversation."""
    messages = [{"role": "user", "content": QUESTION}]
    first = chat(server, messages, **body)
    text = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And when was that?"}]
    second = chat(server, messages, **body)
    return [first["usage"], second["usage"]], [text, second["choices"][0]["message"]["content"]]


def cached(usage: dict[str, Any]) -> int:
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_second_turn_finds_the_first_and_gives_the_text_of_a_server_without_a_cache(smollm2_folder: Path) -> None:
    with serving(smollm2_folder) as server:
        found, texts = two_turns(server)
        assert cached(found[0]) == 0
        assert cached(found[1]) > found[0]["prompt_tokens"], "blocks of the first answer are found too"
        assert found[1]["prompt_tokens"] - cached(found[1]) < 40
        assert server.metric("vllm:prefix_cache_hits_total") == cached(found[1])
        salted, same = two_turns(server, cache_salt="another user")
        assert cached(salted[0]) == 0
        assert same == texts
    with serving(smollm2_folder, "--no-enable-prefix-caching") as server:
        plain, without = two_turns(server)
        assert [cached(usage) for usage in plain] == [0, 0]
        assert without == texts


def test_a_stream_reports_what_was_found(tiny_server: Server) -> None:
    body = {
        "prompt": QUESTION * 3, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
        "cache_salt": "a stream of its own",
    }  # fmt: skip
    counts = []
    for _ in range(2):
        lines = server_lines(tiny_server, body)
        counts.append(cached(json.loads(lines[-2].removeprefix("data: "))["usage"]))
    assert counts[0] == 0
    assert counts[1] > 0


def server_lines(server: Server, body: dict[str, Any]) -> list[str]:
    text = server.client.post("/v1/completions", json=body).text
    return [line for line in text.splitlines() if line]
