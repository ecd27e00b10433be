"""Where the output processor runs: on a thread of its own, so that it overlaps planning, or inside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from common.messages import Finish, Stats
from engine.loop import Event, OutputFailed, Run
from engine.output.processor import OutputProcessor
from engine.plan import StepResult
from engine.request import Request
from engine.scheduler import Committed

RETRY_SECONDS = 0.005


class OutputThread:
    """The loop's `Output`, at the other end of a queue.

    `idle` runs on this thread whenever the queue is empty, and says whether it wants to run again soon: the transport
    uses it to send what a busy peer could not take.
    """

    def __init__(
        self, processor: OutputProcessor, idle: Callable[[], bool], failed: Callable[[OutputFailed], None]
    ) -> None:
        self._processor = processor
        self._idle = idle
        self._failed = failed
        self._queue: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, last: Callable[[], None]) -> None:
        """Ends the thread after what is queued, with one last call. Waits for it."""
        self._queue.put((last, ()))
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def step(self, result: StepResult, committed: list[Committed], scored: list[tuple[Request, Any]]) -> None:
        self._queue.put((self._processor.step, (result, committed, scored)))

    def end(self, request: Request, finish: Finish, error: str | None = None) -> None:
        self._queue.put((self._processor.end, (request, finish, error)))

    def stats(self, stats: Stats) -> None:
        self._queue.put((self._processor.stats, (stats,)))

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Runs `work` on this thread, in its turn."""
        self._queue.put((work, args))

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:  # the loop must hear of it: without this thread no request is ever answered
            self._failed(OutputFailed(e))

    def _serve(self) -> None:
        retry = False
        while True:
            try:
                item = self._queue.get(timeout=RETRY_SECONDS if retry else None)
            except Empty:
                retry = self._idle()
                continue
            if item is None:
                return
            work, args = item
            work(*args)
            if self._queue.empty():
                retry = self._idle()


class InlineOutput:
    """`--async-output off`: the loop's thread turns tokens into text and owns the outbox, for comparison."""

    def __init__(self, processor: OutputProcessor, idle: Callable[[], bool], put: Callable[[Event], None]) -> None:
        self._processor = processor
        self._idle = idle
        self._put = put

    def start(self) -> None:
        """There is no thread."""

    def stop(self, last: Callable[[], None]) -> None:
        """Call on the loop's thread, after its end."""
        self._idle()
        last()

    def step(self, result: StepResult, committed: list[Committed], scored: list[tuple[Request, Any]]) -> None:
        self._processor.step(result, committed, scored)
        self._idle()

    def end(self, request: Request, finish: Finish, error: str | None = None) -> None:
        self._processor.end(request, finish, error)

    def stats(self, stats: Stats) -> None:
        self._processor.stats(stats)
        self._idle()

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Runs `work` on the loop's thread, in its turn."""
        self._put(Run(work, args))
