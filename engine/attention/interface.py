"""The protocol of an attention backend, and the function through which transformers' models reach it.

A model built with `attn_implementation=NAME` calls `_attention` once per layer. No mask function is registered under
that name, so transformers builds no mask: which tokens a query sees follows from the batch's block tables alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.attention.cache import KVCache
from engine.model.batch import Batch

NAME = "stepahead"


class Backend(Protocol):
    """Writes a step's keys and values into the cache and attends over what the block tables name."""

    name: str

    def begin(self, batch: Batch, cache: KVCache) -> None:
        """Once per step, before the first layer."""

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
        """One layer of the step that `begin` announced.

        query [heads, T, key_dim], key [kv_heads, T, key_dim], value [kv_heads, T, value_dim], any strides;
        heads is a multiple of kv_heads. A query sees the last `window` tokens up to and including its own (0: all).
        `softcap` c > 0 turns a score s into c·tanh(s / c). `sinks` [heads] are logits that take part in the softmax
        and attend to nothing. Returns [T, heads, value_dim], contiguous.
        """


_backend: Backend | None = None  # of the step in progress; only the device thread runs steps


def begin_step(backend: Backend, batch: Batch, cache: KVCache) -> None:
    """Makes the model's next forward pass attend with `backend` over `cache`."""
    global _backend
    backend.begin(batch, cache)
    _backend = backend


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, key_dim], key and value [1, kv_heads, T, …]. Returns ([1, T, heads, value_dim], None)."""
    if _backend is None:
        raise RuntimeError("attention outside a step: begin_step was not called")
    out = _backend.attend(
        module.layer_idx,  # type: ignore[arg-type]  # every attention module has one; the load gate has checked it
        query[0],
        key[0],
        value[0],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return out[None], None


AttentionInterface.register(NAME, _attention)
