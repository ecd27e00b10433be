"""What the engine asks of a device, and the thread that feeds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from engine.plan import DeviceFailed, Plan, PlanDone, StepResult

Post = Callable[[StepResult | PlanDone | DeviceFailed], None]


class Device(Protocol):
    """Executes plans, in order, on one thread. Owns the model, the KV cache and every per-row tensor."""

    def begin(self, plan: Plan) -> None:
        """Takes in the plan's admissions and block-table updates. Called once per plan, cut or not."""

    def step(self, plan: Plan, index: int) -> StepResult | None:
        """Runs step `index`; None where no row of it is alive, and then the plan is over."""


class DeviceThread:
    """Runs plans one after the other and posts each step's result as soon as it is on the host.

    ```
    loop     plan 1   plan 2 (queued)        retire 1.0  retire 1.1 …     plan 3 (queued)
    device   ········ 1.0 ─ 1.1 ─ 1.2 ─ … ─ 1.7 ─ 2.0 ─ 2.1 ─ …          3.0
    output                  ids→text 1.0     ids→text 1.1 …
    ```
    Between steps it looks at `plan.cut`. A step with chunks is never left out: the plans behind it count on them.
    """

    def __init__(self, device: Device, post: Post) -> None:
        self._device = device
        self._post = post
        self._plans: SimpleQueue[Plan | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, plan: Plan) -> None:
        self._plans.put(plan)

    def stop(self) -> None:
        """Ends the thread after the plans it has. Waits for it."""
        self._plans.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (plan := self._plans.get()) is not None:
                execute(self._device, plan, self._post)
        except BaseException as e:  # whatever it is, the loop must hear of it: its requests wait
            self._post(DeviceFailed(e))


def execute(device: Device, plan: Plan, post: Post) -> None:
    """One plan: its steps up to its end or its cut, each result posted, then PLAN DONE."""
    device.begin(plan)
    ran = 0
    while ran < plan.steps and not (plan.cut and (ran or not plan.chunks)):
        result = device.step(plan, ran)
        if result is None:
            break
        ran += 1
        post(result)
    post(PlanDone(plan.seq, ran))
