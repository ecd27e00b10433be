"""A tape in the making, and its runs: weights, constants and buffers by name instead of by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.cache import KVCache
from engine.model.batch import Batch
from engine.native import tape as t
from engine.native.attention import MAX_LINES, make_tiles, segment_size
from engine.native.formats import FORMATS, GROUP, Packed
from engine.native.kernels import kernels
from engine.native.operations import PANELS
from engine.native.team import Team

_SPLIT_BELOW = 4  # pieces per thread: with fewer, long contexts are spread over threads
_ALONE = 3_000_000  # multiplications, or numbers read, of a step that one thread does sooner than several


@dataclass(frozen=True, slots=True)
class Buffer:
    """[rows, width] float32, as many rows as a step has tokens."""

    index: int
    width: int


class Program:
    """Operations over named buffers, in order. Owner: the device thread.

    Build it with the methods named after operations, then `run` it. All weights handed in are kept alive here.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._widths: list[int] = []
        self._lines: list[dict[int, int | Buffer]] = []
        self._floats: list[tuple[float, ...]] = []
        self._kept: list[Any] = []
        self._memory: list[np.ndarray[Any, Any]] = []
        self._capacity = 0
        self._step = np.zeros(t.STEP_WIDTH, np.int64)
        self._cache: KVCache | None = None
        self._group, self._kv_heads = 1, 1
        self._weights = [0, 0]  # numbers per token, and per row of logits

    def buffer(self, width: int) -> Buffer:
        """A new buffer; widths are rounded up to whole panels."""
        unit = 2 * kernels().lanes
        self._widths.append(-(-width // unit) * unit)
        return Buffer(len(self._widths) - 1, self._widths[-1])

    def activations(self, weight: Packed) -> Buffer:
        """A new buffer for rows that `weight` is multiplied with, as its tiles want them."""
        if not weight.format.is_integer:
            return self.buffer(weight.in_features)
        header = -(-(1 + weight.inputs // GROUP) // 16) * 16
        return self.buffer(header + weight.inputs // 2)

    def embed(self, table: torch.Tensor | Packed, into: Buffer, scale: float = 1.0) -> None:
        """Rows of `table` [V, n], in the order of the step's tokens."""
        line: dict[int, int | Buffer] = {t.C: into, t.LDC: into.width}
        if isinstance(table, Packed):
            line |= {
                t.READER: kernels().reader(table.format, of_panel=True), t.WEIGHT: self._keep(table.panels),
                t.COLUMNS: table.width, t.ROW_BYTES: table.panel_bytes, t.IN: table.in_features,
            }  # fmt: skip
        else:
            format = next(f for f in FORMATS.values() if f.dtype is table.dtype)
            line |= {
                t.READER: kernels().reader(format, of_panel=False), t.WEIGHT: self._keep(table),
                t.ROW_BYTES: table.shape[1] * format.size, t.IN: table.shape[1],
            }  # fmt: skip
        self._add(t.EMBED, line, scale)

    def norm(
        self, source: Buffer, scales: torch.Tensor | None, epsilon: float, into: Buffer, weight: Packed,
        of_logits: bool = False,
    ) -> None:  # fmt: skip
        """RMS norm with `scales` [n], or none, into what `weight` is multiplied with."""
        size = weight.in_features
        line: dict[int, int | Buffer] = {
            t.A: source, t.LDA: source.width, t.C: into, t.LDC: into.width, t.IN: size, t.OF_LOGITS: int(of_logits),
            t.WEIGHT: 0 if scales is None else self._keep(scales.float()), t.LIMIT: weight.limit,
            t.FILLED: weight.inputs,
        }  # fmt: skip
        self._add(t.NORM, line, epsilon)

    def prepared(self, source: Buffer, weight: Packed, into: Buffer | None) -> Buffer:
        """`source` as `weight` wants it: itself, or its records in `into`."""
        if into is None or not weight.format.is_integer:
            return source
        self.norm(source, None, 0.0, into, weight)
        return into

    def linear(
        self, source: Buffer, weight: Packed, into: Buffer, bias: torch.Tensor | None = None,
        residual: Buffer | None = None, of_logits: bool = False,
    ) -> None:  # fmt: skip
        """into = source · weightᵀ + (bias or residual)."""
        line = self._product(source, weight, into, of_logits)
        if residual is not None:
            line |= {t.INIT: residual, t.LDI: residual.width}
        else:
            padded = torch.zeros(weight.padded)
            if bias is not None:
                padded[: bias.numel()] = bias
            line[t.INIT] = self._keep(padded)
        self._add(t.LINEAR, line)

    def gated(self, source: Buffer, weight: Packed, into: Buffer, activation: int) -> None:
        """into = act(gate) * up, where `weight` holds panels of gate and up in turn."""
        line = self._product(source, weight, into, False)
        line |= {t.INIT: self._keep(torch.zeros(PANELS * weight.width)), t.ACTIVATION: activation}
        self._add(t.GATED, line)

    def _product(self, source: Buffer, weight: Packed, into: Buffer, of_logits: bool) -> dict[int, int | Buffer]:
        self._weights[of_logits] += weight.padded * weight.inputs
        return {
            t.A: source, t.LDA: 4 * source.width, t.WEIGHT: self._keep(weight.panels), t.IN: weight.inputs,
            t.PANEL: weight.panel_bytes, t.PANELS: weight.panels.shape[0], t.C: into,
            t.LDC: into.width, t.TILES: kernels().table[weight.format.name].ctypes.data, t.OF_LOGITS: int(of_logits),
        }  # fmt: skip

    def attention(
        self, qkv: Buffer, layer: int, heads: int, kv_heads: int, dim: int, into: Buffer, scaling: float,
        rotary: tuple[torch.Tensor, torch.Tensor] | None, norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float, window: int, softcap: float, sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Rotates and stores `qkv` [heads + 2 · kv_heads, dim] of each token, then attends.

        rotary: cos and sin [positions, half of the rotated numbers] float32; norms: weights [dim] of the norms of
        queries and keys.
        """
        shape: dict[int, int | Buffer] = {t.QKV: qkv, t.HEADS: heads, t.KV_HEADS: kv_heads, t.DIM: dim, t.LAYER: layer}
        line = dict(shape)
        if rotary is not None:
            cos, sin = rotary
            line |= {t.COS: self._keep(cos), t.SIN: self._keep(sin), t.ROTARY: 2 * cos.shape[1]}
        if norms is not None:
            line |= {t.Q_NORM: self._keep(norms[0].float()), t.K_NORM: self._keep(norms[1].float())}
        self._add(t.ROTATE, line, scaling, epsilon)
        shape |= {t.OUT: into, t.WINDOW: window, t.SINKS: 0 if sinks is None else self._keep(sinks.float())}
        self._add(t.ATTEND, dict(shape), softcap)
        self._add(t.COMBINE, dict(shape))
        self._group, self._kv_heads = max(self._group, heads // kv_heads), max(self._kv_heads, kv_heads)
        self._dim = dim

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
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
        self._tape = np.zeros((len(self._lines), t.WIDTH), np.int64)
        self._constants = np.zeros((len(self._lines), t.FLOATS), np.float32)
        for i, (line, floats) in enumerate(zip(self._lines, self._floats, strict=True)):
            for field, value in line.items():
                self._tape[i, field] = self._memory[value.index].ctypes.data if isinstance(value, Buffer) else value
            self._constants[i, : len(floats)] = floats
        self._claims = np.zeros(len(self._lines), np.int64)
        self._tiles = np.zeros((self._capacity, 4), np.int32)
        self._partials = np.empty(0, np.float32)
        self._step[[t.LINES, t.CONSTANTS, t.COUNT, t.CLAIMS, t.TILE_LIST]] = [
            self._tape.ctypes.data, self._constants.ctypes.data, len(self._lines), self._claims.ctypes.data,
            self._tiles.ctypes.data,
        ]  # fmt: skip

    def _use(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys = np.array([layer.data_ptr() for layer in cache.keys], np.int64)
        self._values = np.array([layer.data_ptr() for layer in cache.values], np.int64)
        self._step[[t.KEYS, t.VALUES, t.BLOCK_SIZE, t.NUM_BLOCKS]] = [
            self._keys.ctypes.data,
            self._values.ctypes.data,
            cache.block_size,
            cache.num_blocks,
        ]

    def run(self, batch: Batch, cache: KVCache, out: Buffer) -> torch.Tensor:
        """Runs the step. Returns the first rows of `out`, as many as there are logits: [n, width], overwritten by
        the next step."""
        tokens, logits = batch.token_ids.numel(), batch.logits_index.numel()
        if max(tokens, logits) > self._capacity:
            self._allocate(max(tokens, logits))
        if cache is not self._cache:
            self._use(cache)
        step = self._step
        step[t.TOKENS], step[t.LOGITS] = tokens, logits
        step[t.TOKEN_IDS : t.LOGITS_INDEX + 1] = (
            batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
            batch.context_lens.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1],
            batch.logits_index.data_ptr(),
        )  # fmt: skip
        step[t.TILE_COUNT] = make_tiles(
            batch.query_starts.numpy(), batch.context_lens.numpy(), self._group, self._tiles
        )
        self._split(batch, cache)
        self._claims[:] = 0
        self._team.run(step, tokens * self._weights[0] + logits * self._weights[1] < _ALONE)
        return torch.from_numpy(self._memory[out.index][:logits])

    def _split(self, batch: Batch, cache: KVCache) -> None:
        """Whether segments of a context are computed apart: where tiles are fewer than threads can share."""
        segments = -(-batch.max_context // segment_size(cache.block_size))
        pieces = int(self._step[t.TILE_COUNT]) * self._kv_heads
        if self._team.threads == 1 or segments < 3 or pieces >= _SPLIT_BELOW * self._team.threads:
            self._step[t.SEGMENTS] = 0
            return
        lines = max(MAX_LINES, self._group)
        size = pieces * segments * lines * (self._dim + 2)
        if self._partials.size < size:
            self._partials = np.empty(2 * size, np.float32)
            self._step[t.PARTIALS] = self._partials.ctypes.data
        self._step[t.SEGMENTS] = segments


def interleave(gate: torch.Tensor, up: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of two weights [n, in] in turn, `width` of one and `width` of the other, filled up with zeros."""
    whole = -(-gate.shape[0] // width) * width
    parts: Sequence[torch.Tensor] = [
        torch.nn.functional.pad(w, (0, 0, 0, whole - w.shape[0])).view(-1, width, w.shape[1]) for w in (gate, up)
    ]
    return torch.stack(list(parts), 1).flatten(0, 2)
