"""The shapes of the answers, for /docs and for tests. Answers are written as bytes; nothing is built from these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    """Token counts; a prompt counts once, however large n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: str | None
    annotations: list[Any]


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="The stop string or stop token id that ended it.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class PromptLogprob(_Answer):
    logprob: float
    rank: int | None
    decoded_token: str


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions; with `stream` its pieces come as `chat.completion.chunk` events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="The stop string or stop token id that ended it.")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class Completion(_Answer):
    """Answer of /v1/completions; with `stream` its pieces come as events of the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer of 400 and above."""

    error: ErrorDetails
