"""Speculative decoding by prompt lookup: what followed the last few tokens before is likely to follow them again.

A row that decodes feeds its last token and a draft of the ones to come; the draft's tokens count as far as they are
what the row draws anyway. A draw depends on seed and position alone, so the output is that of plain decoding, token
for token. How long drafts are is decided at every step: where the tokens they are expected to bring are not worth the
time that a larger step takes, there are none.

The idea is prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

LONGEST_MATCH = 4  # tokens; a longer one says little more
SHORTEST_MATCH = 2
FIRST_GUESS = 0.5  # of the share of drafted tokens that hold
_FORGETTING = 0.2  # of the old estimate, with each draft
_RECOVERING = 0.02  # towards the first guess, with each draft that was not tried

Ints = npt.NDArray[np.int32]


class Drafts:
    """History and luck of every row. Owner: the device thread."""

    def __init__(self, rows: int, max_model_len: int, longest: int, costs: npt.NDArray[np.float64]) -> None:
        """`costs[n]`: time of a step of n tokens, in any unit; beyond its end it grows in proportion."""
        self.longest = longest
        self._history = np.zeros((rows, max_model_len + 1), np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._luck = np.full(rows, FIRST_GUESS)
        self._costs = costs

    def admit(self, row: int, prompt: npt.ArrayLike, output: npt.ArrayLike) -> None:
        """A new request in the row: what it reads, and what it had produced before."""
        tokens = np.concatenate([np.asarray(prompt, np.int32), np.asarray(output, np.int32)])
        self._history[row, : len(tokens)] = tokens
        self._lengths[row] = len(tokens)
        self._luck[row] = FIRST_GUESS

    def propose(self, rows: Ints, room: Ints) -> tuple[Ints, Ints]:
        """A draft for each of `rows`, of at most `room` tokens: their lengths [n], and their tokens one after the
        other."""
        counts = np.zeros(len(rows), np.int32)
        tokens = np.zeros(len(rows) * self.longest, np.int32)
        total = _propose(
            self._history, self._lengths, self._luck, self._costs, rows, room, self.longest, counts, tokens
        )
        return counts, tokens[:total]

    def take(self, rows: Ints, counts: Ints, drafts: Ints, drawn: Ints, ended: npt.NDArray[np.bool_]) -> Ints:
        """How many of the drawn tokens count. `drawn`, `ended`: for each row what followed its last token and each
        token of its draft, rows one after the other. Returns [n], 1 at least; they become part of the history."""
        kept = np.zeros(len(rows), np.int32)
        _take(self._history, self._lengths, self._luck, rows, counts, drafts, drawn, ended, kept)
        return kept


@njit(nogil=True, cache=True)
def _match(history: Any, length: int) -> int:
    """Where the last tokens' longest earlier occurrence ends (exclusive), the most recent one; 0: there is none."""
    best, end = SHORTEST_MATCH - 1, 0
    for j in range(length - 2, SHORTEST_MATCH - 2, -1):
        if history[j] != history[length - 1]:
            continue
        n = 1
        while n < LONGEST_MATCH and n <= j and history[j - n] == history[length - 1 - n]:
            n += 1
        if n > best:
            best, end = n, j + 1
            if n == LONGEST_MATCH:
                break
    return end


@njit(nogil=True, cache=True)
def _cost(costs: Any, tokens: int) -> Any:
    last = costs.size - 1
    return costs[tokens] if tokens <= last else costs[last] * tokens / last


@njit(nogil=True, cache=True)
def _propose(
    history: Any, lengths: Any, luck: Any, costs: Any, rows: Any, room: Any, longest: int, counts: Any, tokens: Any
) -> int:
    n = rows.size
    ends = np.zeros(n, np.int64)
    most = 0
    for i in range(n):
        length = lengths[rows[i]]
        if room[i] > 0:
            ends[i] = _match(history[rows[i]], length)
        if ends[i] > 0:
            counts[i] = min(longest, room[i], length - ends[i])
            most = max(most, counts[i])
    best, best_rate = 0, n / _cost(costs, n)
    gained, fed = float(n), n
    for m in range(1, most + 1):
        for i in range(n):
            if counts[i] >= m:
                gained += luck[rows[i]] ** m
                fed += 1
        rate = gained / _cost(costs, fed)
        if rate > best_rate:
            best, best_rate = m, rate
    total = 0
    for i in range(n):
        if best == 0 and counts[i] > 0:
            luck[rows[i]] += _RECOVERING * (FIRST_GUESS - luck[rows[i]])
        counts[i] = min(counts[i], best)
        for k in range(counts[i]):
            tokens[total] = history[rows[i], ends[i] + k]
            total += 1
    return total


@njit(nogil=True, cache=True)
def _take(
    history: Any, lengths: Any, luck: Any, rows: Any, counts: Any, drafts: Any, drawn: Any, ended: Any, kept: Any
) -> None:
    at, place = 0, 0
    for i in range(rows.size):
        row = rows[i]
        n = 1
        while n <= counts[i] and not ended[place + n - 1] and drawn[place + n - 1] == drafts[at + n - 1]:
            n += 1
        for k in range(n):
            history[row, lengths[row] + k] = drawn[place + k]
        lengths[row] += n
        if counts[i] > 0:
            tried = n - 1 if n > counts[i] else n
            luck[row] += _FORGETTING * ((n - 1) / max(1, tried) - luck[row])
        at += counts[i]
        place += counts[i] + 1
        kept[i] = n
