"""`--engine-procs 0`: the engine's threads inside the API process. The one place here that imports engine code.

The same engine, the same messages and the same threads as in a process of its own; only the boundary is gone, and with
it the packing. This is the baseline that the split is compared with.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.messages import ToApi, ToEngine
from common.models import ModelError

if TYPE_CHECKING:
    from engine.core import Engine

log = logging.getLogger(__name__)

EPOCH = 1  # this engine lives as long as its process


class SingleProcess:
    """Runs one engine beside the event loop. Owner: the API process's runtime."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[dict[str, Any]], None],
        on_message: Callable[[ToApi], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_event` and `on_message` are called on the event loop, `on_failure` on the engine's own thread."""
        self._config = config
        self._loop = loop
        self._on_event = on_event
        self._on_message = on_message
        self._on_failure = on_failure
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def start(self, folder: str) -> None:
        """Loads the model and serves, on a thread of its own."""
        self._config = replace(self._config, model=replace(self._config.model, folder=folder))
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine's threads, and waits a little for them."""
        if self._engine is not None:
            self._engine.shutdown()
            self._thread.join(timeout=5)

    # What the event loop sees: a transport.

    def send(self, message: ToEngine) -> bool:
        """Hands the object over as it is."""
        if self._engine is None:
            return False
        self._engine.handle(message)
        return True

    def close(self) -> None:
        """There is no socket."""

    # What the engine sees: an outbox.

    class _Outbox:
        def __init__(self, deliver: Callable[[ToApi], None]) -> None:
            self._deliver = deliver

        def connect(self, api_id: int, endpoint: str) -> None:
            pass

        def drop(self, api_id: int) -> None:
            pass

        def send(self, api_id: int, message: ToApi) -> None:
            self._deliver(message)

        def flush(self) -> bool:
            return False

        def close(self) -> None:
            pass

    def _deliver(self, message: ToApi) -> None:
        self._soon(self._on_message, message)

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the event loop has ended before the engine")

    def _run(self) -> None:
        def progress(phase: str, fraction: float) -> None:
            self._soon(self._on_event, {"event": "phase", "phase": phase, "progress": round(fraction, 3)})

        try:
            from engine.core import Engine, load

            loaded = load(self._config, progress)
            self._engine = Engine(self._config, loaded, 0, EPOCH, self._Outbox(self._deliver))
            self._soon(self._on_event, {"event": "engine", "engine": 0, "epoch": EPOCH, "endpoint": ""})
            self._engine.run()
        except ModelError as e:
            self._on_failure(str(e))
        except Exception as e:
            log.exception("the engine failed")
            self._on_failure(f"the engine failed: {type(e).__name__}: {e}")
