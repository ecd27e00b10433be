"""What the loop does with each thing that it hears of."""

from __future__ import annotations

import pytest

from common.messages import Finish
from common.sampling import SamplingParams
from engine.loop import DropApi, EngineError, Shutdown, StopHit
from engine.plan import DeviceFailed
from tests.engine.harness import VOCAB, Harness, prompt_of

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), ([1, VOCAB], "token ids"), ([-1], "token ids"), ([1] * 65, "65 tokens; the context holds 64")],
)
def test_what_cannot_run_is_refused_with_a_reason(prompt: list[int], words: str) -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt, LONG)
    h.submit(1, prompt_of(1, 4), SamplingParams(max_tokens=2))
    h.drain()
    assert h.output.terminals[0] == [Finish.ERROR]
    assert words in (h.output.errors[0] or "")
    assert len(h.output.terminals[1]) == 1
    h.assert_all_returned()


def test_a_prompt_as_long_as_the_context_has_no_room_for_a_token() -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt_of(0, 64), LONG)
    h.drain()
    assert "full" in (h.output.errors[0] or "")


def test_the_context_bounds_the_output() -> None:
    h = Harness(steps_ahead=8)
    h.submit(0, prompt_of(0, 60), LONG)
    h.drain()
    assert (len(h.output.tokens[0]), h.output.terminals[0]) == (4, [Finish.LENGTH])


def test_an_abort_while_waiting_in_prefill_and_in_decode() -> None:
    h = Harness(steps_ahead=8, max_num_seqs=1, budget=16)
    h.submit(0, prompt_of(0, 40), LONG)
    h.submit(1, prompt_of(1, 4), LONG)
    h.tick_loop()
    h.abort(1)
    h.abort(0)
    h.drain()
    assert h.output.terminals[0] == h.output.terminals[1] == [Finish.ABORT]
    h.assert_all_returned()


def test_an_abort_that_comes_together_with_the_end_gives_one_terminal() -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt_of(0, 4), SamplingParams(max_tokens=3, ignore_eos=True))
    h.tick_loop()
    while h.tick_device():
        pass
    h.abort(0)
    h.drain()
    assert h.output.terminals[0] in ([Finish.LENGTH], [Finish.ABORT])
    h.assert_all_returned()


def test_aborts_of_unknown_and_of_ended_requests_are_harmless() -> None:
    h = Harness(steps_ahead=4)
    h.abort(99)
    h.submit(0, prompt_of(0, 4), SamplingParams(max_tokens=2))
    h.drain()
    h.abort(0)
    h.drain()
    assert len(h.output.terminals[0]) == 1
    h.assert_all_returned()


def test_an_api_process_that_goes_takes_its_requests_along() -> None:
    h = Harness(steps_ahead=4)
    for handle in range(6):
        h.submit(handle, prompt_of(handle, 4), LONG)
    h.tick_loop()
    h.inbox.put(DropApi(1))
    h.drain()
    assert all(h.output.terminals[handle] == [Finish.ABORT] for handle in range(6))
    h.assert_all_returned()


def test_an_output_error_ends_that_request_and_no_other() -> None:
    h = Harness(steps_ahead=4)
    for handle in range(2):
        h.submit(handle, prompt_of(handle, 4), SamplingParams(max_tokens=9, ignore_eos=True))
    h.tick_loop()
    request = next(iter(h.scheduler.running))
    h.output.terminals[0].append(Finish.ERROR)
    h.inbox.put(StopHit(request, Finish.ERROR))
    h.drain()
    assert len(h.output.tokens[1]) == 9
    h.assert_all_returned()


def test_a_device_failure_ends_the_loop() -> None:
    h = Harness(steps_ahead=4)
    h.inbox.put(DeviceFailed(ValueError("no memory")))
    with pytest.raises(EngineError, match="ValueError: no memory"):
        h.loop.run()


def test_shutdown_ends_the_loop() -> None:
    h = Harness(steps_ahead=4)
    h.inbox.put(Shutdown())
    h.loop.run()


def test_the_heartbeat_tells_what_runs_and_what_waits_and_that_it_progresses() -> None:
    h = Harness(steps_ahead=1, max_num_seqs=2)
    for handle in range(5):
        h.submit(handle, prompt_of(handle, 4), LONG)
    h.tick_loop()
    first = h.output.last_stats
    assert first is not None
    assert (first.running, first.waiting) == (2, 3)
    assert first.gauges["kv_cache_usage"] > 0
    h.drain()
    h.loop._stats_due = 0
    h.abort(99)
    h.tick_loop()
    last = h.output.last_stats
    assert last is not None
    assert (last.running, last.waiting) == (0, 0)
    assert last.progress > first.progress
    assert last.counters["generation_tokens"] == 250
