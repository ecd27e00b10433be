"""Attention for transformers' own modules, by the tape's operations, spread over the team's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.cache import KVCache, LayerShape
from engine.model.batch import Batch
from engine.native import tape as t
from engine.native.program import attention_fields
from engine.native.step import Lines, Step
from engine.native.team import Team

_ALONE = 1 << 16  # numbers of keys read by a layer that one thread attends to sooner than several


class NativeBackend:
    """Over a float32 cache in main memory. Owner: the device thread."""

    name = "native"

    def __init__(self, team: Team, heads: Sequence[int], layers: Sequence[LayerShape]) -> None:
        """`heads`: query heads of each layer."""
        self._step = Step(team)
        self._heads, self._layers = heads, layers
        self._group = max(h // layer.kv_heads for h, layer in zip(heads, layers, strict=True))
        self._widths = [
            (h + layer.kv_heads) * layer.key_dim + layer.kv_heads * layer.value_dim
            for h, layer in zip(heads, layers, strict=True)
        ]
        self._made: dict[tuple[int, float, int, float], Lines] = {}

    def begin(self, batch: Batch, cache: KVCache) -> None:
        self._step.begin(batch, cache, self._group)
        self._read = int(batch.context_lens.sum())

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int,
        softcap: float, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        shape, heads, tokens = self._layers[layer], self._heads[layer], query.shape[1]
        parts = [part.transpose(0, 1).reshape(tokens, -1) for part in (query, key, value)]
        qkv = torch.cat(parts, 1)
        out = torch.empty(tokens, heads, shape.value_dim)
        sinks = None if sinks is None else sinks.float().contiguous()
        lines = self._lines(layer, scaling, window, softcap)
        lines.numbers[:, t.QKV], lines.numbers[:, t.OUT] = qkv.data_ptr(), out.data_ptr()
        lines.numbers[:, t.SINKS] = 0 if sinks is None else sinks.data_ptr()
        self._step.run(lines, self._read * shape.kv_heads * shape.key_dim < _ALONE)
        return out

    def _lines(self, layer: int, scaling: float, window: int, softcap: float) -> Lines:
        """A layer's tape, without addresses."""
        key = layer, scaling, window, softcap
        if key not in self._made:
            shape, heads = self._layers[layer], self._heads[layer]
            fields = attention_fields(layer, heads, shape, self._widths[layer], heads * shape.value_dim)
            fields[t.WINDOW] = window
            lines = self._made[key] = Lines(3)
            lines.write(0, {**fields, t.KIND: t.ROTATE}, (scaling,))
            lines.write(1, {**fields, t.KIND: t.ATTEND}, (softcap,))
            lines.write(2, {**fields, t.KIND: t.COMBINE})
        return self._made[key]
