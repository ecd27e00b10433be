"""A server with a fake engine, reached through the ASGI interface or over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from api_server.app import create_app
from api_server.http_server import http_server
from api_server.served_model import ServedModel
from api_server.state import ServerState
from common.config import Config, ModelConfig, ServerConfig
from tests.api_server.fake_engine import FakeEngine, make_model_folder

NAME = "fake/model"
Client = httpx.AsyncClient


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path)


@pytest.fixture
def make_state(model_folder: Path) -> Callable[..., ServerState]:
    """`make_state(max_num_queued_reqs=…)`: a state with the model loaded and no engine yet."""

    def make(**server: int | float) -> ServerState:
        config = Config(model=ModelConfig(model=NAME), server=ServerConfig(**server))  # type: ignore[arg-type]
        state = ServerState.create(config, 1)
        state.served = ServedModel.load(config.model, str(model_folder))
        state.phase = "ready"
        return state

    return make


@pytest.fixture
def state(make_state: Callable[..., ServerState]) -> ServerState:
    return make_state()


@pytest.fixture
def engine(state: ServerState) -> FakeEngine:
    return FakeEngine().attach(state.engines)


@pytest.fixture
async def client(state: ServerState, engine: FakeEngine) -> AsyncIterator[Client]:
    """No socket: answers come whole, also streamed ones."""
    async with asgi_client(create_app(state)) as client:
        yield client


@pytest.fixture
async def base_url(state: ServerState, engine: FakeEngine) -> AsyncIterator[str]:
    """The same over a real socket."""
    server = http_server(create_app(state))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.force_exit = server.should_exit = True
    await task


def asgi_client(app: FastAPI) -> Client:
    return Client(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server")
