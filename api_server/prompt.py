"""A prompt that is ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids within the context, how many tokens may follow, and what the answer begins with."""

    ids: list[int]  # not empty
    max_tokens: int
    echo: str = ""
    is_text: bool = True  # came as text, so special tokens that the tokenizer added do not show in `echo`
