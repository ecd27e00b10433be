"""What a batch's rows need from the sampler, told apart once per batch rather than once per step.

All tensors are on the sampler's device. A place is an index into the batch, a row the request's number in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The m places that are drawn at random, by column."""

    places: torch.Tensor  # [m] int64
    seeds: torch.Tensor  # [m] int64
    top_k: torch.Tensor  # [m] int64, the vocabulary's size where off
    temperature: torch.Tensor  # [m] float64, above 0
    top_p: torch.Tensor  # [m] float64, 1 where off
    min_p: torch.Tensor  # [m] float64, 0 where off
    truncated: bool  # whether any of them has top_k, top_p or min_p


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """The m places with penalties, by column."""

    places: torch.Tensor  # [m] int64
    slots: torch.Tensor  # [m] int64, into the pool of counts
    repetition: torch.Tensor  # [m] float32
    presence: torch.Tensor  # [m] float32
    frequency: torch.Tensor  # [m] float32


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Single logits: of token `ids[i]` at place `places[i]`, changed to or by `values[i]` where there is one."""

    places: torch.Tensor  # [k] int64
    ids: torch.Tensor  # [k] int64
    values: torch.Tensor | None = None  # [k] float32


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The m places that want log probabilities, and of how many candidates."""

    places: torch.Tensor  # [m] int64
    counts: list[int]  # on the host


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """A batch's n rows, grouped by what they need; None where no row does.

    True for the rows as they were admitted when it was made: ask for a new one after an admission.
    """

    rows: np.ndarray  # [n] int64
    ends: torch.Tensor  # [e, n] int64: end tokens, −1 where a row has fewer
    first_end: torch.Tensor  # [n] int64: the first position at which an end token ends the row
    fallback: torch.Tensor  # [n] int64: the lowest allowed token, for logits that allow none
    draws: Draws | None = None
    penalties: Penalties | None = None
    bias: Entries | None = None
    early_ends: Entries | None = None  # the end tokens of rows with min_tokens
    allowed: Entries | None = None
    allowed_places: torch.Tensor | None = None  # [m] int64: where all but the allowed are impossible
    logprobs: Wanted | None = None

    @property
    def adjusted(self) -> bool:
        """Whether sampling changes the logits in place."""
        return any(group is not None for group in (self.penalties, self.bias, self.early_ends, self.allowed))
