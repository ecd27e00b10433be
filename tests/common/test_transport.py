"""ZeroMQ as this project uses it: nothing blocks, nothing is lost, nothing waits for the dead."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from queue import Queue

from hypothesis import given
from hypothesis import strategies as st

from common import transport
from common.messages import Abort, Extra, Finish, Hello, Message, Stats, Step, ToApi, pack_ints, unpack_ints
from common.transport import ApiInbox, EngineIntake, EngineOutbox, EngineTransport, merge_steps
from tests.system.server import wait_until


def step(*entries: tuple[int, list[int], str, Finish], extras: dict[int, Extra] | None = None) -> Step:
    return Step(
        0,
        1,
        0,
        pack_ints("I", [entry[0] for entry in entries]),
        pack_ints("H", [len(entry[1]) for entry in entries]),
        bytes(entry[3] for entry in entries),
        pack_ints("i", [token for entry in entries for token in entry[1]]),
        [entry[2] for entry in entries],
        extras or {},
    )


def contents(steps: list[Step]) -> dict[int, tuple[list[int], str, int]]:
    """By handle: all token ids, all text, the finish."""
    found: dict[int, tuple[list[int], str, int]] = {}
    for message in steps:
        tokens, position = unpack_ints("i", message.token_ids), 0
        columns = zip(unpack_ints("I", message.handles), unpack_ints("H", message.counts), strict=True)
        for index, (handle, count) in enumerate(columns):
            ids, text, finish = found.get(handle, ([], "", 0))
            ids = ids + tokens[position : position + count]
            found[handle] = (ids, text + message.texts[index], max(finish, message.finishes[index]))
            position += count
    return found


entries = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=2), st.text(max_size=3), st.just(Finish.NONE)),
    max_size=6,
    unique_by=lambda entry: entry[0],
)


@given(st.lists(entries, min_size=2, max_size=5))
def test_merged_steps_say_what_the_single_ones_said(batches: list[list[tuple[int, list[int], str, Finish]]]) -> None:
    steps = [step(*batch) for batch in batches]
    merged = steps[0]
    for message in steps[1:]:
        merged = merge_steps(merged, message)
    assert contents([merged]) == contents(steps)
    handles = unpack_ints("I", merged.handles)
    assert len(handles) == len(set(handles))


def test_merging_keeps_finishes_and_extras() -> None:
    first = step((1, [5], "a", Finish.NONE), extras={0: Extra(logprobs=[("a", -1.0, b"a", [])])})
    second = step((1, [6], "b", Finish.STOP), extras={0: Extra(logprobs=[("b", -2.0, b"b", [])], usage=(1, 2, 0))})
    merged = merge_steps(first, second)
    assert contents([merged]) == {1: ([5, 6], "ab", Finish.STOP)}
    assert merged.extras == {0: Extra(logprobs=[("a", -1.0, b"a", []), ("b", -2.0, b"b", [])], usage=(1, 2, 0))}


def test_a_message_reaches_the_engine(tmp_path: Path) -> None:
    received: Queue[Message] = Queue()
    intake = EngineIntake(f"ipc://{tmp_path}/engine", received.put)
    intake.start()
    out = EngineTransport(f"ipc://{tmp_path}/engine")
    wait_until(lambda: out.send(Hello(1, "x")), what="the connection")
    assert received.get(timeout=5) == Hello(1, "x")
    out.close()
    intake.stop()


def test_nothing_is_queued_for_an_engine_that_is_not_there(tmp_path: Path) -> None:
    out = EngineTransport(f"ipc://{tmp_path}/engine")
    assert out.send(Abort(1, 1)) is False
    received: Queue[Message] = Queue()
    intake = EngineIntake(f"ipc://{tmp_path}/engine", received.put)
    intake.start()
    wait_until(lambda: out.send(Abort(1, 2)), what="the connection")
    assert received.get(timeout=5) == Abort(1, 2)
    assert received.empty()
    out.close()
    intake.stop()


def test_rubbish_is_dropped_and_the_next_message_arrives(tmp_path: Path) -> None:
    received: Queue[Message] = Queue()
    intake = EngineIntake(f"ipc://{tmp_path}/engine", received.put)
    intake.start()
    out = EngineTransport(f"ipc://{tmp_path}/engine")
    wait_until(lambda: out.send(Abort(1, 1)), what="the connection")
    out._socket.send(b"\x07rubbish")
    out.send(Abort(1, 2))
    assert [received.get(timeout=5), received.get(timeout=5)] == [Abort(1, 1), Abort(1, 2)]
    out.close()
    intake.stop()


async def test_a_slow_api_process_gets_everything_merged_and_in_order(tmp_path: Path) -> None:
    """It reads nothing while thousands of steps are sent; what the socket cannot hold waits as one message."""
    received: list[ToApi] = []
    inbox = ApiInbox(f"ipc://{tmp_path}/api", received.append)
    outbox = EngineOutbox()
    outbox.connect(1, inbox.endpoint)
    sent = [step((7, [i], f"{i},", Finish.NONE)) for i in range(5000)]
    for message in sent:
        outbox.send(1, message)
    outbox.send(1, Stats(0, 1, 1, 0, 0))
    outbox.send(1, Stats(0, 1, 2, 0, 0))
    assert len(outbox._backlog[1]) <= 3, "a backlog of steps must merge"
    inbox.start()
    while outbox.flush() or not isinstance(received[-1] if received else None, Stats):
        await asyncio.sleep(0.005)
    steps = [message for message in received if isinstance(message, Step)]
    assert contents(steps) == contents(sent)
    assert [message.seq for message in steps] == list(range(len(steps))), "merging makes no gap in the numbers"
    assert len(steps) < len(sent)
    assert [message for message in received if isinstance(message, Stats)][-1].progress == 2
    inbox.close()
    outbox.close()


async def test_more_messages_than_one_turn_takes_all_arrive(tmp_path: Path) -> None:
    received: list[ToApi] = []
    inbox = ApiInbox(f"ipc://{tmp_path}/api", received.append)
    inbox.start()
    outbox = EngineOutbox()
    outbox.connect(1, inbox.endpoint)
    count = 10 * transport.DRAIN_AT_ONCE

    def send() -> None:
        for index in range(count):
            outbox.send(1, step((index, [index], "x", Finish.NONE)))
        while outbox.flush():
            pass

    thread = threading.Thread(target=send)
    thread.start()
    while len(contents([m for m in received if isinstance(m, Step)])) < count:
        await asyncio.sleep(0.01)
    thread.join()
    inbox.close()
    outbox.close()


def test_a_dropped_api_process_is_forgotten(tmp_path: Path) -> None:
    outbox = EngineOutbox()
    outbox.connect(1, f"ipc://{tmp_path}/nobody")
    outbox.send(1, step((1, [1], "x", Finish.NONE)))
    assert outbox.flush() is True
    outbox.drop(1)
    assert outbox.flush() is False
    outbox.send(1, step((1, [1], "x", Finish.NONE)))
    assert outbox.flush() is False
    outbox.close()


def test_an_error_in_taking_a_message_in_loses_no_other(tmp_path: Path) -> None:
    received: Queue[Message] = Queue()

    def take(message: Message) -> None:
        if message == Abort(1, 1):
            raise RuntimeError("planted")
        received.put(message)

    intake = EngineIntake(f"ipc://{tmp_path}/engine", take)
    intake.start()
    out = EngineTransport(f"ipc://{tmp_path}/engine")
    wait_until(lambda: out.send(Abort(1, 1)), what="the connection")
    out.send(Abort(1, 2))
    assert received.get(timeout=5) == Abort(1, 2)
    out.close()
    intake.stop()


def test_a_backlog_merges_only_as_far_as_its_counts_reach() -> None:
    outbox = EngineOutbox()
    outbox.connect(1, "ipc:///nowhere")
    for _ in range(70):
        outbox.send(1, step((7, [5] * 1000, "x", Finish.NONE)))
    assert sum(len(message.token_ids) for message in outbox._backlog[1] if isinstance(message, Step)) == 4 * 70_000
    assert len(outbox._backlog[1]) == 3
    outbox.close()
