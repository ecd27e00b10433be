"""Greedy decoding on a bare ModelRunner, in whatever mixture of chunks a test wants, and transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.config import Config, EngineConfig, ModelConfig
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner


def load_runner(
    folder: Path, max_model_len: int | None = None, dtype: str = "float32", impl: str = "auto", threads: int = 2,
    quantization: str = "none",
) -> ModelRunner:  # fmt: skip
    model = ModelConfig(folder=str(folder), max_model_len=max_model_len, dtype=dtype, quantization=quantization)
    engine = EngineConfig(device="cpu", model_impl=impl, threads=threads)
    return ModelRunner.load(Config(model=model, engine=engine), lambda phase, fraction: None)


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


Greedy = tuple[list[int], torch.Tensor]  # the tokens, and the logits [new_tokens, V] they were chosen from


def decidable_greedy(
    folder: Path, lengths: tuple[int, ...], new_tokens: int, vocabulary: int
) -> tuple[list[list[int]], list[Greedy]]:
    """Random prompts of these lengths and what `generate` makes of them, without near-ties.

    Where the two best candidates lie closer than rounding moves them, the order of additions picks the token and a
    comparison says nothing: such prompts are drawn again.
    """
    prompts, found = [], []
    for index, length in enumerate(lengths):
        for attempt in range(100):
            (prompt,) = random_prompts((length,), vocabulary, seed=100 * index + attempt)
            (greedy,) = transformers_greedy(folder, [prompt], new_tokens)
            best = greedy[1].topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) > _NEAR_TIE * float(greedy[1].std()):
                break
        prompts.append(prompt)
        found.append(greedy)
    return prompts, found


_NEAR_TIE = 0.003  # of the logits' standard deviation; rounding moves the random models' by up to 0.001


def transformers_greedy(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[Greedy]:
    """What `generate` makes of each prompt alone."""
    model = _reference(folder)
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


@lru_cache(maxsize=2)  # models are not kept longer than their tests take
def _reference(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model
