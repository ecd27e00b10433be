"""Grammars are compiled for a vocabulary, kept, and refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError, Grammars

GBNF = 'root ::= "a" digit+\ndigit ::= [0-9]'


@pytest.fixture(scope="module")
def grammars(smollm2_folder: Path) -> Grammars:
    return Grammars(smollm2_folder, 49152, (2,))


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (("json", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'), '{"a": 12}', '{"b": 1}'),
        (("json", "true"), "[1, null]", "[1,,"),
        (("json ", '{"type":"object"}'), '{"a":1}', '{"a": 1}'),
        (("regex", r"\d{4}-\d\d-\d\d"), "2026-12-01", "2026-1"),
        (("regex", "(cat|dog)s?"), "dogs", "cow"),
        (("lark", 'start: "ä" | "日本"'), "日本", "日本語"),
        (("gbnf", GBNF), "a17", "a"),
    ],
)
def test_what_fits_is_accepted_and_nothing_else(
    grammar: Grammar, good: str, bad: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.compile(grammar)
    assert matcher.consume_tokens(tokenizer.encode(good).ids)
    assert matcher.is_accepting()
    matcher = grammars.compile(grammar)
    assert not (matcher.consume_tokens(tokenizer.encode(bad).ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    "grammar",
    [
        ("json", "{"),
        ("json", "false"),
        ("json", '{"type":"nonsense"}'),
        ("regex", "("),
        ("lark", "start: other"),
        ("gbnf", "root ::= x"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(grammar: Grammar, grammars: Grammars) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.compile(grammar)
    assert caught.value.args[0]
    assert "\n" not in caught.value.args[0]


def test_a_grammar_too_long_is_refused(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="longer than"):
        grammars.compile(("regex", "a" * (MAX_GRAMMAR_BYTES + 1)))


def test_a_grammar_that_explodes_is_refused_or_gives_up_in_bounded_time(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    try:
        matcher = grammars.compile(("regex", "((a|b)*a(a|b){400}){1,400}"))
    except GrammarError:
        return
    for token in tokenizer.encode("abba" * 100).ids:
        matcher.compute_bitmask()
        if not matcher.consume_token(token):
            break


def test_each_request_has_a_matcher_of_its_own(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one, other = (grammars.compile(("regex", "ab")) for _ in range(2))
    assert one.consume_tokens(tokenizer.encode("ab").ids)
    assert not other.is_accepting()
