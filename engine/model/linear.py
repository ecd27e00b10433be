"""Linear layers, each packed for the kernel that measures fastest on this machine for its shape.

A kernel is a module made from a weight and a bias. The candidates here compute in float32 and differ only by rounding;
another file may bring candidates of lower precision and hand them to `pack_linears`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  # the field's own name for it
from torch import nn
from transformers.pytorch_utils import Conv1D

log = logging.getLogger(__name__)

ROWS = (1, 16, 64)  # rows of the batches that are measured: a lone stream, a small and a large batch
BUDGET = 1.5  # seconds for all measuring at load
_REPEATS = 3
_MEASURED_NUMBERS = 1 << 24  # of a weight: more than a last-level cache holds, little enough to measure quickly
_CLEARLY = 0.9  # of the first candidate's time; less is noise, and loads should agree with each other


class Kernel(nn.Module):
    """A module that computes x · weightᵀ + bias for x [..., in], giving [..., out]."""

    name: ClassVar[str]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Packs `weight` [out, in] and `bias` [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias


class PlainLinear(Kernel):
    """torch's own, on the weight as it was loaded."""

    name = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class TransposedLinear(Kernel):
    """The weight as [in, out]: reads fewer pages per output for a single row."""

    name = "transposed"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight.t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return out.view(*x.shape[:-1], out.shape[-1])


class OneDnnLinear(Kernel):
    """The weight in oneDNN's blocked layout, which its float32 matmul reads without repacking it every time."""

    name = "onednn"
    _ROWS_HINT = 64

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:  # oneDNN refuses empty matrices
            return x.new_empty(*x.shape[:-1], self.out_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


Shape = tuple[int, int]  # out, in


def float32_candidates() -> list[type[Kernel]]:
    """The exact kernels that this build of torch has."""
    found: list[type[Kernel]] = [PlainLinear, TransposedLinear]
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        found.append(OneDnnLinear)
    return found


def pack_linears(model: nn.Module, candidates: Sequence[type[Kernel]], budget: float = BUDGET) -> dict[Shape, str]:
    """Replaces each linear layer of `model` by the candidate that is fastest for its shape, and frees the plain weight.

    Returns the chosen kernel's name by (out, in). Shapes are measured from the costliest down; those that `budget`
    seconds no longer reach take the kernel of the measured shape that is nearest in size.
    """
    layers: dict[Shape, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Conv1D):
                weight, _ = _weights(child)
                layers.setdefault((weight.shape[0], weight.shape[1]), []).append((parent, name))
    chosen: dict[Shape, type[Kernel]] = {}
    deadline = time.monotonic() + budget
    for shape in sorted(layers, key=lambda s: s[0] * s[1] * len(layers[s]), reverse=True):
        if chosen and time.monotonic() > deadline:
            chosen[shape] = chosen[min(chosen, key=lambda s: abs(s[0] * s[1] - shape[0] * shape[1]))]
        else:
            parent, name = layers[shape][0]
            chosen[shape] = fastest(candidates, *_weights(getattr(parent, name)))
    for shape, places in layers.items():
        for parent, name in places:
            setattr(parent, name, chosen[shape](*_weights(getattr(parent, name))))
    names = {shape: kernel.name for shape, kernel in chosen.items()}
    log.info("linear layers: %s", ", ".join(f"{out}x{in_} {name}" for (out, in_), name in names.items()))
    return names


def fastest(candidates: Sequence[type[Kernel]], weight: torch.Tensor, bias: torch.Tensor | None) -> type[Kernel]:
    """The candidate whose times over `ROWS` have the smallest product; the first one keeps its place in a near-tie.

    A very large weight is judged by its first rows.
    """
    out = min(weight.shape[0], max(1, _MEASURED_NUMBERS // weight.shape[1]))
    weight, bias = weight[:out], None if bias is None else bias[:out]
    with torch.inference_mode():
        modules = [kernel(weight, bias) for kernel in candidates]
        scores = [1.0] * len(modules)
        for rows in ROWS:
            x = torch.randn(1, rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            for i, seconds in enumerate(_best_times(modules, x)):
                scores[i] *= seconds
    best = min(range(len(scores)), key=scores.__getitem__)
    return candidates[best if scores[best] < _CLEARLY ** len(ROWS) * scores[0] else 0]


def _best_times(modules: Sequence[nn.Module], x: torch.Tensor) -> list[float]:
    """Seconds of this thread's own time, the best of a few rounds; taking turns, so that a disturbance meets all."""
    best = [math.inf] * len(modules)
    for _ in range(1 + _REPEATS):
        for i, module in enumerate(modules):
            begin = time.thread_time()
            module(x)
            best[i] = min(best[i], time.thread_time() - begin)
    return best


def _weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight as [out, in] and bias, detached. GPT-2's Conv1D keeps its weight as [in, out]."""
    weight = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight, bias
