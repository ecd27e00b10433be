"""What one API process knows: its configuration, its engines, and how far start-up or shutdown has come."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from api_server.admission import Admission
from api_server.engines import EngineClient
from api_server.errors import DrainingError, NotReadyError
from api_server.served_model import ServedModel
from common.config import Config
from common.messages import Ready


@dataclass(slots=True)
class ServerState:
    """Owned by the event loop."""

    config: Config
    engines: EngineClient
    seeds: random.Random  # for requests that bring no seed
    served: ServedModel | None = None
    phase: str = "starting"
    progress: float = 0.0  # of the phase, 0 … 1
    draining: bool = False
    open_requests: int = 0  # for generation; what /load tells
    errors: dict[int, int] = field(default_factory=dict)  # answers of 4xx and 5xx, by status

    @classmethod
    def create(cls, config: Config, api_id: int) -> ServerState:
        """A process that has just begun."""
        server = config.server
        admission = Admission(server.max_num_queued_reqs, server.max_num_queued_tokens)
        seeds = random.Random(config.model.seed << 64 | api_id)  # no two processes draw the same
        return cls(config, EngineClient(api_id, admission), seeds)

    @property
    def is_ready(self) -> bool:
        return self.served is not None and not self.draining and self.engines.is_ready

    def status(self) -> dict[str, str | float]:
        """For health checks: `phase` and `progress`."""
        if self.draining:
            return {"phase": "draining", "progress": 1.0}
        if self.is_ready:
            return {"phase": "ready", "progress": 1.0}
        if self.phase == "ready":  # once, and no longer
            return {"phase": "waiting for an engine", "progress": 0.0}
        return {"phase": self.phase, "progress": self.progress}

    def require_ready(self) -> tuple[ServedModel, Ready]:
        """What a request needs. Raises `DrainingError` or `NotReadyError`."""
        if self.draining:
            raise DrainingError()
        model = self.engines.model
        if self.served is None or model is None or not self.engines.is_ready:
            status = self.status()
            raise NotReadyError(f"The model is not ready yet: {status['phase']}.", details=status)
        return self.served, model

    def require_model(self) -> ServedModel:
        """The model once it has been served, even while its engine is away. Raises `NotReadyError`."""
        if self.served is None or not (self.phase == "ready" or self.is_ready):
            status = self.status()
            raise NotReadyError(f"The model is not ready yet: {status['phase']}.", details=status)
        return self.served
