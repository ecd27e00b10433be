"""Random numbers without a generator: a pure function of (seed, position, token id), the same on every device.

So a draw depends on nothing else in the batch, and a request that moves to another engine goes on as it would have.
The constants are shared with the compiled kernels in `cpu`, which compute the same integers.
"""

from __future__ import annotations

import torch

# splitmix64 (Steele, Lea and Flood, 2014; finalizer by Stafford, variant 13)
GOLDEN = 0x9E3779B97F4A7C15
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
MIX64_LAST = 31
# triple32 of Wellons' hash prospector: bias 0.021, close to that of a random permutation
MIX32 = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
MIX32_LAST = 14


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One 64-bit key per row: distinct positions of a seed never share one. [m] int64, [m] int64 → [m] int64."""
    return _mix64(_mix64(seeds + _signed(GOLDEN, 64)) + positions)


def uniforms(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), 2**32 of them equally likely. [m] int64 → [m, vocab_size] float64."""
    low = keys.to(torch.int32)[:, None]
    high = (keys >> 32).to(torch.int32)[:, None]
    x = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) ^ low
    for stage, (shift, factor) in enumerate(MIX32):
        x = x ^ _shift_right(x, shift, 32)
        if stage == 1:  # the key's other half enters where the first half is mixed already
            x = x + high
        x = x * _signed(factor, 32)
    x = x ^ _shift_right(x, MIX32_LAST, 32)
    return ((x.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32


def exponentials(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential variates with mean 1, finite and above 0. [m] int64 → [m, vocab_size] float64."""
    return -torch.log1p(-uniforms(keys, vocab_size))


def _mix64(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIX64:
        x = (x ^ _shift_right(x, shift, 64)) * _signed(factor, 64)
    return x ^ _shift_right(x, MIX64_LAST, 64)


def _shift_right(x: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> shift) & ((1 << (bits - shift)) - 1)


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant: torch has no unsigned arithmetic, but wraps the same."""
    return value - (1 << bits) if value >> (bits - 1) else value
