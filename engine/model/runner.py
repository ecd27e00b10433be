"""The model as the device sees it: a batch in, logits out."""

from __future__ import annotations

import logging
import os
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from common.config import Config
from common.models import ModelError
from engine.attention.cache import KVCache, LayerShape, bytes_per_block
from engine.attention.reference import ReferenceBackend
from engine.model import gate
from engine.model.anatomy import read, rotations
from engine.model.batch import Batch
from engine.model.decorators import strip_decorators
from engine.model.invariance import is_invariant
from engine.model.loader import DTYPES, load_config, load_model, resolve_weights
from engine.model.memory import give_back, kv_cache_bytes
from engine.model.modules import Modules
from engine.model.probe import make_batch
from engine.model.rounding import round_weights

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

# (rows, tokens of each): a lone stream, small and large batches, a prefill chunk.
_COSTS = (1, 2, 3, 4, 6, 8, 16)  # tokens of the steps that are measured
_WARM_UP = ((1, 1), (2, 1), (16, 1), (64, 1), (1, 64))


class Executor(Protocol):
    """What computes a step."""

    invariant: bool  # a token's logits are the same bits whatever else is in the batch, and by prefill or by decode

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Writes the batch's keys and values into `cache`. Returns the logits of `batch.logits_index`, [n, V]
        float32, good until the next step."""


@dataclass(slots=True)
class ModelRunner:
    """One model on one device with its KV cache. Owner: the device thread, after `load`."""

    executor: Executor
    layers: tuple[LayerShape, ...]
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    weights: str  # the format that the weights are stored in
    dtype: torch.dtype  # of what is computed
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    kv_cache_memory_bytes: int | None = None
    _cache: KVCache | None = None

    @classmethod
    def load(cls, config: Config, progress: Progress) -> ModelRunner:
        """Loads `config.model.folder`, checks that it can be served, and makes it fast.

        `progress(phase, fraction)` tells how far it is. Raises ModelError.
        """
        progress("loading", 0.0)
        folder, device = Path(config.model.folder), resolve_device(config.engine.device)
        model_config = load_config(folder)
        max_model_len = resolve_max_model_len(model_config, config.model.max_model_len)
        gate.check_config(model_config, max_model_len)
        weights = resolve_weights(config.model, model_config)
        dtype = torch.float32 if device.type == "cpu" else DTYPES[weights]
        model = load_model(folder, model_config, dtype, device)
        vocab_size: int = model_config.get_text_config(decoder=True).vocab_size
        with torch.inference_mode():
            if device.type == "cpu":
                try:
                    round_weights(model, weights)
                except ValueError as e:
                    raise ModelError(f"{folder}: {e}") from e
            progress("checking", 0.6)
            inspection = gate.inspect(model, vocab_size, max_model_len)
            progress("packing", 0.7)
            executor = make_executor(model, inspection, max_model_len, weights, config)
            progress("checking", 0.9)
            like, quantized = torch.empty(0, dtype=dtype, device=device), config.model.quantization != "none"
            gate.verify(model_config, inspection, executor.forward, like, quantized)
            if isinstance(executor, Modules):
                executor.invariant = is_invariant(executor.forward, inspection.layers, vocab_size, like)
            if config.engine.batch_invariant and not executor.invariant:
                raise ModelError(
                    f"--batch-invariant: {model_config.model_type!r} as transformers' modules gives other bits in other"
                    " batches here; without this option it can be served"
                )
        del model
        give_back()
        progress("loading", 1.0)
        return cls(
            executor, inspection.layers, max_model_len, end_token_ids(folder, model_config), vocab_size, weights,
            dtype, resolve_kv_dtype(config.engine.kv_cache_dtype, weights, dtype), device,
            config.engine.kv_cache_memory_bytes,
        )  # fmt: skip

    def bytes_per_block(self, block_size: int) -> int:
        """KV-cache memory of one block, all layers, in bytes."""
        return bytes_per_block(self.layers, block_size, self.kv_dtype)

    def available_kv_bytes(self) -> int:
        """Bytes that the KV cache may take: `--kv-cache-memory-bytes`, else a share of what is free now."""
        return kv_cache_bytes(self.device, self.kv_cache_memory_bytes)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, block 0 (scratch) included, in place of an earlier one."""
        self._cache = None
        self._cache = KVCache(self.layers, num_blocks, block_size, self.kv_dtype, self.device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Writes the batch's keys and values into the cache. Returns the logits of `batch.logits_index`, [n, V]
        float32, good until the next step; n may be 0. Raises RuntimeError before `allocate`."""
        if self._cache is None:
            raise RuntimeError("forward before allocate")
        with torch.inference_mode():
            return self.executor.forward(batch, self._cache)

    def warm_up(self) -> None:
        """One step of each kind over the scratch block, so that no request waits for a compiler or an allocator."""
        if self._cache is None:
            raise RuntimeError("warm_up before allocate")
        block_size = self._cache.block_size
        for rows, tokens in _WARM_UP:
            chunks = [[0] * min(tokens, block_size)] * rows
            wanted = range(0, rows * len(chunks[0]), len(chunks[0]))
            self.forward(make_batch(chunks, [0] * rows, [[0]] * rows, block_size, self.device, wanted))

    def step_costs(self) -> npt.NDArray[np.float64]:
        """Seconds of a step of n tokens, n from 0 to 16: measured at some, in between in proportion."""
        if self._cache is None:
            raise RuntimeError("step_costs before allocate")
        size = self._cache.block_size
        seconds = []
        for tokens in _COSTS:
            table = [0] * (-(-tokens // size))
            batch = make_batch([[0] * tokens], [0], [table], size, self.device)
            seconds.append(min(timeit.repeat(partial(self.forward, batch), number=1, repeat=3)))
        return np.interp(np.arange(_COSTS[-1] + 1), _COSTS, np.maximum.accumulate(seconds))


def make_executor(
    model: PreTrainedModel, inspection: gate.Inspection, max_model_len: int, weights: str, config: Config
) -> Executor:
    """The fastest there is for the model on its device. The model's own weights may be given up."""
    native = _native() if model.device.type == "cpu" else None
    if native is None:
        strip_decorators(model)
        return Modules(model, ReferenceBackend())
    team = native.Team(config.engine.threads or cores())
    if config.engine.model_impl != "transformers" and (anatomy := read(model)):
        log.info("model: one tape for all layers, weights in %s", weights)
        turned = rotations(model, max_model_len)
        decoder: Executor = native.Decoder(anatomy, inspection, turned, weights, team)
        return decoder
    strip_decorators(model)
    native.pack_layers(model, weights, team)
    log.info("model: transformers' modules, weights in %s", weights)
    backend = native.NativeBackend(team, [call.heads for call in inspection.calls], inspection.layers)
    return Modules(model, backend, native=True)


def _native() -> Any:
    """The package of what numba compiles; None where it is not installed."""
    try:
        from engine.model import native
    except ImportError as e:
        log.warning("the model runs in plain torch, which is slow: %s", e)
        return None
    return native


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ModelError naming `--device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ModelError(f"--device is {name!r}, but this machine offers cpu{' and cuda' * torch.cuda.is_available()}")
    return torch.device(name)


def resolve_kv_dtype(name: str, weights: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are stored in. `auto` is float32 with float32 weights. Otherwise it is what is computed in,
    if that has sixteen bits, and else float16, which rounds eight times finer than bfloat16 and clips at 65,504."""
    if name != "auto":
        return DTYPES[name]
    if weights == "float32":
        return torch.float32
    return torch.float16 if dtype is torch.float32 else dtype


def resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """The context in tokens: what was asked for, or the model's own. Raises ModelError naming `--max-model-len`."""
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit and rope.get("rope_type") == "yarn":
        limit = max(limit, int((rope.get("original_max_position_embeddings") or limit) * rope.get("factor", 1)))
    if requested is None:
        if limit is None:
            raise ModelError("the model names no context length: give one with --max-model-len")
        return limit
    if not 1 <= requested <= (limit or requested):
        raise ModelError(f"--max-model-len is {requested}, but must be from 1 to the model's {limit}")
    return requested


def end_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """The tokens that end a text, from generation_config.json and config.json, ascending."""
    found: set[int] = set()
    sources: list[object] = [config, config.get_text_config(decoder=True)]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True))
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))
