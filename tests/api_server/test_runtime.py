"""The API process as a process: started, told, and ended as its supervisor does it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.child import Child
from common.config import Config, ModelConfig, ServerConfig
from common.control import CONFIG, EPOCH, INDEX, LISTEN_FDS, RUN_DIR
from tests.api_server.reading import CHAT, events, joined_text, say
from tests.api_server.wire_engine import WireEngine

PATIENCE_S = 30.0


def until(condition: Callable[[], Any]) -> Any:
    """Polls for what another process will do; returns the first truthy value."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {PATIENCE_S:.0f} s")


class ApiProcess:
    """One API process, and this test as its supervisor."""

    def __init__(self, run_dir: Path, **server: float) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.set_inheritable(True)
        self.run_dir = str(run_dir)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE_S)
        config = Config(model=ModelConfig(model="fake"), server=ServerConfig(**server))  # type: ignore[arg-type]
        environment = {
            CONFIG: config.to_json(),
            RUN_DIR: self.run_dir,
            LISTEN_FDS: str(listener.fileno()),
            INDEX: "0",
            EPOCH: "1",
        }
        self.child = Child("API process 0", "api_server", environment, (listener.fileno(),))
        listener.close()
        self._left = False
        self.reported: list[dict[str, Any]] = []

    def status(self, path: str) -> int:
        try:
            return self.client.get(path).status_code
        except httpx.HTTPError:
            return 0

    def connect(self, engine: WireEngine, epoch: int = 1) -> None:
        self.child.tell({"event": "engine", "engine": 0, "epoch": epoch, "endpoint": engine.endpoint})

    def has_reported(self, event: str) -> bool:
        self.reported += self.child.read()
        return any(found["event"] == event for found in self.reported)

    def leave(self) -> None:
        """Closes the pipes, as a supervisor does that dies."""
        if not self._left:
            self._left = True
            self.child.close()

    def end(self) -> int:
        """The exit status, once it has ended by itself."""
        until(lambda: self.child.poll() is not None)
        status = self.child.poll()
        assert status is not None
        return status


@contextmanager
def running(run_dir: Path, **server: float) -> Iterator[ApiProcess]:
    api = ApiProcess(run_dir, **server)
    try:
        until(lambda: api.status("/health/live") == 200)
        yield api
    finally:
        if api.child.poll() is None:
            api.child.kill()
        api.leave()
        api.client.close()


@pytest.fixture
def api(tmp_path: Path, model_folder: Path) -> Iterator[ApiProcess]:
    with running(tmp_path) as api:
        yield api


def serve(api: ApiProcess, model_folder: Path, engine: WireEngine) -> None:
    """Until it is ready."""
    api.child.tell({"event": "model", "folder": str(model_folder)})
    api.connect(engine)
    until(lambda: api.status("/health/ready") == 200)


def test_it_loads_serves_loses_and_finds_its_engine_and_never_maps_torch(api: ApiProcess, model_folder: Path) -> None:
    api.child.tell({"event": "phase", "phase": "converting", "progress": 0.4})
    until(lambda: api.client.get("/health").json().get("phase") == "converting")
    with WireEngine(api.run_dir) as engine:
        serve(api, model_folder, engine)
        assert api.has_reported("ready")
        answer = api.client.post(CHAT, json=say(stream=True))
        assert joined_text(events(answer)) == "abc"
    api.child.tell({"event": "engine_down", "engine": 0, "epoch": 1, "reason": "test"})
    until(lambda: api.status("/health/ready") == 503)
    with WireEngine(api.run_dir, epoch=2) as engine:
        api.connect(engine, epoch=2)
        until(lambda: api.status("/health/ready") == 200)
        assert api.client.post(CHAT, json=say()).json()["choices"][0]["message"]["content"] == "abc"
    maps = Path(f"/proc/{api.child.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "torch" not in maps


def test_a_drain_finishes_what_is_open_refuses_what_is_new_and_ends_with_status_0(
    api: ApiProcess, model_folder: Path
) -> None:
    with WireEngine(api.run_dir) as engine:
        serve(api, model_folder, engine)
        engine.hold.clear()
        with api.client.stream("POST", CHAT, json=say(stream=True)) as answer:
            assert answer.status_code == 200  # the first token is there
            api.child.tell({"event": "drain"})
            until(lambda: api.status("/health/ready") == 503)
            assert api.client.post(CHAT, json=say()).headers["connection"] == "close"
            engine.hold.set()
            assert joined_text(events(answer.read().decode())) == "abc"
        assert api.end() == 0


def test_what_is_open_at_the_shutdown_timeout_is_told_so(tmp_path: Path, model_folder: Path) -> None:
    with running(tmp_path, shutdown_timeout=0.2) as api, WireEngine(api.run_dir) as engine:
        serve(api, model_folder, engine)
        engine.hold.clear()
        with api.client.stream("POST", CHAT, json=say(stream=True)) as answer:
            api.child.tell({"event": "drain"})
            assert '"error"' in answer.read().decode()
        assert api.end() == 0


def test_a_model_that_cannot_be_read_ends_it_with_the_reason(api: ApiProcess, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{")
    api.child.tell({"event": "model", "folder": str(model_folder)})
    assert api.end() == 1
    assert api.has_reported("fatal")
    assert str(model_folder) in api.reported[-1]["reason"]


def test_it_ends_when_its_supervisor_is_gone(api: ApiProcess) -> None:
    api.leave()
    api.end()
