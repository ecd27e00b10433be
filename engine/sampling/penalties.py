"""Which tokens a request has seen: counts over the vocabulary, only for rows with penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.sampling import SamplingParams


def penalized(params: SamplingParams) -> bool:
    """Whether a request needs counts."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


class PenaltyPool:
    """Counts by slot, on the device. Grows to as many slots as were ever needed at once. Owner: the sampler."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def acquire(self, prompt: Sequence[int] | np.ndarray, output: Sequence[int] | np.ndarray) -> int:
        """A slot that holds these tokens. Raises ValueError where an id lies outside the vocabulary."""
        vocab_size = self.in_prompt.shape[1]
        prompt_ids, output_ids = np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)
        for field, ids in (("prompt", prompt_ids), ("output", output_ids)):
            if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
                raise ValueError(f"{field}: token ids must be from 0 to {vocab_size - 1}")
        if not self._free:
            self._grow()
        slot = self._free.pop()
        seen, counts = np.unique(output_ids, return_counts=True)
        device = self.in_prompt.device
        self.in_prompt[slot].zero_().index_fill_(0, torch.from_numpy(np.unique(prompt_ids)).to(device), True)
        self.output_counts[slot].zero_()[torch.from_numpy(seen).to(device)] = torch.from_numpy(counts).to(
            device, torch.int32
        )
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def record(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one token for each of some slots. Both [m] int64."""
        one = torch.ones((), dtype=torch.int32, device=slots.device)
        self.output_counts.index_put_((slots, tokens), one, accumulate=True)

    def _grow(self) -> None:
        old = len(self.in_prompt)
        more = max(4, old)
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])])
        self.output_counts = torch.cat(
            [self.output_counts, self.output_counts.new_zeros(more, self.in_prompt.shape[1])]
        )
        self._free.extend(range(old + more - 1, old - 1, -1))
