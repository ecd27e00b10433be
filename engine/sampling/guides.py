"""Grammars of rows: which tokens each may draw next, worked out on threads of their own while the model computes.

```
device   ··· forward ─ apply ─ draw ─┐ forward ───── apply ─ draw ─┐
masks                                └ consume, mask ┘             └ consume, mask ┘
```
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)

_NONE = np.empty(0, np.int32)


class Guides:
    """Matchers by row. Owner: the device thread; masks are written by one other thread, which it waits for."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._masks = np.zeros((rows, self._words), np.int32)
        self._matchers: dict[int, Any] = {}
        self._guided = np.zeros(rows, np.bool_)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._pending: list[Future[None]] = []

    def admit(self, row: int, matcher: Any, end_token_ids: tuple[int, ...], output: tuple[int, ...]) -> None:
        """A request takes the row, with a grammar of its own or None. `output`: what it had produced before."""
        if self._matchers.pop(row, None) is not None or matcher is not None:
            self.wait()
        self._guided[row] = matcher is not None
        if matcher is None:
            return
        self._matchers[row] = matcher
        ends = np.zeros(self._words, np.uint32)
        for token in end_token_ids:
            ends[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        self._pending.append(self._submit(self._begin, row, matcher, ends.view(np.int32), output))

    def guided(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `rows` have a grammar."""
        found: npt.NDArray[np.bool_] = self._guided[rows]
        return found

    def advance(self, rows: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> None:
        """What the guided among `rows` drew. Their next masks are ready when `masks` asks for them."""
        if not self._guided.any():
            return
        drawn = [(int(row), int(token)) for row, token in zip(rows, tokens, strict=True) if self._guided[row]]
        if drawn:
            self._pending.append(self._submit(self._advance, drawn))

    def masks(self, rows: npt.NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of a batch of rows: the places of the guided ones [m] int64, and the tokens that each may draw, [m, V / 32]
        int32, bit by bit. None where there are none. Waits for the masks."""
        places = np.flatnonzero(self._guided[rows])
        if not len(places):
            return None
        self.wait()
        return torch.from_numpy(places), torch.from_numpy(self._masks[rows[places]])

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        for future in self._pending:
            future.result()
        self._pending.clear()

    def _submit(self, work: Any, *arguments: Any) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._executor = llguidance.LLExecutor(num_threads=2)
            self._ends: dict[int, npt.NDArray[np.int32]] = {}
        return self._thread.submit(work, *arguments)

    # On the thread of masks.

    def _begin(self, row: int, matcher: Any, ends: npt.NDArray[np.int32], output: tuple[int, ...]) -> None:
        self._ends[row] = ends
        if output:
            matcher.consume_tokens(list(output))
        self._fill([(row, matcher)])

    def _advance(self, drawn: list[tuple[int, int]]) -> None:
        found = [(row, token, self._matchers.get(row)) for row, token in drawn]
        going = [(matcher, token) for _, token, matcher in found if matcher is not None and not matcher.is_stopped()]
        if going:
            self._executor.consume_token_par(going)
        self._fill([(row, matcher) for row, _, matcher in found if matcher is not None])

    def _fill(self, matchers: list[tuple[int, Any]]) -> None:
        """Rows whose grammar is at its end, or gave up, may only end."""
        going = [(matcher, row) for row, matcher in matchers if not matcher.is_stopped()]
        if going:
            size = 4 * self._words
            self._executor.unsafe_compute_mask_ptr(going, self._masks.ctypes.data, size, len(self._masks))
        for row, matcher in matchers:
            if matcher.is_stopped():
                if matcher.is_error():
                    log.warning("a grammar gave up: %s", matcher.get_error().strip()[:200])
                self._masks[row] = self._ends[row]
