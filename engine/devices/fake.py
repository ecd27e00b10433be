"""A device without a model, for tests of everything around it: its tokens are a hash of the context it was given.

The context is read back through the block tables from a memory of token ids, so a wrong block, a wrong length, a row
released too early or a lost chunk changes the tokens that follow.
"""

from __future__ import annotations

import time
from zlib import crc32

import numpy as np

from engine.blocks import SCRATCH_BLOCK
from engine.plan import Ints, Plan, StepResult


class FakeDevice:
    """Owner: the device thread. `drops_dead=False` computes on for rows that ended, as an accelerator does; with a
    `burst` above 1 a step brings a row up to that many tokens, as drafts do."""

    def __init__(
        self, rows: int, num_blocks: int, block_size: int, vocab_size: int, *, drops_dead: bool = True, burst: int = 1
    ) -> None:
        self._burst = burst
        self._left = [0] * rows  # tokens that the plan still wants of a row
        self._memory = np.full((num_blocks, block_size), -1, np.int32)
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._lengths = [0] * rows
        self._last = [0] * rows
        self._alive = [False] * rows
        self._ends: list[frozenset[int]] = [frozenset()] * rows
        self._seeds = [0] * rows
        self._vocab_size = vocab_size
        self._drops_dead = drops_dead

    def begin(self, plan: Plan) -> None:
        for admission in plan.admissions:
            row = admission.row
            self._tables[row], self._lengths[row], self._alive[row] = [], admission.length, True
            self._ends[row], self._seeds[row] = frozenset(admission.end_token_ids), admission.params.seed
        for row, index, blocks in plan.blocks:
            self._tables[row][index:] = blocks
        wanted = [*zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)]
        for row, count in [*wanted, *((chunk.row, chunk.count) for chunk in plan.chunks)]:
            self._left[row] = count

    def step(self, plan: Plan, index: int) -> StepResult | None:
        began = time.monotonic_ns()
        fresh = set()
        if index == 0:
            for chunk in plan.chunks:
                self._feed(chunk.row, chunk.token_ids)
                fresh.add(chunk.row)
        named = [*plan.rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        rows = [row for row in named if self._left[row] > 0 and (self._alive[row] or not self._drops_dead)]
        if not rows and not fresh:
            return None
        drawn = [(row, *draw) for row in rows for draw in self._draw(row, row in fresh)]
        return StepResult(
            plan.seq, index, [row for row, _, _ in drawn], [token for _, token, _ in drawn],
            [ended for _, _, ended in drawn], began, time.monotonic_ns(),
        )  # fmt: skip

    def _draw(self, row: int, is_fed: bool) -> list[tuple[int, bool]]:
        """A row's tokens of one step, and whether each of them ended it."""
        drawn: list[tuple[int, bool]] = []
        most = min(self._left[row], 1 + (self._last[row] + self._lengths[row]) % self._burst)
        while len(drawn) < most and not (drawn and drawn[-1][1]):
            if drawn or not is_fed:
                self._feed(row, np.asarray([self._last[row]], np.int32))
            token = self._last[row] = self._next(row)
            drawn.append((token, token in self._ends[row]))
            self._alive[row] = self._alive[row] and not drawn[-1][1]
        self._left[row] -= len(drawn)
        return drawn

    def _feed(self, row: int, token_ids: Ints) -> None:
        size = self._memory.shape[1]
        for token in token_ids:
            block = self._tables[row][self._lengths[row] // size] if self._alive[row] else SCRATCH_BLOCK
            self._memory[block, self._lengths[row] % size] = token
            self._lengths[row] += self._alive[row]

    def _next(self, row: int) -> int:
        context = self._memory[self._tables[row]].reshape(-1)[: self._lengths[row]]
        return crc32(context.tobytes(), self._seeds[row]) % self._vocab_size


def expected_tokens(prompt: Ints, seed: int, count: int, ends: frozenset[int], vocab_size: int) -> list[int]:
    """What `FakeDevice` answers to a prompt, computed without blocks, rows or plans."""
    context = [int(token) for token in prompt]
    output: list[int] = []
    while len(output) < count:
        token = crc32(np.asarray(context, np.int32).tobytes(), seed) % vocab_size
        output.append(token)
        context.append(token)
        if token in ends:
            break
    return output
