"""Packed linear layers compute what torch's own do, and the choice among them is measured, bounded and told."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.model import linear
from engine.model.linear import Kernel, PlainLinear, float32_candidates, pack_linears

KERNELS = float32_candidates()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("out", "in_"), [(64, 64), (1, 3), (160, 64), (100, 33), (2048, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_plain_one_does(kernel: type[Kernel], out: int, in_: int, bias: bool) -> None:
    weight, b = torch.randn(out, in_), torch.randn(out) if bias else None
    packed = kernel(weight, b)
    with torch.inference_mode():
        for shape in ((in_,), (1, in_), (1, 33, in_), (2, 5, in_), (1, 0, in_)):
            x = torch.randn(*shape)
            torch.testing.assert_close(packed(x), F.linear(x, weight, b), rtol=1e-5, atol=1e-5)


def _conv(out: int, in_: int) -> nn.Module:
    return Conv1D(out, in_)  # type: ignore[no-untyped-call]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 32)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 48), nn.SiLU(), _conv(32, 48)) for _ in range(2)])
        self.head = nn.Linear(32, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_a_model_computes_the_same_after_packing() -> None:
    model, ids = Model(), torch.arange(30)[None]
    with torch.inference_mode():
        before = model(ids)
        chosen = pack_linears(model, KERNELS)
        torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-4)
    assert set(chosen) == {(48, 32), (32, 48), (300, 32)}
    assert set(chosen.values()) <= {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k is not PlainLinear], ids=lambda kernel: kernel.name)
def test_the_plain_weight_is_freed_unless_the_embedding_shares_it(kernel: type[Kernel]) -> None:
    model = Model()
    plain = weakref.ref(model.layers[0][0].weight)  # type: ignore[index]
    pack_linears(model, [kernel])
    gc.collect()
    assert plain() is None
    assert torch.equal(model.embedding(torch.tensor([7]))[0], model.embedding.weight[7])


def test_the_fastest_is_chosen_and_a_near_tie_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"plain": 1.0, "transposed": 0.97, "onednn": 2.0}
    monkeypatch.setattr(linear, "_best_times", lambda modules, x: [times[m.name] for m in modules])
    weight = torch.randn(8, 8)
    assert linear.fastest(KERNELS, weight, None).name == "plain"
    times["transposed"] = 0.5
    assert linear.fastest(KERNELS, weight, None).name == "transposed"


def test_without_time_the_other_shapes_follow_the_nearest_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def fastest(candidates: list[type[Kernel]], weight: torch.Tensor, bias: torch.Tensor | None) -> type[Kernel]:
        measured.append(tuple(weight.shape))
        return candidates[-1]

    monkeypatch.setattr(linear, "fastest", fastest)
    chosen = pack_linears(Model(), KERNELS, budget=-1.0)
    assert measured == [(300, 32)]  # the costliest
    assert set(chosen.values()) == {KERNELS[-1].name}
