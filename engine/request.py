"""A request as the loop sees it."""

from __future__ import annotations

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
    sink: Any = None
    resumed: list[int] = field(default_factory=list)  # of `output`, what an earlier engine had produced
    delivered: int = 0  # characters of its text that the client has
    output: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    row: int = -1  # −1 while it waits
    blocks: list[int] = field(default_factory=list)
    to_feed: Ints | None = None  # what prefill must feed in all; None while it waits
    fed: int = 0  # prefill tokens planned so far
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

    def start(self, row: int) -> None:
        """Takes a row; its prefill feeds the prompt and all that it has produced before."""
        self.row = row
        self.fed = 0
        self.to_feed = np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt

    def preempt(self) -> list[int]:
        """Back to waiting; returns its blocks. Only when nothing in flight names it (rule 4)."""
        if self.plans:
            raise RuntimeError("a request in flight cannot be preempted")
        blocks, self.blocks = self.blocks, []
        self.row, self.to_feed, self.fed = -1, None, 0
        return blocks
