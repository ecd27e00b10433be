"""The sampler's heavy operations behind one protocol, and which implementation a device gets."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from engine.sampling.logprobs import Scores
from engine.sampling.reference import ReferenceOperations
from engine.sampling.rows import Draws, Penalties

log = logging.getLogger(__name__)


class Operations(Protocol):
    """Works on logits [n, V] float32 of a batch; all tensors on one device."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, the lowest of equals; a NaN is likelier than any. → [n] int64"""

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, draws: Draws, positions: torch.Tensor) -> None:
        """Replaces the greedy `tokens` [n] int64 at the draws' places, but for rows whose greatest logit is not finite.

        positions: [n] int64, of the tokens being drawn.
        """

    def mask(self, logits: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> None:
        """Makes tokens impossible in rows `places` [m] int64, in place: those whose bit in `words` [m, V / 32] int32 is
        not set, the lowest bit of a word first."""

    def penalize(
        self, logits: torch.Tensor, penalties: Penalties, in_prompt: torch.Tensor, output_counts: torch.Tensor
    ) -> None:
        """Applies the penalties in place. in_prompt: [slots, V] bool; output_counts: [slots, V] int32."""

    def logprobs(self, logits: torch.Tensor, places: torch.Tensor, chosen: torch.Tensor, top: int) -> Scores:
        """Log probabilities in rows `places` [m] of the tokens `chosen` [m] and of the `top` likeliest."""


def operations(device: torch.device) -> Operations:
    """Compiled kernels on a CPU, plain torch elsewhere."""
    if device.type == "cpu":
        try:
            from engine.sampling.cpu import CpuOperations
        except ImportError as e:
            log.warning("sampling without compiled kernels: %s", e)
        else:
            return CpuOperations()
    return ReferenceOperations()
