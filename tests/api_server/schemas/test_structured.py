"""Every way to ask for a constrained output becomes one grammar; two at once are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from api_server.errors import BadRequestError
from api_server.schemas.structured import StructuredRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def constraint(body: dict[str, Any]) -> Any:
    return StructuredRequest.model_validate_json(json.dumps(body)).constraint()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("response_format", ("json", '{"type":"object"}'))),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            ("response_format.json_schema", ("json", json.dumps(SCHEMA))),
        ),
        ({"guided_json": SCHEMA}, ("guided_json", ("json", json.dumps(SCHEMA)))),
        ({"guided_json": '{"type": "array"}'}, ("guided_json", ("json", '{"type": "array"}'))),
        ({"guided_json": True, "guided_whitespace_pattern": " ?"}, ("guided_json", ("json  ?", "true"))),
        ({"structured_outputs": {"regex": "a+"}}, ("structured_outputs.regex", ("regex", "a+"))),
        (
            {"structured_outputs": {"choice": ['say "ä"', "b"]}},
            ("structured_outputs.choice", ("lark", 'start: "say \\"ä\\"" | "b"')),
        ),
        ({"guided_grammar": 'root ::= "a"'}, ("guided_grammar", ("gbnf", 'root ::= "a"'))),
        ({"guided_grammar": 'start: "a"'}, ("guided_grammar", ("lark", 'start: "a"'))),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            ("structured_outputs.json", ("json ", json.dumps(SCHEMA))),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            ("structured_outputs.json_object", ("json", '{"type":"object"}')),
        ),
    ],
)
def test_it_becomes_one_grammar(body: dict[str, Any], expected: Any) -> None:
    assert constraint(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a", "grammar": "start: A"}},
    ],
)
def test_two_at_once_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="Only one of"):
        constraint(body)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": "json"},
        {"guided_choice": []},
        {"structured_outputs": {"structural_tag": "x"}},
        {"guided_json": 7},
    ],
)
def test_what_is_not_of_its_form_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        constraint(body)
