"""The sampler's operations on a CPU: numpy's argmax (five times as fast as torch's) and compiled kernels."""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling import kernels
from engine.sampling.logprobs import Scores
from engine.sampling.rows import Draws, Penalties


class CpuOperations:
    """Implements `operations.Operations`. Owns the kernels' scratch memory, so it serves one thread."""

    def __init__(self) -> None:
        self._ints = np.empty((5, 0), dtype=np.int32)
        self._floats = np.empty((4, 0), dtype=np.float32)

    def _reserve(self, vocab_size: int) -> None:
        if self._ints.shape[1] != vocab_size:
            self._ints = np.empty((5, vocab_size), dtype=np.int32)
            self._ints[0] = np.arange(vocab_size)
            self._floats = np.empty((4, vocab_size), dtype=np.float32)
            self._floats[3] = 1.0

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(logits.numpy().argmax(axis=1))

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, draws: Draws, positions: torch.Tensor) -> None:
        self._reserve(logits.shape[1])
        kernels.draw(
            logits.numpy(), tokens.numpy(), positions.numpy(), draws.places.numpy(), draws.seeds.numpy(),
            draws.temperature.numpy(), draws.top_k.numpy(), draws.top_p.numpy(), draws.min_p.numpy(),
            self._ints, self._floats,
        )  # fmt: skip

    def mask(self, logits: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> None:
        kernels.mask(logits.numpy(), places.numpy(), words.numpy())

    def penalize(
        self, logits: torch.Tensor, penalties: Penalties, in_prompt: torch.Tensor, output_counts: torch.Tensor
    ) -> None:
        kernels.penalize(
            logits.numpy(), penalties.places.numpy(), penalties.slots.numpy(), penalties.repetition.numpy(),
            penalties.presence.numpy(), penalties.frequency.numpy(), in_prompt.numpy(), output_counts.numpy(),
        )  # fmt: skip

    def logprobs(self, logits: torch.Tensor, places: torch.Tensor, chosen: torch.Tensor, top: int) -> Scores:
        m = len(places)
        out = Scores(torch.empty(m), torch.empty(m, top, dtype=torch.int64), torch.empty(m, top))
        kernels.logprobs(
            logits.numpy(), places.numpy(), chosen.numpy(), out.chosen.numpy(), out.top_ids.numpy(), out.top.numpy(),
            np.empty(top, dtype=np.int32), np.empty(kernels.BLOCK, dtype=np.float32),
        )  # fmt: skip
        return out
