"""Sampling parameters of one request: the one shape that the API process fills in and the engine obeys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Validated by the API process, in full, before it is sent.

    Order of application, as in vLLM: allowed tokens, min_tokens, logit bias, penalties, temperature, min_p, top_k,
    top_p.
    """

    max_tokens: int = 16  # ≥ 0; 0 only scores the prompt (with prompt_logprobs)
    min_tokens: int = 0  # end tokens are impossible, and stop strings unseen, before this many tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    seed: int = 0  # always set: the API process draws one where the client gave none; 0 ≤ seed < 2**63
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: and those of the n likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: tuple[str, str] | None = None  # kind and text, as in `common.grammar`: what the output must be

    def to_wire(self) -> dict[str, Any]:
        """Only what differs from the defaults."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> SamplingParams:
        """Inverse of `to_wire`. Raises TypeError on an unknown name."""
        for name in _TUPLES & body.keys():
            body[name] = tuple(tuple(item) if isinstance(item, list) else item for item in body[name])
        return cls(**body)


_DEFAULTS = tuple((field.name, field.default) for field in fields(SamplingParams))
_TUPLES = frozenset({"logit_bias", "allowed_token_ids", "stop", "stop_token_ids", "grammar"})
