"""The sampler: parameters and penalty counts of every row, one call per step, nothing read back by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.sampling import SamplingParams
from engine.sampling.columns import Columns
from engine.sampling.logprobs import Logprobs
from engine.sampling.operations import Operations, operations
from engine.sampling.penalties import PenaltyPool, penalized
from engine.sampling.rows import RowSet, Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What one step chose for n rows. On the sampler's device."""

    tokens: torch.Tensor  # [n] int64
    ended: torch.Tensor  # [n] bool: the token is one of the row's end tokens
    logprobs: Logprobs | None  # of the rows that asked


class Sampler:
    """Chooses tokens. A token depends on its row's logits, parameters and past alone, never on the rest of the batch.

    Owner: the device thread. `rows` is the number of rows that can be admitted at once.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, ops: Operations | None = None) -> None:
        self._vocab_size = vocab_size
        self._ops = operations(device) if ops is None else ops
        self._columns = Columns(rows, vocab_size, device)
        self._pool = PenaltyPool(vocab_size, device)
        self._slots: dict[int, int] = {}  # of admitted rows with penalties
        self._row_set: RowSet | None = None

    def admit(
        self,
        row: int,
        params: SamplingParams,
        end_token_ids: Sequence[int],
        prompt: Sequence[int] | np.ndarray,
        output: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Gives a row to a request. end_token_ids: the model's EOS, unless ignored, and the request's stop tokens.

        `output` is what the request has produced already, where it was preempted or resumed; penalties and min_tokens
        count it as output. Raises ValueError, and leaves the row free, where a token id lies outside the vocabulary.
        """
        self.release(row)
        slot = self._pool.acquire(prompt, output) if penalized(params) else -1
        ends = np.unique(np.array([token for token in end_token_ids if 0 <= token < self._vocab_size], dtype=np.int64))
        try:
            self._columns.write(row, params, ends, len(prompt), slot)
        except ValueError:
            if slot >= 0:
                self._pool.release(slot)
            raise
        if slot >= 0:
            self._slots[row] = slot

    def release(self, row: int) -> None:
        """Frees what a row holds. Releasing a free row does nothing."""
        self._row_set = None
        self._columns.clear(row)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._pool.release(slot)

    def row_set(self, rows: np.ndarray) -> RowSet:
        """The grouping of a batch. rows: [n] int64, each admitted; one with penalties not twice. The last is kept."""
        known = self._row_set
        if known is None or not np.array_equal(known.rows, rows):
            self._row_set = known = self._columns.row_set(np.array(rows, dtype=np.int64))
        return known

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: RowSet, positions: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Sampled:  # fmt: skip
        """One token for each of n rows. `masks`: rows of a grammar and their possible tokens, as in `Operations.mask`.

        logits: [n, V] float32, overwritten where rows have penalties, bias or forbidden tokens. positions: [n] int64,
        the place in the whole sequence of the token being drawn: prompt length + output so far. A row whose logits
        allow no token, or are not numbers, gets the lowest allowed one.
        """
        logits = logits.contiguous()
        changed = rows.adjusted or masks is not None
        raw = logits[rows.logprobs.places] if changed and rows.logprobs is not None else None
        if masks is not None:
            self._ops.mask(logits, *masks)
        if rows.adjusted:
            self._adjust(logits, rows, positions)
        tokens = self._ops.greedy(logits)
        if rows.draws is not None:
            self._ops.draw(logits, tokens, rows.draws, positions)
        possible = logits.gather(1, tokens[:, None])[:, 0] > -torch.inf
        tokens = torch.where(possible, tokens, rows.fallback)
        ended = (tokens == rows.ends).any(dim=0)
        if rows.early_ends is not None:
            ended &= positions >= rows.first_end
        if rows.penalties is not None:
            self._pool.record(rows.penalties.slots, tokens[rows.penalties.places])
        return Sampled(
            tokens, ended, None if rows.logprobs is None else self._score(logits, raw, rows.logprobs, tokens)
        )

    def prompt_logprobs_of(self, row: int) -> int:
        """How many candidates the row's request wants for each token of its prompt."""
        return self._columns.prompt_logprobs_of(row)

    def _score(self, logits: torch.Tensor, raw: torch.Tensor | None, wanted: Wanted, tokens: torch.Tensor) -> Logprobs:
        """`raw`: [m, V], the wanted rows' logits as the model gave them, where `logits` has been changed."""
        chosen, top = tokens[wanted.places], max(wanted.counts)
        if raw is None:
            scores = self._ops.logprobs(logits, wanted.places, chosen, top)
        else:
            scores = self._ops.logprobs(raw, torch.arange(len(raw), device=raw.device), chosen, top)
        return Logprobs(wanted.places, wanted.counts, scores)

    def _adjust(self, logits: torch.Tensor, rows: RowSet, positions: torch.Tensor) -> None:
        """In vLLM's order: allowed tokens, min_tokens, bias, penalties."""
        if rows.allowed is not None and rows.allowed_places is not None:
            at = (rows.allowed.places, rows.allowed.ids)
            kept = logits[at]
            logits.index_fill_(0, rows.allowed_places, -torch.inf)
            logits[at] = kept
        if rows.early_ends is not None:
            at = (rows.early_ends.places, rows.early_ends.ids)
            early = positions[at[0]] < rows.first_end[at[0]]
            logits[at] = torch.where(early, -torch.inf, logits[at])
        if rows.bias is not None and rows.bias.values is not None:
            logits.index_put_((rows.bias.places, rows.bias.ids), rows.bias.values, accumulate=True)
        if rows.penalties is not None:
            self._ops.penalize(logits, rows.penalties, self._pool.in_prompt, self._pool.output_counts)


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, next_ids: torch.Tensor, top: int) -> Logprobs:
    """Scores a prompt's tokens. logits: [m, V] float32; next_ids: [m] int64, what follows each; top: candidates."""
    top = min(top, logits.shape[1])
    places = torch.arange(len(next_ids), device=logits.device)
    scores = operations(logits.device).logprobs(logits, places, next_ids, top)
    return Logprobs(places, [top] * len(next_ids), scores)
