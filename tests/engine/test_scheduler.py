"""What a plan holds, when one is cut, who is preempted."""

from __future__ import annotations

from common.messages import Finish
from common.sampling import SamplingParams
from tests.engine.harness import Harness, prompt_of


def params(max_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)  # type: ignore[arg-type]


def test_a_plan_fuses_the_prefill_and_the_decode_steps_after_it() -> None:
    h = Harness(steps_ahead=8)
    h.submit(0, prompt_of(0, 10), params())
    h.tick_loop()
    first, second = h.made
    assert (len(first.chunks), first.chunks[0].count, first.steps) == (1, 8, 8)
    assert (second.rows.tolist(), second.counts.tolist()) == ([first.chunks[0].row], [8])


def test_the_next_plan_is_queued_while_one_runs() -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt_of(0, 5), params(40))
    h.tick_loop()
    assert len(h.plans) == 2
    h.drain()
    assert len(h.made) == 10


def test_the_synchronous_schedule_has_one_step_in_flight() -> None:
    h = Harness(steps_ahead=0)
    h.submit(0, prompt_of(0, 5), params(6))
    while h.tick_loop() or h.tick_device():
        assert len(h.scheduler.in_flight) <= 1
    assert [plan.steps for plan in h.made] == [1] * 6


def test_a_long_prompt_is_fed_in_chunks_under_the_token_budget() -> None:
    h = Harness(steps_ahead=8, budget=16)
    h.submit(0, prompt_of(0, 40), params())
    h.drain()
    chunks = [len(chunk.token_ids) for plan in h.made for chunk in plan.chunks]
    assert chunks == [16, 16, 8]
    assert [plan.steps for plan in h.made[:3]] == [1, 1, 8]


def test_decode_rows_go_on_while_another_prompt_is_fed() -> None:
    h = Harness(steps_ahead=1, budget=16)
    h.submit(0, prompt_of(0, 4), params(30))
    h.tick_loop()
    h.tick_device()
    h.submit(1, prompt_of(1, 40), params())
    h.drain()
    mixed = [plan for plan in h.made if plan.chunks and len(plan.rows)]
    assert len(mixed) >= 3
    assert all(len(plan.rows) + sum(len(c.token_ids) for c in plan.chunks) <= 16 for plan in h.made)


def test_a_request_that_could_start_cuts_the_plan() -> None:
    h = Harness(steps_ahead=8)
    h.submit(0, prompt_of(0, 4), params(50))
    h.tick_loop()
    for _ in range(3):
        h.tick_device()
    h.submit(1, prompt_of(1, 4), params())
    h.tick_loop()
    assert [plan.cut for plan in h.made[:2]] == [True, True]
    assert len(h.made[2].chunks) == 1, "the newcomer's plan is queued at the moment of the cut"


def test_a_request_that_could_not_start_cuts_nothing() -> None:
    h = Harness(steps_ahead=8, max_num_seqs=1)
    h.submit(0, prompt_of(0, 4), params(50))
    h.tick_loop()
    h.submit(1, prompt_of(1, 4), params())
    h.tick_loop()
    assert not any(plan.cut for plan in h.made)


def test_a_cut_plan_with_a_chunk_still_runs_that_step() -> None:
    h = Harness(steps_ahead=8)
    h.submit(0, prompt_of(0, 4), params(50))
    h.tick_loop()
    h.abort(0)
    h.submit(1, prompt_of(1, 4), params(3))
    h.tick_loop()
    h.drain()
    assert h.output.terminals[0] == [Finish.ABORT]
    assert h.output.terminals[1] == [Finish.LENGTH]
    h.assert_all_returned()


def test_ends_by_length_waste_nothing() -> None:
    h = Harness(steps_ahead=8, drops_dead=False)
    for handle, count in enumerate((1, 2, 7, 8, 9, 17)):
        h.submit(handle, prompt_of(handle, 5), params(count))
    h.drain()
    assert h.scheduler.surplus_tokens == 0
    assert [len(h.output.tokens[handle]) for handle in range(6)] == [1, 2, 7, 8, 9, 17]


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    h = Harness(steps_ahead=1, blocks=14, block_size=4)
    for handle in range(3):
        h.submit(handle, prompt_of(handle, 8), params(16))
    h.tick_loop()
    old, middle, young = h.scheduler.running
    h.drain()
    assert h.scheduler.preemptions > 0
    assert old.finish is middle.finish is young.finish is Finish.LENGTH
    resumed = [a for plan in h.made for a in plan.admissions if a.output]
    assert {tuple(a.prompt) for a in resumed} == {tuple(young.prompt)}


def test_a_lower_priority_number_runs_first() -> None:
    h = Harness(steps_ahead=4, max_num_seqs=1)
    for handle, priority in ((0, 0), (1, 5), (2, 1)):
        h.submit(handle, prompt_of(handle, 4), params(3), priority=priority)
    h.drain()
    order = [int(a.prompt[0]) for plan in h.made for a in plan.admissions]
    assert order == [prompt_of(handle, 4)[0] for handle in (0, 2, 1)]


def test_max_tokens_0_feeds_the_prompt_and_samples_nothing() -> None:
    h = Harness(steps_ahead=8)
    h.submit(0, prompt_of(0, 30), params(0, prompt_logprobs=1))
    h.drain()
    assert h.output.tokens[0] == []
    assert h.output.terminals[0] == [Finish.LENGTH]
    scored = [len(chunk.score_ids) for plan in h.made for chunk in plan.chunks if chunk.score_ids is not None]
    assert sum(scored) == 29
    h.assert_all_returned()


def test_a_resumed_request_goes_on_where_it_stopped() -> None:
    whole = Harness(steps_ahead=4)
    whole.submit(0, prompt_of(0, 9), params(20, seed=3))
    whole.drain()
    tokens = whole.output.tokens[0]
    rest = Harness(steps_ahead=4)
    rest.submit(0, prompt_of(0, 9), params(20, seed=3), emitted=tokens[:8])
    rest.drain()
    assert rest.output.tokens[0] == tokens[8:]
