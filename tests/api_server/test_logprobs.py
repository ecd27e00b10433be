from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from api_server.logprobs import FLOOR, CompletionLogprobs, chat_logprobs, finite, joined, prompt_logprobs
from common.messages import TokenLogprob


def token(text: str, logprob: float = -1.0, others: list[tuple[str, float]] | None = None) -> TokenLogprob:
    candidates = [(other, value, other.encode(), 40 + i) for i, (other, value) in enumerate(others or [])]
    return text, logprob, text.encode(), candidates


def test_a_chosen_token_that_is_not_among_the_likeliest_takes_the_last_place() -> None:
    body = chat_logprobs([token("c", -3.0, [("a", -1.0), ("b", -2.0)])], 2)
    (entry,) = body["content"]
    assert [item["token"] for item in entry["top_logprobs"]] == ["a", "c"]
    assert entry["top_logprobs"][1]["logprob"] == entry["logprob"] == -3.0
    assert entry["bytes"] == [99]


def test_no_top_logprobs_are_shown_when_none_were_asked_for() -> None:
    assert chat_logprobs([token("c", -3.0, [("a", -1.0)])], 0)["content"][0]["top_logprobs"] == []


def test_completions_hold_the_chosen_token_beside_the_likeliest_with_the_identical_number() -> None:
    columns = CompletionLogprobs(2).scored([token("c", -3.25, [("a", -1.0), ("b", -2.0), ("d", -2.5)])])
    assert columns["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -3.25}]
    assert list(columns["top_logprobs"][0]) == ["a", "b", "c"]
    assert columns["token_logprobs"] == [-3.25]


@given(st.text(min_size=1, max_size=12), st.data())
def test_offsets_point_at_the_characters_that_begin_in_a_token(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(raw) - 1, 1)))))
    parts = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    logprobs = CompletionLogprobs(0)
    offsets = [logprobs.scored([("?", -1.0, part, [])])["text_offset"][0] for part in parts]
    begins = 0
    for part, offset in zip(parts, offsets, strict=True):
        whole = len(raw[:begins].decode(errors="ignore"))
        cut_short = len(raw[:begins]) != len(raw[:begins].decode(errors="ignore").encode())
        assert offset == whole + cut_short
        begins += len(part)


def test_an_invisible_first_token_takes_no_room() -> None:
    logprobs = CompletionLogprobs(0)
    columns = joined(logprobs.unscored("<s>", visible=False), logprobs.scored([token("ab"), token("c")]))
    assert columns["tokens"] == ["<s>", "ab", "c"]
    assert columns["token_logprobs"][0] is None
    assert columns["text_offset"] == [0, 0, 2]


def test_numbers_that_json_cannot_hold_become_the_floor() -> None:
    assert [finite(value) for value in (-math.inf, math.nan, -1e30, -2.0)] == [FLOOR, FLOOR, FLOOR, -2.0]


def test_prompt_logprobs_are_keyed_by_token_id_and_hold_no_more_than_was_asked_for() -> None:
    tokens = [None, token("b", -2.0, [("a", -1.0), ("b", -2.0), ("c", -3.0)])]
    scored = prompt_logprobs(tokens, [7, 41], 2)
    assert scored[0] is None
    assert scored[1] == {
        "41": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        "40": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
    }
    assert prompt_logprobs(tokens, [7, 41], 0)[1] == {"41": {"logprob": -2.0, "rank": None, "decoded_token": "b"}}
    assert prompt_logprobs(None, [7], 2) == [None]
