from __future__ import annotations

import json
from typing import Any

import pytest

from api_server.errors import BadRequestError
from api_server.generate import parse
from api_server.schemas.completion import CompletionRequest


def body(prompt: Any, **fields: Any) -> CompletionRequest:
    request = parse(CompletionRequest, json.dumps({"prompt": prompt, **fields}).encode())
    request.check(300)
    return request


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("a", ["a"], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [[1, 2]]),
        ([[1], [2, 3]], [], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_one_of_four_kinds(prompt: Any, texts: list[str], tokens: list[list[int]]) -> None:
    request = body(prompt)
    assert (request.texts(), request.token_prompts()) == (texts, tokens)


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], [1, "a"], ["a", 1], [[1], "a"], [[1], 2], 5, {}, True, [True], [1.5], [-1], [2**31], [["a"]]],
    ids=json.dumps,
)
def test_every_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        body(prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_a_token_id_outside_the_vocabulary_is_refused_with_the_range() -> None:
    with pytest.raises(BadRequestError, match="token id 300 is not within the vocabulary, 0 to 299"):
        body([[1], [2, 300]])


def test_no_tokens_at_all_needs_something_else_to_answer() -> None:
    assert body("a", max_tokens=0, echo=True).max_tokens == 0
    assert body("a", max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(BadRequestError, match="echo"):
        body("a", max_tokens=0)


def test_prompt_logprobs_are_not_streamed() -> None:
    with pytest.raises(BadRequestError, match="prompt_logprobs"):
        body("a", stream=True, prompt_logprobs=1)
