"""Token ids to text and STEP messages. The only writer of terminals (rule 10)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

from common.messages import Extra, Finish, Stats, Step, ToApi, TokenLogprob, pack_ints
from engine.loop import StopHit
from engine.output.detokenizer import Detokenizer, Vocabulary
from engine.output.logprobs import render
from engine.output.stop_strings import StopMatcher
from engine.plan import StepResult
from engine.request import Request
from engine.scheduler import Committed

log = logging.getLogger(__name__)

Send = Callable[[int, ToApi], None]


class RequestOutput:
    """One request's text. Owner: whoever runs the processor; the loop only passes it along."""

    __slots__ = ("count", "detokenizer", "finished", "matcher", "min_tokens", "prompt_logprobs", "request", "text")

    def __init__(self, request: Request, vocabulary: Vocabulary) -> None:
        params = request.params
        self.request = request
        self.detokenizer = Detokenizer(vocabulary, params.skip_special_tokens, continues=True)
        self.matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.min_tokens = params.min_tokens
        self.count = 0
        self.finished = False
        self.text = ""  # decoded, and due with the next entry: only after a resume
        self.prompt_logprobs: list[TokenLogprob | None] | None = None

    def feed(self, token_id: int, finish: Finish) -> tuple[str, Finish, str | int | None]:
        """A token's new text, whether the request ends with it, and the stop string or token id that ended it."""
        self.count += 1
        params = self.request.params
        reason: str | int | None = None
        if finish is Finish.STOP:
            reason = token_id if token_id in params.stop_token_ids else None
            text = self.detokenizer.feed(token_id) if params.include_stop_str_in_output else ""
        else:
            text = self.detokenizer.feed(token_id)
        if finish:
            text += self.detokenizer.flush()
        matcher = self.matcher
        if matcher is None or self.count <= self.min_tokens:
            return text, finish, reason
        text, hit = matcher.feed(text)
        if hit is not None:
            return text, Finish.STOP, hit
        if finish:
            text += matcher.flush()
        return text, finish, reason

    def replay(self, emitted: list[int], delivered: int) -> None:
        """Feeds what an earlier engine had produced; text that the client has is not sent again."""
        for token_id in emitted:
            self.text += self.feed(token_id, Finish.NONE)[0]
        self.text = self.text[delivered:]

    def usage(self) -> tuple[int, int, int]:
        return len(self.request.prompt), self.count, self.request.cached_tokens or 0


class Columns:
    """A STEP message in the making, for one API process."""

    __slots__ = ("counts", "extras", "finishes", "handles", "texts", "token_ids")

    def __init__(self) -> None:
        self.handles = array("I")
        self.counts = array("H")
        self.finishes = bytearray()
        self.token_ids = array("i")
        self.texts: list[str] = []
        self.extras: dict[int, Extra] = {}

    def add(self, handle: int, text: str, finish: Finish, token_id: int | None, extra: Extra | None) -> None:
        if extra is not None:
            self.extras[len(self.texts)] = extra
        self.handles.append(handle)
        self.texts.append(text)
        self.finishes.append(finish)
        if token_id is None:
            self.counts.append(0)
        else:
            self.counts.append(1)
            self.token_ids.append(token_id)


