"""HTTP/1.1 as uvicorn reads it, with this server's answer to what is not HTTP, and without upgrades."""

from __future__ import annotations

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api_server.body import new_request_id
from api_server.errors import BadRequestError

_REQUEST = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r\n")
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def data_received(self, data: bytes) -> None:
        super().data_received(without_upgrade(data))

    def send_400_response(self, msg: str) -> None:
        """Answers in OpenAI's shape, and closes."""
        body = BadRequestError("The request is not valid HTTP/1.1.").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def without_upgrade(data: bytes) -> bytes:
    """Takes the offer of another protocol out of a request's head: RFC 9110 (7.8) lets a server stay with HTTP/1.1.

    With the offer the parser would end the request at its head. Java's client offers HTTP/2 with every request.
    """
    if not _REQUEST.match(data):
        return data
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"\r\nx-upgrade:", head) + end + rest
