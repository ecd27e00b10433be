from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.admission import Admission, Place
from api_server.errors import BadRequestError, OverloadedError


def test_the_request_that_is_one_too_many_is_refused_and_counted() -> None:
    admission = Admission(2, 1_000)
    places = [admission.enter(4), admission.enter(4)]
    with pytest.raises(OverloadedError):
        admission.enter(4)
    assert (admission.requests, admission.tokens, admission.rejected) == (2, 2, 1)
    places[0].leave()
    admission.enter(4)


def test_a_long_prompt_is_let_in_when_nothing_else_waits() -> None:
    admission = Admission(8, 100)
    place = admission.enter(4_000)
    with pytest.raises(OverloadedError):
        admission.enter(4)
    place.leave()
    assert admission.tokens == 0


def test_a_request_that_could_never_fit_is_told_so() -> None:
    with pytest.raises(BadRequestError, match="at most 8"):
        Admission(8, 100).check_fan_out(9)


def test_leaving_twice_gives_back_once() -> None:
    admission = Admission(8, 100)
    place = admission.enter(40)
    place.leave()
    place.leave()
    assert (admission.requests, admission.tokens) == (0, 0)


def test_a_place_that_could_not_grow_holds_nothing() -> None:
    admission = Admission(3, 100)
    admission.enter(4)
    place = admission.enter(4)
    with pytest.raises(OverloadedError):
        place.resize(3, 10)
    assert (place.requests, admission.requests, admission.tokens) == (0, 1, 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 50)), max_size=60))
def test_what_is_counted_is_what_the_places_hold(moves: list[tuple[int, int, int]]) -> None:
    admission = Admission(10, 100)
    places = [Place(admission) for _ in range(6)]
    for which, requests, tokens in moves:
        place = places[which]
        try:
            if place.requests and requests == 1:
                place.leave_part(place.tokens if place.requests == 1 else place.tokens // 2)
            elif requests:
                place.resize(requests, tokens)
            else:
                place.leave()
        except OverloadedError:
            pass
        assert admission.requests == sum(place.requests for place in places)
        assert admission.tokens == sum(place.tokens for place in places)
        holders = sum(place.requests > 0 for place in places)
        assert admission.requests <= 10 or holders == 1
        assert admission.tokens <= 100 or holders == 1


def test_a_check_refuses_what_would_not_be_let_in_and_takes_nothing() -> None:
    admission = Admission(max_requests=2, max_tokens=1000)
    admission.check(10**9)
    place = admission.enter(4_000)
    with pytest.raises(OverloadedError):
        admission.check(4)
    place.leave()
    assert (admission.requests, admission.tokens) == (0, 0)
