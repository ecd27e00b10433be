"""Messages to bytes and back: one type byte, then a msgpack array of the fields. No pickle, no per-token maps.

The decoder trusts nothing: every malformed input raises `WireError` and no other exception.
"""

from __future__ import annotations

from typing import Any

import msgpack

from common.messages import Abort, Call, Extra, Fatal, Hello, Message, Ready, Stats, Step, Submit, unpack_ints
from common.sampling import SamplingParams


class WireError(ValueError):
    """A message that does not follow the protocol."""


_TYPES: dict[int, type[Message]] = {1: Hello, 2: Submit, 3: Abort, 4: Call, 5: Ready, 6: Step, 7: Stats, 8: Fatal}
_CODES = {kind: bytes([code]) for code, kind in _TYPES.items()}
_FIELDS: dict[type[Message], tuple[str, ...]] = {kind: tuple(kind.__dataclass_fields__) for kind in _TYPES.values()}
_EXTRA = tuple(Extra.__dataclass_fields__)


def encode(message: Message) -> bytes:
    """Raises TypeError only on a programming error: an object msgpack does not know."""
    kind = type(message)
    values = [getattr(message, name) for name in _FIELDS[kind]]
    if kind is Step:
        extras: dict[int, Extra] = values[-1]
        values[-1] = {entry: [getattr(extra, name) for name in _EXTRA] for entry, extra in extras.items()}
    elif kind is Submit:
        values[3] = values[3].to_wire()
    body: bytes = msgpack.packb(values, use_bin_type=True)
    return _CODES[kind] + body


def decode(data: bytes) -> Message:
    """The message that `encode` made. Raises WireError."""
    kind = _TYPES.get(data[0]) if data else None
    if kind is None:
        raise WireError(f"unknown message type {data[:1]!r}")
    try:
        values = msgpack.unpackb(memoryview(data)[1:], raw=False, strict_map_key=False)
        if not isinstance(values, list) or len(values) != len(_FIELDS[kind]):
            raise WireError(f"{kind.__name__} has {len(_FIELDS[kind])} fields")
        if kind is Step:
            values[-1] = {entry: _extra(fields) for entry, fields in values[-1].items()}
        elif kind is Submit:
            values[3] = SamplingParams.from_wire(values[3])
        message = kind(*values)
        if isinstance(message, Step):
            _check_columns(message)
        elif isinstance(message, Submit):
            unpack_ints("i", message.prompt + message.emitted)
            message.cache_salt.encode()
        return message
    except WireError:
        raise
    except Exception as e:  # whatever a hostile body provokes is the peer's fault, not ours
        raise WireError(f"malformed {kind.__name__}: {type(e).__name__}: {e}") from e


def _extra(fields: list[Any]) -> Extra:
    extra = dict(zip(_EXTRA, fields, strict=True))
    if extra["usage"] is not None:
        extra["usage"] = tuple(extra["usage"])
    for name in ("logprobs", "prompt_logprobs"):
        if extra[name] is not None:
            extra[name] = [
                None if item is None else (item[0], item[1], item[2], [tuple(top) for top in item[3]])
                for item in extra[name]
            ]
    return Extra(**extra)


def _check_columns(step: Step) -> None:
    entries = len(step.texts)
    if not (len(step.handles) == 4 * entries and len(step.counts) == 2 * entries and len(step.finishes) == entries):
        raise WireError("STEP columns differ in length")
    if len(step.token_ids) != 4 * sum(unpack_ints("H", step.counts)):
        raise WireError("STEP token ids do not add up to its counts")
