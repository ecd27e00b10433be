"""The process that the user starts: starts the others, restarts what dies, passes a SIGTERM on as a drain.

Imports neither torch nor fastapi, so it is up at once and stays small.
"""

from __future__ import annotations

import heapq
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.child import Child
from common.config import Config
from common.control import CONFIG, EPOCH, INDEX, LISTEN_FDS, RUN_DIR
from common.log import set_up
from common.models import ModelError, Resolved, resolve
from common.transport import engine_endpoint

log = logging.getLogger("supervisor")

BACK_OFF = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before the n-th restart in a row
STEADY_SECONDS = 60.0  # a child that lived so long starts again without back-off
STOP_SECONDS = 5.0  # for an engine to end by itself once nothing is open
TICK_SECONDS = 0.2  # how often children are looked after when no pipe has news
RUN_DIR_PREFIX = "stepahead-"
LONGEST_RUN_BASE = 60  # bytes; a socket's whole path has at most 107


@dataclass(slots=True)
class Slot:
    """A place for one process: the child in it now, and how often it has been filled."""

    module: str
    index: int
    child: Child | None = None
    incarnation: int = 0  # unique per slot and rising: an engine's epoch, an API process's id
    failures: int = 0  # in a row
    started: float = 0.0


@dataclass(order=True, slots=True)
class _Timer:
    due: float
    order: int
    action: Callable[[], None] = field(compare=False)


class StartupError(Exception):
    """Nothing can be served; the text says why, in one line."""


