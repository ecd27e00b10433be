"""Numba kernels over the paged cache: float32, one thread, the interpreter lock released while they run.

Compiled when imported, for every geometry at once, or loaded from what numba has kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.attention.vector import (
    LANES,
    ROWS,
    VECTORS,
    prefetch,
    score_row,
    score_row_scalar,
    score_rows,
    score_rows_scalar,
    sum_row,
    sum_row_narrow,
    sum_row_scalar,
    sum_rows,
    sum_rows_narrow,
    sum_rows_scalar,
)

MAX_SCORES = 1 << 16  # floats of the score buffer that a tile of queries should stay within: 256 KiB, an L2's share
MAX_QUERIES = 16  # queries of one tile; beyond this a block's keys are in the first-level cache anyway
_LINE = 16  # floats of a cache line
_WIDE = VECTORS * LANES

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)

_inlined = njit(inline="always", nogil=True)
_fast = njit(nogil=True, fastmath=True)


@njit(inline="always", fastmath=True)
def _exp(x: Any) -> Any:
    """e**x for x ≤ 0 in float32, to 2 ulp, in code that vectorizes (libm's would be called number by number).

    The classic range reduction x = n·ln 2 + r and a polynomial in r (Cephes, expf).
    """
    x = max(x, _LOWEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@_fast
def _cap(scores: Any, softcap: Any) -> None:
    """c · tanh(s / c), by tanh x = sign x · (1 − e) / (1 + e) with e = exp(−2 |x|)."""
    for t in range(scores.size):
        x = scores[t] / softcap
        e = _exp(np.float32(-2.0) * abs(x))
        y = softcap * (np.float32(1.0) - e) / (np.float32(1.0) + e)
        scores[t] = y if x > 0 else -y


@_fast
def _top(scores: Any) -> Any:
    top = scores[0]
    for t in range(scores.size):
        top = max(top, scores[t])
    return top


@_fast
def _exp_sum(scores: Any, top: Any) -> Any:
    """scores to exp(scores − top). Returns their sum."""
    total = np.float32(0.0)
    for t in range(scores.size):
        e = _exp(scores[t] - top)
        scores[t] = e
        total += e
    return total


@_inlined
def _score_block(
    rows: Any, count: int, keys: Any, at: int, scores: Any, to: int, width: int, size: int, dim: int
) -> None:
    """scores[r, to : to + size] = rows[r] [dim] · the block of keys [dim, size] at `at`, for all `count` rows."""
    whole = count - count % ROWS
    if size % LANES == 0:
        for j in range(0, size, LANES):
            for r in range(0, whole, ROWS):
                score_rows(dim, rows, r * dim, dim, keys, at + j, size, scores, r * width + to + j, width)
            for r in range(whole, count):
                score_row(dim, rows, r * dim, dim, keys, at + j, size, scores, r * width + to + j, width)
    else:
        for j in range(size):
            for r in range(0, whole, ROWS):
                score_rows_scalar(dim, rows, r * dim, dim, keys, at + j, size, scores, r * width + to + j, width)
            for r in range(whole, count):
                score_row_scalar(dim, rows, r * dim, dim, keys, at + j, size, scores, r * width + to + j, width)


@_inlined
def _sum_block(
    scores: Any, to: int, width: int, count: int, values: Any, at: int, sums: Any, size: int, dim: int
) -> None:
    """sums[r] [dim] += scores[r, to : to + size] · the block of values [size, dim] at `at`, for all `count` rows."""
    whole = count - count % ROWS
    wide = dim - dim % _WIDE
    for r in range(0, whole, ROWS):
        for d in range(0, wide, _WIDE):
            sum_rows(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)
        for d in range(wide, dim - dim % LANES, LANES):
            sum_rows_narrow(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)
        for d in range(dim - dim % LANES, dim):
            sum_rows_scalar(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)
    for r in range(whole, count):
        for d in range(0, wide, _WIDE):
            sum_row(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)
        for d in range(wide, dim - dim % LANES, LANES):
            sum_row_narrow(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)
        for d in range(dim - dim % LANES, dim):
            sum_row_scalar(size, scores, r * width + to, width, values, at + d, dim, sums, r * dim + d, dim)


@_inlined
def _prefetch_block(array: Any, at: int, size: int) -> None:
    for i in range(0, size, _LINE):
        prefetch(array, at + i)


@_inlined
def _weigh(scores: Any, low: int, high: int, softcap: Any, sink: Any, has_sink: bool) -> Any:
    """scores[low:high] to softmax weights but for their common factor, which is returned; zero elsewhere.

    A sink takes its share of the sum and no place.
    """
    scores[:low] = np.float32(0.0)
    scores[high:] = np.float32(0.0)
    seen = scores[low:high]
    if softcap > 0:
        _cap(seen, softcap)
    top = _top(seen)
    if has_sink:
        top = max(top, sink)
    total = _exp_sum(seen, top)
    if has_sink:
        total += _exp(sink - top)
    return np.float32(1.0) / total


@_inlined
def _tile(
    query: Any, first: int, count: int, kv_head: int, position: int, table: Any, keys: Any, values: Any,
    sinks: Any, rows: Any, sums: Any, scores: Any, out: Any, scaling: Any, window: int, softcap: Any,
) -> None:  # fmt: skip
    """`count` queries from token `first` on, the first at `position`, all heads of one kv head."""
    kv_heads, key_dim, size, value_dim = keys.shape[1], keys.shape[2], keys.shape[3], values.shape[3]
    group = query.shape[0] // kv_heads
    lines = count * group
    for i in range(count):
        for g in range(group):
            for d in range(key_dim):
                rows[i * group + g, d] = query[kv_head * group + g, first + i, d] * scaling
    sums[:lines] = np.float32(0.0)
    start = max(0, position + 1 - window) // size if window > 0 else 0
    stop = (position + count - 1) // size + 1
    width = (stop - start) * size
    key_block, value_block = size * key_dim, size * value_dim
    for b in range(start, stop):
        if b + 1 < stop:
            _prefetch_block(keys, (table[b + 1] * kv_heads + kv_head) * key_block, key_block)
        at = (table[b] * kv_heads + kv_head) * key_block
        _score_block(rows, lines, keys, at, scores, (b - start) * size, width, size, key_dim)
    for b in range(start, min(start + 1, stop)):
        _prefetch_block(values, (table[b] * kv_heads + kv_head) * value_block, value_block)
    for r in range(lines):
        high = position + r // group + 1 - start * size
        low = max(0, high - window) if window > 0 else 0
        sink = sinks[kv_head * group + r % group] if sinks.size > 0 else np.float32(0.0)
        rows[r, 0] = _weigh(scores[r * width : (r + 1) * width], low, high, softcap, sink, sinks.size > 0)
    for b in range(start, stop):
        if b + 1 < stop:
            _prefetch_block(values, (table[b + 1] * kv_heads + kv_head) * value_block, value_block)
        at = (table[b] * kv_heads + kv_head) * value_block
        _sum_block(scores, (b - start) * size, width, lines, values, at, sums, size, value_dim)
    for r in range(lines):
        for d in range(value_dim):
            out[first + r // group, kv_head * group + r % group, d] = sums[r, d] * rows[r, 0]


_VIEW_3, _INTS_2, _INTS_1 = "float32[:, :, :]", "int32[:, :]", "int32[:]"
_FLAT, _OUT, _CACHE = "float32[::1]", "float32[:, :, ::1]", "float32[:, :, :, ::1]"
_SIGNATURE = (
    f"void({_VIEW_3}, {_VIEW_3}, {_VIEW_3}, int64[:], {_INTS_1}, {_INTS_1}, {_INTS_2}, {_CACHE}, {_CACHE}, {_FLAT},"
    f" {_FLAT}, {_OUT}, float32, int64, float32)"
)


@njit(_SIGNATURE, cache=True, nogil=True)
def attend(
    query: Any, key: Any, value: Any, slots: Any, starts: Any, lengths: Any, tables: Any, keys: Any, values: Any,
    sinks: Any, scores: Any, out: Any, scaling: Any, window: int, softcap: Any,
) -> None:  # fmt: skip
    """Writes a step's keys and values into the cache, then attends.

    query [heads, T, key_dim], key [kv_heads, T, key_dim], value [kv_heads, T, value_dim], slots [T] int64,
    starts [S + 1] int32, lengths [S] int32, tables [S, blocks] int32, keys and values: a layer's cache, sinks [heads]
    or [0], scores: scratch, out [T, heads, value_dim]; scaling, window, softcap as in `Backend.attend`. A tile of
    queries takes at most MAX_SCORES scores; a tile of one query takes group · (its context up to a block's end).
    """
    kv_heads, block_size = keys.shape[1], keys.shape[3]
    group = query.shape[0] // kv_heads
    rows = np.empty((MAX_QUERIES * group, keys.shape[2]), dtype=np.float32)
    sums = np.empty((MAX_QUERIES * group, values.shape[3]), dtype=np.float32)
    for token in range(slots.size):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for h in range(kv_heads):
            for d in range(key.shape[2]):
                keys[block, h, d, offset] = key[h, token, d]
            for d in range(value.shape[2]):
                values[block, h, offset, d] = value[h, token, d]
    for s in range(lengths.size):
        first, end = starts[s], starts[s + 1]
        position = lengths[s] - (end - first)
        while first < end:
            reach = (position + MAX_QUERIES + block_size) * group
            count = min(end - first, max(1, min(MAX_QUERIES, MAX_SCORES // reach)))
            for h in range(kv_heads):
                _tile(
                    query, first, count, h, position, tables[s], keys, values, sinks, rows, sums, scores, out,
                    scaling, window, softcap,
                )  # fmt: skip
            first += count
            position += count
