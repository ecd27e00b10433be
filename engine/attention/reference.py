"""Attention in plain torch, on any device, in any dtype: the ground truth that the fast backends are tested against."""

from __future__ import annotations

import torch

from engine.attention.cache import KVCache
from engine.model.batch import Batch


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: the last `t` tokens query all `n` tokens of the context, causally. The softmax is in float32.

    query [heads, t, key_dim], key [kv_heads, n, key_dim], value [kv_heads, n, value_dim], n ≥ t; the rest as in
    `Backend.attend`. Returns [t, heads, value_dim].
    """
    heads, t, _ = query.shape
    kv_heads, n, _ = key.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, t, -1)
    scores = torch.einsum("hgtd,hnd->hgtn", grouped.float(), key.float()) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(n - t, n, device=query.device)[:, None]
    seen = torch.arange(n, device=query.device)[None, :]
    hidden = seen > at
    if window:
        hidden = hidden | (seen <= at - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().reshape(kv_heads, -1, 1, 1).expand(-1, -1, t, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = torch.einsum("hgtn,hnd->thgd", weights, value.float())
    return out.reshape(t, heads, -1).to(query.dtype)


class ReferenceBackend:
    """Sequence by sequence: gather its context from the cache, then `attend_dense`."""

    name = "reference"

    def begin(self, batch: Batch, cache: KVCache) -> None:
        self._batch, self._cache = batch, cache
        self._starts = batch.query_starts.tolist()
        self._lengths = batch.context_lens.tolist()

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
        batch, cache = self._batch, self._cache
        cache.write(layer, batch.slots, key.transpose(0, 1), value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for row, length in enumerate(self._lengths):
            here = slice(self._starts[row], self._starts[row + 1])
            keys, values = cache.read(layer, batch.block_tables[row], length)
            out[here] = attend_dense(query[:, here], keys, values, scaling, window, softcap, sinks)
        return out
