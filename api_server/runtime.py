"""The life of an API process: what its supervisor and its engines say, connected to what it serves."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

from api_server.app import create_app
from api_server.engines import Transport
from api_server.http_server import http_server
from api_server.served_model import ServedModel
from api_server.single_process import SingleProcess
from api_server.state import ServerState
from common.config import Config
from common.control import Control
from common.messages import Hello, Ready, ToApi
from common.transport import ApiInbox, EngineTransport

log = logging.getLogger(__name__)

GREETING_S = 0.05  # how often an engine that has not answered is greeted
LINGER_S = 0.5  # for the answers to what was cut off by --shutdown-timeout


class Runtime:
    """One API process. Owner of the HTTP server, the inbox and the state; all on one event loop."""

    def __init__(self, config: Config, control: Control, api_id: int, endpoint: str) -> None:
        """`endpoint` is where engines send to."""
        self._config = config
        self._control = control
        self._api_id = api_id
        self._endpoint = endpoint
        self._failure: str | None = None
        self._reported_ready = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._single: SingleProcess | None = None  # with --engine-procs 0
        self._inbox: ApiInbox | None = None  # without
        self.state = ServerState.create(config, api_id)
        self._server = http_server(create_app(self.state))

    def run(self, sockets: list[socket.socket]) -> int:
        """Serves on `sockets` until it is drained or has failed; the exit status."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._run(sockets))
        return 0 if self._failure is None else 1

    async def _run(self, sockets: list[socket.socket]) -> None:
        self._startup(asyncio.get_running_loop())
        try:
            await self._server.serve(sockets)
        finally:
            self._shutdown()

    def _startup(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._config.engine.engine_procs == 0:

            def fail(reason: str) -> None:
                loop.call_soon_threadsafe(self._fail, reason)

            self._single = SingleProcess(self._config, loop, self._on_event, self._on_message, fail)
        else:
            self._inbox = ApiInbox(self._endpoint, self._on_message)
            self._inbox.start()
        self._control.listen_on_loop(loop, self._on_event, self._stop)

    def _shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._leave_engines("this process ends")
        if self._single is not None:
            self._single.stop()
        if self._inbox is not None:
            self._inbox.close()
        if self.state.served is not None:
            self.state.served.tokenizer.close()

    # What comes from the supervisor.

    def _on_event(self, event: dict[str, Any]) -> None:
        handlers = {
            "phase": self._on_phase,
            "model": self._on_model,
            "engine": self._on_engine,
            "engine_down": self._on_engine_down,
            "drain": self._on_drain,
        }
        handler = handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def _on_phase(self, event: dict[str, Any]) -> None:
        self.state.phase, self.state.progress = event["phase"], float(event.get("progress", 0.0))

    def _on_model(self, event: dict[str, Any]) -> None:
        self._spawn(self._load(event["folder"]))
        if self._single is not None:
            self._single.start(event["folder"])

    async def _load(self, folder: str) -> None:
        try:
            self.state.served = await asyncio.to_thread(ServedModel.load, self._config.model, folder)
        except (OSError, ValueError) as e:
            self._fail(str(e))
            return
        except Exception as e:  # the tokenizers package raises nothing more specific
            self._fail(f"{folder}: the tokenizer cannot be read: {e}")
            return
        gc.collect()
        gc.freeze()  # the vocabulary lives as long as we do; no collection need walk it
        self._note_readiness()

    def _on_engine(self, event: dict[str, Any]) -> None:
        number, epoch = event["engine"], event["epoch"]
        transport: Transport = self._single if self._single is not None else EngineTransport(event["endpoint"])
        self.state.engines.connect(number, epoch, transport)
        self._spawn(self._greet(number, epoch, transport))

    async def _greet(self, number: int, epoch: int, transport: Transport) -> None:
        """Says HELLO until the engine is there to hear it."""
        hello = Hello(self._api_id, self._endpoint)
        while self._is_current(number, epoch) and not transport.send(hello):
            await asyncio.sleep(GREETING_S)

    def _is_current(self, number: int, epoch: int) -> bool:
        engine = self.state.engines.engines.get(number)
        return engine is not None and engine.epoch == epoch

    def _on_engine_down(self, event: dict[str, Any]) -> None:
        self.state.engines.disconnect(event["engine"], event["epoch"], event["reason"])

    def _on_drain(self, event: dict[str, Any]) -> None:
        if not self.state.draining:
            self.state.draining = True
            self._spawn(self._drain())

    async def _drain(self) -> None:
        """Until nothing is open. At --shutdown-timeout what still is gets an error, and a moment to be told."""
        await self._wait_until_idle(self._config.server.shutdown_timeout)
        if self.state.open_requests:
            log.warning("%d requests were still open at --shutdown-timeout", self.state.open_requests)
            self._leave_engines("--shutdown-timeout is over")
            await self._wait_until_idle(LINGER_S)
            self._server.force_exit = True
        self._server.should_exit = True

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.state.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # What comes from engines.

    def _on_message(self, message: ToApi) -> None:
        self.state.engines.on_message(message)
        if isinstance(message, Ready):
            self._note_readiness()

    def _note_readiness(self) -> None:
        if not self._reported_ready and self.state.is_ready:
            self._reported_ready = True
            self.state.phase, self.state.progress = "ready", 1.0
            self._control.report({"event": "ready"})

    # How it ends.

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._control.report({"event": "fatal", "reason": reason})
        self._stop()

    def _stop(self) -> None:
        """At once: the supervisor is gone, or nothing can be served."""
        self._server.force_exit = True
        self._server.should_exit = True

    def _leave_engines(self, reason: str) -> None:
        for engine in list(self.state.engines.engines.values()):
            self.state.engines.disconnect(engine.number, engine.epoch, reason, "The server is shutting down.")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
