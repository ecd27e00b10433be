from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api_server.app import create_app
from api_server.chat_template import ChatTemplate
from api_server.schemas.responses import ChatCompletion
from api_server.served_model import ServedModel
from api_server.state import ServerState
from common.messages import Finish, unpack_ints
from tests.api_server.conftest import NAME, Client, asgi_client
from tests.api_server.fake_engine import FakeEngine, Reply
from tests.api_server.reading import CHAT, error_of, events, joined_text, say


async def complete(client: Client, **fields: Any) -> dict[str, Any]:
    """The answer, whose shape is checked on the way."""
    answer = await client.post(CHAT, json=say(**fields))
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content)
    body: dict[str, Any] = answer.json()
    return body


async def test_an_answer_has_the_shape_that_clients_expect(client: Client, engine: FakeEngine) -> None:
    body = await complete(client)
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello world", "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["object"] == "chat.completion"
    assert body["model"] == NAME
    assert body["id"].startswith("chatcmpl-")
    prompt = len(unpack_ints("i", engine.submits[0].prompt))
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == prompt + 3


async def test_the_template_makes_the_prompt_and_adds_its_own_special_tokens(
    client: Client, engine: FakeEngine, state: ServerState
) -> None:
    await complete(client)
    assert state.served is not None
    text = state.served.tokenizer.decode(unpack_ints("i", engine.submits[0].prompt))
    assert text == "<|begin|>user:hi<|end|><|begin|>assistant:"


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: Client) -> None:
    chunks = events(await client.post(CHAT, json=say(stream=True)))
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert joined_text(chunks) == "Hello world"


async def test_usage_comes_in_a_last_chunk_only_when_asked_for(client: Client) -> None:
    chunks = events(await client.post(CHAT, json=say(stream=True, stream_options={"include_usage": True})))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_usage_so_far_stands_in_every_chunk_when_asked_for(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await client.post(CHAT, json=say(stream=True, stream_options=options)))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_carries_its_index_and_has_its_own_seed(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    engine.reply = lambda submit: Reply([f"seed {submit.params.seed}"], Finish.STOP)
    answer = await client.post(CHAT, json=say(n=3, seed=7, stream=stream))
    if stream:
        chunks = events(answer)
        texts = [joined_text(chunks, index) for index in range(3)]
        roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2]
    else:
        body = answer.json()
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == len(engine.submits[0].prompt) // 4
        assert body["usage"]["completion_tokens"] == 3
    assert texts == ["seed 7", "seed 8", "seed 9"]


async def test_the_rest_of_the_context_is_used_when_no_bound_is_given(client: Client, engine: FakeEngine) -> None:
    await complete(client)
    submit = engine.submits[0]
    assert submit.params.max_tokens == 128 - len(submit.prompt) // 4


async def test_a_bound_that_does_not_fit_is_refused_with_the_figures(client: Client, engine: FakeEngine) -> None:
    answer = await client.post(CHAT, json=say(max_completion_tokens=120))
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "max_completion_tokens",
        "context_length_exceeded",
    )
    assert "108" in error["message"]
    assert "120" in error["message"]
    assert engine.submits == []


@pytest.mark.parametrize("length", [200, 200_000])
async def test_a_prompt_longer_than_the_context_is_refused_with_both_figures(client: Client, length: int) -> None:
    answer = await client.post(CHAT, json=say("x" * length))
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "128" in error["message"]
    if length == 200:
        assert "218" in error["message"]


async def test_a_long_prompt_can_be_truncated(client: Client, engine: FakeEngine) -> None:
    await complete(client, text="x" * 200, truncate_prompt_tokens=-1, max_tokens=8)
    assert len(engine.submits[0].prompt) // 4 == 120


