"""Experts as layers of their own give what transformers' stacked ones do; a router's product is theirs to replace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from engine.model.experts import Experts, RouterWeight, experts_weights, is_experts, is_router
from engine.model.loader import load_config, load_model

Zoo = Callable[[str], Path]


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight.data = weight.clone()
    if bias is not None:
        layer.bias.data = bias.clone()
    return layer


def found(folder: Path, wanted: Callable[[nn.Module], bool]) -> Any:
    model = load_model(folder, load_config(folder), torch.float32, torch.device("cpu"))
    return next(module for module in model.modules() if wanted(module))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_they_give_what_stacked_experts_do(family: str, zoo_folder: Zoo) -> None:
    stacked = found(zoo_folder(family), is_experts)
    size = next(experts_weights(stacked))[1][0].shape[1]
    x, chosen = torch.randn(9, size), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    with torch.inference_mode():
        expected = stacked(x, chosen, weights)
        torch.testing.assert_close(Experts(stacked, linear)(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)


def test_a_token_has_the_same_bits_whoever_else_is_routed(zoo_folder: Zoo) -> None:
    experts = Experts(found(zoo_folder("mixtral"), is_experts), lambda w, b: RowByRow(w))
    x, chosen, weights = torch.randn(5, 64), torch.tensor([[3, 0], [1, 2], [0, 3], [2, 3], [0, 1]]), torch.rand(5, 2)
    with torch.inference_mode():
        together = experts(x, chosen, weights)
        for i in range(5):
            assert torch.equal(experts(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1])[0], together[i])


class RowByRow(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.kept = weight.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.kept @ row for row in x])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_router_is_known_by_its_name_and_weight(family: str, zoo_folder: Zoo) -> None:
    assert found(zoo_folder(family), is_router).weight.dim() == 2


def test_a_linear_function_over_a_routers_weight_is_the_layers() -> None:
    weight = torch.randn(4, 8)
    routed = RouterWeight.of(weight, RowByRow(2 * weight))
    x, bias = torch.randn(3, 8), torch.randn(4)
    torch.testing.assert_close(F.linear(x, routed), 2 * x @ weight.t())
    torch.testing.assert_close(F.linear(x, routed, bias), 2 * x @ weight.t() + bias)
    torch.testing.assert_close(F.linear(x, routed.type(torch.float32)), 2 * x @ weight.t())


def test_every_other_use_of_a_routers_weight_is_plain() -> None:
    weight = torch.randn(4, 4)
    routed = RouterWeight.of(weight, nn.Identity())
    assert torch.equal(routed.t() + 0, weight.t())
    assert torch.equal(routed[1] * 2, weight[1] * 2)
