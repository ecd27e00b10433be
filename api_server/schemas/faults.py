"""What pydantic finds wrong with a body, as a sentence that names the field and what it takes."""

from __future__ import annotations

import re
import reprlib

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from api_server.errors import BadRequestError

# pydantic puts the arm of a union that it tried into an error's location
_UNION_ARM = re.compile(r"(str|int|float|bool|none|list\[.*|dict\[.*|constrained-.*|function-.*|[A-Z]\w*)")


def bad_request(model: type[BaseModel], error: ValidationError) -> BadRequestError:
    """The first fault, in the arm of a union that got furthest."""
    faults = error.errors(include_url=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return BadRequestError(f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    if not first["loc"]:
        return BadRequestError(f"The body must be a JSON object: {first['msg']}.")
    fault = max((fault for fault in faults if fault["loc"][0] == first["loc"][0]), key=lambda fault: len(_path(fault)))
    field = str(first["loc"][0])
    allowed = _allowed(model, field)
    path = [field] if allowed else _path(fault)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if fault["type"] == "missing":
        return BadRequestError(f"{name} is required.", param=name, code="missing_required_parameter")
    if fault["type"] == "too_short" and not allowed:
        return BadRequestError(f"{name} must have at least {fault['ctx']['min_length']} item.", param=name)
    if fault["type"] == "value_error":
        return BadRequestError(f"{name}: {fault['ctx']['error']}", param=name)
    if allowed:
        return BadRequestError(f"{name} must be {allowed}, not {reprlib.repr(first['input'])}.", param=name)
    return BadRequestError(f"{name}: {fault['msg']} (got {reprlib.repr(fault['input'])}).", param=name)


def _path(fault: ErrorDetails) -> list[int | str]:
    return [part for part in fault["loc"] if isinstance(part, int) or not _UNION_ARM.fullmatch(part)]


def _allowed(model: type[BaseModel], name: str) -> str | None:
    """What a field of the request takes, in words: its own sentence, or made of its bounds."""
    field = model.model_fields.get(name)
    if field is None:
        return None
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "allowed" in extra:
        return str(extra["allowed"])
    bounds = [words for bound in field.metadata if (words := _bound(bound))]
    if not bounds or "list" in str(field.annotation):
        return None
    kind = "an integer" if "int" in str(field.annotation) else "a number"
    return f"{kind}, {' and '.join(bounds)}"


def _bound(bound: object) -> str | None:
    match bound:
        case annotated_types.Ge(ge=limit):
            return f"at least {limit}"
        case annotated_types.Le(le=limit):
            return f"at most {limit}"
        case annotated_types.Lt(lt=limit):
            return f"below {limit}"
    return None
