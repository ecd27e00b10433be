"""Layers for transformers' own modules that compute with a tape of their own: what a tape of the whole model would."""

from __future__ import annotations

import torch
from torch import nn

from engine.native import tape as t
from engine.native.formats import FORMATS, GROUP, Packed
from engine.native.kernels import kernels
from engine.native.step import Lines, new_record
from engine.native.team import Team

_ALONE = 1_000_000  # multiplications of a call that one thread does sooner than several


class PackedLinear(nn.Module):
    """x · weightᵀ + bias for float32 x [..., in], giving [..., out]. Owner: the device thread."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None, team: Team) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bias = torch.zeros(weight.padded)
        if bias is not None:
            self.bias[: weight.out_features] = bias
        self.packed, self._team, self._record = weight, team, new_record()
        self._lines = Lines(1 + weight.format.is_integer)
        self._products = weight.padded * weight.inputs
        if weight.format.is_integer:
            self._record_floats = record_floats(weight)
            self._lines.write(0, {
                t.KIND: t.NORM, t.LDA: weight.in_features, t.LDC: self._record_floats, t.IN: weight.in_features,
                t.LIMIT: weight.limit, t.FILLED: weight.inputs,
            })  # fmt: skip
        self._lines.write(-1, {
            t.KIND: t.LINEAR, t.LDA: 4 * (self._record_floats if weight.format.is_integer else weight.in_features),
            t.WEIGHT: weight.panels.data_ptr(), t.IN: weight.inputs, t.PANEL: weight.panel_bytes,
            t.PANELS: weight.panels.shape[0], t.INIT: self.bias.data_ptr(), t.LDC: weight.padded,
            t.TILES: kernels().table[weight.format.name].ctypes.data,
        })  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.numel() // self.in_features
        out = torch.empty(*x.shape[:-1], self.packed.padded)
        numbers = self._lines.numbers
        if self.packed.format.is_integer:
            prepared = torch.empty(rows, self._record_floats)
            numbers[0, t.A], numbers[0, t.C] = x.data_ptr(), prepared.data_ptr()
            numbers[1, t.A] = prepared.data_ptr()
        else:
            numbers[0, t.A] = x.data_ptr()
        numbers[-1, t.C] = out.data_ptr()
        self._record[t.TOKENS] = rows
        self._lines.into(self._record)
        self._team.run(self._record, rows * self._products < _ALONE)
        return out if self.out_features == self.packed.padded else out[..., : self.out_features]


class FusedNorm(nn.Module):
    """RMS norm of float32 x [..., n] with `weight` [n]. Owner: the device thread."""

    def __init__(self, weight: torch.Tensor, epsilon: float, team: Team) -> None:
        super().__init__()
        self.weight = owned(weight.detach().float().contiguous())
        self._team, self._record, self._lines = team, new_record(), Lines(1)
        size = self._size = self.weight.numel()
        fields = {t.KIND: t.NORM, t.LDA: size, t.LDC: size, t.IN: size, t.WEIGHT: self.weight.data_ptr()}
        self._lines.write(0, fields, (epsilon,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        line = self._lines.numbers[0]
        line[t.A], line[t.C] = x.data_ptr(), out.data_ptr()
        self._record[t.TOKENS] = x.numel() // self._size
        self._lines.into(self._record)
        self._team.run(self._record, x.numel() < _ALONE)
        return out


class PackedEmbedding(nn.Module):
    """Rows of a table [V, n], times a scale. Owner: the device thread."""

    def __init__(self, table: Packed | torch.Tensor, scale: float, team: Team) -> None:
        super().__init__()
        self._table = table = owned(table) if isinstance(table, torch.Tensor) else table
        self._team, self._record, self._lines = team, new_record(), Lines(1)
        self._size = table.in_features if isinstance(table, Packed) else table.shape[1]
        self._lines.write(0, {t.KIND: t.EMBED, t.LDC: self._size, **embed_fields(table)}, (scale,))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64, any shape. Returns [..., n] float32."""
        ids = ids.contiguous()
        out = torch.empty(*ids.shape, self._size)
        self._lines.numbers[0, t.C] = out.data_ptr()
        self._record[t.TOKENS], self._record[t.TOKEN_IDS] = ids.numel(), ids.data_ptr()
        self._lines.into(self._record)
        self._team.run(self._record, out.numel() < _ALONE)
        return out


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: a weight as it was loaded may lie in a mapped file, which it would keep in memory whole."""
    return tensor.clone()


def embed_fields(table: Packed | torch.Tensor) -> dict[int, int]:
    """Of an EMBED line over `table`, which must stay alive."""
    if isinstance(table, Packed):
        return {
            t.READER: kernels().reader(table.format, of_panel=True), t.WEIGHT: table.panels.data_ptr(),
            t.COLUMNS: table.width, t.ROW_BYTES: table.panel_bytes, t.IN: table.in_features,
        }  # fmt: skip
    format = next(f for f in FORMATS.values() if f.dtype is table.dtype)
    return {
        t.READER: kernels().reader(format, of_panel=False), t.WEIGHT: table.data_ptr(),
        t.ROW_BYTES: table.shape[1] * format.size, t.IN: table.shape[1],
    }  # fmt: skip


def record_floats(weight: Packed) -> int:
    """Of a row as integer tiles want it, counted as float32 numbers: scale and sums, then sixteen-bit numbers."""
    return -(-(1 + weight.inputs // GROUP) // 16) * 16 + weight.inputs // 2
