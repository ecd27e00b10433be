"""The sampler against a plain one, parameter by parameter and all together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from engine.sampling.operations import Operations
from engine.sampling.sampler import Sampler
from tests.engine.sampling.batch import CPU, Batch, Row, both, sample_one
from tests.engine.sampling.oracle import adjust, choose

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
GREEDY = SamplingParams(temperature=0.0)

PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 20, VOCAB, 1000]),
    "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
    "presence_penalty": st.sampled_from([0.0, -1.5, 1.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.4, 0.4]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.0, 3.0, 100.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    "allowed_token_ids": st.one_of(st.just(()), st.sets(TOKENS, min_size=1, max_size=12).map(tuple)),
    "min_tokens": st.integers(0, 6),
    "seed": st.integers(0, 2**63 - 1),
}

ROWS = st.builds(
    Row,
    params=st.fixed_dictionaries({}, optional=PARAMS).map(lambda fields: SamplingParams(**fields)),
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    output=st.lists(TOKENS, max_size=8),
    ends=st.sets(TOKENS, max_size=3).map(tuple),
)
# ties and impossible tokens are common; half steps keep float32 and float64 arithmetic the same
LOGITS = st.lists(
    st.one_of(st.integers(-12, 12).map(lambda n: n / 2), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB
)


@both
@settings(max_examples=400, deadline=None)
@given(row=ROWS, logits=LOGITS)
def test_every_parameter_does_what_the_plain_sampler_does(ops: Operations, row: Row, logits: list[float]) -> None:
    adjusted = adjust(logits, row.params, row.ends, row.prompt, row.output)
    choice = choose(adjusted, row.params, len(row.prompt) + len(row.output))
    assume(not choice.ambiguous)
    sampled = sample_one(ops, logits, row)
    assert sampled.tokens.tolist() == [choice.token]
    assert sampled.ended.tolist() == [choice.token in row.ends and len(row.output) >= row.params.min_tokens]


@both
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), data=st.data())
def test_a_row_never_depends_on_the_rest_of_its_batch(ops: Operations, rows: list[Row], data: st.DataObject) -> None:
    logits = torch.from_numpy(np.random.default_rng(len(rows)).standard_normal((5, len(rows), VOCAB)) * 3).float()
    together, alone = Batch(ops, rows, VOCAB), [Batch(ops, [row], VOCAB) for row in rows]
    for step in logits:
        places = data.draw(
            st.permutations(range(len(rows))).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n]))
        )
        together.step(step[places], places)
        for place in places:
            alone[place].step(step[place : place + 1])
    assert together.outputs == [batch.outputs[0] for batch in alone]


@both
@settings(max_examples=40, deadline=None)
@given(row=ROWS, cut=st.integers(0, 6))
def test_a_request_goes_on_after_preemption_as_if_it_had_not_been(ops: Operations, row: Row, cut: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(cut).standard_normal((6, 1, VOCAB)) * 3).float()
    whole = Batch(ops, [row], VOCAB)
    ended = [whole.step(step).ended.tolist() for step in logits]
    first = Batch(ops, [row], VOCAB)
    for step in logits[:cut]:
        first.step(step)
    resumed = Batch(ops, [replace(row, output=first.outputs[0])], VOCAB)
    again = [resumed.step(step).ended.tolist() for step in logits[cut:]]
    assert resumed.outputs == whole.outputs
    assert again == ended[cut:]


@both
def test_a_rounding_error_in_the_logits_flips_practically_no_draw(ops: Operations) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 4000, generator=generator) * 3
    nudged = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 8e-5
    flips = 0
    for params in (SamplingParams(), SamplingParams(top_p=0.9, top_k=50), SamplingParams(top_p=0.95)):
        rows = [Row(replace(params, seed=seed)) for seed in range(len(logits))]
        first, second = Batch(ops, rows, 4000), Batch(ops, rows, 4000)
        flips += int((first.step(logits).tokens != second.step(nudged).tokens).sum())
    assert flips <= 1


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("allowed", [(), (7, 5)])
def test_logits_that_allow_nothing_give_the_lowest_allowed_token(
    ops: Operations, temperature: float, allowed: tuple[int, ...]
) -> None:
    lowest = min(allowed, default=0)
    params = SamplingParams(temperature=temperature, allowed_token_ids=allowed, top_p=0.9)
    for value in (math.nan, -math.inf):
        assert sample_one(ops, [value] * 300, Row(params)).tokens.tolist() == [lowest]
    assert sample_one(ops, [1.0] * 5 + [math.nan] * 295, Row(params)).tokens.tolist() == [lowest]


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_logit_is_chosen(ops: Operations, temperature: float) -> None:
    logits = [0.0] * 300
    logits[200] = math.inf
    assert sample_one(ops, logits, Row(SamplingParams(temperature=temperature))).tokens.tolist() == [200]


@both
def test_greedy_takes_the_lowest_of_equal_tokens(ops: Operations) -> None:
    logits = [0.0] * 300
    logits[20] = logits[250] = 2.0
    assert sample_one(ops, logits, Row(GREEDY)).tokens.tolist() == [20]


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_token_can_be_drawn_only_once_min_tokens_have_been(ops: Operations, temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 90.0, 50.0
    batch = Batch(ops, [Row(replace(GREEDY, temperature=temperature, min_tokens=2), ends=(3,))], VOCAB)
    assert [batch.step(logits).ended.tolist() for _ in range(3)] == [[False], [False], [True]]
    assert batch.outputs == [[4, 4, 3]]


@both
@pytest.mark.parametrize("params", [SamplingParams(min_p=1.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_the_narrowest_truncation_leaves_the_likeliest_and_its_equals(ops: Operations, params: SamplingParams) -> None:
    logits = [1.0, 3.0, 2.0, 3.0, 2.9]
    drawn = {sample_one(ops, logits, Row(replace(params, seed=seed))).tokens.item() for seed in range(60)}
    assert drawn == {1, 3}


@both
def test_min_tokens_that_forbid_every_allowed_token_do_not_end_the_row(ops: Operations) -> None:
    params = replace(GREEDY, min_tokens=2, allowed_token_ids=(3,))
    batch = Batch(ops, [Row(params, ends=(3,))], VOCAB)
    assert [batch.step(torch.zeros(1, VOCAB)).ended.tolist() for _ in range(3)] == [[False], [False], [True]]
    assert batch.outputs == [[3, 3, 3]]


def test_token_ids_outside_the_vocabulary_are_refused_by_field_and_leave_the_row_free() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    for field, params in {
        "logit_bias": SamplingParams(logit_bias=((VOCAB, 1.0),)),
        "allowed_token_ids": SamplingParams(allowed_token_ids=(-1,), presence_penalty=1.0),
    }.items():
        with pytest.raises(ValueError, match=f"{field}: token ids must be from 0 to 39"):
            sampler.admit(0, params, (), [1])
    with pytest.raises(ValueError, match="prompt"):
        sampler.admit(0, SamplingParams(presence_penalty=1.0), (), [VOCAB])
    sampler.admit(0, GREEDY, (VOCAB + 5,), [1])  # an end token that cannot be drawn ends nothing
    sampled = sampler.sample(torch.zeros(1, VOCAB), sampler.row_set(np.array([0])), torch.tensor([1]))
    assert sampled.ended.tolist() == [False]


def test_a_row_set_is_made_again_only_when_it_must_be() -> None:
    sampler = Sampler(3, VOCAB, CPU)
    for row in range(3):
        sampler.admit(row, GREEDY, (), [1])
    rows = np.array([2, 0])
    first = sampler.row_set(rows)
    assert sampler.row_set(rows.copy()) is first
    assert sampler.row_set(np.array([0, 2])) is not first
    kept = sampler.row_set(rows)
    sampler.admit(1, GREEDY, (), [1])
    assert sampler.row_set(rows) is not kept


def test_a_reused_row_keeps_nothing_of_its_last_request() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    busy = SamplingParams(
        temperature=1.0,
        presence_penalty=2.0,
        logit_bias=((5, 100.0),),
        allowed_token_ids=(5,),
        min_tokens=9,
        logprobs=3,
    )
    for _ in range(10):  # slots return too
        sampler.admit(0, busy, (1, 2, 3, 4), [1, 2], [5])
        sampler.release(0)
    sampler.admit(0, GREEDY, (), [1])
    rows = sampler.row_set(np.array([0]))
    assert not rows.adjusted
    assert rows.draws is None
    assert rows.logprobs is None
    assert sampler.sample(torch.zeros(1, VOCAB), rows, torch.tensor([1])).tokens.tolist() == [0]
    assert len(sampler._pool.in_prompt) == 4


def test_a_reused_slot_keeps_no_counts() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5)
    z = torch.zeros(1, VOCAB)
    z[0, 5], z[0, 7] = 1.0, 0.9
    for _ in range(2 * len(sampler._pool.in_prompt) + 8):
        sampler.admit(0, params, (), [1], [])
        drawn = [
            sampler.sample(z.clone(), sampler.row_set(np.array([0])), torch.tensor([1 + i])).tokens.item()
            for i in (0, 1)
        ]
        assert drawn == [5, 7]
        sampler.admit(0, params, (), [5], [])
        assert sampler.sample(z.clone(), sampler.row_set(np.array([0])), torch.tensor([1])).tokens.item() == 7
