"""Texts and messages become the ids that a request would have, and ids become text again."""

from __future__ import annotations

from typing import Any

import pytest

from api_server.state import ServerState
from tests.api_server.conftest import NAME, Client


async def tokenize(client: Client, **body: Any) -> Any:
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_there_and_back(client: Client) -> None:
    found = await tokenize(client, prompt="hello world", model=NAME, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 0
    assert found["max_model_len"] > 0
    back = await client.post("/detokenize", json={"tokens": found["tokens"]})
    assert "hello" in back.json()["prompt"]


async def test_messages_are_rendered_as_for_a_chat(client: Client, state: ServerState) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = await tokenize(client, messages=messages)
    assert state.served is not None
    assert state.served.template is not None
    text = state.served.template.render(messages, add_generation_prompt=True)
    ((expected),) = await state.served.tokenizer.encode([text], False)
    assert found["tokens"] == expected
    assert found["token_strs"] is None
    shorter = await tokenize(client, messages=messages, add_generation_prompt=False)
    assert shorter["count"] <= found["count"]


async def test_no_text_is_no_tokens(client: Client) -> None:
    assert (await tokenize(client, prompt="", add_special_tokens=False))["tokens"] == []
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "another"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**8]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], status: int, param: str, client: Client) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    assert str(response.json()["error"]["param"]).startswith(param)