async def test_logprobs_have_the_shape_that_clients_expect(client: Client) -> None:
    body = await complete(client, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " ", "world"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["bytes"] == list(b"Hello")
    plain = await complete(client, logprobs=True)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: Client) -> None:
    whole = await complete(client, logprobs=True, top_logprobs=1)
    chunks = events(await client.post(CHAT, json=say(logprobs=True, top_logprobs=1, stream=True)))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [entry for part in parts if part for entry in part["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]


async def test_token_ids_are_returned_when_asked_for(client: Client, engine: FakeEngine) -> None:
    body = await complete(client, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [100, 101, 102]
    assert body["prompt_token_ids"] == unpack_ints("i", engine.submits[0].prompt)
    chunks = events(await client.post(CHAT, json=say(return_token_ids=True, stream=True)))
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [100, 101, 102]


async def test_prompt_logprobs_are_returned_when_asked_for(client: Client, engine: FakeEngine) -> None:
    body = await complete(client, prompt_logprobs=1)
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == len(engine.submits[0].prompt) // 4


async def test_what_ended_the_answer_is_told(client: Client, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply(["a"], Finish.STOP, stop="###")
    body = await complete(client, stop="###")
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "###")
    chunks = events(await client.post(CHAT, json=say(stream=True)))
    assert chunks[-1]["choices"][0]["stop_reason"] == "###"


async def test_text_of_any_script_arrives_whole_in_a_stream(client: Client, engine: FakeEngine) -> None:
    text = ["日本", "語 ", "👩‍👩‍👧", ' "quoted"\n', "\u2028", "\x00"]
    engine.reply = lambda submit: Reply(text)
    assert joined_text(events(await client.post(CHAT, json=say(stream=True)))) == "".join(text)
    assert (await complete(client))["choices"][0]["message"]["content"] == "".join(text)


async def test_an_answer_can_go_on_with_the_assistants_last_message(
    client: Client, engine: FakeEngine, state: ServerState
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = await client.post(CHAT, json=fields)
    assert answer.json()["choices"][0]["message"]["content"] == "The answerHello world"
    assert state.served is not None
    assert state.served.tokenizer.decode(unpack_ints("i", engine.submits[0].prompt)).endswith("assistant:The answer")
    chunks = events(await client.post(CHAT, json={**fields, "stream": True}))
    assert joined_text(chunks) == "The answerHello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_before_its_first_token_has_an_error_status(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    engine.reply = lambda submit: Reply([], error="The prompt does not fit the KV cache.")
    answer = await client.post(CHAT, json=say(stream=stream))
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "The prompt does not fit the KV cache."


async def test_one_failed_choice_fails_the_answer_and_ends_the_others(client: Client, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply([], error="no") if submit.params.seed == 1 else Reply(["x"] * 50)
    answer = await client.post(CHAT, json=say(n=2, seed=0))
    assert answer.status_code == 500
    assert len(engine.aborts) == 1
    assert engine.open == {}


async def test_a_wrong_model_is_not_found(client: Client) -> None:
    answer = await client.post(CHAT, json=say(model="gpt-9"))
    assert answer.status_code == 404
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("model_not_found", "model")
    assert (await complete(client, model=NAME))["model"] == NAME


async def test_a_model_without_a_template_says_which_flag_helps(
    state: ServerState, engine: FakeEngine, model_folder: Path
) -> None:
    (model_folder / "chat_template.jinja").unlink()
    state.served = ServedModel.load(state.config.model, str(model_folder))
    async with asgi_client(create_app(state)) as client:
        answer = await client.post(CHAT, json=say())
    assert answer.status_code == 400
    assert "--chat-template" in error_of(answer)["message"]


async def test_what_the_template_refuses_is_told(make_state: Callable[..., ServerState], model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    state = make_state()
    FakeEngine().attach(state.engines)
    assert isinstance(state.served and state.served.template, ChatTemplate)
    async with asgi_client(create_app(state)) as client:
        answer = await client.post(CHAT, json=say())
    assert answer.status_code == 400
    assert "no system role" in error_of(answer)["message"]


async def test_nothing_is_left_behind_by_any_kind_of_request(client: Client, state: ServerState) -> None:
    for fields in ({}, {"stream": True}, {"temperature": 9}, {"n": 3}, {"max_tokens": 1000}, {"model": "x"}):
        await client.post(CHAT, json=say(**fields))
    admission = state.engines.admission
    assert (admission.requests, admission.tokens, state.open_requests) == (0, 0, 0)
    assert not any(engine.open for engine in state.engines.engines.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_a_prompt_count_once_however_many_choices(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    engine.reply = lambda submit: Reply(["x"], Finish.STOP, cached=4)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.post(CHAT, json=say(n=3, **options))
    usage = events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_cache_salt_goes_to_the_engine_and_is_empty_when_left_out(client: Client, engine: FakeEngine) -> None:
    await complete(client, n=2, cache_salt="mine")
    await complete(client)
    assert [submit.cache_salt for submit in engine.submits] == ["mine", "mine", ""]
