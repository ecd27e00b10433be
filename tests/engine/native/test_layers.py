"""Native layers compute what torch's own do on the numbers that their format holds, row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from engine.native.formats import FORMATS, pack, round_to
from engine.native.kernels import kernels
from engine.native.layers import FusedNorm, PackedEmbedding, PackedLinear
from engine.native.team import Team

TEAM = Team(2)
FORMAT_NAMES = sorted(FORMATS)


def linear(weight: torch.Tensor, bias: torch.Tensor | None, name: str = "float32") -> PackedLinear:
    return PackedLinear(pack(weight, name, kernels().lanes), bias, TEAM)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("out", "in_"), [(64, 64), (1, 3), (160, 64), (100, 33), (2048, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_of_any_shape(name: str, out: int, in_: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, b = torch.randn(out, in_), torch.randn(out) if bias else None
    layer, rounded = linear(weight, b, name), round_to(weight, name)
    for shape in ((in_,), (1, in_), (1, 33, in_), (2, 5, in_), (1, 0, in_)):
        x = torch.randn(*shape)
        expected = F.linear(x, rounded, b)
        torch.testing.assert_close(layer(x), expected, rtol=2e-4, atol=2e-3 if FORMATS[name].is_integer else 1e-4)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    torch.manual_seed(0)
    layer, x = linear(torch.randn(300, 70), torch.randn(300), name), torch.randn(400, 70)
    together = layer(x)
    for row in (0, 7, 399):
        assert torch.equal(layer(x[row]), together[row])


def test_an_input_of_any_strides() -> None:
    layer, x = linear(torch.randn(20, 30), None), torch.randn(30, 9)
    assert torch.equal(layer(x.t()), layer(x.t().contiguous()))


@pytest.mark.parametrize("size", [1, 5, 64, 576])
def test_a_norm(size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 7, size), torch.randn(size)
    torch.testing.assert_close(FusedNorm(weight, 1e-5, TEAM)(x), F.rms_norm(x, (size,), weight, 1e-5))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_an_embedding_from_a_packed_table(name: str) -> None:
    table = torch.randn(50, 70)
    found = PackedEmbedding(pack(table, name, kernels().lanes), 2.0, TEAM)(torch.tensor([[0, 49, 17]]))
    torch.testing.assert_close(found, 2 * round_to(table, name)[torch.tensor([[0, 49, 17]])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_embedding_from_plain_rows(dtype: torch.dtype) -> None:
    table = torch.randn(50, 70).to(dtype)
    found = PackedEmbedding(table, 1.0, TEAM)(torch.tensor([3, 3]))
    assert torch.equal(found, table[[3, 3]].float())
