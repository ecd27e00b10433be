"""The model as the device sees it: a batch in, logits out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from common.config import Config
from common.models import ModelError
from engine.attention.backends import choose_backend
from engine.attention.cache import KVCache, LayerShape, bytes_per_block
from engine.attention.interface import Backend, begin_step
from engine.model import gate
from engine.model.batch import Batch
from engine.model.decorators import strip_decorators
from engine.model.linear import Shape, float32_candidates, pack_linears
from engine.model.loader import load_config, load_model, resolve_dtype
from engine.model.memory import kv_cache_bytes
from engine.model.probe import make_batch

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

SMALL_STEP = 300_000_000  # multiplications; about 5 ms of one core

# (rows, tokens of each): a lone stream, small and large batches, a prefill chunk.
_WARM_UP = ((1, 1), (2, 1), (16, 1), (64, 1), (1, 64))


class ModelRunner:
    """One model on one device with its KV cache. Owner: the device thread, after `load`."""

    def __init__(
        self, model: PreTrainedModel, layers: tuple[LayerShape, ...], backend: Backend, max_model_len: int,
        eos_token_ids: tuple[int, ...], kv_cache_memory_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.layers = layers
        self.backend = backend
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.linear_kernels: dict[Shape, str] = {}  # by (out, in): which kernel measured fastest
        self._kv_cache_memory_bytes = kv_cache_memory_bytes
        self._threads = torch.get_num_threads()
        self._head_products, self._body_products = _products(model)
        self._cache: KVCache | None = None

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
        dtype = resolve_dtype(config.model.dtype, model_config, device)
        model = load_model(folder, model_config, dtype, device)
        with torch.inference_mode():
            progress("checking", 0.6)
            vocab_size = model_config.get_text_config(decoder=True).vocab_size
            inspection = gate.inspect(model, vocab_size, max_model_len)
            progress("packing", 0.7)
            strip_decorators(model)
            runner = cls(
                model, inspection.layers, choose_backend(device, dtype), max_model_len,
                end_token_ids(folder, model_config), config.engine.kv_cache_memory_bytes,
            )  # fmt: skip
            if device.type == "cpu" and dtype is torch.float32:
                runner.linear_kernels = pack_linears(model, float32_candidates())
            progress("checking", 0.9)
            gate.verify(model_config, inspection, runner.forward_over, next(model.parameters()))
        progress("loading", 1.0)
        return runner

    def bytes_per_block(self, block_size: int) -> int:
        """KV-cache memory of one block, all layers, in bytes."""
        return bytes_per_block(self.layers, block_size, self.dtype)

    def available_kv_bytes(self) -> int:
        """Bytes that the KV cache may take: `--kv-cache-memory-bytes`, else a share of what is free now."""
        return kv_cache_bytes(self.device, self._kv_cache_memory_bytes)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, block 0 (scratch) included, in place of an earlier one."""
        self._cache = None
        self._cache = KVCache(self.layers, num_blocks, block_size, self.dtype, self.device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Writes the batch's keys and values into the cache. Returns the logits of `batch.logits_index`, [n, V]
        float32; n may be 0. Raises RuntimeError before `allocate`."""
        if self._cache is None:
            raise RuntimeError("forward before allocate")
        return self.forward_over(batch, self._cache)

    def forward_over(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """`forward` over a cache other than the runner's own."""
        with torch.inference_mode():
            self._choose_threads(batch)
            begin_step(self.backend, batch, cache)
            logits: torch.Tensor = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_index,
            ).logits[0]
            return logits.float()

    def _choose_threads(self, batch: Batch) -> None:
        """One thread for small steps: there, waiting for each other costs several threads more than they save.

        A step of a single token waits for memory alone, and two cores read faster than one.
        """
        tokens = batch.token_ids.numel()
        products = tokens * self._body_products + len(batch.logits_index) * self._head_products
        threads = self._threads if tokens == 1 or products > SMALL_STEP else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def warm_up(self) -> None:
        """One step of each kind over the scratch block, so that no request waits for a compiler or an allocator."""
        if self._cache is None:
            raise RuntimeError("warm_up before allocate")
        block_size = self._cache.block_size
        for rows, tokens in _WARM_UP:
            chunks = [[0] * min(tokens, block_size)] * rows
            wanted = range(0, rows * len(chunks[0]), len(chunks[0]))
            self.forward(make_batch(chunks, [0] * rows, [[0]] * rows, block_size, self.device, wanted))


def _products(model: PreTrainedModel) -> tuple[int, int]:
    """Multiplications per row of the head, and per token of everything else that is a matrix."""
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    skipped = {id(embedding), id(getattr(head, "weight", None))}
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in skipped)
    return int(embedding.numel()), body


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ModelError naming `--device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ModelError(f"--device is {name!r}, but this machine offers cpu{' and cuda' * torch.cuda.is_available()}")
    return torch.device(name)


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
