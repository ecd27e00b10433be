"""One engine: its threads, put together. The same in a process of its own and inside the API process."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch

from common.config import Config
from common.grammar import Grammars
from common.messages import PROTOCOL_VERSION, Abort, Call, Fatal, Hello, Ready, Submit, ToApi, ToEngine
from common.models import ModelError
from engine.blocks import BlockPool
from engine.compiler import Compiler
from engine.devices.device import Device, DeviceThread
from engine.devices.drafts import Drafts
from engine.devices.torch_device import TorchDevice
from engine.loop import Arrival, DropApi, Event, Loop, LoopConfig, Shutdown
from engine.model.runner import ModelRunner
from engine.output.detokenizer import Vocabulary
from engine.output.processor import OutputProcessor
from engine.output.thread import InlineOutput, OutputThread
from engine.prefix_cache import PrefixCache
from engine.sampling.sampler import Sampler
from engine.scheduler import Limits, Scheduler

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

SWITCH_INTERVAL = 5e-5  # seconds; at Python's 5 ms a busy thread would hold up the device thread for whole steps
SPARE_ROWS = 2  # rows per request that may run: one that starts need not wait for the row of one that ends


class Outbox(Protocol):
    """The engine's way to API processes; used by the thread that runs the output processor."""

    def connect(self, api_id: int, endpoint: str) -> None: ...

    def drop(self, api_id: int) -> None: ...

    def send(self, api_id: int, message: ToApi) -> None: ...

    def flush(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, and what the engine must know of it."""

    device: Device
    vocabulary: Vocabulary
    num_blocks: int
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    dtype: str


def load(config: Config, progress: Progress) -> Loaded:
    """Loads the model, sizes and allocates the KV cache, warms up. Raises ModelError."""
    config = replace(config, engine=replace(config.engine, device="cpu"))
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    vocabulary = Vocabulary.load(Path(config.model.folder))
    runner = ModelRunner.load(config, progress)
    size = config.engine.block_size
    num_blocks, max_model_len = _cache_size(config, runner)
    progress("warming up", 0.0)
    runner.allocate(num_blocks, size)
    with torch.inference_mode():
        runner.warm_up()
    rows = SPARE_ROWS * config.engine.max_num_seqs
    sampler = Sampler(rows, runner.vocab_size, runner.device)
    drafts = None
    if config.engine.num_speculative_tokens and runner.executor.invariant:
        drafts = Drafts(rows, max_model_len, config.engine.num_speculative_tokens, runner.step_costs())
    device = TorchDevice(runner, sampler, rows, size, max_model_len, drafts)
    tokens = (num_blocks - 1) * size
    log.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB: %d tokens, %.1f sequences of the maximum length %d",
        num_blocks, size, num_blocks * runner.bytes_per_block(size) / 2**30, tokens, tokens / max_model_len,
        max_model_len,
    )  # fmt: skip
    return Loaded(
        device, vocabulary, num_blocks, max_model_len, runner.vocab_size, runner.eos_token_ids, runner.weights
    )


def _cache_size(config: Config, runner: ModelRunner) -> tuple[int, int]:
    """Blocks of the KV cache, scratch included, and the context length that fits. Raises ModelError."""
    size = config.engine.block_size
    per_block = runner.bytes_per_block(size)
    available = runner.available_kv_bytes()
    useful = config.engine.max_num_seqs * -(-runner.max_model_len // size)
    blocks = min(available // per_block - 1, useful)
    if blocks * size >= runner.max_model_len:
        return blocks + 1, runner.max_model_len
    tokens = max(0, blocks * size)
    if config.model.max_model_len is not None or tokens < 1:
        raise ModelError(
            f"the KV cache has room for {tokens} tokens ({available >> 20} MiB), less than one sequence of "
            f"{runner.max_model_len}: lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    log.warning("context cut from %d to %d tokens: the KV cache holds no more", runner.max_model_len, tokens)
    return blocks + 1, tokens


class Engine:
    """The engine's threads. `handle` takes messages in, from any thread; answers leave through the outbox.

    ```
    intake ─handle→ inbox ─→ loop ─plans→ device thread
                      ↑        │ results ↩ (through the inbox)
                      └─stops─ output thread ─→ outbox
    ```
    """

    def __init__(self, config: Config, loaded: Loaded, index: int, epoch: int, outbox: Outbox) -> None:
        engine = config.engine
        self.index, self.epoch = index, epoch
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._outbox = outbox
        self._ready = Ready(index, epoch, _model_facts(config, loaded))
        self._processor = OutputProcessor(loaded.vocabulary, index, epoch, outbox.send, self._inbox.put)
        self._output: OutputThread | InlineOutput
        if engine.async_output:
            self._output = OutputThread(self._processor, outbox.flush, self._inbox.put)
        else:
            self._output = InlineOutput(self._processor, outbox.flush, self._inbox.put)
        self._device = DeviceThread(loaded.device, self._inbox.put)
        pool = BlockPool(loaded.num_blocks, engine.block_size)
        self._prefixes = PrefixCache(pool, enabled=engine.enable_prefix_caching)
        grammars = partial(
            Grammars, Path(config.model.folder), loaded.vocab_size, loaded.end_token_ids
        )  # fmt: skip
        self._compiler = Compiler(grammars, self._inbox.put)
        limits = Limits(
            engine.steps_ahead,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            SPARE_ROWS * engine.max_num_seqs,
        )
        loop_config = LoopConfig(
            index, epoch, engine.steps_ahead, loaded.max_model_len, loaded.vocab_size, loaded.end_token_ids
        )
        scheduler = Scheduler(limits, pool, self._prefixes)
        self._loop = Loop(loop_config, scheduler, self._inbox, self._device, self._output)

    def run(self) -> None:
        """Serves until `shutdown`, with the loop on the calling thread. Raises EngineError when every peer is told."""
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection walks over it again
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._device.start()
        self._output.start()
        try:
            self._loop.run()
        except Exception as e:
            self._output.stop(partial(self._processor.broadcast, Fatal(self.index, self.epoch, str(e))))
            raise
        self._compiler.close()
        self._output.stop(self._outbox.close)
        self._device.stop()

    def shutdown(self) -> None:
        """Ends `run` at its next event; what is open is not finished. From any thread, or a signal handler."""
        self._inbox.put(Shutdown())

    def handle(self, message: ToEngine) -> None:
        """Takes in one message of an API process or of the supervisor."""
        match message:
            case Submit():
                chain = self._prefixes.chain(message.cache_salt, message.prompt + message.emitted)
                arrival = Arrival(message, chain)
                if message.params.grammar is None:
                    self._inbox.put(arrival)
                else:
                    self._compiler.submit(arrival)
            case Abort():
                self._compiler.abort(message)
            case Hello():
                self._output.call(self._greet, message)
            case Call(name="drop_api"):
                api_id = int(message.args["api_id"])
                self._compiler.drop_api(api_id)
                self._inbox.put(DropApi(api_id))
                self._output.call(self._drop, api_id)
            case _:
                log.warning("dropped a message that is not for an engine: %s", type(message).__name__)

    def _greet(self, hello: Hello) -> None:
        self._outbox.connect(hello.api_id, hello.endpoint)
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"protocol version {hello.protocol} cannot talk to version {PROTOCOL_VERSION}"
            log.error("refused API process %d: %s", hello.api_id, reason)
            self._outbox.send(hello.api_id, Fatal(self.index, self.epoch, reason))
            return
        self._outbox.send(hello.api_id, self._ready)
        self._processor.add_api(hello.api_id)

    def _drop(self, api_id: int) -> None:
        self._processor.drop_api(api_id)
        self._outbox.drop(api_id)


def _model_facts(config: Config, loaded: Loaded) -> dict[str, object]:
    engine = config.engine
    return {
        "max_model_len": loaded.max_model_len,
        "vocab_size": loaded.vocab_size,
        "eos_token_ids": list(loaded.end_token_ids),
        "dtype": loaded.dtype,
        "kv_cache_tokens": (loaded.num_blocks - 1) * engine.block_size,
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
    }
