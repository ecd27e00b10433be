"""Attention over the paged cache, piece by piece: a tile of queries against one segment of its context.

A context is cut into segments at fixed places, and what the segments give is put together in rising order. So a
query's result does not depend on what else is in its tile, nor on whether one thread or several computed it, to the
last bit; and a long context can be spread over threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.native.functions import LOWEST, cap, exp
from engine.native.products import multiply, prefetch_block

SEGMENT = 256  # tokens of a segment, or one block where that is more
MAX_QUERIES = 16  # of one tile
MAX_LINES = 64  # (query, head) pairs of one tile, if its heads allow

_NONE = np.float32(-np.inf)
_FLOAT = 4  # bytes


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _top(scores: Any) -> Any:
    top = scores[0]
    for t in range(scores.size):
        top = max(top, scores[t])
    return top


@njit(nogil=True, fastmath={"contract", "nsz"})
def _powers(scores: Any, top: Any) -> None:
    for t in range(scores.size):
        scores[t] = exp(scores[t] - top)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _total(scores: Any) -> Any:
    total = np.float32(0.0)
    for t in range(scores.size):
        total += scores[t]
    return total


@njit(nogil=True)
def segment_size(block_size: int) -> int:
    """Tokens of a segment: whole blocks."""
    return max(1, SEGMENT // block_size) * block_size


@njit(nogil=True)
def attend_segment(
    rows: Any, group: int, tile: Any, segment: int, head: int, window: int, softcap: Any, table: Any,
    cache: tuple[Any, int, int, int, int], scores: Any, result: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    """What one segment adds for a tile's scaled queries, `group` heads of each of its tokens.

    rows [lines, dim], scores [lines, segment]; `cache`: table of block tiles, addresses of a layer's keys and values,
    its kv heads, tokens of a block. Writes to `result`, (sums [lines, value_dim], tops [lines], totals [lines]): the
    weighted sum of values, the greatest score, and the sum of exponentials relative to it.
    """
    tiles, keys, values, kv_heads, size = cache
    sums, tops, totals = result
    position, count = tile[3], tile[2]
    lines, width, dim, value_dim = count * group, scores.shape[1], rows.shape[1], sums.shape[1]
    begin = segment * width
    first = begin // size
    stop = min(first + width // size, (position + count - 1) // size + 1)
    if window > 0:  # blocks that no query of the tile sees
        first = max(first, min(stop, max(0, position + 1 - window) // size))
    number = tiles[0, 0, 0, 0]
    block, value_block = size * dim * number, size * value_dim * number
    for b in range(first, stop):
        if b + 1 < stop:
            prefetch_block(keys + (table[b + 1] * kv_heads + head) * block, block)
        at = keys + (table[b] * kv_heads + head) * block
        to = scores.ctypes.data + (b * size - begin) * _FLOAT
        multiply(tiles, 0, lines, rows.ctypes.data, dim, at, size, to, width, dim, size)
    for r in range(lines):
        own = position + r // group
        high = min(width, own + 1 - begin)
        low = max(0, own + 1 - window - begin) if window > 0 else 0
        line = scores[r]
        if high <= low:
            line[:] = np.float32(0.0)
            tops[r], totals[r] = _NONE, np.float32(0.0)
            continue
        if softcap > 0:
            cap(line[low:high], softcap)
        line[:low] = LOWEST
        line[high:] = LOWEST
        top = _top(line[low:high])
        _powers(line, top)
        line[:low] = np.float32(0.0)
        line[high:] = np.float32(0.0)
        tops[r], totals[r] = top, _total(line)
    sums[:lines] = np.float32(0.0)
    for b in range(first, stop):
        if b + 1 < stop:
            prefetch_block(values + (table[b + 1] * kv_heads + head) * value_block, value_block)
        at = values + (table[b] * kv_heads + head) * value_block
        weights = scores.ctypes.data + (b * size - begin) * _FLOAT
        multiply(tiles, 1, lines, weights, width, at, value_dim, sums.ctypes.data, value_dim, size, value_dim)


@njit(nogil=True)
def fold(lines: int, result: tuple[Any, Any, Any], later: tuple[Any, Any, Any]) -> None:
    """Takes a later segment's result into that of the ones before it."""
    sums, tops, totals = result
    more, more_tops, more_totals = later
    for r in range(lines):
        if more_totals[r] == 0:
            continue
        top = max(tops[r], more_tops[r])
        kept = exp(tops[r] - top) if totals[r] > 0 else np.float32(0.0)
        added = exp(more_tops[r] - top)
        totals[r] = totals[r] * kept + more_totals[r] * added
        tops[r] = top
        for d in range(sums.shape[1]):
            sums[r, d] = sums[r, d] * kept + more[r, d] * added


@njit(nogil=True)
def finish(sums: Any, top: Any, total: Any, sink: Any, has_sink: bool, out: Any) -> None:
    """One line's output [dim]. A sink takes its share of the sum and no place."""
    scale = np.float32(1.0)
    if has_sink:
        highest = max(top, sink)
        scale = exp(top - highest)
        total = total * scale + exp(sink - highest)
    scale /= total
    for d in range(out.size):
        out[d] = sums[d] * scale


@njit(nogil=True)
def make_tiles(starts: Any, lengths: Any, group: int, tiles: Any) -> int:
    """Cuts a step's queries into tiles of one sequence each. starts [S + 1], lengths [S]: its context.

    Writes (sequence, first token, tokens, position) to `tiles` [T, 4] and returns how many there are.
    """
    most = max(1, min(MAX_QUERIES, MAX_LINES // group))
    n = 0
    for s in range(lengths.size):
        first, end = starts[s], starts[s + 1]
        position = lengths[s] - (end - first)
        while first < end:
            count = min(most, end - first)
            tiles[n, 0], tiles[n, 1], tiles[n, 2], tiles[n, 3] = s, first, count, position
            first += count
            position += count
            n += 1
    return n
