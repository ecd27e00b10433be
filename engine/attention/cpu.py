"""The fast CPU backend: float32 kernels straight over the block tables."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention import kernels
from engine.attention.cache import KVCache
from engine.model.batch import Batch

_NO_SINKS = np.empty(0, dtype=np.float32)


class CpuBackend:
    """Runs `kernels.attend` over a float32 cache in main memory. Owner: the device thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._cache: KVCache | None = None
        self._scores = np.empty(kernels.MAX_SCORES, dtype=np.float32)

    def begin(self, batch: Batch, cache: KVCache) -> None:
        if cache is not self._cache:
            self._cache = cache
            self._keys = [layer.numpy() for layer in cache.keys]
            self._values = [layer.numpy() for layer in cache.values]
        self._slots = batch.slots.numpy()
        self._starts = batch.query_starts.numpy()
        self._lengths = batch.context_lens.numpy()
        self._tables = batch.block_tables.numpy()
        self._row_scores = batch.max_context + cache.block_size  # that one query of one head may need

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
        scores = heads // key.shape[0] * self._row_scores
        if scores > self._scores.size:
            self._scores = np.empty(2 * scores, dtype=np.float32)
        out = torch.empty(tokens, heads, value.shape[-1])
        kernels.attend(
            query.numpy(), key.numpy(), value.numpy(), self._slots, self._starts, self._lengths, self._tables,
            self._keys[layer], self._values[layer], _NO_SINKS if sinks is None else sinks.numpy(),
            self._scores, out.numpy(), scaling, window, softcap,
        )  # fmt: skip
        return out
