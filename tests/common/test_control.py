"""The pipes between supervisor and child."""

from __future__ import annotations

import os
import signal
import sys
from queue import Queue
from typing import Any

import pytest

from common.child import Child
from common.control import Control
from tests.system.server import wait_until


def test_events_arrive_in_order_and_the_parents_end_is_noticed() -> None:
    read, write = os.pipe()
    events: Queue[Any] = Queue()
    Control(read, None).listen(events.put, lambda: events.put("gone"))
    os.write(write, b'{"event": "a"}\n{"event":')
    os.write(write, b' "b"}\n')
    os.close(write)
    assert [events.get(timeout=5) for _ in range(3)] == [{"event": "a"}, {"event": "b"}, "gone"]


def test_a_report_to_nobody_is_none_of_the_callers_business() -> None:
    Control(None, None).report({"event": "ready"})
    read, write = os.pipe()
    os.close(read)
    Control(None, write).report({"event": "ready"})
    os.close(write)


@pytest.fixture
def module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that children can run, on their path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "a_child.py").write_text(
        "import json, os, sys\n"
        "control = os.fdopen(int(os.environ['STEPAHEAD_CONTROL_FD']))\n"
        "status = int(os.environ['STEPAHEAD_STATUS_FD'])\n"
        "for line in control:\n"
        "    event = json.loads(line)\n"
        "    os.write(status, line.encode())\n"
        "    if event['event'] == 'fatal':\n"
        "        sys.exit(3)\n"
    )
    return "a_child"


def test_a_child_answers_and_its_last_words_are_kept(module: str) -> None:
    child = Child("the child", module, {})
    child.tell({"event": "hello"})
    assert wait_until(child.read) == [{"event": "hello"}]
    child.tell({"event": "fatal", "reason": "out of paper"})
    assert child.wait(10)
    child.read()
    assert child.poll() == 3
    assert child.describe_end() == "out of paper"
    child.tell({"event": "anybody there?"})
    child.close()


def test_a_child_that_is_killed_is_described_by_its_signal(module: str) -> None:
    child = Child("the child", module, {})
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(10)
    assert child.describe_end() == "killed by signal 9"
    child.close()


def test_a_child_sees_its_parents_end_of_the_pipe_close(module: str) -> None:
    child = Child("the child", module, {})
    child.close()
    assert child.wait(10)


def test_nothing_in_the_working_directory_takes_a_modules_place(
    module: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a_child.py").write_text("import sys; sys.exit(77)")
    monkeypatch.chdir(elsewhere)
    child = Child("the child", module, {})
    child.tell({"event": "hello"})
    assert wait_until(child.read) == [{"event": "hello"}]
    child.kill()
    child.close()
    assert sys.executable
