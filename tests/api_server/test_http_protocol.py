"""What is done to a connection's bytes before they are read as HTTP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.http_protocol import without_upgrade

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
def test_an_offer_of_another_protocol_is_renamed(name: bytes) -> None:
    data = HEAD + name + b": h2c\r\ncontent-length: 2\r\n\r\n{}"
    assert without_upgrade(data) == HEAD + b"x-upgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"


def test_a_body_is_left_as_it_is() -> None:
    data = HEAD + b"content-length: 20\r\n\r\n\r\nUpgrade: h2c\r\n\r\nmore"
    assert without_upgrade(data) == data


@given(st.binary(max_size=200))
def test_what_does_not_begin_a_request_is_left_as_it_is(data: bytes) -> None:
    assert without_upgrade(b"{" + data) == b"{" + data


@given(st.binary(max_size=200))
def test_a_head_without_an_offer_is_left_as_it_is(body: bytes) -> None:
    assert without_upgrade(HEAD + b"\r\n" + body) == HEAD + b"\r\n" + body
