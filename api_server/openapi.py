"""The API's own description. Bodies are read as bytes, so what FastAPI cannot see of them is put in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api_server.schemas.responses import ErrorAnswer

_REF = "#/components/schemas/{model}"

_ERRORS = {
    "400": "The request is not right; `param` names the field.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "500": "The server failed.",
    "503": "Too many requests wait, or the model is not ready; see `Retry-After`.",
}

_described: dict[str, type[BaseModel]] = {}  # models that routes refer to, by name


def generation(request: type[BaseModel], response: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads `request` from bytes and answers `response`."""
    for model in (request, response):
        _described[model.__name__] = model
    streams = "stream" in request.model_fields
    events = {"text/event-stream": {"schema": {"type": "string"}}} if streams else {}
    return {
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": {"description": "OK", "content": {**_content(response), **events}}, **failures(*_ERRORS)},
    }


def failures(*statuses: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these error statuses."""
    _described[ErrorAnswer.__name__] = ErrorAnswer
    return {status: {"description": _ERRORS[status], "content": _content(ErrorAnswer)} for status in statuses}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document, with every schema that routes refer to, and without FastAPI's own error shape."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    models = [(model, "validation") for model in _described.values()]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return document
