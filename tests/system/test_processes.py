"""The processes: who holds what, who notices whose death, and what is left behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from tests.system.server import Server, serving, wait_until


def mapped(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


def test_the_api_process_never_maps_torch(tiny_server: Server) -> None:
    tiny_server.complete("hello", max_tokens=4)
    assert "libtorch" not in mapped(tiny_server.child("api_server"))
    assert "libtorch" not in mapped(psutil.Process(tiny_server.process.pid))
    assert "libtorch" in mapped(tiny_server.child("engine"))


def test_single_process_mode_has_no_engine_process(single_server: Server) -> None:
    assert [child.cmdline()[-1] for child in single_server.children()] == ["api_server"]
    assert "libtorch" in mapped(single_server.child("api_server"))


def test_split_and_single_give_the_same_text(tiny_server: Server, single_server: Server) -> None:
    for body in ({"temperature": 0}, {"seed": 5, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}):
        answers = [
            server.complete("The quick brown fox", max_tokens=40, model="tiny", **body)["choices"][0]["text"]
            for server in (tiny_server, single_server)
        ]
        assert answers[0] == answers[1]


def test_the_port_opens_at_once_and_says_how_far_loading_is(tiny_folder: Path) -> None:
    server = Server(tiny_folder)
    try:
        wait_until(lambda: server.status("/health/live") == 200, what="the port")
        health = server.client.get("/health")
        if health.status_code == 503:  # it is not loaded yet, as a rule
            assert {"phase", "progress"} <= health.json().keys()
            assert server.client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        server.wait_until_ready()
    finally:
        server.close()


def test_an_engine_that_is_killed_is_restarted_and_its_requests_end_with_an_error(tiny_folder: Path) -> None:
    with serving(tiny_folder) as server:
        answers: list[int] = []

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}
            answers.append(server.client.post("/v1/completions", json=body).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1, what="the request to run")
        server.child("engine").kill()
        asking.join(20)
        assert answers == [500] or answers == [503]
        wait_until(lambda: server.status("/health/ready") == 503, what="health to fall")
        assert server.status("/health/live") == 200
        server.wait_until_ready()
        server.complete("again", max_tokens=3)


def test_a_stopped_engine_is_not_ready_and_comes_back(tiny_folder: Path) -> None:
    with serving(tiny_folder) as server:
        engine = server.child("engine")
        engine.suspend()
        wait_until(lambda: server.status("/health/ready") == 503, what="health to fall")
        assert server.status("/health/live") == 200
        engine.resume()
        wait_until(lambda: server.status("/health/ready") == 200, what="health to return")
        server.complete("again", max_tokens=3)


def test_an_api_process_that_is_killed_frees_its_rows_and_the_model_is_not_loaded_again(tiny_folder: Path) -> None:
    with serving(tiny_folder) as server:
        engine = server.child("engine").pid
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        ) as response:
            next(response.iter_lines())
            server.child("api_server").kill()
        server.wait_until_ready()
        assert server.child("engine").pid == engine
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, what="the rows")
        server.complete("again", max_tokens=3)


@pytest.mark.parametrize("victim", ["supervisor", "api_server", "engine"])
def test_a_kill_leaves_no_orphan(victim: str, tiny_folder: Path) -> None:
    server = Server(tiny_folder)
    try:
        server.wait_until_ready()
        children = server.children()
        if victim == "supervisor":
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
        else:
            server.child(victim).kill()
            server.wait_until_ready()
            children += server.children()
            server.terminate()
            assert server.process.wait(20) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    finally:
        server.close()


def test_sigterm_leaves_no_file_behind(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:  # short: a socket's path has a bound
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        with serving(tiny_folder) as server:
            (run_dir,) = Path(name).iterdir()
            assert run_dir.stat().st_mode & 0o777 == 0o700
            server.terminate()
            assert server.process.wait(20) == 0
        assert not list(Path(name).iterdir())


def test_a_runtime_folder_too_deep_for_sockets_is_not_used(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with serving(tiny_folder):
        assert not list(deep.iterdir())


def test_a_second_sigterm_ends_at_once(tiny_folder: Path) -> None:
    with (
        serving(tiny_folder) as server,
        server.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        ) as response,
    ):
        next(response.iter_lines())
        server.terminate()
        wait_until(lambda: "draining" in server.log, what="the drain")
        server.terminate()
        assert server.process.wait(5) == 0


def test_an_engine_that_dies_during_a_drain_ends_its_requests(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--shutdown-timeout", "100") as server:
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            engine = server.child("engine")
            server.terminate()
            wait_until(lambda: "draining" in server.log, what="the drain")
            engine.kill()
            assert any('"error"' in line for line in lines)
        assert server.process.wait(20) == 0


def test_sigterm_while_the_model_loads_ends_within_seconds(tiny_folder: Path) -> None:
    server = Server(tiny_folder)
    try:
        wait_until(lambda: server.status("/health/live") == 200, what="the port")
        server.terminate()
        assert server.process.wait(10) == 0
    finally:
        server.close()
