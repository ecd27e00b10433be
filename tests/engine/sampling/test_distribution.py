"""Drawn tokens follow the distribution that the parameters describe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from engine.sampling.operations import Operations
from tests.engine.sampling.batch import Batch, Row, both
from tests.engine.sampling.oracle import choose

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0, 0.1, 0.2, 0.3]
DRAWS = 20_000


def draw_many(ops: Operations, params: SamplingParams, fixed: str) -> np.ndarray:
    """Counts of the tokens drawn, over positions of one seed or over seeds at one position."""
    seeds, positions = np.zeros(DRAWS, dtype=np.int64) + 5, np.zeros(DRAWS, dtype=np.int64) + 3
    (positions if fixed == "seed" else seeds)[:] += np.arange(DRAWS)
    counts = np.zeros(len(LOGITS), dtype=np.int64)
    for start in range(0, DRAWS, 1000):
        rows = [Row(replace(params, seed=int(seed))) for seed in seeds[start : start + 1000]]
        sampler = Batch(ops, rows, len(LOGITS)).sampler
        logits = torch.tensor(LOGITS).expand(1000, -1).contiguous()
        at = torch.from_numpy(positions[start : start + 1000])
        tokens = sampler.sample(logits, sampler.row_set(np.arange(1000)), at).tokens.numpy()
        counts += np.bincount(tokens, minlength=len(LOGITS))
    return counts


@both
@pytest.mark.parametrize("fixed", ["seed", "position"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.8),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(ops: Operations, params: SamplingParams, fixed: str) -> None:
    counts = draw_many(ops, params, fixed)
    expected = choose(LOGITS, params, 0).probabilities
    assert set(np.flatnonzero(counts)) <= set(expected)
    statistic = sum((counts[token] - p * DRAWS) ** 2 / (p * DRAWS) for token, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4
