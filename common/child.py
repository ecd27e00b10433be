"""A child process as the supervisor sees it, with the two pipes between them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.control import CONTROL_FD, STATUS_FD
from common.models import cache_root

Event = dict[str, Any]

# Threads of OpenMP that spin while they wait collapse when another process wants their core: with two of them and one
# busy neighbour a prefill of 0.4 s took 5.7 s (two cores, SmolLM2). Set before torch is loaded, or not at all.
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def compiled_code() -> dict[str, str]:
    """Where numba keeps what it compiled: beside the converted models, as the package's own folder may be read-only.
    Where that cannot be written either, a folder of this process's own."""
    folder = cache_root() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        folder = Path(_own_folder())
    return {"NUMBA_CACHE_DIR": str(folder)}


@functools.cache
def _own_folder() -> str:
    """Made once, removed at exit."""
    folder = tempfile.TemporaryDirectory(prefix="stepahead-compiled-")
    atexit.register(folder.cleanup)
    return folder.name


class Child:
    """Started at once, in a session of its own. Owner: the supervisor."""

    def __init__(self, name: str, module: str, environment: Mapping[str, str], fds: Sequence[int] = ()) -> None:
        """Runs `python -P -m module`: -P, so that nothing in the working directory can take a module's place."""
        self.name = name
        control_read, self._control = os.pipe()
        self.status_fd, status_write = os.pipe()
        os.set_blocking(self._control, False)
        os.set_blocking(self.status_fd, False)
        pipes = {CONTROL_FD: str(control_read), STATUS_FD: str(status_write)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                env={**QUIET_THREADS, **compiled_code(), **os.environ, **environment, **pipes},
                pass_fds=[*fds, control_read, status_write],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(control_read)
            os.close(status_write)
        self._buffer = b""
        self.last_reason: str | None = None  # its own last error

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, event: Event) -> None:
        """A child that is gone, or reads nothing any more, misses it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._control, json.dumps(event).encode() + b"\n")

    def read(self) -> list[Event]:
        """What it has reported since the last call."""
        while True:
            try:
                data = os.read(self.status_fd, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        events: list[Event] = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "fatal":
                self.last_reason = event["reason"]
        return events

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """At once, and waits for it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes; a child that still runs takes it as its parent's end."""
        os.close(self._control)
        os.close(self.status_fd)

    def describe_end(self) -> str:
        """Why it ended, in words."""
        status = self.poll()
        if self.last_reason:
            return self.last_reason
        if status is not None and status < 0:
            return f"killed by signal {-status}"
        return f"exit status {status}"
