"""The engine's loop: takes requests in, plans ahead of the device, retires what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from common.messages import Abort, Finish, Stats, Submit
from engine.plan import DeviceFailed, Plan, PlanDone, StepResult
from engine.request import Request
from engine.scheduler import Committed, Scheduler

log = logging.getLogger(__name__)

PLANS_AHEAD = 2  # one that runs and one that is queued
PLANS_IN_FLIGHT = 4  # cut ones included, which end by themselves
STATS_SECONDS = 0.25

_COUNTERS = (
    "steps", "plans", "cuts", "prompt_tokens", "generation_tokens", "aborted", "device_busy_us",
    "draft_tokens", "accepted_draft_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and its digests for the prefix cache, which take too long to be made on the loop's thread."""

    submit: Submit
    chain: list[bytes]
    grammar: Callable[[], Any] | None = None  # makes a matcher at its beginning
    fault: str | None = None  # why it cannot run


@dataclass(frozen=True, slots=True)
class StopHit:
    """Output thread → loop: a stop string ended this request, or its output failed."""

    request: Request
    finish: Finish


@dataclass(frozen=True, slots=True)
class OutputFailed:
    """The output thread cannot go on."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class DropApi:
    """An API process has gone; so do its requests."""

    api_id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The loop ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """Something to be done on the loop's thread: only where it is the output side too."""

    work: Callable[..., None]
    args: tuple[Any, ...]


Event = Run | Arrival | Abort | DropApi | OutputFailed | StepResult | PlanDone | DeviceFailed | StopHit | Shutdown


class Plans(Protocol):
    """Where plans go: the device thread."""

    def put(self, plan: Plan) -> None: ...


class Output(Protocol):
    """Where results go. It alone writes terminals (rule 10)."""

    def step(self, result: StepResult, committed: list[Committed], scored: list[tuple[Request, Any]]) -> None: ...

    def end(self, request: Request, finish: Finish, error: str | None = None) -> None: ...

    def stats(self, stats: Stats) -> None: ...


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """What the loop must know beside the scheduler's limits."""

    engine: int
    epoch: int
    steps_ahead: int
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]


class EngineError(RuntimeError):
    """The device or the output failed; the engine must be restarted."""


