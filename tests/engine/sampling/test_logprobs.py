"""Log probabilities come from the model's own logits, and are finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from common.sampling import SamplingParams
from engine.sampling.logprobs import FLOOR, Logprobs
from engine.sampling.operations import Operations
from engine.sampling.sampler import prompt_logprobs
from tests.engine.sampling.batch import Batch, Row, both, sample_one

GREEDY = SamplingParams(temperature=0.0, logprobs=3)
VOCAB = 1000


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def found(columns: Logprobs | None) -> Logprobs:
    assert columns is not None
    return columns


@both
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_they_are_those_of_a_log_softmax(ops: Operations, count: int) -> None:
    z = logits(4)
    batch = Batch(ops, [Row(SamplingParams(logprobs=count, seed=i, temperature=2.0)) for i in range(4)], VOCAB)
    sampled = batch.step(z)
    expected = z.double().log_softmax(dim=1)
    for place, (token, logprob, top) in enumerate(found(sampled.logprobs).entries(sampled.tokens)):
        assert token == batch.outputs[place][0]
        assert logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
        assert [candidate for candidate, _ in top] == expected[place].argsort(descending=True)[:count].tolist()
        assert [value for _, value in top] == pytest.approx([float(expected[place, t]) for t, _ in top], abs=1e-5)


@both
def test_the_chosen_token_has_the_identical_float_among_the_likeliest(ops: Operations) -> None:
    batch = Batch(ops, [Row(replace(GREEDY, logprobs=20))] * 50, VOCAB)
    sampled = batch.step(logits(50))
    for token, logprob, top in found(sampled.logprobs).entries(sampled.tokens):
        assert top[0] == (token, logprob)


@both
def test_penalties_bias_and_temperature_leave_them_as_they_are(ops: Operations) -> None:
    params = SamplingParams(
        logprobs=2, temperature=0.5, top_k=1, presence_penalty=2.0, logit_bias=((9, 100.0),), min_tokens=5
    )
    z = logits(1)
    sampled = sample_one(ops, z[0], Row(params, output=[int(z.argmax())], ends=(4,)))
    assert sampled.tokens.tolist() == [9]
    [(token, logprob, [best, _])] = found(sampled.logprobs).entries(sampled.tokens)
    expected = z[0].double().log_softmax(dim=0)
    assert (token, best[0]) == (9, int(z.argmax()))
    assert (logprob, best[1]) == pytest.approx((float(expected[9]), float(expected.max())), abs=1e-5)


@both
def test_only_rows_that_asked_get_them_and_as_many_as_they_asked_for(ops: Operations) -> None:
    wanted = [None, 4, None, 0, 2]
    batch = Batch(ops, [Row(SamplingParams(temperature=0.0, logprobs=count)) for count in wanted], VOCAB)
    sampled = batch.step(logits(5))
    columns = found(sampled.logprobs)
    assert columns.places.tolist() == [1, 3, 4]
    assert [len(top) for _, _, top in columns.entries(sampled.tokens[columns.places])] == [4, 0, 2]
    assert batch.step(logits(5)[:1], [0]).logprobs is None


@both
@pytest.mark.parametrize(
    "row",
    [
        [math.nan] * VOCAB,
        [-math.inf] * VOCAB,
        [0.0] + [-math.inf] * (VOCAB - 1),
        [0.0] * (VOCAB - 1) + [math.inf],
        [0.0] * (VOCAB - 1) + [math.nan],
        [3e38, -3e38] * (VOCAB // 2),
    ],
    ids=["nan", "impossible", "certain", "infinite", "one nan", "huge"],
)
def test_they_are_finite_whatever_the_logits(ops: Operations, row: list[float]) -> None:
    sampled = sample_one(ops, row, Row(replace(GREEDY, logprobs=20)))
    for _, logprob, top in found(sampled.logprobs).entries(sampled.tokens):
        for value in (logprob, *(value for _, value in top)):
            assert math.isfinite(value)
            assert FLOOR <= value <= 0


@both
def test_equally_likely_candidates_come_in_order_of_their_ids(ops: Operations) -> None:
    z = torch.zeros(VOCAB)
    z[[700, 3, 500]] = 5.0
    sampled = sample_one(ops, z, Row(GREEDY))
    [(token, _, top)] = found(sampled.logprobs).entries(sampled.tokens)
    assert token == 3
    assert [candidate for candidate, _ in top] == [3, 500, 700]


def test_a_prompt_is_scored_by_what_follows_each_token() -> None:
    z, following = logits(30), torch.arange(30) * 7
    columns = prompt_logprobs(z, following, 2)
    expected = z.double().log_softmax(dim=1)
    entries = columns.entries(following)
    assert len(entries) == 30
    for place, (token, logprob, top) in enumerate(entries):
        assert token == 7 * place
        assert logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
        assert top[0][0] == int(expected[place].argmax())
        assert len(top) == 2


def test_scoring_nothing_gives_nothing() -> None:
    assert prompt_logprobs(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64), 3).entries(torch.empty(0)) == []


@both
def test_more_candidates_than_tokens_give_every_token(ops: Operations) -> None:
    sampled = sample_one(ops, [1.0, 3.0, 2.0], Row(replace(GREEDY, logprobs=20), prompt=[0]))
    [(_, _, top)] = found(sampled.logprobs).entries(sampled.tokens)
    assert [token for token, _ in top] == [1, 2, 0]
