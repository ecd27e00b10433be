"""Whatever happens and in whatever order, every request's tokens are its own, and everything comes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Finish
from common.sampling import SamplingParams
from engine.devices.fake import expected_tokens
from tests.engine.harness import EOS, VOCAB, Harness, prompt_of


@dataclass(frozen=True)
class Job:
    prompt: int
    max_tokens: int
    ignore_eos: bool
    stop_at: int | None
    abort_at: int | None  # in moves after its submission
    priority_seed: int
    family: int  # prompts of one family begin alike
    follows: bool  # the prompt is the one before, its answer, and a bit more


jobs = st.builds(
    Job,
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 30),
    ignore_eos=st.booleans(),
    stop_at=st.none() | st.integers(1, 12),
    abort_at=st.none() | st.integers(0, 60),
    priority_seed=st.integers(0, 2**40),
    family=st.integers(0, 2),
    follows=st.booleans(),
)


def whole_output(job: Job, prompt: list[int]) -> tuple[list[int], Finish]:
    """What it gets if nobody ends it from outside, and why it ends."""
    ends = frozenset() if job.ignore_eos else frozenset(EOS)
    most = min(job.max_tokens, 64 - len(prompt))
    whole = expected_tokens(np.asarray(prompt, np.int32), job.priority_seed, most, ends, VOCAB)
    finish = Finish.STOP if whole[-1] in ends else Finish.LENGTH
    if job.stop_at is not None and job.stop_at <= len(whole):
        return whole[: job.stop_at], Finish.STOP
    return whole, finish


def prompts_of(plan: list[Job]) -> list[list[int]]:
    prompts: list[list[int]] = []
    for index, job in enumerate(plan):
        prompt = prompt_of(job.family, job.prompt)
        if index and job.follows:
            prompt = (prompts[-1] + whole_output(plan[index - 1], prompts[-1])[0] + prompt[:5])[:60]
        prompts.append(prompt)
    return prompts


def run(
    plan: list[Job],
    moves: list[int],
    *,
    steps_ahead: int,
    blocks: int,
    drops_dead: bool,
    burst: int = 1,
    caching: bool = True,
) -> Harness:
    stops = {handle: job.stop_at for handle, job in enumerate(plan) if job.stop_at is not None}
    h = Harness(
        steps_ahead=steps_ahead, blocks=blocks, drops_dead=drops_dead, burst=burst, stops=stops, caching=caching
    )
    prompts = prompts_of(plan)
    todo = list(enumerate(plan))
    aborts: list[list[int]] = []
    for move in moves:
        for abort in aborts:
            abort[1] -= 1
            if abort[1] == 0:
                h.abort(abort[0])
        if move == 0 and todo:
            handle, job = todo.pop(0)
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos, seed=job.priority_seed)
            h.submit(handle, prompts[handle], params)
            if job.abort_at is not None:
                aborts.append([handle, job.abort_at + 1])
        elif move == 1:
            h.tick_loop()
        elif move == 2:
            h.tick_device()
        elif move == 3:
            h.tick_output()
    for handle, job in todo:
        params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.ignore_eos, seed=job.priority_seed)
        h.submit(handle, prompts[handle], params)
    h.drain()
    return h


@settings(max_examples=250, deadline=None)
@given(
    plan=st.lists(jobs, min_size=1, max_size=8),
    moves=st.lists(st.integers(0, 3), max_size=250),
    blocks=st.sampled_from([18, 20, 26, 40, 100]),
    drops_dead=st.booleans(),
    burst=st.sampled_from([1, 3]),
    cached=st.sets(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=3),
)
def test_outputs_are_the_same_for_every_number_of_steps_ahead_with_and_without_a_prefix_cache(
    plan: list[Job], moves: list[int], blocks: int, drops_dead: bool, burst: int, cached: set[int]
) -> None:
    for steps_ahead in (0, 1, 2, 3, 5, 8):
        h = run(
            plan,
            moves,
            steps_ahead=steps_ahead,
            blocks=blocks,
            drops_dead=drops_dead,
            burst=burst,
            caching=steps_ahead in cached,
        )
        for handle, (job, prompt) in enumerate(zip(plan, prompts_of(plan), strict=True)):
            whole, finish = whole_output(job, prompt)
            (terminal,) = h.output.terminals[handle]
            if terminal is Finish.ABORT:
                assert job.abort_at is not None
                assert h.output.tokens[handle] == whole[: len(h.output.tokens[handle])]
            else:
                assert (h.output.tokens[handle], terminal) == (whole, finish)
        h.assert_all_returned()


@settings(max_examples=60, deadline=None)
@given(plan=st.lists(jobs, min_size=1, max_size=6), moves=st.lists(st.integers(0, 3), max_size=200))
def test_no_row_is_planned_past_its_length(plan: list[Job], moves: list[int]) -> None:
    h = run(plan, moves, steps_ahead=8, blocks=40, drops_dead=False)
    without_stops = [job for job in plan if job.stop_at is None and job.abort_at is None and job.ignore_eos]
    if len(without_stops) == len(plan):
        assert h.scheduler.surplus_tokens == 0