class Loop:
    """Owner of requests, scheduler and blocks. Everything it hears of comes through one inbox."""

    def __init__(
        self,
        config: LoopConfig,
        scheduler: Scheduler,
        inbox: SimpleQueue[Event],
        plans: Plans,
        output: Output,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._inbox = inbox
        self._plans = plans
        self._output = output
        self._clock = clock
        self._requests: dict[tuple[int, int], Request] = {}
        self._arrivals = 0
        self._progress = 0
        self._stats_due = 0.0
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._running = True

    def run(self) -> None:
        """Until Shutdown. Raises EngineError."""
        self._report()  # so that a peer finds a heartbeat as soon as it is greeted
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Waits for events, takes in all that there are, plans what can be planned."""
        self._take()
        if self._config.steps_ahead == 0:
            self._synchronous()
        else:
            self._ahead()
        if self._clock() >= self._stats_due:
            self._report()

    # The two schedules

    def _ahead(self) -> None:
        """Keeps the device's queue filled; cuts when a request that waits could start now."""
        scheduler = self._scheduler
        if scheduler.cuttable and scheduler.can_start():
            self._cut()
        while scheduler.uncut < PLANS_AHEAD and len(scheduler.in_flight) < PLANS_IN_FLIGHT and self._plan():
            pass

    def _synchronous(self) -> None:
        """Plan, run, retire: the next step is planned when nothing is in flight."""
        if not self._scheduler.in_flight:
            self._plan()

    def _plan(self) -> bool:
        plan = self._scheduler.plan()
        if plan is None:
            return False
        self._counters["plans"] += 1
        self._plans.put(plan)
        return True

    def _cut(self) -> None:
        self._counters["cuts"] += 1
        self._scheduler.cut()

    # Events

    def _take(self) -> None:
        """Waits for an event, then takes in all that there are."""
        try:
            event = self._inbox.get(timeout=STATS_SECONDS)
        except Empty:
            self._progress += 1  # idle, and alive
            return
        while True:
            self._handle(event)
            try:
                event = self._inbox.get_nowait()
            except Empty:
                return

    def _handle(self, event: Event) -> None:
        match event:
            case StepResult():
                self._retire(event)
            case PlanDone():
                self._complete(event)
            case Arrival():
                self._submit(event)
            case Abort():
                self._abort(event.api_id, event.handle)
            case StopHit():
                self._end(event.request, event.finish)
            case DropApi():
                for api_id, handle in [key for key in self._requests if key[0] == event.api_id]:
                    self._abort(api_id, handle)
            case DeviceFailed() | OutputFailed():
                raise EngineError(f"{type(event.error).__name__}: {event.error}") from event.error
            case Run():
                event.work(*event.args)
            case Shutdown():
                self._running = False

    def _submit(self, arrival: Arrival) -> None:
        submit = arrival.submit
        prompt = np.frombuffer(submit.prompt, "<i4").astype(np.int32)
        params = submit.params
        self._arrivals += 1
        ends = () if params.ignore_eos and params.grammar is None else self._config.end_token_ids
        request = Request(
            api_id=submit.api_id,
            handle=submit.handle,
            prompt=prompt,
            params=params,
            end_token_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))),
            max_total=min(len(prompt) + params.max_tokens, self._config.max_model_len),
            order=(submit.priority, self._arrivals),
            output=np.frombuffer(submit.emitted, "<i4").tolist(),
            resumed=np.frombuffer(submit.emitted, "<i4").tolist(),
            delivered=submit.delivered,
            chain=arrival.chain,
            grammar=arrival.grammar,
        )
        error = arrival.fault or self._refusal(request)
        if error:
            self._output.end(request, Finish.ERROR, error)
            return
        self._requests[submit.api_id, submit.handle] = request
        self._counters["prompt_tokens"] += len(prompt)
        self._scheduler.add(request)

    def _refusal(self, request: Request) -> str | None:
        """Why it cannot run. The API process checks all this before; an engine does not rely on it."""
        prompt, config = request.prompt, self._config
        if (request.api_id, request.handle) in self._requests:
            return "a request with this handle is running"
        if not len(prompt):
            return "the prompt is empty"
        if len(prompt) > config.max_model_len:
            return f"the prompt has {len(prompt)} tokens; the context holds {config.max_model_len}"
        ids = np.concatenate([prompt, np.asarray(request.output, np.int32)])
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            return f"token ids must be in [0, {config.vocab_size})"
        if request.remaining <= 0 and (request.params.max_tokens or request.output):
            return f"the context of {config.max_model_len} tokens is full"
        return None

    def _abort(self, api_id: int, handle: int) -> None:
        request = self._requests.get((api_id, handle))
        if request is not None and not request.ended:
            self._counters["aborted"] += 1
            self._output.end(request, Finish.ABORT)
            self._end(request, Finish.ABORT)

    def _end(self, request: Request, finish: Finish) -> None:
        """Ends what the device has not ended by itself; its rows leave the plans at the next step."""
        if request.ended:
            return
        flying = request.plans > 0
        self._scheduler.end(request, finish)
        self._forget(request)
        if flying and self._scheduler.cuttable:
            self._cut()

    def _forget(self, request: Request) -> None:
        self._requests.pop((request.api_id, request.handle), None)

    def _retire(self, result: StepResult) -> None:
        self._progress += 1
        self._counters["steps"] += 1
        self._counters["device_busy_us"] += (result.ended_ns - result.began_ns) // 1000
        self._counters["draft_tokens"] += result.drafted
        self._counters["accepted_draft_tokens"] += result.accepted
        scored = [
            (request, scores)
            for row, scores in result.prompt_logprobs.items()
            if (request := self._scheduler.request_at(row)) is not None
        ]
        committed = self._scheduler.retire(result)
        self._counters["generation_tokens"] += len(committed)
        self._output.step(result, committed, scored)
        for item in committed:
            if item.finish:
                self._forget(item.request)

    def _complete(self, done: PlanDone) -> None:
        for request in self._scheduler.complete(done):
            self._output.end(request, Finish.LENGTH)
            self._forget(request)

    def _report(self) -> None:
        scheduler, config = self._scheduler, self._config
        self._stats_due = self._clock() + STATS_SECONDS
        counters = self._counters | {
            "surplus_tokens": scheduler.surplus_tokens,
            "preemptions": scheduler.preemptions,
            "prefix_cache_queries": scheduler.prefixes.queries,
            "prefix_cache_hits": scheduler.prefixes.hits,
        }
        gauges = {"kv_cache_usage": scheduler.pool.usage}
        running, waiting = len(scheduler.running), scheduler.num_waiting
        self._output.stats(Stats(config.engine, config.epoch, self._progress, running, waiting, gauges, counters))
