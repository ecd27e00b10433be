"""The device thread: order, cuts, and failures that are heard of."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np

from engine.devices.device import DeviceThread, execute
from engine.plan import Chunk, DeviceFailed, Plan, PlanDone, StepResult


class Scripted:
    """Answers every step; cuts its own plan after `cut_after` steps, dies after `alive_for`, fails at `fails_at`."""

    def __init__(self, cut_after: int = 99, alive_for: int = 99, fails_at: int = 99) -> None:
        self.cut_after, self.alive_for, self.fails_at = cut_after, alive_for, fails_at
        self.begun: list[int] = []

    def begin(self, plan: Plan) -> None:
        self.begun.append(plan.seq)

    def step(self, plan: Plan, index: int) -> StepResult | None:
        if index == self.fails_at:
            raise MemoryError("the card is full")
        if index >= self.alive_for:
            return None
        if index + 1 >= self.cut_after:
            plan.cut = True
        return StepResult(plan.seq, index, [], [], [], 0, 0)


def plan(seq: int = 1, steps: int = 4, *, chunk: bool = False, cut: bool = False) -> Plan:
    rows = np.zeros(0, np.int32)
    return Plan(seq, steps, rows, rows, (Chunk(0, rows, 1),) if chunk else (), cut=cut)


def run(device: Scripted, what: Plan) -> list[Any]:
    posted: list[Any] = []
    execute(device, what, posted.append)
    return posted


def test_results_are_posted_step_by_step_then_the_end() -> None:
    posted = run(Scripted(), plan(steps=3))
    assert [r.step for r in posted[:-1]] == [0, 1, 2]
    assert posted[-1] == PlanDone(1, 3)


def test_a_cut_is_seen_between_steps() -> None:
    assert run(Scripted(cut_after=2), plan())[-1] == PlanDone(1, 2)


def test_a_plan_cut_before_it_began_runs_nothing_but_is_begun() -> None:
    device = Scripted()
    assert run(device, plan(cut=True)) == [PlanDone(1, 0)]
    assert device.begun == [1], "its block-table updates count for the plans behind it"


def test_a_step_with_chunks_is_never_left_out() -> None:
    assert run(Scripted(), plan(chunk=True, cut=True))[-1] == PlanDone(1, 1)


def test_a_plan_ends_when_no_row_is_alive() -> None:
    assert run(Scripted(alive_for=1), plan())[-1] == PlanDone(1, 1)


def test_the_thread_runs_plans_in_order_and_reports_a_failure() -> None:
    posted: SimpleQueue[Any] = SimpleQueue()
    thread = DeviceThread(Scripted(fails_at=1), posted.put)
    thread.put(plan(seq=1, steps=1))
    thread.put(plan(seq=2, steps=2))
    thread.start()
    got = [posted.get(timeout=5) for _ in range(4)]
    assert got[1] == PlanDone(1, 1)
    assert isinstance(got[3], DeviceFailed)
    assert isinstance(got[3].error, MemoryError)
    thread.stop()
