from __future__ import annotations

from typing import Any

import pytest

from api_server.errors import BadRequestError
from api_server.schemas.chat import ChatRequest
from api_server.schemas.completion import CompletionRequest
from api_server.schemas.unsupported import UNSUPPORTED, refuse_unsupported

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"suffix": "x"},
        {"bad_words": ["x"]},
        {"verbosity": "low"},
        {"web_search_options": {"x": 1}},
        {"use_beam_search": True},
        {"length_penalty": 2},
        {"chat_template": "{{ x }}"},
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        refuse_unsupported(body)
    assert caught.value.param in body
    assert (caught.value.param or "") in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {},
        dict.fromkeys(UNSUPPORTED),
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"modalities": ["text"]},
        {"suffix": "", "bad_words": []},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": {"content": "x"}},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(body: dict[str, Any]) -> None:
    refuse_unsupported(body)


def test_no_field_is_both_served_and_refused() -> None:
    for schema in (ChatRequest, CompletionRequest):
        assert not UNSUPPORTED.keys() & schema.model_fields.keys()
