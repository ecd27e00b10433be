"""The configuration tree that every process gets. Made once, in `common.options`, from flags, environment and file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str = (
        "SmolLM2-135M-Instruct"  # as the user wrote it: local folder, .gguf file, hub id, or the default's name
    )
    folder: str = ""  # the Hugging Face folder it resolved to; filled in by the supervisor
    served_model_name: tuple[str, ...] = ()  # the first is reported; all are answered; empty: derived from `model`
    revision: str | None = None
    download_dir: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    chat_template: str | None = None  # path of a file, or the template itself
    generation_config: str = "auto"  # auto: the model's; vllm: neutral; or a folder
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model answers, the reported one first."""
        return self.served_model_name or (self.model,)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How engines run."""

    engine_procs: int = 1  # 0: inside the API process
    tensor_parallel_size: int = 1
    device: str = "auto"
    steps_ahead: int = 8  # 0: synchronous
    async_output: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    threads: int | None = None
    num_speculative_tokens: int = 5  # 0: no drafts
    batch_invariant: bool = False  # refuse a model that cannot be
    model_impl: str = "auto"  # transformers: its modules, even where a faster form is known


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How HTTP is served and bounded."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_194_304
    sse_keep_alive_interval: float = 15.0  # seconds; 0 is off
    shutdown_timeout: float = 30.0  # seconds
    max_body_bytes: int = 32 << 20
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything. Crosses to child processes as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        tree: dict[str, dict[str, Any]] = json.loads(text)
        tree["model"]["served_model_name"] = tuple(tree["model"]["served_model_name"])
        return cls(ModelConfig(**tree["model"]), EngineConfig(**tree["engine"]), ServerConfig(**tree["server"]))