class OutputProcessor:
    """Implements the loop's `Output`. With `--async-output off` the loop calls it directly, else the output thread."""

    def __init__(
        self, vocabulary: Vocabulary, engine: int, epoch: int, send: Send, stop_hit: Callable[[StopHit], None]
    ) -> None:
        self._vocabulary = vocabulary
        self._engine = engine
        self._epoch = epoch
        self._send = send
        self._stop_hit = stop_hit
        self._apis: set[int] = set()
        self._stats: Stats | None = None

    def step(self, result: StepResult, committed: list[Committed], scored: list[tuple[Request, Any]]) -> None:
        columns: dict[int, Columns] = {}
        for request, scores in scored:
            self._guard(columns, request, self._score, request, scores)
        for item in committed:
            self._guard(columns, item.request, self._token, columns, result, item)
        for api_id, column in columns.items():
            self._post(api_id, column)

    def end(self, request: Request, finish: Finish, error: str | None = None) -> None:
        columns: dict[int, Columns] = {}
        self._terminal(columns, request, finish, error)
        for api_id, column in columns.items():
            self._post(api_id, column)

    def stats(self, stats: Stats) -> None:
        self._stats = stats
        self.broadcast(stats)

    def broadcast(self, message: ToApi) -> None:
        """To every API process."""
        for api_id in self._apis:
            self._send(api_id, message)

    def add_api(self, api_id: int) -> None:
        """From now on it hears of everything; the newest heartbeat comes at once."""
        self._apis.add(api_id)
        if self._stats is not None:
            self._send(api_id, self._stats)

    def drop_api(self, api_id: int) -> None:
        self._apis.discard(api_id)

    def _guard(self, columns: dict[int, Columns], request: Request, work: Callable[..., None], *args: Any) -> None:
        """An error in one request's output ends that request and no other."""
        try:
            work(*args)
        except Exception as e:
            log.exception("output of request %s failed", request.handle)
            self._terminal(columns, request, Finish.ERROR, f"detokenizing failed: {type(e).__name__}")
            self._stop_hit(StopHit(request, Finish.ERROR))

    def _output(self, request: Request) -> RequestOutput:
        output: RequestOutput | None = request.sink
        if output is None:
            output = request.sink = RequestOutput(request, self._vocabulary)
            if request.resumed:
                output.replay(request.resumed, request.delivered)
        return output

    def _token(self, columns: dict[int, Columns], result: StepResult, item: Committed) -> None:
        request = item.request
        output: RequestOutput = request.sink or self._output(request)
        if output.finished:
            return
        text, finish, reason = output.feed(item.token_id, item.finish)
        if output.text:
            text, output.text = output.text + text, ""
        extra = None
        logprobs = result.logprobs.get(item.index) if result.logprobs else None
        if finish or logprobs is not None or output.prompt_logprobs is not None:
            extra = Extra(
                logprobs=None if logprobs is None else [render(logprobs, self._vocabulary)],
                prompt_logprobs=output.prompt_logprobs,
                stop=reason,
                usage=output.usage() if finish else None,
            )
            output.prompt_logprobs = None
        self._columns(columns, request.api_id).add(request.handle, text, finish, item.token_id, extra)
        if finish:
            output.finished = True
            if finish is not item.finish:
                self._stop_hit(StopHit(request, finish))

    def _score(self, request: Request, scores: tuple[int, list[Any]]) -> None:
        """Prompt logprobs of one chunk: (index of the first scored token, one entry for each)."""
        output = self._output(request)
        if output.prompt_logprobs is None:
            if output.count:
                return  # sent already; the request was preempted and its prompt fed again
            output.prompt_logprobs = [None] * len(request.prompt)
        start, entries = scores
        for index, entry in enumerate(entries, start):
            output.prompt_logprobs[index] = render(entry, self._vocabulary)

    def _terminal(self, columns: dict[int, Columns], request: Request, finish: Finish, error: str | None) -> None:
        """The end of a request that no token of its own brought."""
        try:
            output = self._output(request)
        except Exception:  # nothing of it could be set up, not even its stop strings: end it all the same
            log.exception("request %s has no output state", request.handle)
            extra = Extra(error=error, usage=(len(request.prompt), 0, 0))
            self._columns(columns, request.api_id).add(request.handle, "", finish, None, extra)
            return
        if output.finished:
            return
        output.finished = True
        text = output.detokenizer.flush()
        if output.matcher is not None:
            text, hit = output.matcher.feed(text)
            text += output.matcher.flush() if hit is None else ""
        extra = Extra(prompt_logprobs=output.prompt_logprobs, usage=output.usage(), error=error)
        self._columns(columns, request.api_id).add(request.handle, output.text + text, finish, None, extra)

    def _columns(self, columns: dict[int, Columns], api_id: int) -> Columns:
        column = columns.get(api_id)
        if column is None:
            column = columns[api_id] = Columns()
        return column

    def _post(self, api_id: int, column: Columns) -> None:
        message = Step(
            self._engine,
            self._epoch,
            0,  # numbered by the transport
            pack_ints("I", column.handles),
            pack_ints("H", column.counts),
            bytes(column.finishes),
            pack_ints("i", column.token_ids),
            column.texts,
            column.extras,
        )
        self._send(api_id, message)
