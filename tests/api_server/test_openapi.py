from __future__ import annotations

import json
from typing import Any

from tests.api_server.conftest import Client


async def document(client: Client) -> dict[str, Any]:
    body: dict[str, Any] = (await client.get("/openapi.json")).json()
    return body


async def test_every_reference_leads_somewhere(client: Client) -> None:
    tree = await document(client)
    schemas = tree["components"]["schemas"]
    text = json.dumps(tree)
    references = {part.partition('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert references <= schemas.keys()
    assert {"ChatRequest", "CompletionRequest", "ChatCompletion", "Completion", "ErrorAnswer"} <= references


async def test_fields_are_described_with_their_ranges(client: Client) -> None:
    schema = (await document(client))["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    (number, _) = schema["properties"]["temperature"]["anyOf"]
    assert (number["minimum"], number["maximum"]) == (0, 2)
    assert schema["properties"]["n"]["anyOf"][0]["maximum"] == 128


async def test_every_path_that_answers_is_described(client: Client) -> None:
    paths = (await document(client))["paths"]
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/generate",
        "/predict",
        "/",
    } <= paths.keys()
    stream = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert stream.keys() == {"application/json", "text/event-stream"}


async def test_only_our_own_shape_of_errors_is_described(client: Client) -> None:
    text = json.dumps(await document(client))
    assert "HTTPValidationError" not in text
    assert '"422"' not in text
