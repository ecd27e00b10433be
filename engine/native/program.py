"""A tape in the making, and its runs: weights, constants and buffers by name instead of by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.cache import KVCache, LayerShape
from engine.model.batch import Batch
from engine.native import tape as t
from engine.native.formats import Packed
from engine.native.kernels import kernels
from engine.native.layers import embed_fields, owned, record_floats
from engine.native.step import Lines, Step
from engine.native.team import Team

_ALONE = 3_000_000  # multiplications, or numbers read, of a step that one thread does sooner than several


@dataclass(frozen=True, slots=True)
class Buffer:
    """[rows, width] float32, as many rows as a step has tokens; or its columns from `offset` on."""

    index: int
    width: int
    offset: int = 0


class Program:
    """Operations over named buffers, in order. Owner: the device thread.

    Build it with the methods named after operations, then `run` it. All weights handed in are kept alive here.
    """

    def __init__(self, team: Team) -> None:
        self._widths: list[int] = []
        self._lines: list[dict[int, int | Buffer]] = []
        self._floats: list[tuple[float, ...]] = []
        self._kept: list[Any] = []
        self._memory: list[np.ndarray[Any, Any]] = []
        self._capacity = 0
        self._step = Step(team)
        self._group = 1
        self._weights = [0, 0]  # numbers per token, and per row of logits

    def buffer(self, width: int) -> Buffer:
        """A new buffer; widths are rounded up to whole panels."""
        unit = 2 * kernels().lanes
        self._widths.append(-(-width // unit) * unit)
        return Buffer(len(self._widths) - 1, self._widths[-1])

    def activation_floats(self, weight: Packed) -> int:
        """Width of a buffer for rows that `weight` is multiplied with, as its tiles want them."""
        return record_floats(weight) if weight.format.is_integer else weight.in_features

    def embed(self, table: torch.Tensor | Packed, into: Buffer, scale: float = 1.0) -> None:
        """Rows of `table` [V, n], in the order of the step's tokens."""
        if isinstance(table, torch.Tensor):
            table = owned(table)
        self._kept.append(table)
        line: dict[int, int | Buffer] = {t.C: into, t.LDC: into.width, **embed_fields(table)}
        self._add(t.EMBED, line, scale)

    def norm(
        self, source: Buffer, scales: torch.Tensor | None, epsilon: float, into: Buffer, weight: Packed | None = None,
        of_logits: bool = False,
    ) -> None:  # fmt: skip
        """RMS norm with `scales` [n], or none, into what `weight` is multiplied with, or into plain numbers."""
        line: dict[int, int | Buffer] = {
            t.A: source, t.LDA: source.width, t.C: into, t.LDC: into.width, t.OF_LOGITS: int(of_logits),
            t.WEIGHT: 0 if scales is None else self._keep(scales.float()),
        }  # fmt: skip
        if weight is not None:
            line |= {t.IN: weight.in_features, t.LIMIT: weight.limit, t.FILLED: weight.inputs}
        elif scales is not None:
            line[t.IN] = scales.numel()
        self._add(t.NORM, line, epsilon)

    def add(self, source: Buffer, scales: torch.Tensor | None, epsilon: float, into: Buffer, factor: float) -> None:
        """into += factor * source, normed first where there are `scales` [n]."""
        self._add(t.ADD, {
            t.A: source, t.LDA: source.width, t.C: into, t.LDC: into.width,
            t.IN: min(source.width, into.width) if scales is None else scales.numel(),
            t.WEIGHT: 0 if scales is None else self._keep(scales.float()),
        }, epsilon, factor)  # fmt: skip

    def cap(self, logits: Buffer, factor: float, softcap: float) -> None:
        """logits *= factor; then, where `softcap` c > 0, c · tanh(logits / c)."""
        self._add(t.CAP, {t.C: logits, t.LDC: logits.width, t.IN: logits.width}, factor, softcap)

    def linear(
        self, source: Buffer, weight: Packed, into: Buffer, bias: torch.Tensor | None = None,
        residual: Buffer | None = None, of_logits: bool = False,
    ) -> None:  # fmt: skip
        """into = source · weightᵀ + (bias or residual)."""
        line = self._product(source, weight, into, of_logits)
        if residual is not None:
            line |= {t.INIT: residual, t.LDI: residual.width}
        else:
            line[t.INIT] = self._keep(_padded(bias, weight))
        self._add(t.LINEAR, line)

    def gated(
        self, source: Buffer, weight: Packed, into: Buffer, activation: int, bias: torch.Tensor | None = None
    ) -> None:
        """into = act(gate) * up, where `weight` (and `bias`) hold panels of gate and up in turn."""
        line = self._product(source, weight, into, False)
        line |= {t.INIT: self._keep(_padded(bias, weight)), t.ACTIVATION: activation}
        self._add(t.GATED, line)

    def _product(self, source: Buffer, weight: Packed, into: Buffer, of_logits: bool) -> dict[int, int | Buffer]:
        self._weights[of_logits] += weight.padded * weight.inputs
        return {
            t.A: source, t.LDA: 4 * source.width, t.WEIGHT: self._keep(weight.panels), t.IN: weight.inputs,
            t.PANEL: weight.panel_bytes, t.PANELS: weight.panels.shape[0], t.C: into,
            t.LDC: into.width, t.TILES: kernels().table[weight.format.name].ctypes.data, t.OF_LOGITS: int(of_logits),
        }  # fmt: skip

    def attention(
        self, qkv: Buffer, layer: int, heads: int, shape: LayerShape, into: Buffer, scaling: float,
        rotary: tuple[torch.Tensor, torch.Tensor] | None, norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float, window: int, softcap: float, sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Rotates and stores `qkv` of each token, then attends.

        qkv: in each row `heads` queries and kv_heads keys of key_dim numbers, then values of value_dim. rotary: cos
        and sin [positions, half of the rotated numbers] float32; norms: weights [key_dim] of the norms of queries and
        keys.
        """
        fields = attention_fields(layer, heads, shape, qkv.width, into.width)
        rotation: dict[int, int | Buffer] = {t.QKV: qkv, **fields}
        if rotary is not None:
            cos, sin = rotary
            rotation |= {t.COS: self._keep(cos), t.SIN: self._keep(sin), t.ROTARY: 2 * cos.shape[1]}
        if norms is not None:
            rotation |= {t.Q_NORM: self._keep(norms[0].float()), t.K_NORM: self._keep(norms[1].float())}
        self._add(t.ROTATE, rotation, scaling, epsilon)
        rest: dict[int, int | Buffer] = {t.QKV: qkv, t.OUT: into, t.WINDOW: window, **fields}
        rest[t.SINKS] = 0 if sinks is None else self._keep(sinks.float())
        self._add(t.ATTEND, rest, softcap)
        self._add(t.COMBINE, rest)
        self._group = max(self._group, heads // shape.kv_heads)

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = owned(tensor.contiguous())
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _add(self, kind: int, line: dict[int, int | Buffer], *floats: float) -> None:
        self._lines.append({t.KIND: kind, **line})
        self._floats.append(floats)
        self._capacity = 0

    def _allocate(self, rows: int) -> None:
        """Buffers for `rows` tokens, and the tape with their addresses."""
        self._capacity = max(64, 1 << (rows - 1).bit_length())
        self._memory = [np.zeros((self._capacity, width), np.float32) for width in self._widths]
        self._tape = Lines(len(self._lines))
        for i, (line, floats) in enumerate(zip(self._lines, self._floats, strict=True)):
            self._tape.write(i, {field: self._address(value) for field, value in line.items()}, floats)

    def _address(self, value: int | Buffer) -> int:
        if not isinstance(value, Buffer):
            return value
        return int(self._memory[value.index].ctypes.data) + 4 * value.offset

    def run(self, batch: Batch, cache: KVCache, out: Buffer) -> torch.Tensor:
        """Runs the step. Returns the first rows of `out`, as many as there are logits: [n, width], overwritten by
        the next step."""
        tokens, logits = batch.token_ids.numel(), batch.logits_index.numel()
        if max(tokens, logits) > self._capacity:
            self._allocate(max(tokens, logits))
        self._step.begin(batch, cache, self._group)
        self._step.run(self._tape, tokens * self._weights[0] + logits * self._weights[1] < _ALONE)
        return torch.from_numpy(self._memory[out.index][:logits])

    def measure(self) -> None:
        """From now on, adds up the time of each line, which costs a tenth of a microsecond a line."""
        self._times = np.zeros(len(self._lines), np.int64)
        self._step.record[t.TIMES] = self._times.ctypes.data

    def spent(self) -> dict[str, float]:
        """Seconds since `measure`, by operation; products with the head apart from the others."""
        found: dict[str, float] = {}
        for line, nanoseconds in zip(self._lines, self._times.tolist(), strict=True):
            kind = line[t.KIND]
            of_head = kind == t.LINEAR and line.get(t.OF_LOGITS)
            name = "head" if of_head else t.NAMES[int(kind)]  # type: ignore[arg-type]  # no buffer stands there
            found[name] = found.get(name, 0.0) + nanoseconds / 1e9
        return found


def attention_fields(layer: int, heads: int, shape: LayerShape, qkv_width: int, out_width: int) -> dict[int, int]:
    """What ROTATE, ATTEND and COMBINE share. Widths: floats of a row."""
    return {
        t.HEADS: heads, t.KV_HEADS: shape.kv_heads, t.DIM: shape.key_dim, t.VALUE_DIM: shape.value_dim,
        t.LAYER: layer, t.LDQ: qkv_width, t.LDO: out_width,
    }  # fmt: skip


def _padded(bias: torch.Tensor | None, weight: Packed) -> torch.Tensor:
    """`bias`, or zeros, for all of the weight's panels."""
    padded = torch.zeros(weight.padded)
    if bias is not None:
        padded[: bias.numel()] = bias
    return padded


def interleave(gate: torch.Tensor, up: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of two weights [n, in] in turn, `width` of one and `width` of the other, filled up with zeros."""
    whole = -(-gate.shape[0] // width) * width
    parts: Sequence[torch.Tensor] = [
        torch.nn.functional.pad(w, (0, 0, 0, whole - w.shape[0])).view(-1, width, w.shape[1]) for w in (gate, up)
    ]
    return torch.stack(list(parts), 1).flatten(0, 2)
