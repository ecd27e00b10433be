"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from api_server.chat_template import RESERVED, Message
from api_server.errors import BadRequestError
from api_server.schemas.sampling import GenerationRequest

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
_CONTENT = "a string or a list of parts"


class ContentPart(BaseModel):
    """One part of a message's content. Only text is served."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(BaseModel):
    """What the model called, sent back; `arguments` is JSON in a string."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """One tool call of an earlier answer, sent back."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message. An assistant's may have no content."""

    model_config = ConfigDict(strict=True)

    role: Role
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(None, description="The oldest form of tool_calls.")
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest):
    """A conversation to be continued."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Default: what the context leaves.")
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs logprobs.")
    reasoning_effort: str | None = Field(None, description="Given to the chat template.")
    echo: bool | None = Field(None, description="Begin the answer with the last message, when it is the assistant's.")
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message.")
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="False when left out: templates bring their own.")
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs is only allowed with logprobs: true.", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadRequestError(
                "add_generation_prompt and continue_final_message exclude each other.", param="continue_final_message"
            )
        reserved = RESERVED & (self.chat_template_kwargs or {}).keys()
        if reserved:
            raise BadRequestError(
                f"chat_template_kwargs: {min(reserved)} is set by the server.", param="chat_template_kwargs"
            )

    @property
    def requested_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def conversation(self) -> list[Message]:
        """The messages as templates know them: content is text. Raises `BadRequestError` naming the part."""
        return [_message(f"messages[{i}]", message) for i, message in enumerate(self.messages)]


def _message(where: str, message: ChatMessage) -> Message:
    if message.content is None and message.role != "assistant":
        raise BadRequestError(f"{where}.content must be {_CONTENT}.", param=f"{where}.content")
    plain: Message = {"role": message.role, "content": _text(f"{where}.content", message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    calls = message.tool_calls or ([ToolCall(function=message.function_call)] if message.function_call else [])
    if calls:
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _text(where: str, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            fault = "has no text" if part.type in ("text", "refusal") else "is not supported: the model takes text only"
            raise BadRequestError(f"{where}[{i}] of type {part.type!r} {fault}.", param=f"{where}[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates expect the arguments as an object."""
    plain = call.model_dump(exclude_none=True)
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            plain["function"]["arguments"] = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            plain["function"]["arguments"] = arguments  # cut by max_tokens, perhaps; the template may still show it
    return plain
