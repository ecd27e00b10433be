"""Where a step's tokens stand: positions, cache slots and contexts, from the rows' lengths and block tables."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(nogil=True, cache=True)
def locate(
    sequences: Any, sizes: Any, lengths: Any, tables: Any, block_size: int, positions: Any, slots: Any, starts: Any,
    contexts: Any,
) -> int:  # fmt: skip
    """For each of S sequences (a row), the next `sizes` tokens after the `lengths` that its row has in the cache.

    Writes positions [T] and slots [T], starts [S + 1] and contexts [S]. Returns the longest context.
    """
    at, longest = 0, 0
    starts[0] = 0
    for s in range(sequences.size):
        row = sequences[s]
        for i in range(sizes[s]):
            position = lengths[row] + i
            positions[at] = position
            slots[at] = tables[row, position // block_size] * block_size + position % block_size
            at += 1
        starts[s + 1] = at
        contexts[s] = lengths[row] + sizes[s]
        longest = max(longest, contexts[s])
    return longest
