"""Stored weights: what a format holds, and that packing what it holds loses nothing."""

from __future__ import annotations

import pytest
import torch

from engine.native.formats import FORMATS, pack, quantize_int4, quantize_int8, round_to

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


def test_int4_keeps_what_llama_cpp_has_quantized() -> None:
    generator = torch.Generator().manual_seed(1)
    d = torch.rand(8, 3, generator=generator).half() / 50
    m = -torch.rand(8, 3, generator=generator).half() / 4
    q = torch.randint(0, 16, (8, 3, 32), generator=generator)
    q[:, :, 0], q[:, :, 1] = 0, 15
    weight = (q * d.float()[..., None] + m.float()[..., None]).flatten(1)
    found_d, found_m, found_q = quantize_int4(weight)
    assert torch.equal(found_d, d)
    assert torch.equal(found_m, m)
    assert torch.equal(found_q.view_as(q), q.to(torch.uint8))


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
