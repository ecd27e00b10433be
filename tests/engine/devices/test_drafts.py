"""Drafts by prompt lookup: what is proposed, what of it counts, and that neither changes the output."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.devices.drafts import LONGEST_MATCH, Drafts

CHEAP = np.linspace(1.0, 1.1, 33)  # a step of more tokens costs next to nothing
DEAR = np.arange(33.0)  # a step costs what its tokens cost
LONGEST = 4


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def drafts_for(tokens: list[int], costs: np.ndarray = CHEAP) -> Drafts:
    drafts = Drafts(2, 200, LONGEST, costs)
    drafts.admit(1, tokens, [])
    return drafts


def expected_draft(tokens: list[int], room: int) -> list[int]:
    """What followed the most recent of the longest earlier matches of the last tokens."""
    for n in range(LONGEST_MATCH, 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + min(LONGEST, room)]
    return []


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 6))
def test_a_draft_is_what_followed_the_longest_match_before(tokens: list[int], room: int) -> None:
    counts, found = drafts_for(tokens).propose(ints(1), ints(room))
    whole = expected_draft(tokens, room)
    assert counts.tolist() == [len(found)]
    assert found.tolist() == whole[: len(found)]
    assert len(found) >= min(1, len(whole)), "a draft that costs nothing was not made"


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=8, max_size=40))
def test_nothing_is_drafted_where_it_does_not_pay(tokens: list[int]) -> None:
    assert drafts_for(tokens, DEAR).propose(ints(1), ints(6))[0].tolist() == [0]


def test_only_what_was_drawn_counts() -> None:
    drafts = drafts_for([1, 2, 3, 4, 1, 2])
    kept = drafts.take(ints(1), ints(3), ints(3, 4, 9), ints(3, 4, 1, 5), np.zeros(4, np.bool_))
    assert kept.tolist() == [3], "two tokens held, and the one drawn after them"
    kept = drafts.take(ints(1), ints(1), ints(7), ints(8, 7), np.zeros(2, np.bool_))
    assert kept.tolist() == [1]


def test_nothing_counts_after_an_end() -> None:
    ended = np.array([False, True, False])
    assert drafts_for([1, 2]).take(ints(1), ints(2), ints(3, 4), ints(3, 4, 5), ended).tolist() == [2]


def test_bad_luck_ends_drafting_and_time_brings_it_back() -> None:
    costs = np.array([0, 1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 3.1])
    text = [1, 2, 3] * 8 + [1, 2]
    drafts = drafts_for(text, costs)
    tries = 0
    while (found := drafts.propose(ints(1), ints(4))[1]).size and tries < 30:
        wrong = ints(*([9] * (len(found) + 1)))
        drafts.take(ints(1), ints(len(found)), found, wrong, np.zeros(len(wrong), np.bool_))
        for token in text[:8]:
            drafts.take(ints(1), ints(0), ints(), ints(token), np.zeros(1, np.bool_))
        tries += 1
    assert 0 < tries < 30
    for _ in range(200):
        if drafts.propose(ints(1), ints(4))[1].size:
            return
    raise AssertionError("it never tried again")
