"""Log probabilities of chosen tokens and of the likeliest ones, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOOR = -9999.0  # stands for −inf and NaN, which JSON cannot say

# (token id, logprob, [(token id, logprob), …] likeliest first)
Entry = tuple[int, float, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The floats of m tokens, on their device. All finite; a chosen token's is identical where it is among the top."""

    chosen: torch.Tensor  # [m] float32
    top_ids: torch.Tensor  # [m, t] int64, likeliest first, of equally likely ones the lower first
    top: torch.Tensor  # [m, t] float32


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Of m tokens, from the model's own logits: before penalties, bias, temperature and truncation."""

    places: torch.Tensor  # [m] int64, index into the batch
    wanted: list[int]  # how many candidates each of the m asked for, at most t
    scores: Scores

    def entries(self, tokens: torch.Tensor) -> list[Entry]:
        """On the host, one for each place. tokens: [m] int64, the chosen ones."""
        scores = self.scores
        rows = zip(
            tokens.tolist(),
            scores.chosen.tolist(),
            self.wanted,
            scores.top_ids.tolist(),
            scores.top.tolist(),
            strict=True,
        )
        return [
            (token, logprob, list(zip(ids[:count], top[:count], strict=True)))
            for token, logprob, count, ids, top in rows
        ]
