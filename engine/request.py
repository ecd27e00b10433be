"""A request as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.messages import Finish
from common.sampling import SamplingParams
from engine.plan import Ints


@dataclass(slots=True, eq=False)
class Request:
    """Owner: the loop thread. `sink` is the output thread's state of the same request, passed along untouched."""

    api_id: int
    handle: int
    prompt: Ints
    params: SamplingParams
    end_token_ids: tuple[int, ...]
    max_total: int  # tokens, prompt included, that it may grow to
    order: tuple[int, int]  # (priority, arrival): the smaller runs first
    grammar: Callable[[], Any] | None = None  # makes a matcher at its beginning
    sink: Any = None
    resumed: list[int] = field(default_factory=list)  # of `output`, what an earlier engine had produced
    delivered: int = 0  # characters of its text that the client has
    output: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    row: int = -1  # −1 while it waits
    blocks: list[int] = field(default_factory=list)
    to_feed: Ints | None = None  # what prefill must feed in all; None while it waits
    fed: int = 0  # prefill tokens planned so far, or found in the prefix cache
    computed: int = 0  # committed tokens whose keys and values are known to be written
    published: int = 0  # leading blocks that are published
    chain: list[bytes] = field(default_factory=list)  # digests for the prefix cache: of the salt, then of full blocks
    cached_tokens: int | None = None  # of its prompt, found when it first started; None before that
    in_flight: int = 0  # tokens that plans in flight may still bring
    plans: int = 0  # plans in flight that name it

    @property
    def total(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.prompt) + len(self.output)

    @property
    def planned_total(self) -> int:
        """Tokens it has at most once everything in flight has come back."""
        return len(self.prompt) + len(self.output) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that may still be planned: never past max_tokens or the context (rule 1)."""
        return self.max_total - self.planned_total

    @property
    def in_prefill(self) -> bool:
        return self.to_feed is not None and self.fed < len(self.to_feed)

    @property
    def ended(self) -> bool:
        return self.finish is not Finish.NONE

    def tokens(self, start: int, end: int) -> Ints:
        """Committed tokens from `start` up to `end`, int32 [end − start]."""
        prompt = len(self.prompt)
        output = np.asarray(self.output[max(0, start - prompt) : max(0, end - prompt)], np.int32)
        return np.concatenate([self.prompt[start:end], output])

    def start(self, row: int, found: list[int], block_size: int) -> None:
        """Takes a row, and the blocks of its beginning that exist already; its prefill feeds the rest of the prompt and
        of all that it has produced before."""
        self.row = row
        self.blocks = list(found)
        self.published = len(found)
        self.fed = self.computed = len(found) * block_size
        self.to_feed = self.tokens(0, self.total) if self.output else self.prompt

    def preempt(self) -> list[int]:
        """Back to waiting; returns its blocks. Only when nothing in flight names it (rule 4)."""
        if self.plans:
            raise RuntimeError("a request in flight cannot be preempted")
        blocks, self.blocks = self.blocks, []
        self.row, self.to_feed, self.fed, self.computed, self.published = -1, None, 0, 0, 0
        return blocks
