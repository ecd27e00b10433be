"""The HTTP server: uvicorn as this project runs it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from api_server.http_protocol import HttpProtocol

KEEP_ALIVE_S = 60


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: signals are the supervisor's, and come here as control events."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(app: FastAPI) -> HttpServer:
    """A server for `app`, to be run with `serve(sockets)` on uvloop. It logs what is wrong and nothing else."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return HttpServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
    )
