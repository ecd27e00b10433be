"""The messages between API and engine processes, as frozen objects. `common.wire` turns them into bytes and back.

In single-process mode the same objects are handed over as they are.

Columns of integers are little-endian bytes: `<i4` token ids, `<u4` handles, `<u2` counts.
A handle names a request within one API process; the engine answers with it.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from common.sampling import SamplingParams

PROTOCOL_VERSION = 1


class Finish(IntEnum):
    """Why a request ended; NONE while it runs. Every request gets exactly one other than NONE."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """API → engine, first: who I am and where I listen. The engine answers with READY when the protocol fits."""

    api_id: int  # unique per API process incarnation
    endpoint: str
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Submit:
    """API → engine: run this request."""

    api_id: int
    handle: int
    prompt: bytes  # <i4 token ids, not empty
    params: SamplingParams
    priority: int = 0  # lower runs first
    emitted: bytes = b""  # <i4 token ids that an earlier engine produced already
    delivered: int = 0  # characters of their text that the client has
    request_id: str = ""  # for logs only
    sent_ns: int = 0  # time.monotonic_ns() at the API process
    cache_salt: str = ""  # requests with different ones share no cached prefix


@dataclass(frozen=True, slots=True)
class Abort:
    """API → engine: the client has gone. Answered by a terminal ABORT, unless the request ended before."""

    api_id: int
    handle: int


@dataclass(frozen=True, slots=True)
class Call:
    """API or supervisor → engine: a control call; `name` is one of `drop_api`."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine → API: I serve. Answers every HELLO."""

    engine: int
    epoch: int
    model: dict[str, Any]  # max_model_len, vocab_size, eos_token_ids, dtype, kv_cache_tokens, block_size, max_num_seqs
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Extra:
    """What only some requests have in a STEP.

    logprobs: one `TokenLogprob` for each token of this request in this step.
    prompt_logprobs: once, before the first token: one for each prompt token, None for the first.
    stop: the stop string or stop token id that ended it. usage: (prompt, completion, cached) tokens, with a terminal.
    error: a sentence for the client, with Finish.ERROR.
    """

    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop: str | int | None = None
    usage: tuple[int, int, int] | None = None
    error: str | None = None


# (token text, logprob, bytes of the token, [(text, logprob, bytes, token id), …] likeliest first)
Candidate = tuple[str, float, bytes, int]
TokenLogprob = tuple[str, float, bytes, list[Candidate]]


@dataclass(frozen=True, slots=True)
class Step:
    """Engine → API: what one or more steps brought, by column; entry i of every column is one request.

    `counts[i]` token ids of request i stand in `token_ids`, in order of the entries; `texts[i]` is new text, often "".
    """

    engine: int
    epoch: int
    seq: int  # rises by one per message and API process
    handles: bytes  # <u4
    counts: bytes  # <u2
    finishes: bytes  # u1, of `Finish`
    token_ids: bytes  # <i4
    texts: list[str]
    extras: dict[int, Extra] = field(default_factory=dict)  # by entry


@dataclass(frozen=True, slots=True)
class Stats:
    """Engine → API: heartbeat, at least every half second, and at once after a change when idle."""

    engine: int
    epoch: int
    progress: int  # rises with every step and every idle wake-up
    running: int
    waiting: int
    gauges: dict[str, float] = field(default_factory=dict)  # kv_cache_usage, …
    counters: dict[str, int] = field(default_factory=dict)  # totals since this epoch began


@dataclass(frozen=True, slots=True)
class Fatal:
    """Engine → API: my last words."""

    engine: int
    epoch: int
    reason: str


ToEngine = Hello | Submit | Abort | Call
ToApi = Ready | Step | Stats | Fatal
Message = ToEngine | ToApi


def pack_ints(code: str, values: Any) -> bytes:
    """`code` is an `array` type code: 'i' token ids, 'I' handles, 'H' counts."""
    column = array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack_ints(code: str, data: bytes) -> list[int]:
    """Inverse of `pack_ints`. Raises ValueError where the length is not a multiple of the item's size."""
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()
