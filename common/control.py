"""The pipes between the supervisor and each of its children: JSON lines down (control) and up (status).

Their closing is news too: a child whose control pipe ends has lost its parent, and ends itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]

CONTROL_FD = "STEPAHEAD_CONTROL_FD"
STATUS_FD = "STEPAHEAD_STATUS_FD"
LISTEN_FDS = "STEPAHEAD_LISTEN_FDS"
CONFIG = "STEPAHEAD_CONFIG"
RUN_DIR = "STEPAHEAD_RUN_DIR"
INDEX = "STEPAHEAD_INDEX"
EPOCH = "STEPAHEAD_EPOCH"

_PR_SET_PDEATHSIG = 1


class Control:
    """A child's ends of both pipes."""

    def __init__(self, control_fd: int | None, status_fd: int | None) -> None:
        self._control_fd = control_fd
        self._status_fd = status_fd
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> Control:
        """The pipes this process was started with; a process started by hand has none, and both do nothing."""

        def number(name: str) -> int | None:
            return int(os.environ[name]) if name in os.environ else None

        return cls(number(CONTROL_FD), number(STATUS_FD))

    def report(self, event: Event) -> None:
        """Tells the supervisor. From any thread; a supervisor that is gone is none of the caller's business."""
        if self._status_fd is None:
            return
        line = json.dumps(event).encode() + b"\n"
        with self._lock:
            try:
                os.write(self._status_fd, line)
            except OSError:
                self._status_fd = None

    def listen(self, on_event: Callable[[Event], None], on_parent_death: Callable[[], None]) -> None:
        """Calls back on a thread of its own, for processes without an event loop."""
        if self._control_fd is None:
            return
        threading.Thread(target=self._read, args=(on_event, on_parent_death), name="control", daemon=True).start()

    def listen_on_loop(
        self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None], on_parent_death: Callable[[], None]
    ) -> None:
        """Calls back on the event loop."""
        self.listen(
            lambda event: _soon(loop, on_event, event),
            lambda: _soon(loop, on_parent_death),
        )

    def _read(self, on_event: Callable[[Event], None], on_parent_death: Callable[[], None]) -> None:
        if self._control_fd is None:
            return
        with os.fdopen(self._control_fd, "rb") as pipe:
            for line in pipe:
                on_event(json.loads(line))
        on_parent_death()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop has ended, and so will this process
        logging.getLogger(__name__).debug("an event came after the loop's end")


def be_a_child() -> None:
    """A child's attitude to signals: SIGINT and SIGTERM are the supervisor's business, which a terminal or a service
    manager may send to every process of the group; the kernel kills a child whose parent has died (Linux), even one
    that is stopped and would never see its pipe close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
