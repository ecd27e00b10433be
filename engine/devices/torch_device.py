"""The device that runs the model with torch on this host's CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.devices.drafts import Drafts
from engine.devices.locate import locate
from engine.model.batch import Batch
from engine.model.runner import ModelRunner
from engine.plan import Chunk, Ints, Plan, StepResult
from engine.sampling.guides import Guides
from engine.sampling.penalties import penalized
from engine.sampling.rows import RowSet
from engine.sampling.sampler import Sampled, Sampler, prompt_logprobs

Positions = np.ndarray[Any, np.dtype[np.int64]]

_EMPTY = np.empty(0, np.int32)


@dataclass(slots=True)
class _Work:
    """One step: `rows` feed their last token and a draft each, then come the chunks; `sampled` rows draw, decode rows
    first, once for each token that they feed."""

    rows: Ints
    chunks: tuple[Chunk, ...]
    drafted: Ints  # tokens of each row's draft
    drafts: Ints  # their tokens, row after row
    drawing: Ints  # rows that draw: `rows`, and those whose chunk ends their prefill
    sampled: Ints


class TorchDevice:
    """Row state lives in numpy arrays next to the model, so a step needs nothing from the loop.

    Owner: the device thread.
    The token that a row draws is fed to it in the next step; rows that ended take no further part.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, rows: int, block_size: int, max_model_len: int,
        drafts: Drafts | None = None,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._sampler = sampler
        self._block_size = block_size
        self._drafts = drafts
        self._lengths = np.zeros(rows, np.int64)  # tokens in the cache
        self._last = np.zeros(rows, np.int64)  # the token drawn last, not fed yet
        self._left = np.zeros(rows, np.int32)  # tokens that the plan still wants of the row
        self._alive = np.zeros(rows, np.bool_)
        self._drafting = np.zeros(rows, np.bool_)
        self._tables = np.zeros((rows, -(-max_model_len // block_size)), np.int32)
        self._row_sets: dict[bytes, RowSet] = {}
        self._guides = Guides(rows, runner.vocab_size)
        self._rows = _EMPTY  # of the current plan: every row that samples in it

    def begin(self, plan: Plan) -> None:
        """Takes in admissions and block-table updates."""
        for admission in plan.admissions:
            row = admission.row
            self._lengths[row], self._alive[row] = admission.length, True
            self._sampler.admit(row, admission.params, admission.end_token_ids, admission.prompt, admission.output)
            self._row_sets.clear()
            self._guides.admit(row, admission.matcher, admission.end_token_ids, admission.output)
            if self._drafts is not None:
                self._drafts.admit(row, admission.prompt, admission.output)
                plain = admission.params.logprobs is None and admission.matcher is None
                self._drafting[row] = plain and not penalized(admission.params)
        for row, index, blocks in plan.blocks:
            self._tables[row, index : index + len(blocks)] = blocks
        joining = [chunk for chunk in plan.chunks if chunk.count]
        self._rows = np.concatenate([plan.rows, np.asarray([chunk.row for chunk in joining], np.int32)])
        self._left[plan.rows] = plan.counts
        for chunk in joining:
            self._left[chunk.row] = chunk.count

    def step(self, plan: Plan, index: int) -> StepResult | None:
        """One forward pass and one draw for each token that is fed to a decoding row."""
        began = time.monotonic_ns()
        work = self._work(plan, index)
        if not len(work.rows) and not work.chunks:
            return None
        with torch.inference_mode():
            batch, positions, scored = self._batch(work)
            logits = self._runner.forward(batch)
            for chunk in work.chunks:
                self._lengths[chunk.row] += len(chunk.token_ids)
            count = len(work.sampled)
            scores = {chunk.row: self._score(logits, chunk, place) for chunk, place in scored}
            if not count:
                return StepResult(plan.seq, index, [], [], [], began, time.monotonic_ns(), {}, scores)
            masks = self._guides.masks(work.sampled)
            at = torch.from_numpy(positions)
            sampled = self._sampler.sample(logits[:count], self._row_set(work.sampled), at, masks)
        if masks is not None:
            guided = masks[0].numpy()
            self._guides.advance(work.sampled[guided], sampled.tokens.numpy()[guided])
        tokens, ended = sampled.tokens.numpy(), sampled.ended.numpy()
        rows, places, accepted = work.sampled, _by_place(sampled), 0
        if self._drafts is None:
            self._last[rows], self._alive[rows[ended]] = tokens, False
            self._lengths[work.rows] += 1
            self._left[rows] -= 1
        else:
            kept = self._keep(self._drafts, work, tokens, ended)
            places = {int(kept[:place].sum()): entry for place, entry in places.items()}
            rows, tokens, ended = rows[kept], tokens[kept], ended[kept]
            accepted = len(rows) - len(work.drawing)
        return StepResult(
            plan.seq, index, rows.tolist(), tokens.tolist(), ended.tolist(), began, time.monotonic_ns(), places, scores,
            len(work.drafts), accepted,
        )  # fmt: skip

    def _keep(
        self, drafts: Drafts, work: _Work, tokens: np.ndarray[Any, Any], ended: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Takes the drawn tokens in as far as the drafts hold. Returns which of them count."""
        drawing = work.drawing
        drafted = np.concatenate([work.drafted, np.zeros(len(drawing) - len(work.rows), np.int32)])
        counts = drafts.take(drawing, drafted, work.drafts, tokens, ended)
        firsts = np.cumsum(drafted + 1) - drafted - 1
        lasts = firsts + counts - 1
        self._last[drawing], self._alive[drawing] = tokens[lasts], ~ended[lasts]
        self._lengths[work.rows] += counts[: len(work.rows)]
        self._left[drawing] -= counts
        kept: np.ndarray[Any, np.dtype[np.bool_]] = np.arange(len(tokens)) <= np.repeat(lasts, drafted + 1)
        return kept

    def _work(self, plan: Plan, index: int) -> _Work:
        first = not index and bool(plan.chunks)
        rows = plan.rows if first else self._rows
        rows = rows[(self._left[rows] > 0) & self._alive[rows]]
        if not first:
            drafted, drafts = self._propose(rows)
            sampled = np.repeat(rows, drafted + 1) if len(drafts) else rows
            return _Work(rows, (), drafted, drafts, rows, sampled)
        joining = np.asarray([chunk.row for chunk in plan.chunks if chunk.count], np.int32)
        sampled = np.concatenate([rows, joining])
        return _Work(rows, plan.chunks, np.zeros(len(rows), np.int32), _EMPTY, sampled, sampled)

    def _propose(self, rows: Ints) -> tuple[Ints, Ints]:
        if self._drafts is None or not len(rows):
            return np.zeros(len(rows), np.int32), _EMPTY
        return self._drafts.propose(rows, (self._left[rows] - 1) * self._drafting[rows])

    def _row_set(self, rows: Ints) -> RowSet:
        key = rows.tobytes()
        found = self._row_sets.get(key)
        if found is None:
            if len(self._row_sets) > 64:
                self._row_sets.clear()
            found = self._row_sets[key] = self._sampler.row_set(rows)
        return found

    def _batch(self, work: _Work) -> tuple[Batch, Positions, list[tuple[Chunk, int]]]:
        """The forward pass's input, the position of each token that is drawn, and for each scored chunk the place of
        its first logits."""
        sequences, sizes = work.rows, work.drafted.astype(np.int64) + 1
        tokens = self._last[work.rows]
        if len(work.drafts):
            tokens = np.insert(tokens, np.repeat(np.arange(1, len(tokens) + 1), work.drafted), work.drafts)
        if work.chunks:
            sequences = np.concatenate([sequences, np.asarray([chunk.row for chunk in work.chunks], np.int32)])
            sizes = np.concatenate([sizes, [len(chunk.token_ids) for chunk in work.chunks]])
            tokens = np.concatenate([tokens, *(chunk.token_ids for chunk in work.chunks)])
        size = self._block_size
        positions, slots = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64)
        starts, contexts = np.empty(len(sequences) + 1, np.int32), np.empty(len(sequences), np.int32)
        longest = locate(sequences, sizes, self._lengths, self._tables, size, positions, slots, starts, contexts)
        wanted, scored = self._logits_index(work, starts)
        batch = Batch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(np.ascontiguousarray(self._tables[sequences, : -(-longest // size)])),
            logits_index=torch.from_numpy(wanted),
            max_query=int(sizes.max()),
            max_context=longest,
        )
        return batch, positions[wanted[: len(work.sampled)]] + 1, scored

    @staticmethod
    def _logits_index(work: _Work, starts: Ints) -> tuple[Positions, list[tuple[Chunk, int]]]:
        """The tokens of the rows that decode and the last ones of the chunks that draw; then those of scored chunks."""
        decode = len(work.rows)
        if not work.chunks:
            return np.arange(starts[decode], dtype=np.int64), []
        index = [np.arange(starts[decode], dtype=np.int64)]
        lasts = [starts[decode + i + 1] - 1 for i, chunk in enumerate(work.chunks) if chunk.count]
        index.append(np.asarray(lasts, np.int64))
        scored: list[tuple[Chunk, int]] = []
        place = int(starts[decode]) + len(lasts)
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
