"""A model as transformers' own modules, with our attention and our linear layers in them: every family can run so."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.attention.cache import KVCache
from engine.attention.interface import Backend, begin_step
from engine.model.batch import Batch


class Modules:
    """Runs a transformers model on flattened batches. Owner: the device thread."""

    def __init__(self, model: PreTrainedModel, backend: Backend, native: bool = False) -> None:
        """`native`: products and attention have threads of their own, and torch is left what one thread does best.

        Then a row's numbers do not depend on how torch shares rows out either.
        """
        self.model = model
        self.backend = backend
        self._native = native
        self.invariant = False  # the loader looks

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Writes the batch's keys and values into `cache`. Returns the logits of `batch.logits_index`, [n, V]
        float32."""
        if self._native and torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        begin_step(self.backend, batch, cache)
        logits: torch.Tensor = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_index,
        ).logits[0]
        return logits.float()
