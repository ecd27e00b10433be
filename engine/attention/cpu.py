"""The fast CPU backend: float32 kernels straight over the block tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.attention.cache import KVCache
from engine.attention.kernels import MAX_QUERIES, MAX_SCORES, make_kernel
from engine.model.batch import Batch

_NO_SINKS = np.empty(0, dtype=np.float32)


class CpuBackend:
    """Runs `kernels` over a float32 cache in main memory. Owner: the device thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._cache: KVCache | None = None

    def begin(self, batch: Batch, cache: KVCache) -> None:
        if cache is not self._cache:
            self._adopt(cache)
        self._slots = batch.slots.numpy()
        self._starts = batch.query_starts.numpy()
        self._lengths = batch.context_lens.numpy()
        self._tables = batch.block_tables.numpy()
        self._reserve(batch.max_context)

    def _adopt(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys = [layer.numpy() for layer in cache.keys]
        self._values = [layer.numpy() for layer in cache.values]
        self._kernels: list[Callable[..., None] | None] = [None] * len(cache.layers)
        self._rows: list[np.ndarray] = [_NO_SINKS] * len(cache.layers)
        self._sums: list[np.ndarray] = [_NO_SINKS] * len(cache.layers)
        self._group = 1
        self._scores = np.empty(0, dtype=np.float32)

    def _reserve(self, context: int) -> None:
        """A tile is as many queries as keep it within MAX_SCORES, but one query must fit, whatever its context."""
        assert self._cache is not None
        wanted = max(MAX_SCORES, self._group * (context + MAX_QUERIES + self._cache.block_size))
        if self._scores.size < wanted:
            self._scores = np.empty(2 * wanted, dtype=np.float32)

    def _compile(self, layer: int, heads: int, context: int) -> Callable[..., None]:
        assert self._cache is not None
        shape = self._cache.layers[layer]
        group = heads // shape.kv_heads
        kernel = make_kernel(self._cache.block_size, shape.key_dim, shape.value_dim, group)
        self._kernels[layer] = kernel
        self._rows[layer] = np.empty((MAX_QUERIES * group, shape.key_dim), dtype=np.float32)
        self._sums[layer] = np.empty((MAX_QUERIES * group, shape.value_dim), dtype=np.float32)
        self._group = max(self._group, group)
        self._reserve(context)
        return kernel

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, tokens, _ = query.shape
        out = torch.empty(tokens, heads, value.shape[-1])
        kernel = self._kernels[layer] or self._compile(layer, heads, int(self._lengths.max(initial=0)))
        kernel(
            query.numpy(), key.numpy(), value.numpy(), self._slots, self._starts, self._lengths, self._tables,
            self._keys[layer], self._values[layer], _NO_SINKS if sinks is None else sinks.numpy(),
            self._rows[layer], self._sums[layer], self._scores, out.numpy(), scaling, window, softcap,
        )  # fmt: skip
        return out
