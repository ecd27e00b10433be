"""The loop, the scheduler and the fake device on one thread, so that a test decides who moves when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from common.messages import Abort, Finish, Stats, Submit, pack_ints
from common.sampling import SamplingParams
from engine.blocks import BlockPool
from engine.devices.device import Device
from engine.devices.fake import FakeDevice
from engine.loop import Arrival, Event, Loop, LoopConfig, StopHit
from engine.plan import Plan, PlanDone, StepResult
from engine.prefix_cache import PrefixCache
from engine.request import Request
from engine.scheduler import Committed, Limits, Scheduler

VOCAB = 50
EOS = (7,)


class Recorder:
    """Stands in for the output thread: keeps tokens and terminals, and stops some requests at a token count."""

    def __init__(self, stops: dict[int, int]) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.terminals: defaultdict[int, list[Finish]] = defaultdict(list)
        self.errors: dict[int, str | None] = {}
        self.pending: deque[StopHit] = deque()  # what the loop has not been told yet
        self.last_stats: Stats | None = None
        self._stops = stops

    def step(self, result: StepResult, committed: list[Committed], scored: list[tuple[Request, Any]]) -> None:
        for item in committed:
            handle = item.request.handle
            if self.terminals[handle]:
                continue
            self.tokens[handle].append(item.token_id)
            if len(self.tokens[handle]) == self._stops.get(handle):
                self.terminals[handle].append(Finish.STOP)
                self.pending.append(StopHit(item.request, Finish.STOP))
            elif item.finish:
                self.terminals[handle].append(item.finish)

    def end(self, request: Request, finish: Finish, error: str | None = None) -> None:
        if not self.terminals[request.handle]:
            self.terminals[request.handle].append(finish)
            self.errors[request.handle] = error

    def stats(self, stats: Stats) -> None:
        self.last_stats = stats


class Harness:
    """`tick_*` moves one part by the smallest amount that it can move by."""

    def __init__(
        self,
        *,
        steps_ahead: int,
        blocks: int = 40,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 16,
        max_model_len: int = 64,
        drops_dead: bool = True,
        burst: int = 1,
        caching: bool = True,
        stops: dict[int, int] | None = None,
        device: Device | None = None,
        vocab_size: int = VOCAB,
        end_token_ids: tuple[int, ...] = EOS,
    ) -> None:
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.plans: deque[Plan] = deque()
        self.made: list[Plan] = []
        rows = 2 * max_num_seqs
        self.pool = BlockPool(blocks, block_size)
        self.prefixes = PrefixCache(self.pool, enabled=caching)
        self.scheduler = Scheduler(Limits(steps_ahead, max_num_seqs, budget, rows), self.pool, self.prefixes)
        self.device: Device = device or FakeDevice(
            rows, blocks, block_size, vocab_size, drops_dead=drops_dead, burst=burst
        )
        self.output = Recorder(stops or {})
        config = LoopConfig(0, 1, steps_ahead, max_model_len, vocab_size, end_token_ids)
        self.loop = Loop(config, self.scheduler, self.inbox, self, self.output)
        self._step = -1  # of the plan at the head of the queue; −1: not begun

    def put(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.made.append(plan)

    def submit(
        self,
        handle: int,
        prompt: Sequence[int],
        params: SamplingParams,
        emitted: Sequence[int] = (),
        *,
        priority: int = 0,
        salt: str = "",
    ) -> None:
        before, after = pack_ints("i", prompt), pack_ints("i", emitted)
        submit = Submit(1, handle, before, params, priority, after, cache_salt=salt)
        self.inbox.put(Arrival(submit, self.prefixes.chain(salt, before + after)))

    def abort(self, handle: int) -> None:
        self.inbox.put(Abort(1, handle))

    def tick_loop(self) -> bool:
        if self.inbox.empty():
            return False
        self.loop.turn()
        return True

    def tick_device(self) -> bool:
        """Begins a plan, or runs one step of it, or closes it."""
        if not self.plans:
            return False
        plan = self.plans[0]
        if self._step < 0:
            self.device.begin(plan)
            self._step = 0
            return True
        over = self._step >= plan.steps or (plan.cut and (self._step > 0 or not plan.chunks))
        result = None if over else self.device.step(plan, self._step)
        if result is None:
            self.inbox.put(PlanDone(plan.seq, self._step))
            self.plans.popleft()
            self._step = -1
        else:
            self._step += 1
            self.inbox.put(result)
        return True

    def tick_output(self) -> bool:
        if not self.output.pending:
            return False
        self.inbox.put(self.output.pending.popleft())
        return True

    def drain(self) -> None:
        """Until nothing moves any more."""
        for _ in range(100_000):
            if not (self.tick_loop() or self.tick_output() or self.tick_device()):
                return
        raise AssertionError("the engine does not come to rest")

    def assert_all_returned(self) -> None:
        """Every block and row is back, and nothing is queued, running or in flight."""
        assert self.scheduler.idle
        assert self.pool.free == self.pool.total
        taken = self.pool.take(self.pool.total)
        assert taken is not None
        assert sorted(taken) == list(range(1, self.pool.total + 1)), "a block came back twice"
        self.pool.give(taken)
        assert self.scheduler.free_rows == self.scheduler.limits.rows


def prompt_of(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]
