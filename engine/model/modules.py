"""A model as transformers' own modules, with our attention and our linear layers in them: every family can run so."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.cache import KVCache
from engine.attention.interface import Backend, begin_step
from engine.model.batch import Batch

SMALL_STEP = 300_000_000  # multiplications; about 5 ms of one core


class Modules:
    """Runs a transformers model on flattened batches. Owner: the device thread."""

    invariant = False  # torch picks its kernels by shape

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self._threads = torch.get_num_threads()
        self._head_products, self._body_products = products(model)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Writes the batch's keys and values into `cache`. Returns the logits of `batch.logits_index`, [n, V]
        float32."""
        self._choose_threads(batch)
        begin_step(self.backend, batch, cache)
        logits: torch.Tensor = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_index,
        ).logits[0]
        return logits.float()

    def _choose_threads(self, batch: Batch) -> None:
        """One thread for small steps: there, waiting for each other costs several threads more than they save.

        A step of a single token waits for memory alone, and two cores read faster than one.
        """
        tokens = batch.token_ids.numel()
        amount = tokens * self._body_products + len(batch.logits_index) * self._head_products
        threads = self._threads if tokens == 1 or amount > SMALL_STEP else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def products(model: PreTrainedModel) -> tuple[int, int]:
    """Multiplications per row of the head, and per token of everything else that is a matrix."""
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    skipped = {id(embedding), id(getattr(head, "weight", None))}
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in skipped)
    return int(embedding.numel()), body
