"""Products of a tile of rows with one block of keys or of values."""

from __future__ import annotations

from typing import Any

from numba import njit

from engine.native.vector import (
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

_LINE = 16  # floats of a cache line
_WIDE = VECTORS * LANES

_inlined = njit(inline="always", nogil=True)


@_inlined
def score_block(
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
def sum_block(
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
def prefetch_block(array: Any, at: int, size: int) -> None:
    for i in range(0, size, _LINE):
        prefetch(array, at + i)
