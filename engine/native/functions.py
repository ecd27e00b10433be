"""Functions of one number or one row, in code that vectorizes: libm's would be called number by number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from engine.native import tape as t

LOWEST = np.float32(-87.0)  # e to that is the smallest normal number, about

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(inline="always", fastmath=True)
def exp(x: Any) -> Any:
    """e**x for x ≤ 0 in float32, to 2 ulp, in code that vectorizes (libm's would be called number by number).

    The classic range reduction x = n·ln 2 + r and a polynomial in r (Cephes, expf).
    """
    x = max(x, LOWEST)
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


@njit(nogil=True, fastmath=True)
def cap(scores: Any, softcap: Any) -> None:
    """c · tanh(s / c), by tanh x = sign x · (1 − e) / (1 + e) with e = exp(−2 |x|)."""
    for i in range(scores.size):
        x = scores[i] / softcap
        e = exp(np.float32(-2.0) * abs(x))
        y = softcap * (np.float32(1.0) - e) / (np.float32(1.0) + e)
        scores[i] = y if x > 0 else -y


@njit(nogil=True)
def silu(x: Any) -> Any:
    e = exp(-abs(x))
    return x / (np.float32(1.0) + e) if x >= 0 else x * e / (np.float32(1.0) + e)


@njit(nogil=True)
def activate(x: Any, kind: int) -> Any:
    if kind == t.GELU:
        return np.float32(0.5) * x * np.float32(1.0 + math.erf(x * 0.7071067811865476))
    y = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    e = exp(np.float32(-2.0) * abs(y))
    tanh = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return np.float32(0.5) * x * (np.float32(1.0) + (tanh if y >= 0 else -tanh))
