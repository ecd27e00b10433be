"""An engine that runs no model: it answers in this process with tokens from a script, one STEP message at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers

from api_server.engines import EngineClient
from common.messages import (
    Abort,
    Extra,
    Finish,
    Ready,
    Stats,
    Step,
    Submit,
    ToEngine,
    TokenLogprob,
    pack_ints,
    unpack_ints,
)

MODEL = {
    "max_model_len": 128,
    "vocab_size": 300,
    "eos_token_ids": [1],
    "dtype": "float32",
    "kv_cache_tokens": 4096,
    "block_size": 16,
    "max_num_seqs": 8,
}
SPECIAL = ("<|begin|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}:{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}"
)


def make_model_folder(folder: Path, template: str | None = TEMPLATE, generation_config: str | None = None) -> Path:
    """A folder with a byte-level tokenizer (a token per byte, two special ones) and what stands around it."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>", "eos_token": "<|end|>"}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(generation_config)
    return folder


@dataclass
class Reply:
    """What the fake says to one request: pieces of text, a token each."""

    pieces: list[str]
    finish: Finish = Finish.STOP
    stop: str | int | None = None
    error: str | None = None
    cached: int = 0  # tokens of the prompt


@dataclass
class FakeEngine:
    """A transport whose other end is scripted. Submits wait in `open` until `step` or `run` moves them on."""

    client: EngineClient | None = None
    number: int = 0
    epoch: int = 1
    reply: Callable[[Submit], Reply] = lambda submit: Reply(["Hello", " ", "world"], Finish.LENGTH)
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    automatic: bool = True
    reachable: bool = True
    submits: list[Submit] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    open: dict[int, tuple[Submit, Reply, int]] = field(default_factory=dict)
    closed: bool = False
    seq: int = 0

    def attach(self, client: EngineClient) -> FakeEngine:
        """Connects, and says READY."""
        self.client = client
        client.connect(self.number, self.epoch, self)
        client.on_message(Ready(self.number, self.epoch, self.model))
        return self

    def send(self, message: ToEngine) -> bool:
        if not self.reachable:
            return False
        if isinstance(message, Submit):
            self.submits.append(message)
            self.open[message.handle] = (message, self.reply(message), 0)
            if self.automatic:
                _soon(self._run_on)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            self.open.pop(message.handle, None)
        return True

    def close(self) -> None:
        self.closed = True

    def heartbeat(self, counters: dict[str, int] | None = None, **gauges: float) -> None:
        assert self.client is not None
        counted = {"steps": self.seq} | (counters or {})
        self.client.on_message(Stats(self.number, self.epoch, 1, len(self.open), 0, gauges, counted))

    def _run_on(self) -> None:
        if self.automatic and self.step():
            _soon(self._run_on)

    def run(self) -> None:
        """Everything to its end."""
        while self.step():
            pass

    def step(self) -> bool:
        """One token for every open request. False when there was none."""
        if not self.open:
            return False
        entries = [self._advance(handle) for handle in list(self.open)]
        self.deliver(entries)
        return True

    def deliver(self, entries: Iterable[tuple[int, list[int], str, Finish, Extra | None]]) -> None:
        """One STEP of (handle, token ids, text, finish, extra)."""
        assert self.client is not None
        rows = list(entries)
        self.seq += 1
        self.client.on_message(
            Step(
                self.number,
                self.epoch,
                self.seq,
                handles=pack_ints("I", [row[0] for row in rows]),
                counts=pack_ints("H", [len(row[1]) for row in rows]),
                finishes=bytes(row[3] for row in rows),
                token_ids=pack_ints("i", [token for row in rows for token in row[1]]),
                texts=[row[2] for row in rows],
                extras={i: row[4] for i, row in enumerate(rows) if row[4] is not None},
            )
        )

    def _advance(self, handle: int) -> tuple[int, list[int], str, Finish, Extra | None]:
        submit, reply, at = self.open[handle]
        self.open[handle] = (submit, reply, at + 1)
        if reply.error is not None and at >= len(reply.pieces):
            del self.open[handle]
            return handle, [], "", Finish.ERROR, Extra(error=reply.error)
        extra = Extra()
        params = submit.params
        if at == 0 and params.prompt_logprobs is not None:
            scored = [token_logprob(chr(96 + i), params.prompt_logprobs) for i in unpack_ints("i", submit.prompt)]
            extra = replace(extra, prompt_logprobs=[None, *scored[1:]] if len(scored) > 1 else None)
        if params.max_tokens == 0:
            del self.open[handle]
            return handle, [], "", Finish.LENGTH, replace(extra, usage=(len(submit.prompt) // 4, 0, 0))
        piece = reply.pieces[at]
        if params.logprobs is not None:
            extra = replace(extra, logprobs=[token_logprob(piece, params.logprobs)])
        finish = Finish.NONE
        if at + 1 >= min(len(reply.pieces), params.max_tokens) and reply.error is None:
            del self.open[handle]
            finish = reply.finish
            extra = replace(extra, stop=reply.stop, usage=(len(submit.prompt) // 4, at + 1, reply.cached))
        return handle, [100 + at], piece, finish, extra if extra != Extra() else None


def token_logprob(text: str, top: int) -> TokenLogprob:
    """The token itself is the likeliest; the others are made up."""
    others = [(text, -0.5, text.encode(), 100), *((f"<{i}>", -1.0 - i, b"<%d>" % i, 200 + i) for i in range(20))]
    return text, -0.5, text.encode(), others[:top]


def _soon(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)
