"""Starts the real server for a test, on a free port, and ends what it started."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

COMMAND = [sys.executable, "-P", "-c", "import sys; from common.cli import main; sys.exit(main())", "serve"]
START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, *, what: str = "the condition") -> Any:
    """Polls; returns the first truthy value. Raises AssertionError when it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


class Server:
    """One `stepahead serve` and its children."""

    def __init__(self, model: str | Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", prefix="stepahead-test-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*COMMAND, str(model), "--port", str(self.port), *options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            return self.status("/health/ready") == 200

        wait_until(ready, START_SECONDS, what=f"readiness; log:\n{self.log}")

    def status(self, path: str) -> int:
        """Status code of a GET; 0 where nobody listens."""
        try:
            return self.client.get(path, timeout=10).status_code
        except httpx.HTTPError:
            return 0

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={"prompt": prompt, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        assert values, f"no metric {name}"
        return sum(values)

    def child(self, module: str) -> psutil.Process:
        """The child process that runs `python -m module`."""
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[-1] == module:
                return child
        raise AssertionError(f"no child runs {module}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Ends it, if a test has not."""
        self.client.close()
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def serving(model: str | Path, *options: str) -> Iterator[Server]:
    """A server that is ready."""
    server = Server(model, *options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()
