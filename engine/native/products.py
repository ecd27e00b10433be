"""Products of any number of rows with one block of keys or of values."""

from __future__ import annotations

from typing import Any

from numba import njit

from engine.native.block_tiles import LEVELS, MAX_ROWS
from engine.native.intrinsics import call_tile, prefetch

_FLOAT = 4  # bytes
_LINE = 64  # bytes of a cache line


@njit(nogil=True)
def multiply(
    tiles: Any, add: int, count: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, n: int, columns: int
) -> None:
    """c[r, j] = Σᵢ a[r, i] · b[i, j], or c[r, j] + that, for `count` rows, i < n, j < `columns`. a, b, c: addresses;
    strides in elements; `tiles`: the table of b's format, as `BlockKernels` has it."""
    r = 0
    while r < count:
        rows = min(MAX_ROWS, count - r)
        begin = 0
        for level in range(LEVELS):
            width = tiles[add, rows, level, 0]
            if width == 0 or columns - begin < width:
                continue
            end = columns - (columns - begin) % width
            to = c + r * ldc * _FLOAT
            call_tile(tiles[add, rows, level, 1], (a + r * lda * _FLOAT, lda, b, ldb, to, ldc, n, begin, end))
            begin = end
        r += rows


@njit(nogil=True)
def prefetch_block(address: int, size: int) -> None:
    for at in range(0, size, _LINE):
        prefetch(address + at)  # type: ignore[call-arg]  # numba hands the context over
