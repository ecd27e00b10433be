"""The compiled operations choose the same tokens as plain torch, at every size and shape of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from engine.sampling import kernels
from engine.sampling.cpu import CpuOperations
from engine.sampling.kernels import BLOCK
from engine.sampling.reference import ReferenceOperations
from tests.engine.sampling.batch import Batch, Row

SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "flat": lambda random, size: np.zeros(size),
    "normal": lambda random, size: random.standard_normal(size) * 3,
    "narrow": lambda random, size: random.standard_normal(size) * 0.01 - 7,
    "peaked": lambda random, size: random.standard_normal(size) * 2 + 15 * (random.random(size) < 0.001),
    "bfloat16": lambda random, size: (random.standard_normal(size) * 3).round(1),
    "mostly impossible": lambda random, size: np.where(random.random(size) < 0.01, 1.0, -np.inf),
    "huge": lambda random, size: random.standard_normal(size) * 1e4,
}
PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.05),
    "hot": SamplingParams(temperature=5.0),
    "top_k": SamplingParams(top_k=50),
    "large top_k": SamplingParams(top_k=2000),
    "top_p": SamplingParams(top_p=0.95),
    "small top_p": SamplingParams(top_p=0.1),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
}


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_and_plain_draws_are_the_same_tokens(shape: str, size: int) -> None:
    random = np.random.default_rng(size)
    rows = [Row(replace(params, seed=seed)) for params in PARAMS.values() for seed in range(4)]
    logits = torch.from_numpy(np.stack([SHAPES[shape](random, size) for _ in rows])).float()
    compiled, plain = Batch(CpuOperations(), rows, size), Batch(ReferenceOperations(), rows, size)
    for _ in range(2):
        compiled.step(logits)
        plain.step(logits)
    differ = [i for i, pair in enumerate(zip(compiled.outputs, plain.outputs, strict=True)) if pair[0] != pair[1]]
    assert not differ


@pytest.mark.parametrize("spread", [3.0, 0.01], ids=["normal", "narrow"])
def test_compiled_and_plain_draws_are_the_same_over_a_real_vocabulary(spread: float) -> None:
    rows = [Row(replace(params, seed=seed)) for params in PARAMS.values() for seed in range(3)]
    logits = torch.randn(len(rows), 49_152, generator=torch.Generator().manual_seed(0)) * spread
    compiled, plain = Batch(CpuOperations(), rows, 49_152), Batch(ReferenceOperations(), rows, 49_152)
    assert compiled.step(logits).tokens.tolist() == plain.step(logits).tokens.tolist()


def test_compiled_and_plain_penalties_agree_and_touch_no_other_row() -> None:
    params = SamplingParams(repetition_penalty=1.37, presence_penalty=0.61, frequency_penalty=-0.23)
    rows = [Row(params, prompt=range(0, 3000, 7), output=[t % 500 for t in range(1700)])] * 3
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 3
    results = []
    for ops in (CpuOperations(), ReferenceOperations()):
        batch = Batch(ops, rows, 5000)
        penalties = batch.sampler.row_set(np.array([2, 0])).penalties
        assert penalties is not None
        z = logits.clone()
        ops.penalize(z, penalties, batch.sampler._pool.in_prompt, batch.sampler._pool.output_counts)
        results.append(z)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][2], logits[2])


@pytest.mark.parametrize("span", [1, 40, 3000, 2**20, 2**31 - 1])
@pytest.mark.parametrize("share", [0.001, 0.4, 0.97, 1.0, 1.5])
def test_a_threshold_is_the_highest_with_enough_at_or_above_it(span: int, share: float) -> None:
    """Whole numbers are measured, so that sums are exact in any order."""
    random = np.random.default_rng(span)
    keys = random.integers(-span // 2, span // 2 + 1, 20_000).astype(np.int32)
    measure = random.integers(0, 4, keys.size).astype(np.float32)
    target = share * float(measure.sum())
    scratch = np.empty_like(keys), np.empty_like(measure)
    found = kernels._threshold(keys, measure, target, -(2**31), int(keys.max()) + 1, *scratch)
    if target > measure.sum():
        assert found == -(2**31)
    else:
        assert measure[keys >= found].sum() >= target
        assert measure[keys > found].sum() < target
