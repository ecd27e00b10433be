"""Completions: prompts as text or token ids, and from tokens to the answer's shape."""

from __future__ import annotations

from typing import Any

import orjson

from api_server.answer import FINISH_REASONS, Identity, usage
from api_server.budget import output_tokens, too_long, truncated
from api_server.errors import BadRequestError
from api_server.logprobs import Columns, CompletionLogprobs, joined, prompt_logprobs
from api_server.mailbox import Sequence
from api_server.prompt import Prompt
from api_server.schemas.completion import CompletionRequest
from api_server.served_model import ServedModel
from api_server.sse import event
from api_server.tokenizer import Tokenizer
from common.messages import Ready, unpack_ints

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16


async def prompts_of(body: CompletionRequest, served: ServedModel, engine: Ready) -> list[Prompt]:
    """One for each prompt of the body, in order. Raises `BadRequestError`."""
    max_model_len: int = engine.model["max_model_len"]
    texts = body.texts()
    if body.truncate_prompt_tokens is None:
        for text in texts:
            at_least = served.tokenizer.at_least(text)
            if at_least > max_model_len:
                raise too_long(at_least, max_model_len, "prompt", at_least=True)
    encoded = await served.tokenizer.encode(texts, body.add_special_tokens is not False)
    prompts = []
    for i, ids in enumerate(encoded or body.token_prompts()):
        if not ids:
            raise BadRequestError("prompt must not be empty.", param="prompt")
        kept = truncated(ids, body.truncate_prompt_tokens, max_model_len, body.max_tokens)
        max_tokens = output_tokens(
            len(kept),
            max_model_len,
            "max_tokens",
            body.max_tokens,
            DEFAULT_MAX_TOKENS,
            served.defaults.max_new_tokens,
        )
        as_text = bool(texts) and len(kept) == len(ids)
        echo = ""
        if body.echo:
            echo = texts[i] if as_text else served.tokenizer.decode(kept)
        prompts.append(Prompt(kept, max_tokens, echo, as_text))
    return prompts


class CompletionForm:
    """The shape of completions; of `Form`."""

    def __init__(
        self, identity: Identity, body: CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer
    ) -> None:
        self._identity = identity
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._count = body.count
        self._logprobs = body.logprobs
        self._echo = bool(body.echo)
        self._ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._usage = body.usage_in_stream
        self._usage_so_far = body.usage_in_chunks
        self._plain = self._logprobs is None and not self._ids and not self._usage_so_far
        choices = len(prompts) * self._count
        self._columns = [CompletionLogprobs(body.logprobs or 0) for _ in range(choices)]
        self._around = [self._split(index) for index in range(choices)] if body.stream else []

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """An event with only text, as what stands before and after the text."""
        chunk = event(self._chunk({"index": index, "text": "", "logprobs": None, "finish_reason": None}))
        before, after = chunk.rsplit(b'"text":""', 1)
        return before + b'"text":', after

    def _chunk(self, choice: dict[str, Any], sequence: Sequence | None = None) -> dict[str, Any]:
        chunk = {**self._identity.fields(KIND), "choices": [choice]}
        if self._usage_so_far and sequence is not None:
            chunk["usage"] = usage([sequence], 1)
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def _prompt(self, sequence: Sequence) -> Prompt:
        return self._prompts[sequence.index // self._count]

    def opening(self, sequence: Sequence) -> bytes:
        prompt = self._prompt(sequence)
        if not prompt.echo and not self._ids:
            return b""
        choice = self._base(sequence, prompt.echo)
        if self._echo and self._logprobs is not None:
            choice["logprobs"] = self._echoed(sequence)
        if self._ids:
            choice["prompt_token_ids"] = prompt.ids
            choice["token_ids"] = []
        return event(self._chunk(choice, sequence))

    def _base(self, sequence: Sequence, text: str) -> dict[str, Any]:
        return {"index": sequence.index, "text": text, "logprobs": None, "finish_reason": None}

    def _echoed(self, sequence: Sequence) -> Columns:
        """The logprobs of the prompt's tokens. A prompt of one token has none, and engines then send nothing."""
        prompt, columns = self._prompt(sequence), self._columns[sequence.index]
        first = prompt.ids[0]
        visible = not (prompt.is_text and self._tokenizer.is_special(first))
        head = columns.unscored(self._tokenizer.decode([first]), visible)
        return joined(head, columns.scored((sequence.prompt_logprobs or [None])[1:]))

    def delta(self, sequence: Sequence) -> bytes:
        text = sequence.take_text()
        if self._plain:
            if not text:
                return b""
            before, after = self._around[sequence.index]
            return before + orjson.dumps(text) + after
        tokens = sequence.take_logprobs() if self._logprobs is not None else []
        ids = sequence.take_ids() if self._ids else []
        if not (text or tokens or ids):
            return b""
        choice = self._base(sequence, text)
        if tokens:
            choice["logprobs"] = self._columns[sequence.index].scored(tokens)
        if self._ids:
            choice["token_ids"] = ids
        return event(self._chunk(choice, sequence))

    def closing(self, sequence: Sequence) -> bytes:
        choice = self._base(sequence, "")
        choice["finish_reason"] = FINISH_REASONS[sequence.finish]
        choice["stop_reason"] = sequence.stop
        return event(self._chunk(choice, sequence))

    def ending(self, sequences: list[Sequence]) -> bytes:
        if not self._usage:
            return b""
        return event({**self._identity.fields(KIND), "choices": [], "usage": usage(sequences, self._count)})

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {
            **self._identity.fields(KIND),
            "choices": [self._choice(sequence) for sequence in sequences],
            "usage": usage(sequences, self._count),
        }

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        prompt = self._prompt(sequence)
        choice = self._base(sequence, prompt.echo + sequence.take_text())
        choice["finish_reason"] = FINISH_REASONS[sequence.finish]
        choice["stop_reason"] = sequence.stop
        if self._logprobs is not None:
            choice["logprobs"] = self._whole_logprobs(sequence)
        if self._prompt_logprobs is not None:
            scored = sequence.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(scored, prompt.ids, self._prompt_logprobs)
        if self._ids:
            choice["prompt_token_ids"] = prompt.ids
            choice["token_ids"] = unpack_ints("i", bytes(sequence.emitted))
        return choice

    def _whole_logprobs(self, sequence: Sequence) -> Columns:
        prompt = self._echoed(sequence) if self._echo else None
        generated = self._columns[sequence.index].scored(sequence.take_logprobs())
        return generated if prompt is None else joined(prompt, generated)
