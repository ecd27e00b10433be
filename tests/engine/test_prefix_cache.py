"""What a request finds of what others computed, and that nobody finds what is not there yet."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.messages import pack_ints
from common.sampling import SamplingParams
from engine.blocks import BlockPool
from engine.devices.fake import expected_tokens
from engine.plan import Admission
from engine.prefix_cache import PrefixCache
from tests.engine.harness import VOCAB, Harness, prompt_of


def params(max_tokens: int = 4, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)  # type: ignore[arg-type]


def fed(h: Harness) -> list[int]:
    """Prompt tokens computed in each plan that has any."""
    return [sum(len(chunk.token_ids) for chunk in plan.chunks) for plan in h.made if plan.chunks]


def found(h: Harness) -> list[int]:
    """Tokens that each request found when it was admitted, in order."""
    admissions: list[Admission] = [admission for plan in h.made for admission in plan.admissions]
    return [admission.length for admission in admissions]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_digests_agree_as_far_as_whole_blocks_from_the_beginning_agree(a: list[int], b: list[int]) -> None:
    cache = PrefixCache(BlockPool(8, 4))
    first, second = cache.chain("", pack_ints("i", a)), cache.chain("", pack_ints("i", b))
    assert (len(first), len(second)) == (1 + len(a) // 4, 1 + len(b) // 4)
    for blocks in range(min(len(first), len(second))):
        assert (first[blocks] == second[blocks]) == (a[: 4 * blocks] == b[: 4 * blocks])


def test_no_digest_of_one_salt_or_one_process_is_one_of_another() -> None:
    cache, other = PrefixCache(BlockPool(8, 4)), PrefixCache(BlockPool(8, 4))
    tokens = pack_ints("i", [1] * 16)
    chains = [cache.chain("", tokens), cache.chain("a", tokens), cache.chain("b", tokens), other.chain("", tokens)]
    assert len({digest for chain in chains for digest in chain}) == sum(map(len, chains))


def test_the_same_prompt_again_computes_only_what_follows_its_last_full_block() -> None:
    h = Harness(steps_ahead=4)
    for handle in range(2):
        h.submit(handle, prompt_of(0, 14), params())
        h.drain()
    assert (found(h), fed(h)) == ([0, 12], [14, 2])
    assert h.output.tokens[0] == h.output.tokens[1]
    assert (h.prefixes.queries, h.prefixes.hits) == (28, 12)


def test_the_last_token_of_a_prompt_is_computed_even_where_all_its_blocks_are_there() -> None:
    h = Harness(steps_ahead=4)
    for handle in range(2):
        h.submit(handle, prompt_of(0, 16), params())
        h.drain()
    assert (found(h), fed(h)) == ([0, 12], [16, 4])


def test_a_second_turn_computes_neither_the_first_prompt_nor_its_answer() -> None:
    h = Harness(steps_ahead=8)
    first = prompt_of(0, 10)
    h.submit(0, first, params(20))
    h.drain()
    second = [*first, *h.output.tokens[0], 1, 2, 3]
    h.submit(1, second, params(5, seed=9))
    h.drain()
    assert found(h) == [0, 28], "the answer's last token was never fed, so the 29 before it count"
    assert h.output.tokens[1] == expected_tokens(np.asarray(second, np.int32), 9, 5, frozenset(), VOCAB)
    h.assert_all_returned()


def test_different_salts_share_nothing_and_the_same_salt_shares() -> None:
    h = Harness(steps_ahead=4)
    for handle, salt in enumerate(("", "a", "b", "a", "")):
        h.submit(handle, prompt_of(0, 14), params(), salt=salt)
        h.drain()
    assert found(h) == [0, 0, 0, 12, 12]


def test_a_scored_prompt_is_computed_whole_and_can_be_found_by_others() -> None:
    h = Harness(steps_ahead=4)
    for handle, scored in enumerate((1, 1, None)):
        h.submit(handle, prompt_of(0, 14), params(prompt_logprobs=scored))
        h.drain()
    assert found(h) == [0, 0, 12]
    assert (h.prefixes.queries, h.prefixes.hits) == (14, 12)


def test_without_the_cache_nothing_is_found_and_nothing_is_counted() -> None:
    h = Harness(steps_ahead=4, caching=False)
    for handle in range(2):
        h.submit(handle, prompt_of(0, 14), params())
        h.drain()
    assert (found(h), h.prefixes.queries, h.prefixes.hits) == ([0, 0], 0, 0)


def test_tokens_in_flight_are_not_found_and_committed_ones_are() -> None:
    h = Harness(steps_ahead=8, budget=64)
    prompt = prompt_of(0, 8)
    answer = expected_tokens(np.asarray(prompt, np.int32), 0, 8, frozenset(), VOCAB)
    h.submit(0, prompt, params(30))
    h.tick_loop()
    (request,) = h.scheduler.running
    assert h.pool.find(h.prefixes.chain("", pack_ints("i", prompt))[1:]) == [], "planned, not computed"
    h.tick_device()
    for step in range(8):
        h.tick_device()
        h.tick_loop()
        chain = h.prefixes.chain("", pack_ints("i", [*prompt, *answer]))[1:]
        written = len(prompt) + step  # of step + 1 drawn tokens the last is not fed yet
        assert h.pool.find(chain) == request.blocks[: written // 4]


def test_a_chunk_is_found_as_soon_as_its_step_is_done() -> None:
    h = Harness(steps_ahead=4, budget=16)
    h.submit(0, prompt_of(0, 40), params())
    h.tick_loop()
    h.tick_device()
    h.tick_device()
    h.tick_loop()
    chain = h.prefixes.chain("", pack_ints("i", prompt_of(0, 40)))[1:]
    assert len(h.pool.find(chain)) == 4


def test_a_prompt_that_was_aborted_after_its_prefill_can_still_be_found() -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt_of(0, 14), params(40))
    h.tick_loop()
    h.tick_device()
    h.abort(0)
    h.drain()
    h.submit(1, prompt_of(0, 14), params())
    h.drain()
    assert found(h) == [0, 12]


def test_requests_of_one_prompt_wait_for_the_first_ones_prefill() -> None:
    h = Harness(steps_ahead=8, budget=64)
    for handle in range(4):
        h.submit(handle, prompt_of(0, 15), params(6, seed=handle))
    h.drain()
    assert found(h) == [0, 12, 12, 12]
    assert fed(h) == [15, 9]
    for handle in range(4):
        prompt = np.asarray(prompt_of(0, 15), np.int32)
        assert h.output.tokens[handle] == expected_tokens(prompt, handle, 6, frozenset(), VOCAB)
    h.assert_all_returned()


def test_nobody_waits_for_a_beginning_that_is_less_than_half_of_a_prompt() -> None:
    h = Harness(steps_ahead=8, budget=64)
    for handle in range(2):
        h.submit(handle, prompt_of(9, 8) + prompt_of(handle, 20), params())
    h.drain()
    assert found(h) == [0, 0]
    assert fed(h) == [56]


def test_who_waits_for_a_prefill_goes_on_when_that_request_is_aborted() -> None:
    h = Harness(steps_ahead=8, budget=16)
    for handle in range(2):
        h.submit(handle, prompt_of(0, 40), params())
    h.tick_loop()
    h.abort(0)
    h.drain()
    assert found(h) == [0, 16]
    assert len(h.output.tokens[1]) == 4
    h.assert_all_returned()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    h = Harness(steps_ahead=1, blocks=16, block_size=4, max_num_seqs=3)
    for handle in range(3):
        h.submit(handle, prompt_of(handle, 8), params(20))
    h.drain()
    assert h.scheduler.preemptions > 0
    again = [admission for plan in h.made for admission in plan.admissions if admission.output]
    assert any(admission.length > 0 for admission in again)
    assert all(h.output.tokens[i] == whole_answer(i, 8, 20) for i in range(3))
    assert h.prefixes.queries == 24, "looking for its own blocks again does not count"


def whole_answer(seed: int, prompt: int, count: int) -> list[int]:
    return expected_tokens(np.asarray(prompt_of(seed, prompt), np.int32), 0, count, frozenset(), VOCAB)


def test_a_shared_beginning_takes_its_blocks_once() -> None:
    h = Harness(steps_ahead=1, blocks=24, block_size=4, max_num_seqs=4, budget=64)
    beginning = prompt_of(9, 40)
    h.submit(9, beginning, params(1))
    h.drain()
    for handle in range(4):
        h.submit(handle, beginning + prompt_of(handle, 3), params(4))
    h.tick_loop()
    assert len(h.scheduler.running) == 4, "four times eleven blocks would not fit into 23"
    h.drain()
    assert h.scheduler.preemptions == 0
    h.assert_all_returned()


def test_what_is_kept_for_others_gives_way_before_anybody_is_preempted() -> None:
    h = Harness(steps_ahead=4, blocks=18, max_num_seqs=1)
    for handle in range(6):
        h.submit(handle, prompt_of(handle, 30), params(20))
    h.drain()
    assert h.scheduler.preemptions == 0
    assert all(h.output.tokens[i] == whole_answer(i, 30, 20) for i in range(6))
    h.assert_all_returned()


def test_the_heartbeat_counts_tokens_looked_for_and_found() -> None:
    h = Harness(steps_ahead=4)
    for handle in range(2):
        h.submit(handle, prompt_of(0, 14), params())
        h.drain()
    h.loop._stats_due = 0
    h.abort(99)
    h.tick_loop()
    assert h.output.last_stats is not None
    counters = h.output.last_stats.counters
    assert (counters["prefix_cache_queries"], counters["prefix_cache_hits"]) == (28, 12)


def test_a_resumed_request_finds_the_tokens_it_had_emitted() -> None:
    h = Harness(steps_ahead=4)
    h.submit(0, prompt_of(0, 10), params(12, seed=3))
    h.drain()
    h.submit(1, prompt_of(0, 10), params(12, seed=3), emitted=h.output.tokens[0][:8])
    h.drain()
    assert found(h) == [0, 16]
    assert h.output.tokens[1] == h.output.tokens[0][8:]
