"""The bodies of `POST /tokenize` and `POST /detokenize`, and their answers, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api_server.schemas.chat import ChatMessage
from api_server.schemas.sampling import TokenId

MAX_TOKENS = 1 << 20


class TokenizeRequest(BaseModel):
    """A text, or messages for the chat template: one of them."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="One of the served names; the first when left out.")
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="Of messages. Default: unless continue_final_message.")
    continue_final_message: bool | None = Field(None, description="Of messages.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Of messages.")
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    """How many tokens, and which."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="One of the served names; the first when left out.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    """Their text, special tokens included."""

    prompt: str
