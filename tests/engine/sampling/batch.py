"""A sampler with one row per request, and both implementations of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from engine.sampling.operations import Operations, operations
from engine.sampling.reference import ReferenceOperations
from engine.sampling.sampler import Sampled, Sampler

CPU = torch.device("cpu")

both = pytest.mark.parametrize("ops", [ReferenceOperations(), operations(CPU)], ids=["reference", "compiled"])


@dataclass
class Row:
    """One request as the sampler sees it."""

    params: SamplingParams
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    ends: Sequence[int] = ()


@dataclass
class Batch:
    """Rows 0 … n − 1 of a sampler. `step` draws one token for each and appends it to the row's output."""

    ops: Operations
    rows: list[Row]
    vocab_size: int
    outputs: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampler = Sampler(len(self.rows), self.vocab_size, CPU, self.ops)
        for number, row in enumerate(self.rows):
            self.sampler.admit(number, row.params, row.ends, row.prompt, row.output)
            self.outputs.append(list(row.output))

    def step(self, logits: torch.Tensor, places: Sequence[int] | None = None) -> Sampled:
        """places: the rows that take part, all by default; logits: one row for each, left as they are."""
        numbers = np.arange(len(self.rows)) if places is None else np.asarray(places)
        positions = torch.tensor([len(self.rows[i].prompt) + len(self.outputs[i]) for i in numbers])
        sampled = self.sampler.sample(logits.clone(), self.sampler.row_set(numbers), positions)
        for number, token in zip(numbers, sampled.tokens.tolist(), strict=True):
            self.outputs[number].append(token)
        return sampled


def sample_one(ops: Operations, logits: Sequence[float] | torch.Tensor, row: Row) -> Sampled:
    """A batch of one."""
    z = torch.as_tensor(logits, dtype=torch.float32)[None, :]
    return Batch(ops, [row], z.shape[1]).step(z)
