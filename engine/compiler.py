"""Requests with a grammar wait here until it is compiled, on a thread of its own, so that no other request does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from common.grammar import Grammar, GrammarError
from common.messages import Abort
from engine.loop import Arrival

Key = tuple[int, int]


class Compiles(Protocol):
    """As `common.grammar.Grammars`."""

    def compile(self, grammar: Grammar) -> Any: ...


class Compiler:
    """Called by the intake thread. What a request does not survive waiting for is passed on after it, in order."""

    def __init__(self, make: Callable[[], Compiles], put: Callable[[Arrival | Abort], None]) -> None:
        """`make` is called when the first grammar comes."""
        self._make, self._put = make, put
        self._grammars: Compiles | None = None
        self._waiting: dict[Key, list[Abort]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def submit(self, arrival: Arrival) -> None:
        """Puts it on when its grammar is compiled, or with the fault that it has."""
        with self._lock:
            self._waiting[arrival.submit.api_id, arrival.submit.handle] = []
        self._thread.submit(self._compile, arrival)

    def abort(self, message: Abort) -> None:
        """Puts it on, after the request that it aborts."""
        with self._lock:
            held = self._waiting.get((message.api_id, message.handle))
            if held is not None:
                held.append(message)
                return
        self._put(message)

    def drop_api(self, api_id: int) -> None:
        """Aborts what waits for an API process that is gone."""
        with self._lock:
            for (owner, handle), held in self._waiting.items():
                if owner == api_id:
                    held.append(Abort(owner, handle))

    def close(self) -> None:
        """Compiles nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, arrival: Arrival) -> None:
        submit, grammar, fault = arrival.submit, None, None
        try:
            if self._grammars is None:
                self._grammars = self._make()
            assert submit.params.grammar is not None
            self._grammars.compile(submit.params.grammar)
            grammar = partial(self._grammars.compile, submit.params.grammar)
        except GrammarError as e:
            fault = f"the grammar cannot be used: {e}"
        except Exception as e:
            fault = f"the grammar cannot be used: {type(e).__name__}: {e}"
        with self._lock:
            held = self._waiting.pop((submit.api_id, submit.handle))
            self._put(Arrival(submit, arrival.chain, grammar, fault))
            for message in held:
                self._put(message)
