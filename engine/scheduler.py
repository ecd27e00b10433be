"""Which rows run next, for how many steps, and on which blocks."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from common.messages import Finish
from engine.blocks import BlockPool
from engine.plan import Admission, Chunk, Plan, PlanDone, StepResult
from engine.prefix_cache import PrefixCache
from engine.request import Request

SCORED_CHUNK = 256  # prompt tokens a step where each one's logits are wanted: 256 × 150,000 floats are 154 MB


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may hold."""

    steps_ahead: int  # decode steps a plan; 0 and 1: one
    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # tokens a step
    rows: int  # rows of the device: more than `max_num_seqs`, so that one that starts need not wait for one that ends


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan that the device has not finished, and the tokens it may bring to each request."""

    plan: Plan
    entries: tuple[tuple[Request, int], ...]
    delivered: dict[Request, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A token that counts. `finish` is the loop's view of whether it was the last; `index` points into the result."""

    request: Request
    token_id: int
    finish: Finish
    index: int


class Scheduler:
    """Owner: the loop thread. Requests go waiting → running → ended; preemption sends them back to waiting.

    A row and its blocks are released when the request has ended and nothing in flight names it (rule 3).
    """

    def __init__(self, limits: Limits, pool: BlockPool, prefixes: PrefixCache) -> None:
        self.limits = limits
        self.pool = pool
        self.prefixes = prefixes
        self.running: dict[Request, None] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.surplus_tokens = 0
        self.preemptions = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0
        self._free_rows = list(range(limits.rows - 1, -1, -1))
        self._by_row: list[Request | None] = [None] * limits.rows
        self._seq = 0
        self._blocks: list[tuple[int, int, tuple[int, ...]]] = []  # block-table updates of the plan being made

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def idle(self) -> bool:
        return not (self.running or self._num_waiting or self.in_flight)

    def request_at(self, row: int) -> Request | None:
        """Whose row it is."""
        return self._by_row[row]

    @property
    def uncut(self) -> int:
        """Plans in flight that will run to their end."""
        return sum(not flight.plan.cut for flight in self.in_flight.values())

    @property
    def cuttable(self) -> bool:
        """A plan in flight has steps that a cut would leave out."""
        return any(flight.plan.has_tail and not flight.plan.cut for flight in self.in_flight.values())

    def add(self, request: Request) -> None:
        """Queues it. The caller has checked that it fits into the cache on its own."""
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1

    def end(self, request: Request, finish: Finish) -> None:
        """Takes it out of every further plan; released by rule 3. Ending it again changes nothing."""
        if request.ended:
            return
        request.finish = finish
        if request.row < 0:
            self._num_waiting -= 1  # its heap entry is skipped when it comes up
            return
        del self.running[request]
        if not request.plans:
            self._release(request)

    def cut(self) -> None:
        """Ends the plans in flight at their next step."""
        for flight in self.in_flight.values():
            flight.plan.cut = flight.plan.has_tail

    def can_start(self) -> bool:
        """A waiting request would be admitted to a plan made now."""
        request = self._next_waiting()
        return request is not None and self._fits(request)

    # Making a plan

    def plan(self) -> Plan | None:
        """The next plan, its blocks reserved; None where there is nothing to run, or memory must drain first."""
        while True:
            self._blocks = []
            decoding, short = self._plan_decodes()
            if not short:
                break
            self._ungrant()
            if self.in_flight:  # what comes back may free blocks, and rows in flight are never preempted (rule 4)
                return None
            self._preempt_youngest()
        admissions: list[Admission] = []
        chunks, complete = self._plan_prefills(self.limits.max_num_batched_tokens - len(decoding), admissions)
        if not decoding and not chunks:
            return None
        if not complete:  # the rest of the prefill comes with the next plan, so this one is a single step
            decoding = [(request, 1) for request, _ in decoding]
            chunks = [(request, chunk, min(count, 1)) for request, chunk, count in chunks]
        return self._launch(decoding, chunks, admissions)

    def _plan_decodes(self) -> tuple[list[tuple[Request, int]], bool]:
        """Tokens for each row that decodes, and whether one of them found no block for even one."""
        most = max(1, self.limits.steps_ahead)
        planned: list[tuple[Request, int]] = []
        short = False
        for request in self.running:
            if request.in_prefill:
                continue
            wanted = min(most, request.remaining)
            if wanted <= 0:
                continue
            granted = self._reserve(request, request.planned_total - 1, wanted)
            if granted:
                planned.append((request, granted))
            else:
                short = True
        return planned[: self.limits.max_num_batched_tokens], short

    def _ungrant(self) -> None:
        """Undoes the block-table updates of a plan that is not made."""
        for row, index, blocks in self._blocks:
            request = self._by_row[row]
            if request is not None:
                del request.blocks[index:]
            self.pool.give(list(blocks))
        self._blocks = []

    def _plan_prefills(self, budget: int, admissions: list[Admission]) -> tuple[list[tuple[Request, Chunk, int]], bool]:
        """Chunks of what is in prefill already, then of what can start; and whether all of them end here."""
        chunks: list[tuple[Request, Chunk, int]] = []
        complete = True
        for request in list(self.running):
            if request.in_prefill:
                if budget <= 0:
                    return chunks, False
                budget -= self._chunk(request, budget, chunks)
                complete = complete and not request.in_prefill
        while (request_ := self._next_waiting()) is not None and self._fits(request_):
            if budget <= 0:
                return chunks, False
            admissions.append(self._admit(request_))
            budget -= self._chunk(request_, budget, chunks)
            complete = complete and not request_.in_prefill
        return chunks, complete

    def _chunk(self, request: Request, budget: int, chunks: list[tuple[Request, Chunk, int]]) -> int:
        """Plans the next piece of a request's prefill; returns its tokens."""
        if request.to_feed is None:
            raise RuntimeError("a request without a row has no prefill")
        start, scored = request.fed, request.params.prompt_logprobs is not None
        size = min(budget, len(request.to_feed) - start, SCORED_CHUNK if scored else budget)
        request.fed += size
        count = 0
        if not request.in_prefill and request.remaining > 0:
            wanted = min(max(1, self.limits.steps_ahead), request.remaining)
            # The sampled token itself needs no slot yet, so one step always fits.
            count = 1 + self._reserve(request, len(request.to_feed), wanted - 1)
        scores = request.prompt[start + 1 : start + size + 1] if scored and start < len(request.prompt) else None
        chunk = Chunk(request.row, request.to_feed[start : start + size], count, scores)
        chunks.append((request, chunk, count))
        return size

    def _admit(self, request: Request) -> Admission:
        """Gives it a row and the blocks of all its prefill, those with what others computed among them."""
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        request.start(self._free_rows.pop(), self.prefixes.start(request), self.pool.block_size)
        self._by_row[request.row] = request
        self.running[request] = None
        if request.blocks:
            self._blocks.append((request.row, 0, tuple(request.blocks)))
        self._reserve(request, request.total, 0)
        output = tuple(request.output)
        matcher = request.grammar() if request.grammar else None
        return Admission(
            request.row, request.params, request.end_token_ids, request.prompt, output, request.fed, matcher
        )  # fmt: skip

    def _launch(
        self,
        decoding: list[tuple[Request, int]],
        chunks: list[tuple[Request, Chunk, int]],
        admissions: list[Admission],
    ) -> Plan:
        self._seq += 1
        entries = [*decoding, *((request, count) for request, _, count in chunks)]
        plan = Plan(
            seq=self._seq,
            steps=max(1, max(count for _, count in entries)),
            rows=np.fromiter((request.row for request, _ in decoding), np.int32, len(decoding)),
            counts=np.fromiter((count for _, count in decoding), np.int32, len(decoding)),
            chunks=tuple(
                chunk if chunk.count == count else Chunk(chunk.row, chunk.token_ids, count, chunk.score_ids)
                for _, chunk, count in chunks
            ),
            admissions=tuple(admissions),
            blocks=tuple(self._blocks),
        )
        for request, count in entries:
            request.in_flight += count
            request.plans += 1
        self.in_flight[plan.seq] = InFlight(plan, tuple(entries))
        return plan

    # Blocks and rows

    def _reserve(self, request: Request, held: int, steps: int) -> int:
        """Blocks for `held` cached tokens and up to `steps` more; returns for how many of those they reach."""
        size = self.pool.block_size
        missing = self.pool.blocks_for(held + steps) - len(request.blocks)
        if missing > 0:
            taken = self.pool.take(min(missing, self.pool.free))
            if taken:
                self._blocks.append((request.row, len(request.blocks), tuple(taken)))
                request.blocks += taken
        return max(0, min(steps, len(request.blocks) * size - held))

    def _fits(self, request: Request) -> bool:
        """One row more may run: its prefill and first decode step have blocks, and a block is left for each other row.

        Without that reserve a request would be admitted only to be preempted a few steps on.
        """
        if len(self.running) >= self.limits.max_num_seqs or not self._free_rows:
            return False
        need = self.pool.blocks_for(min(request.total + 1, request.max_total)) + len(self.running)
        if need > self.pool.free and need - self.pool.held(self.prefixes.find(request)) > self.pool.free:
            return False
        return not self.prefixes.awaits(request, self.running)

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][1].ended:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _preempt_youngest(self) -> None:
        """Sends the youngest of the lowest priority back to waiting; it is recomputed later (rule 4)."""
        request = max(self.running, key=lambda request: request.order)
        del self.running[request]
        self._free_rows.append(request.row)
        self._by_row[request.row] = None
        self.pool.give(request.preempt())
        self.preemptions += 1
        self.add(request)

    def _release(self, request: Request) -> None:
        self._by_row[request.row] = None
        self._free_rows.append(request.row)
        self.pool.give(request.blocks)
        request.row, request.blocks = -1, []

    # Retiring results

    def retire(self, result: StepResult) -> list[Committed]:
        """Takes a step's tokens in. What came for a request that had ended is surplus: counted and dropped (rule 2)."""
        committed: list[Committed] = []
        flight = self.in_flight[result.plan]
        if not result.step:
            self._prefilled(flight)
        for index, (row, token_id, ended) in enumerate(zip(result.rows, result.token_ids, result.ended, strict=True)):
            request = self._by_row[row]
            if request is None or request.ended:
                self.surplus_tokens += 1
                continue
            request.output.append(token_id)
            request.in_flight -= 1
            flight.delivered[request] = flight.delivered.get(request, 0) + 1
            request.computed = request.total - 1  # the token itself is fed in the next step
            self.prefixes.publish(request)
            finish = Finish.NONE
            if ended:
                finish = Finish.STOP
            elif request.total >= request.max_total:
                finish = Finish.LENGTH
            if finish:
                self.end(request, finish)
            committed.append(Committed(request, token_id, finish, index))
        return committed

    def _prefilled(self, flight: InFlight) -> None:
        """A plan's chunks have been fed, all in its first step."""
        chunks = flight.plan.chunks
        for (request, _), chunk in zip(flight.entries[len(flight.entries) - len(chunks) :], chunks, strict=True):
            request.computed += len(chunk.token_ids)
            self.prefixes.publish(request)

    def complete(self, done: PlanDone) -> list[Request]:
        """Closes a plan: takes back what it had reserved and not brought, releases what has ended.

        Returns the requests that only wanted their prompt scored, and end with this plan.
        """
        scored: list[Request] = []
        flight = self.in_flight.pop(done.plan)
        for request, count in flight.entries:
            request.plans -= 1
            if request.ended:
                if not request.plans:
                    self._release(request)
                continue
            request.in_flight -= count - flight.delivered.get(request, 0)
            if not request.plans and not request.in_prefill and request.max_total <= len(request.prompt):
                self.end(request, Finish.LENGTH)
                scored.append(request)
        return scored
