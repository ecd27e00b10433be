from __future__ import annotations

import json
from typing import Any

import pytest

from api_server.errors import BadRequestError
from api_server.generate import parse
from api_server.schemas.chat import ChatRequest

USER = {"role": "user", "content": "hi"}


def body(*messages: Any, **fields: Any) -> ChatRequest:
    request = parse(ChatRequest, json.dumps({"messages": messages or [USER], **fields}).encode())
    request.check(300)
    request.conversation()
    return request


def refused(*messages: Any, **fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        body(*messages, **fields)
    return caught.value


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool", "function"])
def test_every_role_of_the_api_is_known(role: str) -> None:
    assert body({"role": role, "content": "x"}).conversation() == [{"role": role, "content": "x"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ("hello", "messages[1]"),
    ],
    ids=str,
)
def test_a_wrong_message_is_named_by_its_place(message: Any, param: str) -> None:
    error = refused(USER, message)
    assert error.param == param
    assert param in error.message


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert body({"role": "user", "content": parts}).conversation()[0]["content"] == "a\nb"


def test_an_assistant_may_have_said_nothing_but_called_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    for said in ({"content": None}, {}):
        assistant = {"role": "assistant", "tool_calls": [call], **said}
        tool = {"role": "tool", "tool_call_id": "c1", "content": "4"}
        conversation = body(USER, assistant, tool).conversation()
        assert conversation[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        }
        assert conversation[2]["tool_call_id"] == "c1"


def test_arguments_that_were_cut_stay_a_string() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    conversation = body(USER, {"role": "assistant", "tool_calls": [call]}).conversation()
    assert conversation[1]["tool_calls"][0]["function"]["arguments"] == '{"x": '


def test_no_messages_are_refused() -> None:
    with pytest.raises(BadRequestError, match="messages must have at least 1 item"):
        parse(ChatRequest, b'{"messages": []}')
    with pytest.raises(BadRequestError, match="messages is required"):
        parse(ChatRequest, b"{}")


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert body(max_tokens=5).requested_tokens == ("max_tokens", 5)
    assert body(max_tokens=5, max_completion_tokens=6).requested_tokens == ("max_completion_tokens", 6)
    assert refused(max_tokens=0).param == "max_tokens"


def test_fields_that_exclude_or_need_each_other_are_checked() -> None:
    assert refused(top_logprobs=2).param == "top_logprobs"
    assert refused(top_logprobs=21, logprobs=True).param == "top_logprobs"
    assert refused(logprobs=2).param == "logprobs"
    assert refused(add_generation_prompt=True, continue_final_message=True).param == "continue_final_message"
    for key in ("messages", "self"):
        assert refused(chat_template_kwargs={key: []}).param == "chat_template_kwargs"


def test_what_the_template_should_know_is_handed_on() -> None:
    request = body(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert request.template_variables == {"reasoning_effort": "low", "enable_thinking": False}
