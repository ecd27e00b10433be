"""A scripted engine at the other end of the real transport, for tests that run the API process as a process."""

from __future__ import annotations

import queue
import threading
from types import TracebackType

from common.messages import Abort, Extra, Finish, Hello, Ready, Stats, Step, Submit, ToEngine, pack_ints
from common.transport import EngineIntake, EngineOutbox, engine_endpoint
from tests.api_server.fake_engine import MODEL

HEARTBEAT_S = 0.2


class WireEngine:
    """Answers every request with `pieces`, a token each; `hold` keeps it from going on after the first."""

    def __init__(
        self, run_dir: str, number: int = 0, epoch: int = 1, pieces: tuple[str, ...] = ("a", "b", "c")
    ) -> None:
        self.endpoint = engine_endpoint(run_dir, number, epoch)
        self.hold = threading.Event()
        self.hold.set()
        self.aborted: list[int] = []
        self._number, self._epoch, self._pieces = number, epoch, pieces
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._intake = EngineIntake(self.endpoint, self._inbox.put)
        self._outbox = EngineOutbox()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> WireEngine:
        self._intake.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping = True
        self.hold.set()
        self._thread.join()
        self._intake.stop()

    def _run(self) -> None:
        api_ids: set[int] = set()
        while not self._stopping:
            self._outbox.flush()
            try:
                message = self._inbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                for api_id in api_ids:
                    self._outbox.send(api_id, Stats(self._number, self._epoch, 1, 0, 0))
                continue
            if isinstance(message, Hello):
                api_ids.add(message.api_id)
                self._outbox.connect(message.api_id, message.endpoint)
                self._outbox.send(message.api_id, Ready(self._number, self._epoch, MODEL))
            elif isinstance(message, Submit):
                self._answer(message)
            elif isinstance(message, Abort):
                self.aborted.append(message.handle)
        self._outbox.close()

    def _answer(self, submit: Submit) -> None:
        last = len(self._pieces) - 1
        for i, piece in enumerate(self._pieces):
            finish = Finish.LENGTH if i == last else Finish.NONE
            extras = {0: Extra(usage=(len(submit.prompt) // 4, i + 1, 0))} if finish else {}
            handle, one, token = pack_ints("I", [submit.handle]), pack_ints("H", [1]), pack_ints("i", [7])
            step = Step(self._number, self._epoch, 0, handle, one, bytes([finish]), token, [piece], extras)
            self._outbox.send(submit.api_id, step)
            while not self.hold.wait(HEARTBEAT_S):
                self._outbox.send(submit.api_id, Stats(self._number, self._epoch, 1, 1, 0))
