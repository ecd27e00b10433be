"""The engines as the API process sees them: which are ready, what each is working on, and what they send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from api_server.admission import Admission
from api_server.errors import UnavailableError
from api_server.mailbox import Mailbox, Sequence
from common.messages import (
    Abort,
    Extra,
    Fatal,
    Finish,
    Ready,
    Stats,
    Step,
    Submit,
    ToApi,
    ToEngine,
    unpack_ints,
)

log = logging.getLogger(__name__)

HEARTBEAT_AGE_S = 3.0  # an engine that has been silent for longer is not ready
MAX_HANDLE = 2**32 - 1


class Transport(Protocol):
    """The way to one engine incarnation; used on the event-loop thread alone."""

    def send(self, message: ToEngine) -> bool:
        """Never blocks. False: that engine cannot be reached now."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Engine:
    """One incarnation of one engine."""

    number: int
    epoch: int
    transport: Transport
    ready: Ready | None = None
    stats: Stats | None = None
    heard: float = 0.0  # when its last message came, on the clock of `EngineClient`
    open: dict[int, Sequence] = field(default_factory=dict)  # by handle
    unsent: list[Abort] = field(default_factory=list)  # aborts that found no way yet


@dataclass(slots=True)
class Totals:
    """What this API process has counted since it began."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: {finish: 0 for finish in Finish if finish})


class EngineClient:
    """Hands requests to engines and their results to mailboxes. Owned by the event loop.

    Each submitted sequence gets exactly one end: the engine's, or an ERROR when its engine goes away. After `abort`
    nothing more arrives for it. Messages of an earlier epoch and of unknown handles are dropped.
    """

    def __init__(self, api_id: int, admission: Admission, clock: Callable[[], float] = time.monotonic) -> None:
        self.admission = admission
        self.totals = Totals()
        self.engines: dict[int, Engine] = {}
        self._api_id = api_id
        self._clock = clock
        self._last_handle = 0

    # Engines come and go.

    def connect(self, number: int, epoch: int, transport: Transport) -> None:
        """A new incarnation of engine `number`; it is used from its READY on."""
        self.disconnect(number, epoch, "it was replaced")
        self.engines[number] = Engine(number, epoch, transport)

    def disconnect(
        self, number: int, epoch: int, reason: str, message: str = "The engine that worked on this request was lost."
    ) -> None:
        """That incarnation is no more. Everything it was working on ends with an error, which says `message`."""
        engine = self.engines.get(number)
        if engine is None or engine.epoch > epoch:
            return
        del self.engines[number]
        engine.transport.close()
        level = logging.WARNING if engine.open else logging.INFO
        log.log(level, "engine %d (epoch %d) is left with %d open: %s", number, engine.epoch, len(engine.open), reason)
        lost = Extra(error=message)
        for sequence in list(engine.open.values()):
            sequence.lost = True
            self._put(engine, sequence, b"", "", Finish.ERROR, lost)

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine can take a request now."""
        return any(self._can_serve(engine) for engine in self.engines.values())

    @property
    def model(self) -> Ready | None:
        """What an engine said about the model, once any has."""
        return next((engine.ready for engine in self.engines.values() if engine.ready), None)

    def _can_serve(self, engine: Engine) -> bool:
        return engine.ready is not None and self._clock() - engine.heard <= HEARTBEAT_AGE_S

    # Requests go out.

    def submit(self, sequence: Sequence) -> None:
        """Sends it to the engine with the least open work. Raises `UnavailableError` when none can be reached."""
        able = [engine for engine in self.engines.values() if self._can_serve(engine)]
        for engine in sorted(able, key=lambda engine: len(engine.open)):
            handle = self._next_handle()
            message = Submit(
                self._api_id,
                handle,
                sequence.prompt,
                sequence.params,
                sequence.priority,
                bytes(sequence.emitted),
                sequence.delivered,
                sequence.request_id,
                time.monotonic_ns(),
                sequence.cache_salt,
            )
            if engine.transport.send(message):
                sequence.handle, sequence.engine = handle, engine.number
                engine.open[handle] = sequence
                self.totals.prompt_tokens += len(sequence.prompt) // 4
                return
        raise UnavailableError("No engine can take this request now.", code="engine_unavailable")

    def abort(self, mailbox: Mailbox) -> None:
        """Ends what is still open there. Nothing more arrives."""
        for sequence in mailbox.sequences:
            engine = self.engines.get(sequence.engine)
            if engine is None or engine.open.get(sequence.handle) is not sequence:
                continue
            del engine.open[sequence.handle]
            self.totals.finished[Finish.ABORT] += 1
            message = Abort(self._api_id, sequence.handle)
            if not engine.transport.send(message):
                engine.unsent.append(message)

    def _next_handle(self) -> int:
        while True:
            self._last_handle = self._last_handle % MAX_HANDLE + 1
            if all(self._last_handle not in engine.open for engine in self.engines.values()):
                return self._last_handle

    # Results come in.

    def on_message(self, message: ToApi) -> None:
        """The one way in for whatever an engine sends."""
        engine = self.engines.get(message.engine)
        if engine is None or engine.epoch != message.epoch:
            return
        engine.heard = self._clock()
        if isinstance(message, Step):
            self._deliver(engine, message)
        elif isinstance(message, Stats):
            engine.stats = message
        elif isinstance(message, Ready):
            engine.ready = message
            log.info("engine %d (epoch %d) is ready", engine.number, engine.epoch)
        elif isinstance(message, Fatal):
            log.error("engine %d (epoch %d): %s", engine.number, engine.epoch, message.reason)
            engine.ready = None
        while engine.unsent and engine.transport.send(engine.unsent[-1]):
            engine.unsent.pop()

    def _deliver(self, engine: Engine, step: Step) -> None:
        handles = unpack_ints("I", step.handles)
        counts = unpack_ints("H", step.counts)
        extras = step.extras
        open_sequences = engine.open
        begin = 0
        for entry, handle in enumerate(handles):
            end = begin + 4 * counts[entry]
            sequence = open_sequences.get(handle)
            if sequence is not None:
                ids = step.token_ids[begin:end]
                self._put(engine, sequence, ids, step.texts[entry], step.finishes[entry], extras.get(entry))
            begin = end

    def _put(self, engine: Engine, sequence: Sequence, ids: bytes, text: str, finish: int, extra: Extra | None) -> None:
        self.totals.generation_tokens += len(ids) // 4
        if finish:
            del engine.open[sequence.handle]
            self.totals.finished[Finish(finish)] += 1
        sequence.put(ids, text, finish, extra)
