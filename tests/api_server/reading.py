"""Reading answers, as clients do."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def say(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body with one user message."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def events(answer: httpx.Response | str) -> list[Any]:
    """The JSON of each event; the last one must be [DONE] and is left out."""
    text = answer if isinstance(answer, str) else answer.text
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert data, text
    assert data[-1] == "[DONE]", text
    return [json.loads(item) for item in data[:-1]]


def joined_text(chunks: list[Any], index: int = 0) -> str:
    """The text that a client would have put together for one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, which always has all four keys."""
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str)
    assert error["message"]
    return error
