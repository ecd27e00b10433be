"""The official client, sync and async, with strict validation of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from common.messages import Finish
from tests.api_server.conftest import NAME
from tests.api_server.fake_engine import FakeEngine, Reply

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TEXT = "Hello world"


@pytest.fixture
async def official(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_a_chat_is_answered(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, seed=1
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_a_chat_is_streamed(official: openai.AsyncOpenAI) -> None:
    stream = await official.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"


async def test_the_streaming_helper_puts_the_answer_together(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply(["Hello ", "world"], Finish.STOP)
    async with official.chat.completions.stream(model=NAME, messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


async def test_completions_are_answered(official: openai.AsyncOpenAI) -> None:
    answer = await official.completions.create(model=NAME, prompt=["a", "b"], echo=True)
    assert [choice.text for choice in answer.choices] == [f"a{TEXT}", f"b{TEXT}"]
    scored = await official.completions.create(model=NAME, prompt="a", logprobs=1)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " ", "world"]


async def test_completions_are_streamed(base_url: str) -> None:
    """Without strict validation: the client's own type has no null finish_reason, which OpenAI sends here too."""
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model=NAME, prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models_are_listed_and_found_by_name(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == [NAME]
    assert (await official.models.retrieve(NAME)).id == NAME
    with pytest.raises(openai.NotFoundError):
        await official.models.retrieve("nobody")


async def test_the_synchronous_client_works_too(base_url: str, engine: FakeEngine) -> None:
    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(
            base_url=f"{base_url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
        ) as client:
            whole = client.chat.completions.create(model=NAME, messages=MESSAGES)
            stream = client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(talk) == (TEXT, TEXT)


async def test_extensions_are_taken_from_the_extra_body(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    await official.chat.completions.create(
        model=NAME, messages=MESSAGES, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [3]}
    )
    params = engine.submits[0].params
    assert (params.top_k, params.min_p, params.ignore_eos, params.stop_token_ids) == (5, 0.1, True, (3,))


async def test_errors_are_the_clients_own_kinds(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await official.chat.completions.create(model=NAME, messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await official.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    engine.reply = lambda submit: Reply([], error="broken")
    with pytest.raises(openai.InternalServerError):
        await official.chat.completions.create(model=NAME, messages=MESSAGES)


async def test_an_error_in_mid_stream_is_raised(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.reply = lambda submit: Reply(["a"], error="broken")
    engine.automatic = False
    pending = asyncio.create_task(official.chat.completions.create(model=NAME, messages=MESSAGES, stream=True))
    while not engine.submits:
        await asyncio.sleep(0.005)
    engine.step()
    stream = await pending
    engine.run()
    with pytest.raises(openai.APIError, match="broken"):
        async for _ in stream:
            pass


async def test_the_request_id_is_seen_by_the_client(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model=NAME, messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer._request_id == "mine-1"
    assert answer.id == "chatcmpl-mine-1"
