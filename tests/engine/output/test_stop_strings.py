"""Stop strings end the text where they should, and nothing but a real beginning of one is held back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output.stop_strings import StopMatcher, _Node

WORDS = st.text(alphabet="ab", min_size=1, max_size=5)
STOPS = st.lists(WORDS, max_size=5).map(tuple)
PIECES = st.lists(st.text(alphabet="aab", max_size=4), max_size=12)


def oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The match that ends first, of those the one that begins first."""
    matches = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    end, start, stop = min(matches)
    return text[: end if include else start], stop


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """How much of the end of a text could still become a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
@settings(max_examples=2000)
def test_any_stops_in_any_pieces_match_as_in_the_whole_text(
    stops: tuple[str, ...], pieces: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    sent, seen, hit = "", "", None
    for piece in pieces:
        seen += piece
        safe, hit = matcher.feed(piece)
        sent += safe
        if hit is not None:
            break
        assert sent == seen[: len(seen) - longest_beginning(seen, stops)]
    if hit is None:
        sent += matcher.flush()
    assert (sent, hit) == oracle("".join(pieces), stops, include)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_split_over_tokens_never_leaks(include: bool) -> None:
    matcher = StopMatcher(("\nUser:",), include)
    fed = [matcher.feed(piece) for piece in ("Hi.", "\n", "Us", "er", ": what")]
    assert fed == [("Hi.", None), ("", None), ("", None), ("", None), ("\nUser:" if include else "", "\nUser:")]


def test_what_turns_out_not_to_be_a_stop_string_is_sent_at_once() -> None:
    matcher = StopMatcher(("\nUser:",))
    assert [matcher.feed(piece)[0] for piece in ("\nUse", " it\n", "x")] == ["", "\nUse it", "\nx"]
    assert matcher.flush() == ""


def test_the_end_of_the_text_releases_what_is_held() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("the EN") == ("the ", None)
    assert matcher.flush() == "EN"


def test_no_stops_or_empty_ones_hold_nothing() -> None:
    for stops in ((), ("",)):
        assert StopMatcher(stops).feed("any text") == ("any text", None)


class Counting(StopMatcher):
    """Counts the transitions it looks up: what its work is proportional to."""

    __slots__ = ("lookups",)

    def __init__(self, stops: tuple[str, ...]) -> None:
        super().__init__(stops)
        self.lookups = 0

    def _child(self, node: _Node, char: str) -> _Node | None:
        self.lookups += 1
        return super()._child(node, char)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (tuple("a" * n + "b" for n in range(1000, 1300)), "a" * 20_000),
        (tuple("a" * n + "b" for n in range(1, 300)), "a" * 500 + "c"),
        (("a" * 5_000 + "b",), ("a" * 4_999 + "c") * 4),
        (tuple("ab" * n + "c" for n in range(300)), "ab" * 10_000),
    ],
    ids=["long run", "many lengths", "almost", "period of two"],
)
def test_hostile_stop_strings_cost_no_more_than_others(stops: tuple[str, ...], text: str) -> None:
    matcher = Counting(stops)
    for start in range(0, len(text), 7):
        if matcher.feed(text[start : start + 7])[1] is not None:
            break
    assert matcher.lookups <= 3 * len(text)
