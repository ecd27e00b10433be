"""The device that runs the model with torch on this host's CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.model.batch import Batch
from engine.model.runner import ModelRunner
from engine.plan import Chunk, Ints, Plan, StepResult
from engine.sampling.rows import RowSet
from engine.sampling.sampler import Sampled, Sampler, prompt_logprobs

_EMPTY = np.empty(0, np.int32)


@dataclass(slots=True)
class _Work:
    """One step: `rows` feed their last token each, then come the chunks; `sampled` rows draw, decode rows first."""

    rows: Ints
    chunks: tuple[Chunk, ...]
    sampled: Ints


class TorchDevice:
    """Row state lives in numpy arrays next to the model, so a step needs nothing from the loop.

    Owner: the device thread.
    The token that a row draws is fed to it in the next step; rows that ended take no further part.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, rows: int, block_size: int, max_model_len: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._block_size = block_size
        self._lengths = np.zeros(rows, np.int64)  # tokens in the cache
        self._last = np.zeros(rows, np.int64)  # the token drawn last, not fed yet
        self._alive = np.zeros(rows, np.bool_)
        self._tables = np.zeros((rows, -(-max_model_len // block_size)), np.int32)
        self._row_sets: dict[bytes, RowSet] = {}
        self._rows = _EMPTY  # of the current plan: every row that samples in it, and for how many steps
        self._counts = _EMPTY

    def begin(self, plan: Plan) -> None:
        """Takes in admissions and block-table updates."""
        for admission in plan.admissions:
            row = admission.row
            self._lengths[row], self._alive[row] = 0, True
            self._sampler.admit(row, admission.params, admission.end_token_ids, admission.prompt, admission.output)
            self._row_sets.clear()
        for row, index, blocks in plan.blocks:
            self._tables[row, index : index + len(blocks)] = blocks
        self._rows, self._counts = plan.rows, plan.counts
        joining = [(chunk.row, chunk.count) for chunk in plan.chunks if chunk.count]
        if joining:
            rows, counts = np.asarray(joining, np.int32).T
            self._rows = np.concatenate([plan.rows, rows])
            self._counts = np.concatenate([plan.counts, counts])

    def step(self, plan: Plan, index: int) -> StepResult | None:
        """One forward pass and one draw."""
        began = time.monotonic_ns()
        work = self._work(plan, index)
        if not len(work.rows) and not work.chunks:
            return None
        with torch.inference_mode():
            batch, scored = self._batch(work)
            logits = self._runner.forward(batch)
            self._lengths[work.rows] += 1
            for chunk in work.chunks:
                self._lengths[chunk.row] += len(chunk.token_ids)
            count = len(work.sampled)
            scores = {chunk.row: self._score(logits, chunk, place) for chunk, place in scored}
            if not count:
                return StepResult(plan.seq, index, [], [], [], began, time.monotonic_ns(), {}, scores)
            positions = torch.from_numpy(self._lengths[work.sampled])
            sampled = self._sampler.sample(logits[:count], self._row_set(work.sampled), positions)
        tokens, ended = sampled.tokens.numpy(), sampled.ended.numpy()
        self._last[work.sampled] = tokens
        self._alive[work.sampled[ended]] = False
        return StepResult(
            plan.seq,
            index,
            work.sampled.tolist(),
            tokens.tolist(),
            ended.tolist(),
            began,
            time.monotonic_ns(),
            _by_place(sampled),
            scores,
        )

    def _work(self, plan: Plan, index: int) -> _Work:
        if index or not plan.chunks:
            rows = self._rows[(self._counts > index) & self._alive[self._rows]]
            return _Work(rows, (), rows)
        rows = plan.rows[self._alive[plan.rows]]
        joining = np.asarray([chunk.row for chunk in plan.chunks if chunk.count], np.int32)
        return _Work(rows, plan.chunks, np.concatenate([rows, joining]))

    def _row_set(self, rows: Ints) -> RowSet:
        key = rows.tobytes()
        found = self._row_sets.get(key)
        if found is None:
            if len(self._row_sets) > 64:
                self._row_sets.clear()
            found = self._row_sets[key] = self._sampler.row_set(rows)
        return found

    def _batch(self, work: _Work) -> tuple[Batch, list[tuple[Chunk, int]]]:
        """The forward pass's input, and for each scored chunk the place of its first logits."""
        rows, size = work.rows, self._block_size
        positions = self._lengths[rows]
        tokens = self._last[rows]
        owners = rows
        sizes = np.ones(len(rows), np.int64)
        if work.chunks:
            sequences = np.concatenate([rows, np.asarray([chunk.row for chunk in work.chunks], np.int32)])
            sizes = np.concatenate([sizes, [len(chunk.token_ids) for chunk in work.chunks]])
            tokens = np.concatenate([tokens, *(chunk.token_ids for chunk in work.chunks)])
            starts = [self._lengths[chunk.row] for chunk in work.chunks]
            spans = [
                np.arange(start, start + len(chunk.token_ids)) for start, chunk in zip(starts, work.chunks, strict=True)
            ]
            positions = np.concatenate([positions, *spans])
            owners = np.repeat(sequences, sizes)
        else:
            sequences = rows
        slots = self._tables[owners, positions // size].astype(np.int64) * size + positions % size
        query_starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(sizes, out=query_starts[1:])
        contexts = (self._lengths[sequences] + sizes).astype(np.int32)
        longest = int(contexts.max())
        logits_index, scored = self._logits_index(work, query_starts)
        return (
            Batch(
                token_ids=torch.from_numpy(tokens),
                positions=torch.from_numpy(positions),
                slots=torch.from_numpy(slots),
                query_starts=torch.from_numpy(query_starts),
                context_lens=torch.from_numpy(contexts),
                block_tables=torch.from_numpy(np.ascontiguousarray(self._tables[sequences, : -(-longest // size)])),
                logits_index=torch.from_numpy(logits_index),
                max_query=int(sizes.max()),
                max_context=longest,
            ),
            scored,
        )

    @staticmethod
    def _logits_index(work: _Work, starts: Ints) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[tuple[Chunk, int]]]:
        """The last token of every row that draws; after those, the tokens of scored chunks."""
        decode = len(work.rows)
        index = [np.arange(decode, dtype=np.int64)]
        lasts = [starts[decode + i + 1] - 1 for i, chunk in enumerate(work.chunks) if chunk.count]
        index.append(np.asarray(lasts, np.int64))
        scored: list[tuple[Chunk, int]] = []
        place = decode + len(lasts)
        for i, chunk in enumerate(work.chunks):
            if chunk.score_ids is not None and len(chunk.score_ids):
                first = int(starts[decode + i])
                index.append(np.arange(first, first + len(chunk.score_ids), dtype=np.int64))
                scored.append((chunk, place))
                place += len(chunk.score_ids)
        return np.concatenate(index), scored

    def _score(self, logits: torch.Tensor, chunk: Chunk, place: int) -> tuple[int, list[Any]]:
        """Logprobs of the tokens that follow the chunk's, and the index in the prompt of the first of them."""
        if chunk.score_ids is None:
            raise RuntimeError("the chunk is not scored")
        top = self._sampler.prompt_logprobs_of(chunk.row)
        following = torch.from_numpy(chunk.score_ids.astype(np.int64))
        columns = prompt_logprobs(logits[place : place + len(following)], following, top)
        start = int(self._lengths[chunk.row]) - len(chunk.token_ids) + 1
        return start, list(columns.entries(following))


def _by_place(sampled: Sampled) -> dict[int, Any]:
    if sampled.logprobs is None:
        return {}
    columns = sampled.logprobs
    return dict(zip(columns.places.tolist(), columns.entries(sampled.tokens[columns.places]), strict=True))
