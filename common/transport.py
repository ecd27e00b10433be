"""ZeroMQ between API and engine processes: PUSH/PULL pairs, each socket used by one thread alone.

Three settings without which messages get lost or run twice, each tried: IMMEDIATE, or a PUSH queues for a peer that is
not there and delivers to whoever binds the endpoint next; linger 0, or a dead peer holds up the exit; a fresh endpoint
for each engine life.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace

import zmq

from common.messages import Extra, Finish, Message, Step, ToApi, ToEngine, pack_ints, unpack_ints
from common.wire import WireError, decode, encode

log = logging.getLogger(__name__)

HIGH_WATER = 64  # messages that wait in a socket for a slow API process before they are merged
MERGED_BYTES = 4 * 32768  # of token ids in one merged message; its counts are 16 bits wide
RECONNECT_MS = 20
RECEIVE_MS = 200  # how often a receiving thread looks whether it should end
DRAIN_AT_ONCE = 64  # messages taken per turn of the event loop


def _socket(kind: int, high_water: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set_hwm(high_water)
    return socket


class EngineIntake:
    """The engine's receiving end: a thread that hands every message to `on_message`, on that thread."""

    def __init__(self, endpoint: str, on_message: Callable[[ToEngine], None]) -> None:
        """Binds at once, so that a peer's HELLO finds it. Raises zmq.ZMQError where the endpoint cannot be bound."""
        self._on_message = on_message
        self._socket = _socket(zmq.PULL, 0)
        self._socket.rcvtimeo = RECEIVE_MS
        self._socket.bind(endpoint)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the socket. Waits for it."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                data = self._socket.recv()
            except zmq.Again:
                continue
            try:
                message = decode(data)
            except WireError as e:
                log.warning("dropped a message: %s", e)
                continue
            try:
                self._on_message(message)  # type: ignore[arg-type]  # what is not for an engine, the engine refuses
            except Exception:  # one message must not end the thread that all others come through
                log.exception("a %s could not be taken in", type(message).__name__)
        self._socket.close()


class EngineOutbox:
    """The engine's sending ends, one per API process. Owner: the output thread.

    A send never blocks. What a busy peer cannot take waits here and merges: a STEP grows with tokens, not with steps.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._backlog: dict[int, list[ToApi]] = {}
        self._seqs: dict[int, int] = {}

    def connect(self, api_id: int, endpoint: str) -> None:
        """Connecting again changes nothing."""
        if api_id in self._sockets:
            return
        socket = self._sockets[api_id] = _socket(zmq.PUSH, HIGH_WATER)
        socket.connect(endpoint)

    def drop(self, api_id: int) -> None:
        """Forgets an API process and what waits for it."""
        self._backlog.pop(api_id, None)
        self._seqs.pop(api_id, None)
        socket = self._sockets.pop(api_id, None)
        if socket is not None:
            socket.close()

    def send(self, api_id: int, message: ToApi) -> None:
        """In order per peer. Messages to a peer that was dropped are dropped too."""
        socket = self._sockets.get(api_id)
        if socket is None:
            return
        waiting = self._backlog.get(api_id)
        if not waiting and self._try(api_id, socket, message):
            return
        if waiting is None:
            waiting = self._backlog[api_id] = []
        last = waiting[-1] if waiting else None
        if isinstance(message, Step) and isinstance(last, Step) and len(last.token_ids) < MERGED_BYTES:
            waiting[-1] = merge_steps(last, message)
        elif type(message) is type(last) and not isinstance(message, Step):
            waiting[-1] = message  # only the newest heartbeat counts
        else:
            waiting.append(message)

    def flush(self) -> bool:
        """Sends what waits; True while something still does."""
        for api_id, waiting in list(self._backlog.items()):
            socket = self._sockets[api_id]
            while waiting and self._try(api_id, socket, waiting[0]):
                waiting.pop(0)
            if not waiting:
                del self._backlog[api_id]
        return bool(self._backlog)

    def close(self) -> None:
        for api_id in list(self._sockets):
            self.drop(api_id)

    def _try(self, api_id: int, socket: zmq.Socket[bytes], message: Message) -> bool:
        """STEPs are numbered as they leave, so that merging makes no gap."""
        seq = self._seqs.get(api_id, 0)
        if isinstance(message, Step):
            message = replace(message, seq=seq)
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        if isinstance(message, Step):
            self._seqs[api_id] = seq + 1
        return True


class ApiInbox:
    """The API process's receiving end, on its event loop: one callback per message, no task and no thread."""

    def __init__(self, endpoint: str, on_message: Callable[[ToApi], None]) -> None:
        self.endpoint = endpoint
        self._on_message = on_message
        self._socket = _socket(zmq.PULL, 0)
        self._socket.bind(endpoint)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)  # the descriptor signals changes only; one may lie behind us

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()

    def _drain(self) -> None:
        if self._loop is None:
            return
        for _ in range(DRAIN_AT_ONCE):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data)
            except WireError as e:
                log.warning("dropped a message: %s", e)
                continue
            self._on_message(message)  # type: ignore[arg-type]
        self._loop.call_soon(self._drain)


class EngineTransport:
    """The API process's sending end to one engine incarnation. Owner: the event loop's thread."""

    def __init__(self, endpoint: str) -> None:
        self._socket = _socket(zmq.PUSH, 0)  # admission bounds what can be on its way
        self._socket.connect(endpoint)

    def send(self, message: ToEngine) -> bool:
        """Never blocks. False: the engine cannot be reached, and the message was not taken."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def merge_steps(first: Step, second: Step) -> Step:
    """One message that says what two in a row say. A request's entries become one; its order of tokens is kept."""
    entries: dict[int, _Entry] = {}
    for step in (first, second):
        tokens, position = unpack_ints("i", step.token_ids), 0
        columns = zip(unpack_ints("I", step.handles), unpack_ints("H", step.counts), strict=True)
        for index, (handle, count) in enumerate(columns):
            entry = entries.setdefault(handle, _Entry())
            entry.token_ids += tokens[position : position + count]
            entry.texts.append(step.texts[index])
            entry.finish = max(entry.finish, step.finishes[index])
            entry.extra = _merge_extras(entry.extra, step.extras.get(index))
            position += count
    token_ids = array("i")
    for entry in entries.values():
        token_ids.extend(entry.token_ids)
    return replace(
        second,
        handles=pack_ints("I", entries),
        counts=pack_ints("H", [len(entry.token_ids) for entry in entries.values()]),
        finishes=bytes(entry.finish for entry in entries.values()),
        token_ids=pack_ints("i", token_ids),
        texts=["".join(entry.texts) for entry in entries.values()],
        extras={i: entry.extra for i, entry in enumerate(entries.values()) if entry.extra is not None},
    )


class _Entry:
    __slots__ = ("extra", "finish", "texts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.finish: int = Finish.NONE
        self.extra: Extra | None = None


def _merge_extras(first: Extra | None, second: Extra | None) -> Extra | None:
    if first is None or second is None:
        return first or second
    return Extra(
        logprobs=(first.logprobs or []) + (second.logprobs or []) or None,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        stop=first.stop if first.stop is not None else second.stop,
        usage=second.usage or first.usage,
        error=first.error or second.error,
    )


def engine_endpoint(run_dir: str, index: int, epoch: int) -> str:
    """Where one incarnation of an engine listens."""
    return f"ipc://{run_dir}/engine-{index}-{epoch}"


def api_endpoint(run_dir: str, api_id: int) -> str:
    """Where one incarnation of an API process listens."""
    return f"ipc://{run_dir}/api-{api_id}"
