"""Products with a block of the KV cache are those of float64 on the numbers that the cache holds, whatever their shape,
and an element has the same bits whatever rows and columns are computed beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from engine.native.block_tiles import MAX_ROWS
from engine.native.intrinsics import call_reader
from engine.native.kernels import block_kernels
from engine.native.products import multiply

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def product(add: bool, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    out = c.clone()
    tiles = block_kernels(b.dtype).table
    rows, n = a.shape
    columns = b.shape[1]
    multiply(tiles, int(add), rows, a.data_ptr(), n, b.data_ptr(), columns, out.data_ptr(), columns, n, columns)
    return out


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DTYPES), st.booleans(), st.integers(1, 2 * MAX_ROWS + 3), st.integers(1, 40), st.integers(1, 150),
    st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_any_shape(dtype: torch.dtype, add: bool, rows: int, n: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    a, b, c = torch.randn(rows, n), torch.randn(n, columns).to(dtype), torch.randn(rows, columns)
    found = product(add, a, b, c)
    expected = a.double() @ b.double() + add * c.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    row, column = seed % rows, seed % columns
    alone = product(
        add, a[row : row + 1], b[:, column : column + 1].contiguous(), c[row : row + 1, column : column + 1]
    )
    assert torch.equal(alone[0, 0], found[row, column])


def _store(address: int, source: int, to: int, n: int, stride: int) -> None:
    call_reader(address, (source, to, n, stride))


store: Any = njit(_store)


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_is_rounded_to_the_nearest_number_and_clipped(dtype: torch.dtype, stride: int) -> None:
    torch.manual_seed(0)
    largest = min(torch.finfo(dtype).max, 1e30)
    numbers = torch.cat(
        [torch.randn(100) * 10.0 ** torch.arange(-8, 2).repeat(10), torch.tensor([0.0, -0.0, 3e5, -3e5])]
    )
    cache = torch.zeros(len(numbers), stride, dtype=dtype)
    store(block_kernels(dtype).table[0, 0, 0, 1], numbers.data_ptr(), cache.data_ptr(), len(numbers), stride)
    assert torch.equal(cache[:, 0], numbers.clamp(-largest, largest).to(dtype))
    assert not cache[:, 1:].any()


def test_no_cache_holds_integers() -> None:
    with pytest.raises(ValueError, match="a KV cache of"):
        block_kernels(torch.int8)
