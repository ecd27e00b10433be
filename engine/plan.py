"""What the scheduler hands to the device, and what comes back. Frozen objects: they cross threads.

A plan carries rows, feed counts and block-table updates, but no positions: lengths and last tokens live on the device.
So a plan that was queued behind another stays true when that other one is cut short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from common.sampling import SamplingParams

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row: everything the device must know of it before its first chunk."""

    row: int
    params: SamplingParams
    end_token_ids: tuple[int, ...]  # EOS, unless ignored, and stop token ids
    prompt: Ints
    output: tuple[int, ...]  # what it had produced before it was preempted or resumed
    length: int = 0  # tokens that its first blocks hold already: its first chunk goes on from there
    matcher: Any = None  # of its grammar, at its beginning; the device's from now on


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a row's prefill. Runs in the plan's first step; its row samples then and decodes on if `count` > 0."""

    row: int
    token_ids: Ints
    count: int  # tokens wanted of this row in this plan, the chunk's own included; 0: the prefill goes on later
    score_ids: Ints | None = None  # with prompt_logprobs: the tokens that follow those fed, to be scored


@dataclass(slots=True)
class Plan:
    """One prefill step at most, the first, and decode steps after it.

    A row takes part in a step until it has brought as many tokens as its count; a step brings one, or, where the device
    drafts, several. The loop may set `cut`; the device looks at it between steps
    and then leaves out the steps that remain, but never a step with chunks.
    """

    seq: int
    steps: int
    rows: Ints  # decode rows
    counts: Ints  # tokens wanted of each
    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    blocks: tuple[tuple[int, int, tuple[int, ...]], ...] = ()  # (row, index in its block table, new blocks)
    cut: bool = False

    @property
    def has_tail(self) -> bool:
        """It has steps that a cut leaves out."""
        return self.steps > (1 if self.chunks else 0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's tokens on the host, in the order of the rows that sampled; a row's tokens follow each other."""

    plan: int
    step: int
    rows: list[int]
    token_ids: list[int]
    ended: list[bool]  # the token is one of the row's end tokens; the row takes no further part
    began_ns: int
    ended_ns: int
    logprobs: dict[int, Any] = field(default_factory=dict)  # by index into rows, for rows that asked
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)  # by row, for chunks that are scored
    drafted: int = 0  # tokens that were fed on suspicion
    accepted: int = 0  # of those that came true


@dataclass(frozen=True, slots=True)
class PlanDone:
    """After a plan's last result: how many of its steps ran."""

    plan: int
    steps: int


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The device cannot go on; nothing further comes from it."""

    error: BaseException
