"""Where an engine's results wait for the client: one `Sequence` per engine request, one `Mailbox` per HTTP request.

An engine delivers whenever it has something; a client takes when it is ready. What has not been taken is merged, so a
slow client costs memory in proportion to its text and never a queue of objects, and slows nobody else.
"""

from __future__ import annotations

import asyncio

from api_server.admission import Place
from common.messages import Extra, Finish, TokenLogprob, unpack_ints
from common.sampling import SamplingParams

NO_FINISH = int(Finish.NONE)


class Sequence:
    """One engine request as the API process knows it: all that is needed to answer, and to start again elsewhere.

    prompt, emitted: token ids, `<i4`. delivered: characters of output that arrived, taken or not.
    """

    __slots__ = (
        "_fresh_ids",
        "_pieces",
        "cache_salt",
        "delivered",
        "emitted",
        "engine",
        "error",
        "finish",
        "handle",
        "index",
        "logprobs",
        "lost",
        "mailbox",
        "noticed",
        "params",
        "priority",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "started",
        "stop",
        "usage",
    )

    def __init__(
        self,
        mailbox: Mailbox,
        index: int,
        prompt: bytes,
        params: SamplingParams,
        priority: int = 0,
        request_id: str = "",
        cache_salt: str = "",
    ) -> None:
        self.mailbox = mailbox
        self.index = index
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.handle = -1  # set at submission, with `engine`
        self.engine = -1
        self.emitted = bytearray()
        self.delivered = 0
        self.started = False  # a first token or an end has arrived
        self.noticed = False  # stands in its mailbox's list of news
        self.logprobs: list[TokenLogprob] = []  # not taken yet
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish = NO_FINISH
        self.stop: str | int | None = None
        self.error: str | None = None
        self.lost = False  # its engine went away
        self.usage: tuple[int, int, int] | None = None
        self._pieces: list[str] = []
        self._fresh_ids = 0

    @property
    def prompt_tokens(self) -> int:
        return self.usage[0] if self.usage else len(self.prompt) // 4

    @property
    def completion_tokens(self) -> int:
        """The engine's count once it has ended, until then of what has arrived."""
        return self.usage[1] if self.usage else len(self.emitted) // 4

    @property
    def cached_tokens(self) -> int:
        return self.usage[2] if self.usage else 0

    def put(self, token_ids: bytes, text: str, finish: int, extra: Extra | None) -> None:
        """Takes in what one STEP brought. Nothing may follow an end."""
        if not self.started:
            self.started = True
            self.mailbox.place.leave_part(len(self.prompt) // 4)
        self.emitted += token_ids
        if text:
            self._pieces.append(text)
            self.delivered += len(text)
        if extra is not None:
            self._put_extra(extra)
        if finish:
            self.finish = finish
        self.mailbox.notice(self)

    def _put_extra(self, extra: Extra) -> None:
        if extra.logprobs:
            self.logprobs += extra.logprobs
        if extra.prompt_logprobs is not None:
            self.prompt_logprobs = extra.prompt_logprobs
        self.stop = extra.stop
        self.error = extra.error
        self.usage = extra.usage

    def take_text(self) -> str:
        """The text that arrived since the last call."""
        pieces = self._pieces
        if not pieces:
            return ""
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        return text

    def take_ids(self) -> list[int]:
        """The token ids that arrived since the last call."""
        fresh = bytes(memoryview(self.emitted)[self._fresh_ids :])
        self._fresh_ids = len(self.emitted)
        return unpack_ints("i", fresh)

    def take_logprobs(self) -> list[TokenLogprob]:
        """The logprobs that arrived since the last call, one per token."""
        taken, self.logprobs = self.logprobs, []
        return taken


class Mailbox:
    """The sequences of one HTTP request and whoever waits for them. Owned by the event loop.

    patient: wake only when every sequence has ended, or one has failed; for answers that are not streamed.
    """

    def __init__(self, place: Place, patient: bool = False) -> None:
        self.place = place
        self.sequences: list[Sequence] = []
        self.news: list[Sequence] = []
        self.gone = False  # the client has closed its connection
        self.open = 0
        self.patient = patient
        self._waiter: asyncio.Future[None] | None = None

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.open += 1

    def notice(self, sequence: Sequence) -> None:
        """`sequence` has something new."""
        if sequence.finish:
            self.open -= 1
        if not sequence.noticed:
            sequence.noticed = True
            self.news.append(sequence)
        if not self.patient or self.open == 0 or sequence.finish >= Finish.ABORT:
            self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self.wake()

    def close(self) -> None:
        """Nothing more is expected. Takes the circle of references apart, so that no collector has to."""
        self.place.leave()
        self.sequences = []
        self.news = []

    async def wait(self) -> None:
        """Until something is new for this kind of waiter, the client has gone, or `wake` was called."""
        if not self.gone and not self.is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def is_due(self) -> bool:
        if not self.patient:
            return bool(self.news)
        return self.open == 0 or any(sequence.finish >= Finish.ABORT for sequence in self.news)

    def take_news(self) -> list[Sequence]:
        """The sequences that have something new, in the order of its arrival."""
        news, self.news = self.news, []
        for sequence in news:
            sequence.noticed = False
        return news
