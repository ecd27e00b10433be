"""Grammars that constrain an output: checked by API processes, obeyed by engines, both with llguidance.

A grammar is a kind and a text: `json` a JSON schema, `regex` a regular expression over the whole output, `lark` a
grammar in llguidance's variant of Lark's notation, `gbnf` one in llama.cpp's. `json ` may be followed by a regular
expression of what may stand between the parts of JSON, by nothing for nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

Grammar = tuple[str, str]

MAX_GRAMMAR_BYTES = 1 << 20
_KEPT = 64  # compiled grammars

# Small models lose themselves in blank space if it has no end.
_SPACES = r"[\x20\x0A\x0D\x09]{1,40}"

# A step's share is far below these; a grammar that explodes ends its own request, and no other.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=500_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
)


class GrammarError(ValueError):
    """The grammar cannot be used; a sentence for the client."""


class Grammars:
    """The grammars of one model's vocabulary. From any thread; compiling lets go of the interpreter lock."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Reads tokenizer.json in `folder`. Raises ValueError where it is none that llguidance understands."""
        self._tokenizer = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), n_vocab=vocab_size, eos_token=list(end_token_ids) or None
        )
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Any:
        """A matcher (llguidance.LLMatcher) at its beginning. Raises GrammarError."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
        matcher = llguidance.LLMatcher(self._tokenizer, _text(grammar), limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()


def _text(grammar: Grammar) -> str:
    """As llguidance takes it. Raises GrammarError."""
    kind, text = grammar
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it is longer than {MAX_GRAMMAR_BYTES:,} bytes")
    try:
        if kind == "json" or kind.startswith("json "):
            spaces = kind[5:] if kind != "json" else _SPACES
            options: Any = {"whitespace_pattern": spaces} if spaces else {"whitespace_flexible": False}
            if text.strip() == "false":
                raise GrammarError("the schema false allows nothing")
            schema = "{}" if text.strip() == "true" else text  # options go with objects only
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options))
        if kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(text))
        return str(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text) if kind == "gbnf" else text))
    except GrammarError:
        raise
    except Exception as e:  # the converter of GBNF raises what comes
        raise GrammarError(_first_line(str(e))) from e


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it is not valid")[:500]
