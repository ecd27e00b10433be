"""Starts a server to be measured, and ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 180.0
STOP_SECONDS = 30.0


class ServerError(Exception):
    """The server did not start; the message holds the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: str | Path, options: Sequence[str] = ()) -> Iterator[str]:
    """`stepahead serve` on a free port, from readiness on; yields its URL. Raises ServerError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("stepahead")), "serve", str(model), "--port", str(port), *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if not _ready(process, url):
                log.seek(0)
                raise ServerError(f"{' '.join(command)} was not ready:\n{log.read()[-2000:]}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False
