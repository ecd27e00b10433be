from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.errors import BadRequestError
from api_server.generate import parse
from api_server.generation_config import SamplingDefaults
from api_server.schemas.completion import CompletionRequest
from common.sampling import SamplingParams

VOCABULARY = 300


def body(**fields: Any) -> CompletionRequest:
    request = parse(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())
    request.check(VOCABULARY)
    return request


def refused(**fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        body(**fields)
    return caught.value


RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, 128),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}


@pytest.mark.parametrize(("name", "low", "high"), [(name, *bounds) for name, bounds in RANGES.items()])
def test_both_ends_of_a_range_are_accepted_and_what_lies_beyond_is_named(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(body(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        error = refused(**{name: value})
        assert error.param == name
        assert f"at least {low:g} and at most {high:g}" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.5"},
        {"temperature": True},
        {"max_tokens": "5"},
        {"max_tokens": 5.5},
        {"n": True},
        {"top_k": -2},
        {"seed": 2**63},
        {"seed": 1.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["a"] * 17},
        {"stop": "a" * 1_001},
        {"stop": [1]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [VOCABULARY]},
        {"stop_token_ids": "1"},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [VOCABULARY]},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"AI": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1.5": 1}},
        {"logit_bias": {"191222": -100}},
        {"logit_bias": {"": 1}},
        {"logit_bias": [1]},
        {"stream_options": {"include_usage": True}},
        {"stream": "true"},
        {"best_of": 2},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"min_tokens": -1},
        {"priority": 1.5},
        {"cache_salt": 5},
        {"cache_salt": ""},
        {"cache_salt": "x" * 1_025},
        {"user": 1},
    ],
    ids=json.dumps,
)
def test_what_is_not_right_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused(**fields)
    assert (error.param or "").partition(".")[0].partition("[")[0] == name
    assert name in error.message


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(CompletionRequest, f'{{"prompt": "a", "{name}": {value}}}'.encode())
    assert caught.value.param == name


def test_every_field_may_be_null_but_the_prompt() -> None:
    names = set(CompletionRequest.model_fields) - {"prompt"}
    plain = body(**dict.fromkeys(names))
    assert plain.sampling(SamplingDefaults(), 16, 5, 0) == SamplingParams(max_tokens=16, seed=5)
    assert refused(prompt=None).param == "prompt"


def test_unknown_fields_are_ignored_whatever_they_hold() -> None:
    assert parse(CompletionRequest, b'{"prompt": "a", "new_field": {"x": NaN}, "": 1}').prompt == "a"


def test_fields_left_out_come_from_the_models_defaults_and_given_ones_win() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    plain = body().sampling(defaults, 16, 0, 0)
    assert plain == SamplingParams(
        max_tokens=16, temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2
    )
    given = body(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1).sampling(defaults, 16, 0, 0)
    assert given == SamplingParams(max_tokens=16, temperature=0)


def test_everything_that_was_asked_for_reaches_the_engine() -> None:
    params = body(
        logit_bias={"7": -1.5},
        allowed_token_ids=[1, 2],
        stop=["x", "y"],
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=4,
        skip_special_tokens=False,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=9,
    ).sampling(SamplingDefaults(), 16, 0, 0, logprobs=2, prompt_logprobs=1)
    assert params == SamplingParams(
        max_tokens=16,
        min_tokens=4,
        logit_bias=((7, -1.5),),
        allowed_token_ids=(1, 2),
        stop=("x", "y"),
        stop_token_ids=(3,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=9,
        logprobs=2,
        prompt_logprobs=1,
    )


@given(seed=st.none() | st.integers(-(2**63), 2**63 - 1), drawn=st.integers(0, 2**63 - 1), choice=st.integers(0, 127))
def test_any_seed_becomes_one_that_the_engine_takes_and_choices_differ(
    seed: int | None, drawn: int, choice: int
) -> None:
    request = body(seed=seed)
    engine_seed = request.sampling(SamplingDefaults(), 16, drawn, choice).seed
    assert 0 <= engine_seed < 2**63
    assert engine_seed == ((drawn if seed is None else seed) + choice) % 2**63
    assert engine_seed != request.sampling(SamplingDefaults(), 16, drawn, choice + 1).seed


def test_more_tokens_at_least_than_at_most_is_refused_with_the_figures() -> None:
    with pytest.raises(BadRequestError, match="at most the tokens that can be generated, 16, not 17"):
        body(min_tokens=17).sampling(SamplingDefaults(), 16, 0, 0)


def test_a_top_p_of_zero_still_leaves_a_token() -> None:
    assert 0 < body(top_p=0).sampling(SamplingDefaults(), 16, 0, 0).top_p < 0.01


def test_minus_one_turns_top_k_off() -> None:
    assert body(top_k=-1).sampling(SamplingDefaults(top_k=5), 16, 0, 0).top_k == 0
