"""Where load stops: how many requests, and how many prompt tokens, may wait at once.

What counts is every request from the moment its body has arrived until its first token or its end: those being
tokenized, queued in an engine or prefilled. A request that has begun to answer counts no more; one whose body is still
coming does not count yet, or a client that only announces one would keep all others out.
"""

from __future__ import annotations

from api_server.errors import BadRequestError, OverloadedError

BYTES_PER_TOKEN = 4  # of a JSON body; only for the estimate that stands until the prompt has been tokenized


class Admission:
    """The waiting requests of one API process, counted. Owned by the event loop."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self.rejected = 0

    def check(self, body_bytes: int) -> None:
        """Raises `OverloadedError` where a body of that many bytes need not even be read."""
        self.take(1, body_bytes // BYTES_PER_TOKEN)
        self.give(1, body_bytes // BYTES_PER_TOKEN)

    def enter(self, body_bytes: int) -> Place:
        """A place for one request of that many bytes. Raises `OverloadedError`."""
        place = Place(self)
        place.resize(1, body_bytes // BYTES_PER_TOKEN)
        return place

    def take(self, requests: int, tokens: int) -> None:
        """Raises `OverloadedError` over either bound; what finds the queue empty is let in whatever its length."""
        if self.requests and (self.requests + requests > self._max_requests or self.tokens + tokens > self._max_tokens):
            self.rejected += 1
            raise OverloadedError("Too many requests are waiting; try again later.")
        self.requests += requests
        self.tokens += tokens

    def give(self, requests: int, tokens: int) -> None:
        self.requests -= requests
        self.tokens -= tokens

    def check_fan_out(self, requests: int) -> None:
        """Raises `BadRequestError` for one HTTP request that could never be let in next to any other."""
        if requests > self._max_requests:
            raise BadRequestError(
                f"n times the number of prompts makes {requests} sequences; this server takes at most "
                f"{self._max_requests} at once.",
                param="n",
            )


class Place:
    """What one HTTP request holds of the queue. Leaves once, part by part or at once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.requests = 0
        self.tokens = 0

    def resize(self, requests: int, tokens: int) -> None:
        """Replaces what is held. Raises `OverloadedError`, and then holds nothing."""
        self.leave()
        self._admission.take(requests, tokens)
        self.requests, self.tokens = requests, tokens

    def leave_part(self, tokens: int) -> None:
        """One sequence with a prompt of so many tokens waits no more."""
        self.requests -= 1
        self.tokens -= tokens
        self._admission.give(1, tokens)

    def leave(self) -> None:
        """What is still held is given back. Harmless when repeated."""
        self._admission.give(self.requests, self.tokens)
        self.requests = self.tokens = 0
