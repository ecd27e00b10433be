"""The threads that run a tape together.

The caller is thread 0. The others sleep between steps and know nothing of the interpreter; within a step they meet
after every operation, and who waits there gives its core away after some microseconds.

```
caller   ──post──┤ op 0 ├─┤ op 1 ├─ … ─┤ last ├── (back to Python)
helper   ~sleep~ ┤ op 0 ├─┤ op 1 ├─ … ─┤ last ├~sleep~
                       barrier   barrier
```
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numba import (  # type: ignore[attr-defined]
    carray,
    njit,
)

from engine.native import operations as o
from engine.native import tape as t
from engine.native.intrinsics import (
    fetch_add,
    float32_at,
    int64_at,
    load_acquire,
    monotonic,
    pause,
    sched_yield,
    sem_post,
    sem_wait,
)

Ints = np.ndarray[Any, np.dtype[np.int64]]

SCRATCH = 1 << 18  # floats of each thread

_SPINS = 2000  # pauses before a waiting thread offers its core to others
_SEMAPHORE = 8  # int64 numbers: more than any C library's sem_t
_STEP, _ROUND, _SIZE = 0, 1, 2  # of the control block; then come the semaphores


@njit(nogil=True)
def _meet(barrier: int, target: int) -> None:
    """Waits until `target` arrivals have been counted. The step record may be gone when the last one leaves."""
    fetch_add(barrier, 1)  # type: ignore[call-arg]  # numba hands the context over
    spins = 0
    while load_acquire(barrier) < target:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            sched_yield()


@njit(nogil=True)
def _nanoseconds(clock: int) -> int:
    """The time, by way of 16 bytes at an address."""
    monotonic(clock)
    now = carray(int64_at(clock), 2)
    return int(now[0] * 1_000_000_000 + now[1])


def _sources() -> int:
    """A number that changes with this package's code."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


def _make_run_tape(sources: int) -> Any:
    """numba keeps compiled code on disk by the file and the free variables of a function: what is called from here
    lies in other files, so their digest is a free variable."""

    @njit("int64(int64, int64, boolean, float32[::1])", nogil=True, cache=True)
    def run_tape(address: int, rounds: int, leads: bool, scratch: Any) -> int:
        """All lines of the step record's tape. `rounds`: operations that the team has done together before. Returns
        that number afterwards. Who leads takes the times, if they are wanted."""
        step = carray(int64_at(address), t.STEP_WIDTH)
        lines = carray(int64_at(step[t.LINES]), (step[t.COUNT], t.WIDTH))
        constants = carray(float32_at(step[t.CONSTANTS]), (step[t.COUNT], t.FLOATS))
        barrier, threads, count = step[t.BARRIER], step[t.THREADS], step[t.COUNT]
        timed = leads and step[t.TIMES] != 0
        times, clock = carray(int64_at(step[t.TIMES]), count), address + 8 * t.CLOCK
        if timed:
            began = _nanoseconds(clock)
        for i in range(count if sources else 0):
            op, floats = lines[i], constants[i]
            kind = op[t.KIND]
            if kind == t.LINEAR or kind == t.GATED:
                o.linear(op, step, i, scratch)
            elif kind == t.NORM:
                o.norm(op, floats, step, i, scratch)
            elif kind == t.ROTATE:
                o.rotate(op, floats, step, i)
            elif kind == t.ATTEND:
                o.attend(op, floats, step, i, scratch)
            elif kind == t.COMBINE:
                o.combine(op, step, i)
            elif kind == t.EMBED:
                o.embed(op, floats, step, i)
            elif kind == t.ADD:
                o.add(op, floats, step, i, scratch)
            elif kind == t.CAP:
                o.cap_logits(op, floats, step, i)
            if threads > 1:
                rounds += 1
                _meet(barrier, rounds * threads)
            if timed:
                ended = _nanoseconds(clock)
                times[i] += ended - began
                began = ended
        return rounds

    return run_tape


def _make_team(sources: int, run_tape: Any) -> tuple[Any, Any]:
    @njit("void(int64, int64, float32[::1])", nogil=True, cache=True)
    def help_out(control: int, semaphore: int, scratch: Any) -> None:
        """A helper's life: sleep, run the step that the control block names, sleep again; no step ends it."""
        block = carray(int64_at(control), _SIZE)
        rounds = 0
        while sources:
            sem_wait(semaphore)
            if block[_STEP] == 0:
                return
            rounds = run_tape(block[_STEP], rounds, False, scratch)

    @njit("int64(int64, int64, int64, int64, float32[::1])", nogil=True, cache=True)
    def lead(control: int, semaphores: int, helpers: int, rounds: int, scratch: Any) -> int:
        block = carray(int64_at(control), _SIZE)
        if sources:
            for i in range(helpers):
                sem_post(semaphores + 8 * _SEMAPHORE * i)
        return int(run_tape(block[_STEP], rounds, True, scratch))

    return help_out, lead


_SOURCES = _sources()
run_tape = _make_run_tape(_SOURCES)
_help, _lead = _make_team(_SOURCES, run_tape)


class Team:
    """`threads` threads, the caller included. Owner: the device thread. Its helpers end with it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._control = np.zeros(_SIZE + _SEMAPHORE * max(0, threads - 1), np.int64)
        self._semaphores = self._control[_SIZE:].ctypes.data
        self._barrier = np.zeros(1, np.int64)
        self._rounds = 0
        self._scratch = np.zeros(SCRATCH, np.float32)
        libc = ctypes.CDLL(None)
        helpers = []
        for i in range(threads - 1):
            semaphore = self._semaphores + 8 * _SEMAPHORE * i
            if libc.sem_init(ctypes.c_void_p(semaphore), 0, 0) != 0:
                raise OSError("sem_init failed")
            # The thread holds the arrays, whose memory it uses, but not the team.
            arguments = (self._control, self._barrier, semaphore, np.zeros(SCRATCH, np.float32))
            helpers.append(threading.Thread(target=_serve, args=arguments, name=f"device-{i + 1}", daemon=True))
            helpers[-1].start()
        self.close = weakref.finalize(self, _end, self._control, helpers)

    def run(self, step: np.ndarray[Any, np.dtype[np.int64]], alone: bool) -> None:
        """Runs the tape of a step record, on the caller's thread only where `alone`. Not reentrant."""
        step[t.BARRIER] = self._barrier.ctypes.data
        if alone or self.threads == 1:
            step[t.THREADS] = 1
            run_tape(step.ctypes.data, 0, True, self._scratch)
            return
        step[t.THREADS] = self.threads
        self._control[_STEP] = step.ctypes.data
        self._rounds = _lead(self._control.ctypes.data, self._semaphores, self.threads - 1, self._rounds, self._scratch)


def _serve(control: Ints, barrier: Ints, semaphore: int, scratch: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    _help(control.ctypes.data, semaphore, scratch)


def _end(control: Ints, helpers: list[threading.Thread]) -> None:
    """Ends the helpers, and waits for them. Called by `Team.close`, or when the team is no more."""
    libc = ctypes.CDLL(None)
    control[_STEP] = 0
    for i, helper in enumerate(helpers):
        libc.sem_post(ctypes.c_void_p(control[_SIZE:].ctypes.data + 8 * _SEMAPHORE * i))
        helper.join()
