"""Sampling parameters of all rows, by column, and the grouping of a batch's rows by what they need."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch

from common.sampling import SamplingParams
from engine.sampling.rows import Draws, Entries, Penalties, RowSet, Wanted

GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM

# What a row needs beyond the likeliest token: bits of its `needs`.
RANDOM, TRUNCATED, PENALTIES, BIAS, EARLY_ENDS, ALLOWED, LOGPROBS = (1 << bit for bit in range(7))


class Int(IntEnum):
    """Rows of the table of integers; the end tokens follow them."""

    SEED = 0
    TOP_K = 1
    FIRST_END = 2
    FALLBACK = 3
    SLOT = 4
    ENDS = 5


class Float(IntEnum):
    """Rows of the table of floats."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class Columns:
    """Parameters by row, on the host: a batch's are gathered and sent to the device together. Owner: the sampler."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._needs = np.zeros(rows, dtype=np.uint8)
        self._ints = np.full((Int.ENDS, rows), -1, dtype=np.int64)
        self._floats = np.zeros((len(Float), rows), dtype=np.float64)
        self._end_counts = np.zeros(rows, dtype=np.int64)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._allowed: dict[int, np.ndarray] = {}
        self._top_logprobs: dict[int, int] = {}
        self._prompt_logprobs: dict[int, int] = {}

    def write(self, row: int, params: SamplingParams, ends: np.ndarray, prompt_length: int, slot: int) -> None:
        """ends: [e] int64, within the vocabulary. slot: the row's place in the pool of counts, −1 if it has none.

        Raises ValueError where a token id lies outside the vocabulary.
        """
        allowed = self._ids("allowed_token_ids", params.allowed_token_ids)
        bias_ids = self._ids("logit_bias", [token for token, _ in params.logit_bias])
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        truncated = top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0
        random = params.temperature >= GREEDY_BELOW
        self._needs[row] = (
            RANDOM * random
            | TRUNCATED * (random and truncated)
            | PENALTIES * (slot >= 0)
            | BIAS * (len(bias_ids) > 0)
            | EARLY_ENDS * (params.min_tokens > 0 and len(ends) > 0)
            | ALLOWED * (len(allowed) > 0)
            | LOGPROBS * (params.logprobs is not None)
        )
        if len(ends) > len(self._ints) - Int.ENDS:
            more = len(ends) - (len(self._ints) - Int.ENDS)
            self._ints = np.pad(self._ints, ((0, more), (0, 0)), constant_values=-1)
        fallback = int(allowed.min()) if len(allowed) else 0
        self._ints[: Int.ENDS, row] = params.seed, top_k, prompt_length + params.min_tokens, fallback, slot
        self._ints[Int.ENDS :, row] = -1
        self._ints[Int.ENDS : Int.ENDS + len(ends), row] = ends
        self._end_counts[row] = len(ends)
        self._floats[:, row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._bias[row] = bias_ids, np.array([value for _, value in params.logit_bias], dtype=np.float32)
        self._allowed[row] = allowed
        self._top_logprobs[row] = min(params.logprobs or 0, self._vocab_size)
        self._prompt_logprobs[row] = params.prompt_logprobs or 0

    def clear(self, row: int) -> None:
        """Forgets what a row holds of its request."""
        for table in (self._bias, self._allowed, self._top_logprobs, self._prompt_logprobs):
            table.pop(row, None)

    def prompt_logprobs_of(self, row: int) -> int:
        return self._prompt_logprobs.get(row, 0)

    def row_set(self, rows: np.ndarray) -> RowSet:
        """rows: [n] int64, each admitted; one that has penalties not twice."""
        needs = self._needs[rows]
        ints = self._send(self._ints[: Int.ENDS + self._end_counts[rows].max(initial=0), rows])
        common = (rows, ints[Int.ENDS :], ints[Int.FIRST_END], ints[Int.FALLBACK])
        if not needs.any():
            return RowSet(*common)

        def places(need: int) -> np.ndarray | None:
            found = np.flatnonzero(needs & need)
            return found if len(found) else None

        allowed = places(ALLOWED)
        return RowSet(
            *common,
            draws=self._draws(rows, places(RANDOM), bool((needs & TRUNCATED).any())),
            penalties=self._penalties(rows, places(PENALTIES)),
            bias=self._entries(rows, places(BIAS), lambda row: self._bias[row][0], lambda row: self._bias[row][1]),
            early_ends=self._entries(rows, places(EARLY_ENDS), self._ends),
            allowed=self._entries(rows, allowed, lambda row: self._allowed[row]),
            allowed_places=None if allowed is None else self._send(allowed),
            logprobs=self._wanted(rows, places(LOGPROBS)),
        )

    def _draws(self, rows: np.ndarray, places: np.ndarray | None, truncated: bool) -> Draws | None:
        if places is None:
            return None
        ints = self._send(self._ints[[Int.SEED, Int.TOP_K]][:, rows[places]])
        floats = self._send(self._floats[: Float.MIN_P + 1, rows[places]])
        return Draws(self._send(places), ints[0], ints[1], floats[0], floats[1], floats[2], truncated)

    def _penalties(self, rows: np.ndarray, places: np.ndarray | None) -> Penalties | None:
        if places is None:
            return None
        ints = self._send(np.stack([places, self._ints[Int.SLOT, rows[places]]]))
        floats = self._send(self._floats[Float.REPETITION :, rows[places]].astype(np.float32))
        return Penalties(ints[0], ints[1], floats[0], floats[1], floats[2])

    def _wanted(self, rows: np.ndarray, places: np.ndarray | None) -> Wanted | None:
        if places is None:
            return None
        return Wanted(self._send(places), [self._top_logprobs[row] for row in rows[places].tolist()])

    def _entries(
        self,
        rows: np.ndarray,
        places: np.ndarray | None,
        ids_of: Callable[[int], np.ndarray],
        values_of: Callable[[int], np.ndarray] | None = None,
    ) -> Entries | None:
        if places is None:
            return None
        named = rows[places].tolist()
        ids = [ids_of(row) for row in named]
        repeated = np.repeat(places, [len(some) for some in ids])
        columns = self._send(np.stack([repeated, np.concatenate(ids)]))
        values = None if values_of is None else self._send(np.concatenate([values_of(row) for row in named]))
        return Entries(columns[0], columns[1], values)

    def _ends(self, row: int) -> np.ndarray:
        return self._ints[Int.ENDS : Int.ENDS + self._end_counts[row], row]

    def _ids(self, field: str, ids: object) -> np.ndarray:
        array = np.array(ids, dtype=np.int64)
        if array.size and not (array.min() >= 0 and array.max() < self._vocab_size):
            raise ValueError(f"{field}: token ids must be from 0 to {self._vocab_size - 1}")
        return array

    def _send(self, array: np.ndarray) -> torch.Tensor:
        # numpy lays out what it gathers as it likes; the kernels want every column in one piece
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
