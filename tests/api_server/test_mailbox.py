from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from api_server.admission import Admission
from api_server.mailbox import Mailbox, Sequence
from common.messages import Extra, Finish, pack_ints
from common.sampling import SamplingParams
from tests.api_server.fake_engine import token_logprob


def make_mailbox(count: int = 1, patient: bool = False) -> Mailbox:
    mailbox = Mailbox(Admission(1_000, 1_000_000).enter(0), patient)
    mailbox.place.resize(count, count * 2)
    for index in range(count):
        mailbox.add(Sequence(mailbox, index, pack_ints("i", [5, 6]), SamplingParams()))
    return mailbox


def ids(*tokens: int) -> bytes:
    return pack_ints("i", tokens)


def test_what_a_slow_client_has_not_taken_is_merged_into_one_piece() -> None:
    mailbox = make_mailbox()
    (sequence,) = mailbox.sequences
    for i in range(1_000):
        sequence.put(ids(i), "ab", Finish.NONE, None)
    assert mailbox.take_news() == [sequence]
    assert sequence.take_text() == "ab" * 1_000
    assert sequence.take_ids() == list(range(1_000))
    assert mailbox.take_news() == []
    assert sequence.take_text() == ""
    assert sequence.take_ids() == []


@given(st.lists(st.one_of(st.text(max_size=3), st.none()), max_size=40))
def test_text_and_ids_arrive_whole_however_takes_fall_between_puts(moves: list[str | None]) -> None:
    mailbox = make_mailbox()
    (sequence,) = mailbox.sequences
    texts, tokens = [], []
    put = [move for move in moves if move is not None]
    for i, move in enumerate(moves):
        if move is None:
            texts.append(sequence.take_text())
            tokens += sequence.take_ids()
        else:
            sequence.put(ids(i), move, Finish.NONE, None)
    assert "".join([*texts, sequence.take_text()]) == "".join(put)
    assert [*tokens, *sequence.take_ids()] == [i for i, move in enumerate(moves) if move is not None]
    assert sequence.delivered == len("".join(put))


def test_a_sequence_leaves_the_queue_with_its_first_result_and_only_once() -> None:
    mailbox = make_mailbox(2)
    first, second = mailbox.sequences
    first.put(ids(1), "a", Finish.NONE, None)
    assert (mailbox.place.requests, mailbox.place.tokens) == (1, 2)
    first.put(ids(2), "b", Finish.STOP, None)
    assert (mailbox.place.requests, mailbox.place.tokens) == (1, 2)
    second.put(b"", "", Finish.ERROR, Extra(error="no"))
    assert (mailbox.place.requests, mailbox.place.tokens) == (0, 0)


def test_logprobs_are_taken_once_and_prompt_logprobs_stay() -> None:
    (sequence,) = make_mailbox().sequences
    sequence.put(ids(1), "a", Finish.NONE, Extra(logprobs=[token_logprob("a", 1)], prompt_logprobs=[None]))
    sequence.put(ids(2), "b", Finish.NONE, Extra(logprobs=[token_logprob("b", 1)]))
    assert [token[0] for token in sequence.take_logprobs()] == ["a", "b"]
    assert sequence.take_logprobs() == []
    assert sequence.prompt_logprobs == [None]


def test_counts_are_the_engines_once_it_has_told_them() -> None:
    (sequence,) = make_mailbox().sequences
    sequence.put(ids(1, 2, 3), "a", Finish.NONE, None)
    assert (sequence.prompt_tokens, sequence.completion_tokens, sequence.cached_tokens) == (2, 3, 0)
    sequence.put(b"", "", Finish.STOP, Extra(usage=(2, 4, 1)))
    assert (sequence.prompt_tokens, sequence.completion_tokens, sequence.cached_tokens) == (2, 4, 1)


async def _is_waiting(task: asyncio.Task[None]) -> bool:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return not task.done()


async def test_an_eager_waiter_wakes_with_each_result() -> None:
    mailbox = make_mailbox()
    task = asyncio.create_task(mailbox.wait())
    assert await _is_waiting(task)
    mailbox.sequences[0].put(ids(1), "a", Finish.NONE, None)
    await task
    await mailbox.wait()  # not taken yet: still news


async def test_a_patient_waiter_sleeps_until_every_sequence_has_ended() -> None:
    mailbox = make_mailbox(2, patient=True)
    task = asyncio.create_task(mailbox.wait())
    first, second = mailbox.sequences
    first.put(ids(1), "a", Finish.STOP, None)
    second.put(ids(1), "a", Finish.NONE, None)
    assert await _is_waiting(task)
    second.put(ids(1), "a", Finish.LENGTH, None)
    await task


async def test_a_patient_waiter_wakes_when_one_sequence_fails() -> None:
    mailbox = make_mailbox(2, patient=True)
    task = asyncio.create_task(mailbox.wait())
    assert await _is_waiting(task)
    mailbox.sequences[1].put(b"", "", Finish.ERROR, None)
    await task


async def test_a_client_that_has_gone_wakes_every_waiter() -> None:
    for patient in (False, True):
        mailbox = make_mailbox(1, patient)
        task = asyncio.create_task(mailbox.wait())
        assert await _is_waiting(task)
        mailbox.leave()
        await task
        assert mailbox.gone
