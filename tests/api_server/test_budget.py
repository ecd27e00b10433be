from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.budget import output_tokens, truncated
from api_server.errors import BadRequestError


@given(
    prompt=st.integers(1, 40),
    requested=st.none() | st.integers(0, 40),
    default=st.none() | st.integers(1, 40),
    cap=st.none() | st.integers(1, 40),
)
def test_the_output_fits_the_context_or_the_request_is_refused_with_the_figures(
    prompt: int, requested: int | None, default: int | None, cap: int | None
) -> None:
    limit = 32
    needed = 1 if requested is None else requested
    if prompt + needed > limit:
        with pytest.raises(BadRequestError) as caught:
            output_tokens(prompt, limit, "max_tokens", requested, default, cap)
        assert caught.value.code == "context_length_exceeded"
        assert "32" in caught.value.message
        assert str(prompt) in caught.value.message
        return
    tokens = output_tokens(prompt, limit, "max_tokens", requested, default, cap)
    assert prompt + tokens <= limit
    assert tokens <= (cap or limit)
    if requested is not None and cap is None:
        assert tokens == requested
    if requested is None and default is None and cap is None:
        assert tokens == limit - prompt


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    ids = list(range(50))
    assert truncated(ids, None, 32, None) == ids
    assert truncated(ids, 3, 32, None) == [47, 48, 49]
    assert truncated(ids, -1, 32, 10) == ids[-22:]
    assert truncated(ids, -1, 32, None) == ids[-31:]
    assert truncated(ids, -1, 32, 0) == ids[-32:]
    with pytest.raises(BadRequestError, match="at most the model's context length, 32, not 33"):
        truncated(ids, 33, 32, None)
