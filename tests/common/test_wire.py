"""What is encoded is decoded again; whatever else comes in is a WireError and nothing worse."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import (
    Abort,
    Call,
    Extra,
    Fatal,
    Finish,
    Hello,
    Message,
    Ready,
    Stats,
    Step,
    Submit,
    pack_ints,
    unpack_ints,
)
from common.sampling import SamplingParams
from common.wire import WireError, decode, encode

token_ids = st.integers(-(2**31), 2**31 - 1)
handles = st.integers(0, 2**32 - 1)
candidates = st.tuples(st.text(), st.floats(allow_nan=False), st.binary(), st.integers(0, 9))
token_logprobs = st.tuples(st.text(), st.floats(allow_nan=False), st.binary(), st.lists(candidates, max_size=3))
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 10**6),
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 10**5), st.floats(-100, 100)), max_size=3).map(tuple),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 10**5), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
extras = st.builds(
    Extra,
    logprobs=st.none() | st.lists(token_logprobs, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | token_logprobs, max_size=3),
    stop=st.none() | st.text() | st.integers(0, 10**5),
    usage=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    error=st.none() | st.text(),
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    entries = draw(st.lists(st.tuples(handles, st.lists(token_ids, max_size=3), st.text(), st.sampled_from(Finish))))
    return Step(
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 2**40)),
        pack_ints("I", [entry[0] for entry in entries]),
        pack_ints("H", [len(entry[1]) for entry in entries]),
        bytes(entry[3] for entry in entries),
        pack_ints("i", [token for entry in entries for token in entry[1]]),
        [entry[2] for entry in entries],
        draw(st.dictionaries(st.integers(0, max(0, len(entries) - 1)), extras, max_size=2)) if entries else {},
    )


submits = st.builds(
    Submit,
    api_id=st.integers(0, 9),
    handle=handles,
    prompt=st.lists(token_ids).map(lambda ids: pack_ints("i", ids)),
    params=params,
    emitted=st.lists(token_ids).map(lambda ids: pack_ints("i", ids)),
    request_id=st.text(),
)
others = st.one_of(
    st.builds(Hello, api_id=st.integers(0, 9), endpoint=st.text()),
    st.builds(Abort, api_id=st.integers(0, 9), handle=handles),
    st.builds(Call, name=st.text(), args=st.dictionaries(st.text(), st.integers(0, 9))),
    st.builds(Ready, engine=st.integers(0, 9), epoch=st.integers(0, 9), model=st.dictionaries(st.text(), st.text())),
    st.builds(
        Stats,
        engine=st.integers(0, 9),
        epoch=st.integers(0, 9),
        progress=st.integers(0, 2**60),
        running=st.integers(0, 9),
        waiting=st.integers(0, 9),
        counters=st.dictionaries(st.text(), st.integers(0, 2**60)),
    ),
    st.builds(Fatal, engine=st.integers(0, 9), epoch=st.integers(0, 9), reason=st.text()),
)
messages = st.one_of(steps(), submits, others)


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(data)


json_like: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.integers(0, 9), st.lists(json_like, min_size=2, max_size=10))
def test_a_body_of_the_wrong_types_is_refused_or_harmless(kind: int, values: list[Any]) -> None:
    with contextlib.suppress(WireError):
        decode(bytes([kind]) + msgpack.packb(values))


@given(messages, st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(WireError):
        decode(whole[:cut])


@given(steps())
def test_columns_of_unequal_length_are_refused(step: Step) -> None:
    broken = Step(
        step.engine,
        step.epoch,
        step.seq,
        step.handles + b"\0\0\0\0",
        step.counts,
        step.finishes,
        step.token_ids,
        step.texts,
    )
    with pytest.raises(WireError):
        decode(encode(broken))


@given(st.lists(token_ids))
def test_integers_are_little_endian(values: list[int]) -> None:
    assert pack_ints("i", values) == b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert unpack_ints("i", pack_ints("i", values)) == values


def test_only_what_differs_from_the_defaults_travels() -> None:
    assert SamplingParams().to_wire() == {}
    assert SamplingParams(temperature=0.5, stop=("a",)).to_wire() == {"temperature": 0.5, "stop": ("a",)}


def test_an_unknown_sampling_parameter_is_refused() -> None:
    body = msgpack.packb([1, 2, b"", {"no_such": 1}, 0, b"", 0, "", 0, ""])
    with pytest.raises(WireError, match="no_such"):
        decode(b"\2" + body)
