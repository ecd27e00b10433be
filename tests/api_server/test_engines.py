from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from api_server.admission import Admission
from api_server.engines import HEARTBEAT_AGE_S, EngineClient
from api_server.errors import UnavailableError
from api_server.mailbox import Mailbox, Sequence
from common.messages import Extra, Fatal, Finish, Ready, Step, Submit, pack_ints
from common.sampling import SamplingParams
from tests.api_server.fake_engine import MODEL, FakeEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_client(clock: Clock | None = None) -> EngineClient:
    return EngineClient(9, Admission(1_000, 1_000_000), clock or Clock())


def make_engine(client: EngineClient, number: int = 0, epoch: int = 1) -> FakeEngine:
    return FakeEngine(number=number, epoch=epoch, automatic=False).attach(client)


def send(client: EngineClient, prompt: tuple[int, ...] = (5, 6)) -> Sequence:
    place = client.admission.enter(0)
    place.resize(1, len(prompt))
    mailbox = Mailbox(place)
    sequence = Sequence(mailbox, 0, pack_ints("i", prompt), SamplingParams(seed=3), 2, "id")
    mailbox.add(sequence)
    client.submit(sequence)
    return sequence


def test_an_engine_is_ready_from_its_ready_until_its_heartbeat_stops() -> None:
    clock = Clock()
    client = make_client(clock)
    assert not client.is_ready
    engine = FakeEngine(automatic=False)
    client.connect(0, 1, engine)
    assert not client.is_ready
    engine.attach(client)
    assert client.is_ready
    clock.now += HEARTBEAT_AGE_S + 0.1
    assert not client.is_ready
    with pytest.raises(UnavailableError):
        send(client)
    engine.heartbeat()
    assert client.is_ready


def test_a_submit_carries_all_that_the_engine_needs() -> None:
    client = make_client()
    engine = make_engine(client)
    sequence = send(client)
    (submit,) = engine.submits
    assert (submit.api_id, submit.handle, submit.prompt) == (9, sequence.handle, sequence.prompt)
    assert (submit.params, submit.priority, submit.request_id) == (SamplingParams(seed=3), 2, "id")
    assert (submit.emitted, submit.delivered) == (b"", 0)


def test_requests_go_to_the_engine_with_the_least_open_work() -> None:
    client = make_client()
    engines = [make_engine(client, number) for number in range(3)]
    for _ in range(9):
        send(client)
    assert [len(engine.submits) for engine in engines] == [3, 3, 3]


def test_an_engine_that_cannot_be_reached_is_passed_over() -> None:
    client = make_client()
    first, second = make_engine(client, 0), make_engine(client, 1)
    first.reachable = False
    send(client)
    assert (len(first.submits), len(second.submits)) == (0, 1)
    second.reachable = False
    with pytest.raises(UnavailableError):
        send(client)


def test_every_open_request_of_a_lost_engine_ends_with_one_error() -> None:
    client = make_client()
    lost, other = make_engine(client, 0), make_engine(client, 1)
    sequences = [send(client) for _ in range(4)]
    client.disconnect(0, 1, "it died")
    ended = [sequence for sequence in sequences if sequence.finish]
    assert len(ended) == len(lost.submits) == 2
    assert all(sequence.finish == Finish.ERROR and sequence.lost for sequence in ended)
    assert lost.closed
    assert not other.closed
    assert client.totals.finished[Finish.ERROR] == 2


def test_messages_of_an_earlier_epoch_are_dropped() -> None:
    client = make_client()
    old = make_engine(client)
    sequence = send(client)
    make_engine(client, epoch=2)
    assert sequence.finish == Finish.ERROR
    fresh = send(client)
    old.deliver([(fresh.handle, [7], "old", Finish.STOP, None)])
    assert fresh.finish == Finish.NONE
    assert fresh.take_text() == ""


def test_the_news_that_an_earlier_epoch_has_ended_does_not_touch_the_present_one() -> None:
    client = make_client()
    make_engine(client, epoch=2)
    sequence = send(client)
    client.disconnect(0, 1, "late news")
    assert client.is_ready
    assert sequence.finish == Finish.NONE


def test_results_for_unknown_handles_are_ignored() -> None:
    client = make_client()
    engine = make_engine(client)
    sequence = send(client)
    engine.deliver(
        [(sequence.handle + 1, [1, 2], "?", Finish.STOP, None), (sequence.handle, [3], "!", Finish.NONE, None)]
    )
    assert sequence.take_ids() == [3]
    assert sequence.take_text() == "!"


