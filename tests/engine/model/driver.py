"""Greedy decoding on a bare ModelRunner, in whatever mixture of chunks a test wants, and transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.config import Config, EngineConfig, ModelConfig
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner


def load_runner(folder: Path, max_model_len: int | None = None, dtype: str = "auto") -> ModelRunner:
    model = ModelConfig(folder=str(folder), max_model_len=max_model_len, dtype=dtype)
    return ModelRunner.load(Config(model=model, engine=EngineConfig(device="cpu")), lambda phase, fraction: None)


def random_prompts(lengths: tuple[int, ...], vocabulary: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


@dataclass
class Sequence:
    """One request: what was fed, what came out, and the logits each new token was chosen from."""

    prompt: list[int]
    table: list[int]
    fed: int = 0
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.prompt) + len(self.output) - self.fed

    def take(self, count: int) -> list[int]:
        return (self.prompt + self.output)[self.fed : self.fed + count]


class Driver:
    """Runs sequences to `new_tokens` each, with blocks handed out in a shuffled order."""

    def __init__(self, runner: ModelRunner, block_size: int = 16, num_blocks: int = 160, seed: int = 0) -> None:
        self.runner, self.block_size = runner, block_size
        self.draw = random.Random(seed)
        self.free = self.draw.sample(range(1, num_blocks), num_blocks - 1)
        runner.allocate(num_blocks, block_size)

    def start(self, prompt: list[int], new_tokens: int) -> Sequence:
        blocks = -(-(len(prompt) + new_tokens) // self.block_size)
        return Sequence(prompt, [self.free.pop() for _ in range(blocks)])

    def step(self, feeds: list[tuple[Sequence, int]]) -> None:
        """Feeds each sequence that many tokens; those that reach their end get a new token."""
        chunks = [sequence.take(count) for sequence, count in feeds]
        ends = [sum(map(len, chunks[: i + 1])) - 1 for i in range(len(chunks))]
        done = [count == sequence.waiting for sequence, count in feeds]
        logits = self.runner.forward(
            make_batch(
                chunks,
                [sequence.fed for sequence, _ in feeds],
                [sequence.table for sequence, _ in feeds],
                self.block_size,
                self.runner.device,
                [end for end, whole in zip(ends, done, strict=True) if whole],
            )
        )
        rows = iter(logits)
        for (sequence, count), whole in zip(feeds, done, strict=True):
            sequence.fed += count
            if whole:
                row = next(rows)
                sequence.logits.append(row.clone())
                sequence.output.append(int(row.argmax()))

    def run(self, prompts: list[list[int]], new_tokens: int, chunk: Callable[[int], int]) -> list[Sequence]:
        """All prompts together: each step feeds a random share of the unfinished, `chunk(waiting)` tokens each."""
        sequences = [self.start(prompt, new_tokens) for prompt in prompts]
        while unfinished := [s for s in sequences if len(s.output) < new_tokens]:
            some = [s for s in unfinished if self.draw.random() < 0.8] or unfinished[:1]
            self.step([(s, min(s.waiting, chunk(s.waiting))) for s in some])
        return sequences

    def whole(self, waiting: int) -> int:
        """Chunk rule: the whole prompt at once."""
        return waiting

    def chunked(self, waiting: int) -> int:
        """Chunk rule: from one token to a few blocks."""
        return self.draw.randint(1, 3 * self.block_size)


def transformers_greedy(
    folder: Path, prompts: list[list[int]], new_tokens: int
) -> list[tuple[list[int], torch.Tensor]]:
    """What `generate` makes of each prompt alone, and the logits [new_tokens, V] of every token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return found
