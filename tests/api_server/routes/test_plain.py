from __future__ import annotations

from pathlib import Path

import pytest

from api_server.app import create_app
from api_server.served_model import ServedModel
from api_server.state import ServerState
from common.messages import unpack_ints
from tests.api_server.conftest import Client, asgi_client
from tests.api_server.fake_engine import FakeEngine
from tests.api_server.reading import error_of


@pytest.mark.parametrize("path", ["/generate", "/predict"])
async def test_text_in_text_out(client: Client, engine: FakeEngine, state: ServerState, path: str) -> None:
    answer = await client.post(path, json={"text": "hi"})
    body = answer.json()
    assert set(body) == {"generated_text", "request_time"}
    assert body["generated_text"] == "Hello world"
    assert 0 <= body["request_time"] < 60
    assert state.served is not None
    prompt = state.served.tokenizer.decode(unpack_ints("i", engine.submits[0].prompt))
    assert prompt == "<|begin|>user:hi<|end|><|begin|>assistant:"


async def test_at_most_200_tokens_are_generated(client: Client, engine: FakeEngine) -> None:
    engine.model["max_model_len"] = 1_000
    await client.post("/generate", json={"text": "hi"})
    assert engine.submits[0].params.max_tokens == 200


async def test_a_model_without_a_template_goes_on_with_the_text(
    state: ServerState, engine: FakeEngine, model_folder: Path
) -> None:
    (model_folder / "chat_template.jinja").unlink()
    state.served = ServedModel.load(state.config.model, str(model_folder))
    async with asgi_client(create_app(state)) as client:
        assert (await client.post("/generate", json={"text": "hi"})).status_code == 200
    assert len(engine.submits[0].prompt) // 4 == 2


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"text": 5}, {"text": None}, {"text": "x" * 500}])
async def test_a_wrong_text_is_named(client: Client, body: dict[str, object]) -> None:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 400
    assert "text" in error_of(answer)["message"] or "128" in error_of(answer)["message"]
