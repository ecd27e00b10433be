from __future__ import annotations

from typing import Any

import pytest

from api_server.schemas.responses import Completion
from common.messages import Finish, unpack_ints
from tests.api_server.conftest import Client
from tests.api_server.fake_engine import FakeEngine, Reply
from tests.api_server.reading import COMPLETIONS, error_of, events, joined_text


async def complete(client: Client, prompt: Any = "hey", **fields: Any) -> dict[str, Any]:
    """The answer, whose shape is checked on the way."""
    answer = await client.post(COMPLETIONS, json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    Completion.model_validate_json(answer.content)
    body: dict[str, Any] = answer.json()
    return body


async def test_an_answer_has_the_shape_that_clients_expect(client: Client, engine: FakeEngine) -> None:
    body = await complete(client)
    assert body["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == 3
    assert engine.submits[0].params.max_tokens == 16


async def test_a_stream_is_the_whole_answer_in_pieces(client: Client) -> None:
    chunks = events(await client.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
    assert joined_text(chunks) == "Hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_prompts_and_choices_are_numbered_prompt_by_prompt(client: Client, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply([f"{len(submit.prompt) // 4}/{submit.params.seed}"], Finish.STOP)
    body = await complete(client, ["a", "bb"], n=2, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["1/5", "1/6", "2/5", "2/6"]
    assert body["usage"]["prompt_tokens"] == 3
    chunks = events(await client.post(COMPLETIONS, json={"prompt": ["a", "bb"], "n": 2, "seed": 5, "stream": True}))
    assert [joined_text(chunks, index) for index in range(4)] == ["1/5", "1/6", "2/5", "2/6"]


async def test_token_ids_are_a_prompt(client: Client, engine: FakeEngine) -> None:
    await complete(client, [[5, 6], [7]])
    assert [unpack_ints("i", submit.prompt) for submit in engine.submits] == [[5, 6], [7]]


async def test_an_empty_text_is_refused(client: Client) -> None:
    for prompt in ("", ["a", ""]):
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "prompt"


async def test_echo_begins_with_the_prompt(client: Client) -> None:
    assert (await complete(client, "hey ", echo=True))["choices"][0]["text"] == "hey Hello world"
    chunks = events(await client.post(COMPLETIONS, json={"prompt": "hey ", "echo": True, "stream": True}))
    assert joined_text(chunks) == "hey Hello world"


async def test_logprobs_stand_in_columns(client: Client) -> None:
    logprobs = (await complete(client, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " ", "world"]
    assert logprobs["text_offset"] == [0, 5, 6]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"Hello": -0.5, "<0>": -1.0}


async def test_logprobs_with_echo_begin_with_a_null_for_the_prompts_first_token(client: Client) -> None:
    body = await complete(client, "hey", logprobs=1, echo=True)
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 6
    assert (logprobs["tokens"][0], logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == ("h", None, None)
    assert logprobs["text_offset"] == [0, 1, 2, 3, 8, 9]
    chunks = events(await client.post(COMPLETIONS, json={"prompt": "hey", "logprobs": 1, "echo": True, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in logprobs} == logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_one_token_has_no_logprobs_of_its_own(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    body = {"prompt": "h", "logprobs": 1, "echo": True, "stream": stream}
    answer = await client.post(COMPLETIONS, json=body)
    choice = events(answer)[0]["choices"][0] if stream else answer.json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == "h"
    assert choice["logprobs"]["token_logprobs"][0] is None


async def test_scoring_clients_get_their_prompts_scored(client: Client, engine: FakeEngine) -> None:
    fields = {"echo": True, "logprobs": 1, "temperature": 0}
    engine.reply = lambda submit: Reply(["x"], Finish.STOP)
    one = await complete(client, [[5, 6], [7, 8, 9]], max_tokens=1, **fields)
    assert [len(choice["logprobs"]["tokens"]) for choice in one["choices"]] == [3, 4]
    none = await complete(client, [[5, 6], [7, 8, 9]], max_tokens=0, **fields)
    assert [len(choice["logprobs"]["tokens"]) for choice in none["choices"]] == [2, 3]
    assert [choice["finish_reason"] for choice in none["choices"]] == ["length", "length"]
    assert none["usage"]["completion_tokens"] == 0
    assert all(submit.params.prompt_logprobs == 1 for submit in engine.submits)


async def test_prompt_logprobs_and_token_ids_stand_at_their_choice(client: Client) -> None:
    body = await complete(client, [5, 6], prompt_logprobs=1, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    assert choice["token_ids"] == [100, 101, 102]
    assert choice["prompt_logprobs"][0] is None
    assert "6" in choice["prompt_logprobs"][1]


async def test_the_default_bound_shrinks_to_what_the_context_leaves(client: Client, engine: FakeEngine) -> None:
    await complete(client, "x" * 120)
    assert engine.submits[0].params.max_tokens == 8


@pytest.mark.parametrize("length", [128, 200, 100_000])
async def test_a_prompt_that_leaves_no_room_is_refused_with_both_figures(client: Client, length: int) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "x" * length})
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert "128" in error_of(answer)["message"]


async def test_the_whole_context_may_be_scored(client: Client) -> None:
    body = await complete(client, "x" * 128, echo=True, max_tokens=0)
    assert body["usage"]["prompt_tokens"] == 128


async def test_cached_tokens_are_summed_over_prompts(client: Client, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply(["x"], Finish.STOP, cached=len(submit.prompt) // 4 - 1)
    body = await complete(client, ["abc", "defgh"], n=2, cache_salt="mine")
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert {submit.cache_salt for submit in engine.submits} == {"mine"}
