"""Looks at a request's grammar before it is sent: a bad one is the client's to mend."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

from api_server.errors import BadRequestError
from api_server.schemas.structured import StructuredRequest
from api_server.served_model import ServedModel
from common.grammar import Grammar, GrammarError, Grammars
from common.messages import Ready

SECONDS = 10.0  # for one grammar


async def grammar_of(body: StructuredRequest, served: ServedModel, engine: Ready) -> Grammar | None:
    """What the output has to be, if anything. Raises `BadRequestError` naming the field."""
    found = body.constraint()
    if found is None:
        return None
    field, grammar = found
    ends = tuple(engine.model["eos_token_ids"])
    try:
        async with asyncio.timeout(SECONDS):
            await asyncio.to_thread(_check, served.folder, engine.model["vocab_size"], ends, grammar)
    except GrammarError as e:
        raise BadRequestError(f"{field} cannot be used: {e}", param=field, code="invalid_grammar") from None
    except TimeoutError:
        raise BadRequestError(
            f"{field} cannot be used: it takes longer than {SECONDS:g} s to compile.",
            param=field,
            code="invalid_grammar",
        ) from None
    return grammar


def _check(folder: Path, vocab_size: int, end_token_ids: tuple[int, ...], grammar: Grammar) -> None:
    _grammars(folder, vocab_size, end_token_ids).compile(grammar)


@lru_cache(maxsize=2)
def _grammars(folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> Grammars:
    return Grammars(folder, vocab_size, end_token_ids)
