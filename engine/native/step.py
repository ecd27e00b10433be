"""What a tape reads anew at every step: the batch, where its context lies, and how attention is cut into pieces."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.attention.cache import KVCache
from engine.model.batch import Batch
from engine.native import tape as t
from engine.native.attention import MAX_LINES, make_tiles, segment_size
from engine.native.kernels import block_kernels
from engine.native.team import Team

_SPLIT_BELOW = 4  # pieces per thread: with fewer, long contexts are spread over threads


def new_record() -> np.ndarray[Any, np.dtype[np.int64]]:
    """A step record of nothing."""
    return np.zeros(t.STEP_WIDTH, np.int64)


class Step:
    """The step record. Owner: the device thread."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.record = new_record()
        self._cache: KVCache | None = None
        self._batch: Batch | None = None  # kept alive while its addresses are in use
        self._tiles = np.zeros((0, 4), np.int32)
        self._partials = np.empty(0, np.float32)

    def begin(self, batch: Batch, cache: KVCache, group: int) -> None:
        """`group`: the most query heads of any layer that share a kv head."""
        tokens, logits = batch.token_ids.numel(), batch.logits_index.numel()
        record = self.record
        if cache is not self._cache:
            self._use(cache)
        if tokens > len(self._tiles):
            self._tiles = np.zeros((2 * tokens, 4), np.int32)
            record[t.TILE_LIST] = self._tiles.ctypes.data
        self._batch = batch
        record[t.TOKENS], record[t.LOGITS] = tokens, logits
        record[t.TOKEN_IDS : t.LOGITS_INDEX + 1] = (
            batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
            batch.context_lens.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1],
            batch.logits_index.data_ptr(),
        )  # fmt: skip
        record[t.TILE_COUNT] = make_tiles(batch.query_starts.numpy(), batch.context_lens.numpy(), group, self._tiles)
        self._split(batch, cache, group)

    def _use(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys = np.array([layer.data_ptr() for layer in cache.keys], np.int64)
        self._values = np.array([layer.data_ptr() for layer in cache.values], np.int64)
        tiles = block_kernels(cache.keys[0].dtype).table
        self.record[[t.KEYS, t.VALUES, t.BLOCK_SIZE, t.BLOCK_TILES]] = [
            self._keys.ctypes.data, self._values.ctypes.data, cache.block_size, tiles.ctypes.data,
        ]  # fmt: skip
        self._kv_heads = max(layer.kv_heads for layer in cache.layers)
        self._dim = max(layer.value_dim for layer in cache.layers)

    def _split(self, batch: Batch, cache: KVCache, group: int) -> None:
        """Whether segments of a context are computed apart: where tiles are fewer than threads can share."""
        segments = -(-batch.max_context // segment_size(cache.block_size))
        pieces = int(self.record[t.TILE_COUNT]) * self._kv_heads
        if self._team.threads == 1 or segments < 3 or pieces >= _SPLIT_BELOW * self._team.threads:
            self.record[t.SEGMENTS] = 0
            return
        size = pieces * segments * max(MAX_LINES, group) * (self._dim + 2)
        if self._partials.size < size:
            self._partials = np.empty(2 * size, np.float32)
            self.record[t.PARTIALS] = self._partials.ctypes.data
        self.record[t.SEGMENTS] = segments

    def run(self, lines: Lines, alone: bool) -> None:
        """Runs a tape over the step, on the caller's thread only where `alone`."""
        lines.into(self.record)
        self._team.run(self.record, alone)


class Lines:
    """A tape: `numbers` [n, WIDTH] int64 and `constants` [n, FLOATS] float32 of its lines."""

    def __init__(self, count: int) -> None:
        self.numbers = np.zeros((count, t.WIDTH), np.int64)
        self.constants = np.zeros((count, t.FLOATS), np.float32)
        self._claims = np.zeros(count, np.int64)
        self._addresses = (
            self._claims.ctypes.data, self.numbers.ctypes.data, self.constants.ctypes.data, count,
        )  # fmt: skip

    def write(self, index: int, fields: dict[int, int], floats: tuple[float, ...] = ()) -> None:
        """Fills line `index`."""
        for field, value in fields.items():
            self.numbers[index, field] = value
        self.constants[index, : len(floats)] = floats

    def into(self, record: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Makes them what the record's tape is, nothing of it claimed."""
        self._claims[:] = 0
        record[t.CLAIMS], record[t.LINES], record[t.CONSTANTS], record[t.COUNT] = self._addresses
