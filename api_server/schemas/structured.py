"""What an output has to be: the fields of OpenAI and vLLM that ask for it, and the one grammar that they become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_server.errors import BadRequestError
from common.grammar import Grammar

MAX_CHOICES = 1_024

JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]

_ANY_OBJECT = '{"type":"object"}'


class NamedSchema(BaseModel):
    """Of `response_format`."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="A JSON schema; any object when left out.")
    strict: bool | None = Field(None, description="The schema is always kept to.")


class ResponseFormat(BaseModel):
    """text is no constraint, json_object any object, json_schema what the schema says."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """One of them."""

    model_config = ConfigDict(strict=True, populate_by_name=True, extra="forbid")

    json_: JsonSchema | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="Over the whole output.")
    choice: Choices | None = Field(None, description="The output is one of them.")
    grammar: str | None = Field(None, description="In GBNF, or in llguidance's variant of Lark.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without spaces and line breaks.")
    whitespace_pattern: str | None = Field(None, description="What may stand between the parts of JSON, a regex.")


class StructuredRequest(BaseModel):
    """The fields of a request that constrain its output; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(None, description="As structured_outputs.whitespace_pattern.")

    def constraint(self) -> tuple[str, Grammar] | None:
        """The field that constrains the output, and how. Raises `BadRequestError` where there are several."""
        found = list(self._constraints())
        if len(found) > 1:
            names = ", ".join(name for name, _ in found)
            raise BadRequestError(f"Only one of {names} can constrain the output.", param=found[1][0])
        return found[0] if found else None

    def _constraints(self) -> Iterator[tuple[str, Grammar]]:
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            yield "response_format", ("json", _ANY_OBJECT)
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise BadRequestError("response_format.json_schema is required.", param="response_format.json_schema")
            yield "response_format.json_schema", _json(wanted.json_schema.schema_)
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar,
            json_object=None, disable_any_whitespace=None, whitespace_pattern=self.guided_whitespace_pattern,
        )  # fmt: skip
        yield from _of(guided, "guided_")
        if self.structured_outputs is not None:
            yield from _of(self.structured_outputs, "structured_outputs.")


def _of(wanted: StructuredOutputs, prefix: str) -> Iterator[tuple[str, Grammar]]:
    if wanted.json_ is not None:
        spaces = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
        yield f"{prefix}json", _json(wanted.json_, spaces)
    if wanted.regex is not None:
        yield f"{prefix}regex", ("regex", wanted.regex)
    if wanted.choice is not None:
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in wanted.choice)
        yield f"{prefix}choice", ("lark", f"start: {options}")
    if wanted.grammar is not None:
        yield f"{prefix}grammar", ("gbnf" if "::=" in wanted.grammar else "lark", wanted.grammar)
    if wanted.json_object:
        yield f"{prefix}json_object", ("json", _ANY_OBJECT)


def _json(schema: JsonSchema | str | None, spaces: str | None = None) -> Grammar:
    """`spaces`: a regex of what may stand between parts; empty for nothing, None for the usual."""
    text = schema if isinstance(schema, str) else _ANY_OBJECT if schema is None else json.dumps(schema)
    return ("json" if spaces is None else f"json {spaces}"), text
