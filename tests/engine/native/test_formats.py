"""Stored weights: what a format holds, and that packing what it holds loses nothing."""

from __future__ import annotations

import gguf
import pytest
import torch

from engine.native.formats import FORMATS, pack, quantize_int4, quantize_int8, round_to
from engine.native.kernels import kernels
from engine.native.layers import PackedLinear
from engine.native.team import Team

NAMES = sorted(FORMATS)
SHAPES = [(1, 1), (16, 32), (17, 33), (40, 576), (5, 64)]


def weight_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_twice_is_rounding_once(name: str, shape: tuple[int, int]) -> None:
    once = round_to(weight_of(shape), name)
    torch.testing.assert_close(round_to(once, name), once, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "error"), [("float32", 0.0), ("float16", 5e-4), ("bfloat16", 4e-3)])
def test_float_formats_round_to_their_precision(name: str, error: float) -> None:
    weight = weight_of((40, 64))
    assert ((round_to(weight, name) - weight).abs() <= error * weight.abs() + 1e-7).all()


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = weight_of((40, 64))
    q, scale = quantize_int8(weight)
    assert q.abs().max() <= 127
    assert ((q * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


def groups_of(d: torch.Tensor, m: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[out, inputs] float32 from d and m [out, groups], q [out, groups, n]."""
    return (q.float() * d.float()[..., None] + m.float()[..., None]).flatten(1)


def codes(low: int, high: int, shape: tuple[int, ...] = (40, 3, 32), seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def steps_of(shape: tuple[int, ...] = (40, 3), seed: int = 1) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 50 + 1e-4).half()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_keeps_what_llama_cpp_has_quantized(kind: str) -> None:
    type = gguf.GGMLQuantizationType[kind]
    numbers = weight_of((64, 256)).numpy()
    weight = torch.from_numpy(gguf.dequantize(gguf.quantize(numbers, type), type))
    assert torch.equal(round_to(weight, "int4"), weight)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(-8, 7), (-8, 5), (-3, 7), (-1, 1), (0, 0), (-7, 8), (4, 6)])
def test_int4_keeps_symmetric_grids_that_are_not_used_up(low: int, high: int, seed: int) -> None:
    d = steps_of(seed=seed) * (-1) ** seed
    weight = groups_of(d, torch.zeros_like(d), codes(low, high, seed=seed))
    assert torch.equal(round_to(weight, "int4"), weight)


def test_int4_keeps_a_step_that_float16_cannot_hold_but_for_its_rounding() -> None:
    d = steps_of().float() * (1 + 2**-12)
    m = -5.3 * d
    weight = groups_of(d, m, codes(2, 12))  # as in Q4_K
    error = (round_to(weight, "int4") - weight).abs().view(40, 3, 32) / d[..., None]
    assert error.max() < 15 * 2**-10  # of a step, where another grid would be off by half of one


def test_int4_is_no_further_off_than_a_grid_between_the_extremes() -> None:
    weight = weight_of((40, 256))
    groups = weight.view(-1, 32)
    step = (groups.amax(1) - groups.amin(1)) / 15
    assert ((round_to(weight, "int4") - weight).abs().view(-1, 32) <= 0.51 * step[:, None]).all()


@pytest.mark.parametrize("largest", [-128, -127, 127, 100, 64])
def test_int8_keeps_rows_of_whole_steps(largest: int) -> None:
    numbers = codes(-63, 63, (40, 96)).float()
    numbers[:, 50] = largest
    weight = numbers * steps_of((40, 1)).float()
    assert torch.equal(round_to(weight, "int8"), weight)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_weight_of_zeros_stays_one(name: str) -> None:
    assert not round_to(torch.zeros(5, 40), name).any()


def test_numbers_beyond_a_format_are_refused() -> None:
    with pytest.raises(ValueError, match="float16 cannot hold"):
        pack(torch.full((2, 2), 1e6), "float16", 8)


@pytest.mark.parametrize("size", [64, 4096, 40_000])
def test_no_sum_of_int8_overflows(size: int) -> None:
    packed = pack(torch.ones(16, size), "int8", 8)
    assert packed.limit * 127 * packed.inputs < 2**31


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_grids_that_were_found_are_computed_with_as_they_are(name: str) -> None:
    if name == "int4":  # downwards from 8 steps above zero, as in Q4_0
        d = -steps_of()
        weight = groups_of(d, -8 * d, codes(0, 15))
        assert (quantize_int4(weight)[0] < 0).any()
    else:
        numbers = codes(-63, 63, (40, 96)).float()
        numbers[:, 50] = -128
        weight = numbers * steps_of((40, 1)).float()
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    layer = PackedLinear(pack(weight, name, kernels().lanes), None, Team(1))
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=2e-4, atol=2e-3)
