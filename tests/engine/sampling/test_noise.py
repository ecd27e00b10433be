"""The counter-based noise: uniform, independent in every direction of its key, finite."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.sampling.noise import exponentials, row_keys, uniforms

CELLS = 64


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the statistic lies from its mean, for equally likely cells."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = float(counts.size - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


def grid(seeds: range, positions: range, tokens: int) -> np.ndarray:
    """Uniforms by [seed, position, token]."""
    s, p = torch.meshgrid(torch.tensor(list(seeds)), torch.tensor(list(positions)), indexing="ij")
    return uniforms(row_keys(s.flatten(), p.flatten()), tokens).numpy().reshape(len(seeds), len(positions), tokens)


def cells(u: np.ndarray, count: int = CELLS) -> np.ndarray:
    return (u * count).astype(np.int64)


def test_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    for u in (grid(range(1), range(1), 200_000), grid(range(1), range(20_000), 8), grid(range(20_000), range(1), 8)):
        assert abs(chi_square(np.bincount(cells(u).ravel(), minlength=CELLS))) < 4


def test_the_low_bits_are_uniform_too() -> None:
    u = grid(range(4), range(100), 500)
    low = ((u * 2**32).astype(np.int64) & (CELLS - 1)).ravel()
    assert abs(chi_square(np.bincount(low, minlength=CELLS))) < 4


def test_neighbours_in_seed_position_and_token_are_independent() -> None:
    u = cells(grid(range(60), range(60), 60), 16)
    for axis in range(3):
        for distance in (1, 2, 16):
            first = np.delete(u, range(distance), axis=axis)
            second = np.delete(u, range(u.shape[axis] - distance, u.shape[axis]), axis=axis)
            pairs = np.bincount((first * 16 + second).ravel(), minlength=256)
            assert abs(chi_square(pairs)) < 4, (axis, distance)


def test_one_token_over_many_positions_never_repeats_a_pattern() -> None:
    u = grid(range(1), range(4000), 3)[0]
    assert len(np.unique(u[:, 0])) > 3990  # a birthday or two among 2**32 numbers would be much already
    assert abs(np.corrcoef(u.T)[np.triu_indices(3, 1)]).max() < 0.08


def test_noise_is_finite_and_above_zero_at_both_ends() -> None:
    e = exponentials(torch.arange(8), 200_000)
    assert bool(e.isfinite().all())
    assert float(e.min()) > 0
    u = torch.tensor([0.5, 2**32 - 0.5], dtype=torch.float64) * 2.0**-32
    assert bool((-torch.log1p(-u)).isfinite().all())


def test_large_seeds_and_positions_are_told_apart() -> None:
    seeds = torch.tensor([0, 1, 2**32, 2**63 - 1, 2**62])
    keys = row_keys(seeds.repeat_interleave(3), torch.tensor([0, 1, 2**31]).repeat(5))
    assert len(set(keys.tolist())) == 15


def test_the_numbers_are_fixed_for_good() -> None:
    """A seeded request must give the same text in the next release and on another machine."""
    keys = row_keys(torch.tensor([0, 42]), torch.tensor([0, 7]))
    found = (uniforms(keys, 3) * 2**32).long().tolist()
    assert keys.tolist() == [5197578548964807871, -5626590097152306923]
    assert found == [[550785252, 2568821972, 761447205], [2777831587, 3846077218, 1362109239]]
