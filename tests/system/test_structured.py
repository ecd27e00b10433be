"""Outputs that must keep to a grammar do, whatever else is in the batch, whatever the schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import Server, serving

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "short"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["1", "0"], ids=["split", "single"])
def server(request: pytest.FixtureRequest, smollm2_folder: Path) -> Iterator[Server]:
    with serving(smollm2_folder, "--engine-procs", request.param) as running:
        yield running


def chat(server: Server, **body: Any) -> Any:
    response = server.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 200, **body},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_schema_gives_an_object_that_keeps_to_it(server: Server) -> None:
    for seed in range(3):
        format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        choice = chat(server, response_format=format, temperature=1.0, seed=seed)
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age", "tags"}
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"tall", "short"}


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"\d{4}-\d\d-\d\d"}, r"\d{4}-\d\d-\d\d"),
        ({"choice": ["rot", "grün", "青"]}, "rot|grün|青"),
        ({"grammar": 'root ::= "x" [0-9]+ "y"'}, r"x\d+y"),
        ({"grammar": 'start: "a" /[bc]{3}/'}, "a[bc]{3}"),
    ],
)
def test_regexes_choices_and_grammars_hold(server: Server, wanted: dict[str, Any], pattern: str) -> None:
    choice = chat(server, structured_outputs=wanted, temperature=1.0, max_tokens=60, seed=4)
    text = choice["message"]["content"]
    assert re.fullmatch(pattern, text) or (choice["finish_reason"] == "length" and text)


def test_constrained_and_free_rows_share_batches(server: Server) -> None:
    """The free ones give what they give alone."""

    def free(n: int) -> str:
        text: str = chat(server, temperature=0, max_tokens=40, seed=n)["message"]["content"]
        return text

    def constrained(n: int) -> str:
        text: str = chat(server, guided_regex=r"[a-z]{5,20}\.", temperature=1.0, seed=n)["message"]["content"]
        return text

    alone = free(0)
    with ThreadPoolExecutor(12) as pool:
        texts, bound = pool.map(free, range(6)), pool.map(constrained, range(6))
        assert set(texts) == {alone}
        assert all(re.fullmatch(r"[a-z]{5,20}\.", text) for text in bound)


def test_a_stream_joins_to_the_same_text(server: Server) -> None:
    body = {
        "prompt": "A number:",
        "guided_regex": r"[0-9]{3}-[0-9]{2}",
        "max_tokens": 30,
        "temperature": 1.0,
        "seed": 8,
    }
    whole = server.client.post("/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    parts = []
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                parts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert "".join(parts) == whole
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", whole)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_a_bad_grammar_is_the_clients_to_mend(server: Server, body: dict[str, Any], field: str) -> None:
    response = server.client.post("/v1/completions", json={"prompt": "x", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


def test_a_client_that_goes_while_its_grammar_compiles_leaves_nothing_behind(server: Server) -> None:
    body = {"prompt": "x", "guided_regex": "(a{1,30}b{1,30}){1,30}", "max_tokens": 400, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, timeout=60):
        pass
    assert chat(server, guided_choice=["still here"])["message"]["content"] == "still here"
