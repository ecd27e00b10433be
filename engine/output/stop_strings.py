"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right


class _Node:
    """A prefix of some stop strings: those from `low` to `high` in sorted order, their first `depth` characters."""

    __slots__ = ("children", "depth", "fail", "found", "high", "low")

    def __init__(self, low: int, high: int, depth: int) -> None:
        self.low = low
        self.high = high
        self.depth = depth
        self.children: dict[str, _Node | None] = {}
        self.fail: _Node | None = None  # the longest proper suffix of it that is such a prefix too; None: the root's
        self.found: str | None = None  # the longest stop string that it ends with


class StopMatcher:
    """Holds back what may become a stop string, and nothing else.

    The match that is complete first wins; of those complete at the same character, the one that starts first. An
    automaton of Aho and Corasick's, of which only the states are made that the text has reached: so the work is linear
    in the text, however many, long or hostile the stop strings, and making a matcher costs next to nothing.
    """

    __slots__ = ("_first", "_include", "_node", "_root", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        """include: whether the matched stop string is part of the text. Empty stop strings never match."""
        self._stops = sorted({stop for stop in stops if stop})
        self._include = include
        self._root = self._node = _Node(0, len(self._stops), 0)
        self._first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in self._stops})) or r"(?!)")

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send, and the stop string that it ends before (or with), if any: then it is over."""
        before = node = self._node
        at = 0
        while at < len(text):
            if node is self._root:
                start = self._first.search(text, at)
                if start is None:
                    break
                at = start.start()
            node = self._step(node, text[at])
            at += 1
            if node.found is not None:
                self._node = self._root
                end = before.depth + at - (0 if self._include else len(node.found))
                return (self._prefix(before) + text)[:end], node.found
        self._node = node
        released = before.depth + len(text) - node.depth
        return (self._prefix(before) + text)[:released] if released else "", None

    def flush(self) -> str:
        """What is still held. The text ends here."""
        held = self._prefix(self._node)
        self._node = self._root
        return held

    def _prefix(self, node: _Node) -> str:
        return self._stops[node.low][: node.depth] if node.depth else ""

    def _step(self, node: _Node, char: str) -> _Node:
        """The state after one more character: the longest suffix of the text that is a prefix of a stop string.

        A new state needs its `fail`, which is the state that the search would reach from the old one's `fail`: so the
        search goes on until it comes to a state that has one.
        """
        made: list[_Node] = []
        reached = self._root
        at: _Node | None = node
        while at is not None:
            child = self._child(at, char)
            if child is not None:
                if made:
                    made[-1].fail = child
                else:
                    reached = child
                if child.fail is not None:
                    break
                made.append(child)
            at = at.fail
        for state in reversed(made):
            state.fail = state.fail or self._root
            first = self._stops[state.low]
            state.found = first if len(first) == state.depth else state.fail.found
        return reached

    def _child(self, node: _Node, char: str) -> _Node | None:
        """The state one character further on, None where no stop string goes on so."""
        try:
            return node.children[char]
        except KeyError:
            pass
        depth = node.depth

        def next_char(stop: str) -> str:
            return stop[depth : depth + 1]

        low = bisect_left(self._stops, char, node.low, node.high, key=next_char)
        high = bisect_right(self._stops, char, low, node.high, key=next_char)
        child = _Node(low, high, depth + 1) if low < high else None
        node.children[char] = child
        return child
