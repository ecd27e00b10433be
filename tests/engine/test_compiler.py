"""Requests with grammars go on when they are compiled, others do not wait, and aborts come after what they abort."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from common.grammar import Grammar, GrammarError
from common.messages import Abort, Submit
from common.sampling import SamplingParams
from engine.compiler import Compiler
from engine.loop import Arrival


class SlowGrammars:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, grammar: Grammar) -> Any:
        assert self.go.wait(10)
        if grammar[1] == "bad":
            raise GrammarError("it is bad")
        return grammar


def arrival(api_id: int, handle: int, text: str = "good") -> Arrival:
    return Arrival(Submit(api_id, handle, b"", SamplingParams(grammar=("regex", text))), [])


@pytest.fixture
def events() -> SimpleQueue[Arrival | Abort]:
    return SimpleQueue()


def test_a_compiled_grammar_comes_with_its_request(events: SimpleQueue[Arrival | Abort]) -> None:
    grammars = SlowGrammars()
    compiler = Compiler(lambda: grammars, events.put)
    compiler.submit(arrival(1, 7))
    assert events.empty()
    grammars.go.set()
    found = events.get(timeout=10)
    assert isinstance(found, Arrival)
    assert found.grammar is not None
    assert (found.submit.handle, found.grammar(), found.fault) == (7, ("regex", "good"), None)
    compiler.close()


def test_a_bad_one_comes_with_its_fault(events: SimpleQueue[Arrival | Abort]) -> None:
    grammars = SlowGrammars()
    grammars.go.set()
    Compiler(lambda: grammars, events.put).submit(arrival(1, 7, "bad"))
    found = events.get(timeout=10)
    assert isinstance(found, Arrival)
    assert (found.grammar, found.fault) == (None, "the grammar cannot be used: it is bad")


def test_grammars_that_cannot_be_made_are_a_fault_too(events: SimpleQueue[Arrival | Abort]) -> None:
    def make() -> SlowGrammars:
        raise OSError("no tokenizer.json")

    Compiler(make, events.put).submit(arrival(1, 7))
    found = events.get(timeout=10)
    assert isinstance(found, Arrival)
    assert "no tokenizer.json" in str(found.fault)


def test_aborts_follow_what_they_abort_and_others_pass(events: SimpleQueue[Arrival | Abort]) -> None:
    grammars = SlowGrammars()
    compiler = Compiler(lambda: grammars, events.put)
    compiler.submit(arrival(1, 7))
    compiler.submit(arrival(2, 8))
    compiler.abort(Abort(1, 7))
    compiler.abort(Abort(1, 99))
    compiler.drop_api(2)
    assert events.get(timeout=10) == Abort(1, 99)
    grammars.go.set()
    kinds = [events.get(timeout=10) for _ in range(4)]
    order = [(type(e).__name__, e.submit.handle if isinstance(e, Arrival) else e.handle) for e in kinds]
    assert order == [("Arrival", 7), ("Abort", 7), ("Arrival", 8), ("Abort", 8)]
