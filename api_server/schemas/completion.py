"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from api_server.errors import BadRequestError
from api_server.schemas.sampling import GenerationRequest, TokenId, check_vocabulary

# Lists stop at their first fault: a body of a million wrong items must not become a million errors.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
_PROMPT = "a string, a list of strings, a list of token ids, or a list of lists of token ids, none of them empty"


class CompletionRequest(GenerationRequest):
    """Text, or token ids, to be continued."""

    prompt: str | Texts | Ids | IdLists = Field(json_schema_extra={"allowed": _PROMPT})
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="Default 16; 0 needs echo or prompt_logprobs.")
    logprobs: int | None = Field(None, ge=0, le=20, description="So many likeliest tokens at each place.")
    echo: bool | None = Field(None, description="Begin with the prompt; with logprobs, also those of the prompt.")
    add_special_tokens: bool | None = Field(None, description="True when left out.")

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise BadRequestError("max_tokens must be at least 1 without echo or prompt_logprobs.", param="max_tokens")
        for ids in self.token_prompts():
            check_vocabulary("prompt", ids, vocab_size)

    def texts(self) -> list[str]:
        """The prompts that are text."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [prompt for prompt in self.prompt if isinstance(prompt, str)]

    def token_prompts(self) -> list[list[int]]:
        """The prompts that are token ids. A request has text or ids, never both."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], str):
            return []
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if isinstance(prompt, list)]