def test_after_an_abort_nothing_more_arrives_and_the_engine_is_told_once() -> None:
    client = make_client()
    engine = make_engine(client)
    sequence = send(client)
    client.abort(sequence.mailbox)
    client.abort(sequence.mailbox)
    assert [abort.handle for abort in engine.aborts] == [sequence.handle]
    engine.deliver([(sequence.handle, [1], "late", Finish.ABORT, None)])
    assert sequence.take_text() == ""
    assert client.totals.finished[Finish.ABORT] == 1


def test_an_abort_that_found_no_way_is_sent_when_the_engine_is_heard_again() -> None:
    client = make_client()
    engine = make_engine(client)
    sequence = send(client)
    engine.reachable = False
    client.abort(sequence.mailbox)
    assert engine.aborts == []
    engine.reachable = True
    engine.heartbeat()
    assert [abort.handle for abort in engine.aborts] == [sequence.handle]


def test_an_ended_request_is_not_aborted() -> None:
    client = make_client()
    engine = make_engine(client)
    sequence = send(client)
    engine.run()
    client.abort(sequence.mailbox)
    assert engine.aborts == []


def test_an_engine_that_says_its_last_words_gets_nothing_more() -> None:
    client = make_client()
    make_engine(client)
    client.on_message(Fatal(0, 1, "out of memory"))
    assert not client.is_ready


def test_totals_count_tokens_both_ways() -> None:
    client = make_client()
    engine = make_engine(client)
    send(client, (1, 2, 3))
    engine.run()
    assert (client.totals.prompt_tokens, client.totals.generation_tokens) == (3, 3)
    assert client.totals.finished[Finish.LENGTH] == 1


class Traffic(RuleBasedStateMachine):
    """Whatever happens in whatever order: every request ends at most once, in order, and nothing stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.client = make_client()
        self.sequences: list[Sequence] = []
        self.submitted: dict[tuple[int, int, int], Sequence] = {}
        self.epochs = [0, 0]
        self.aborted: set[int] = set()
        self.pending = (0, 0, 0)  # engine, epoch and handle of the last submit

    @rule(number=st.integers(0, 1))
    def an_engine_starts(self, number: int) -> None:
        self.epochs[number] += 1
        client, epoch = self.client, self.epochs[number]
        machine = self

        class Recorder:
            def send(self, message: object) -> bool:
                if isinstance(message, Submit):
                    machine.pending = (number, epoch, message.handle)
                return True

            def close(self) -> None: ...

        client.connect(number, epoch, Recorder())
        client.on_message(Ready(number, epoch, MODEL))

    @rule(number=st.integers(0, 1), back=st.integers(0, 1))
    def an_engine_is_lost(self, number: int, back: int) -> None:
        self.client.disconnect(number, self.epochs[number] - back, "test")

    @rule()
    def a_request_comes(self) -> None:
        if not self.client.is_ready:
            return
        sequence = send(self.client)
        self.sequences.append(sequence)
        self.submitted[self.pending] = sequence

    @rule(choice=st.integers(0, 10**6), finish=st.sampled_from(list(Finish)), text=st.text(max_size=2))
    def a_result_comes(self, choice: int, finish: Finish, text: str) -> None:
        if not self.submitted:
            return
        number, epoch, handle = sorted(self.submitted)[choice % len(self.submitted)]
        sequence = self.submitted[number, epoch, handle]
        engine = self.client.engines.get(number)
        is_due = (
            not sequence.finish and id(sequence) not in self.aborted and engine is not None and engine.epoch == epoch
        )
        before = sequence.completion_tokens, sequence.finish
        columns = pack_ints("I", [handle]), pack_ints("H", [1]), bytes([finish]), pack_ints("i", [3])
        self.client.on_message(Step(number, epoch, 0, *columns, [text], {0: Extra(stop="x")} if finish else {}))
        after = sequence.completion_tokens, sequence.finish
        assert after == ((before[0] + 1, finish) if is_due else before)

    @rule(choice=st.integers(0, 10**6))
    def a_client_goes(self, choice: int) -> None:
        if self.sequences:
            sequence = self.sequences[choice % len(self.sequences)]
            if not sequence.finish:
                self.aborted.add(id(sequence))
            self.client.abort(sequence.mailbox)
            sequence.mailbox.place.leave()

    @invariant()
    def what_is_open_is_what_has_not_ended(self) -> None:
        open_now = {id(sequence) for engine in self.client.engines.values() for sequence in engine.open.values()}
        expected = {id(s) for s in self.sequences if not s.finish and id(s) not in self.aborted}
        assert open_now == expected
        ended = sum(self.client.totals.finished.values())
        assert ended == len(self.sequences) - len(expected)


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