class Supervisor:
    """Life: start, watch, drain, stop. Owner of the listening socket, the run directory and every child."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._apis = [Slot("api_server", index) for index in range(config.server.api_server_count)]
        self._engines = [Slot("engine", index) for index in range(config.engine.engine_procs)]
        self._preparing: Child | None = None
        self._selector = selectors.DefaultSelector()
        self._timers: list[_Timer] = []
        self._api_ids = 0
        self._timer_order = 0
        self._signals = 0
        self._draining = False
        self._began = time.monotonic()
        self._serving = False  # an engine has been ready once: from then on failures mean restarts
        self._last_phase: dict[str, Any] | None = None

    def run(self) -> int:
        """Until a signal ends it. Exit status 0 after a drain, 1 when start-up failed."""
        set_up(self._config.server.log_level, "supervisor")
        self._catch_signals()
        self._listener: socket.socket | None = None
        self._run_dir = ""
        try:
            resolved = resolve(self._config.model.model, self._config.model.revision, self._config.model.download_dir)
            self._start(resolved)
            while not self._signals:
                self._watch()
            self._drain()
            log.info("stopped")
            return 0
        except (StartupError, ModelError) as e:
            print(f"stepahead: error: {e}", file=sys.stderr, flush=True)
            return 1
        finally:
            self._stop()

    # Start

    def _start(self, resolved: Resolved) -> None:
        """The port first, so that health can be asked for from the beginning."""
        given = self._config  # names the model by its path, which preparing needs
        self._config = replace(given, model=replace(given.model, model=resolved.name))
        self._listener = _listen(self._config.server.host, self._config.server.port)
        self._run_dir = _make_run_dir()
        for slot in self._apis:
            self._start_api(slot)
        host, port = self._listener.getsockname()[:2]
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        if host not in ("127.0.0.1", "::1"):
            log.warning("--host %s: whoever reaches this address may use the model; there are no keys yet", host)
        if resolved.folder is not None:
            self._model_ready(str(resolved.folder))
        else:
            log.info("%s is prepared first, once: converted or downloaded", resolved.name)
            self._preparing = self._spawn("prepare", "engine.prepare", {CONFIG: given.to_json()})

    def _model_ready(self, folder: str) -> None:
        self._config = replace(self._config, model=replace(self._config.model, folder=folder))
        self._tell_apis({"event": "model", "folder": folder})
        for slot in self._engines:
            self._start_engine(slot)

    def _start_api(self, slot: Slot) -> None:
        self._api_ids += 1
        slot.incarnation, slot.started = self._api_ids, time.monotonic()
        if self._listener is None:
            raise RuntimeError("no listening socket")
        fd = self._listener.fileno()
        environment = {LISTEN_FDS: str(fd), INDEX: str(slot.index), EPOCH: str(slot.incarnation)}
        slot.child = self._spawn(f"API process {slot.index}", slot.module, environment, (fd,))
        if self._config.model.folder:  # a restart: it must catch up
            slot.child.tell({"event": "model", "folder": self._config.model.folder})
        elif self._last_phase:
            slot.child.tell(self._last_phase)
        for engine in self._engines:
            if engine.child is not None:
                slot.child.tell(self._engine_event(engine))

    def _start_engine(self, slot: Slot) -> None:
        slot.incarnation += 1
        slot.started = time.monotonic()
        environment = {INDEX: str(slot.index), EPOCH: str(slot.incarnation)}
        slot.child = self._spawn(f"engine {slot.index}", slot.module, environment)
        self._tell_apis(self._engine_event(slot))

    def _engine_event(self, slot: Slot) -> dict[str, Any]:
        endpoint = engine_endpoint(self._run_dir, slot.index, slot.incarnation)
        return {"event": "engine", "engine": slot.index, "epoch": slot.incarnation, "endpoint": endpoint}

    def _spawn(self, name: str, module: str, environment: dict[str, str], fds: tuple[int, ...] = ()) -> Child:
        common = {CONFIG: self._config.to_json(), RUN_DIR: self._run_dir}
        child = Child(name, module, common | environment, fds)
        self._selector.register(child.status_fd, selectors.EVENT_READ)
        log.debug("started %s, pid %d", name, child.pid)
        return child

    # Watch

    def _watch(self) -> None:
        """One round: news from pipes, children that have ended, timers that are due."""
        self._selector.select(self._patience())
        if self._preparing is not None and not self._draining:
            self._look_after_preparing(self._preparing)
        for slot in self._engines:
            self._look_after(slot, self._engine_ended)
        for slot in self._apis:
            self._look_after(slot, self._api_ended)
        while self._timers and self._timers[0].due <= time.monotonic():
            heapq.heappop(self._timers).action()

    def _patience(self) -> float:
        if not self._timers:
            return TICK_SECONDS
        return max(0.0, min(TICK_SECONDS, self._timers[0].due - time.monotonic()))

    def _look_after_preparing(self, child: Child) -> None:
        status = child.poll()
        for event in child.read():
            if event["event"] == "prepared":
                self._preparing = None
                self._forget(child)
                self._model_ready(event["folder"])
                return
            self._relay_phase(event)
        if status is not None:
            raise StartupError(child.describe_end())

    def _look_after(self, slot: Slot, ended: Callable[[Slot, str], None]) -> None:
        child = slot.child
        if child is None:
            return
        status = child.poll()  # before reading: what it wrote last is read after its end
        for event in child.read():
            if event["event"] == "ready":
                self._slot_ready(slot)
            else:
                self._relay_phase(event)
        if status is None:
            return
        reason = child.describe_end()
        slot.child = None
        self._forget(child)
        if time.monotonic() - slot.started > STEADY_SECONDS:
            slot.failures = 0
        ended(slot, reason)

    def _slot_ready(self, slot: Slot) -> None:
        """An engine is ready when it can be greeted; the server is when an API process has an engine."""
        if slot.module == "api_server" and not self._serving:
            self._serving = True
            log.info("ready after %.1f s: %s", time.monotonic() - self._began, self._config.model.names[0])
        elif slot.module == "engine" and self._serving:
            log.info("engine %d is ready again", slot.index)

    def _relay_phase(self, event: dict[str, Any]) -> None:
        if event["event"] == "phase":
            self._last_phase = event
            self._tell_apis(event)

    def _engine_ended(self, slot: Slot, reason: str) -> None:
        event = {"event": "engine_down", "engine": slot.index, "epoch": slot.incarnation, "reason": reason}
        self._tell_apis(event)
        self._restart(slot, reason, self._start_engine)

    def _api_ended(self, slot: Slot, reason: str) -> None:
        for engine in self._engines:
            if engine.child is not None:
                engine.child.tell({"event": "drop_api", "api_id": slot.incarnation})
        self._restart(slot, reason, self._start_api)

    def _restart(self, slot: Slot, reason: str, start: Callable[[Slot], None]) -> None:
        """Starts what has died again, later each time. Before anything has ever served there is nothing to restart."""
        if self._draining:
            return
        if not self._serving:
            raise StartupError(reason)
        wait = BACK_OFF[min(slot.failures, len(BACK_OFF) - 1)]
        slot.failures += 1
        log.error("%s %d ended: %s; starting it again in %.0f s", slot.module, slot.index, reason, wait)
        self._timer_order += 1
        heapq.heappush(self._timers, _Timer(time.monotonic() + wait, self._timer_order, lambda: start(slot)))

    def _tell_apis(self, event: dict[str, Any]) -> None:
        for slot in self._apis:
            if slot.child is not None:
                slot.child.tell(event)

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.status_fd)
        child.close()

    # Drain and stop

    def _drain(self) -> None:
        """API processes finish what is open; nobody listens for more. A second signal ends this at once."""
        log.info("draining, for at most %.0f s", self._config.server.shutdown_timeout)
        self._signals = 0
        self._draining = True
        self._timers.clear()
        self._close_listener()
        self._tell_apis({"event": "drain"})
        self._watch_until_gone(self._apis, self._config.server.shutdown_timeout + STOP_SECONDS)
        for slot in self._engines:
            if slot.child is not None:
                slot.child.tell({"event": "stop"})
        self._watch_until_gone(self._engines, STOP_SECONDS)

    def _watch_until_gone(self, slots: list[Slot], seconds: float) -> None:
        """Looks after everybody meanwhile: an engine that dies now must be reported, or its requests would hang."""
        deadline = time.monotonic() + seconds
        while any(slot.child for slot in slots) and not self._signals and time.monotonic() < deadline:
            self._watch()

    def _stop(self) -> None:
        """Leaves nothing behind: no child, socket or file."""
        self._close_listener()
        children = [slot.child for slot in (*self._apis, *self._engines) if slot.child is not None]
        for child in [*children, *([self._preparing] if self._preparing else [])]:
            child.kill()
            self._forget(child)
        self._selector.close()
        if self._run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _close_listener(self) -> None:
        """While this process held the socket open, clients would hang instead of being refused."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _catch_signals(self) -> None:
        def caught(number: int, frame: object) -> None:
            self._signals += 1

        # The wake-up pipe ends a select that would otherwise sleep on: signal handlers alone make it resume.
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(read, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, caught)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that children inherit. Raises StartupError naming the option."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], info[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.listen(2048)
    except OSError as e:
        raise StartupError(f"cannot listen on --host {host} --port {port}: {e.strerror or e}") from None
    listener.setblocking(False)
    listener.set_inheritable(True)
    return listener


def _make_run_dir() -> str:
    """A private directory for this run's sockets (mode 0700); those of runs that were killed are removed."""
    base = _run_base()
    for stale in base.glob(f"{RUN_DIR_PREFIX}*-*"):
        pid = stale.name.removeprefix(RUN_DIR_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and stale.owner() == _user():
            shutil.rmtree(stale, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{RUN_DIR_PREFIX}{os.getpid()}-", dir=base)


def _run_base() -> Path:
    """Where sockets may lie: the system bounds the length of their paths. Raises StartupError."""
    candidates = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    for name in filter(None, candidates):
        if len(os.fsencode(name)) <= LONGEST_RUN_BASE and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise StartupError(
        "no folder for sockets: XDG_RUNTIME_DIR or TMPDIR must name one that can be written to, in at most"
        f" {LONGEST_RUN_BASE} bytes"
    )


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
