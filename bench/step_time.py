"""What a step costs without a server around it: the model's forward pass and greedy sampling.

`python -m bench.step_time FOLDER ROWS,ROWS,…` prints JSON: milliseconds by number of rows. In a process of its own,
because torch must not load where the load client runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench.load import numbers
from common.config import Config, ModelConfig
from common.sampling import SamplingParams
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler

CONTEXT = 200  # tokens: about a prompt of 100 words and half of an answer
BLOCK_SIZE = 16
SECONDS = 1.0  # measured for each number of rows


def step_ms(runner: ModelRunner, rows: int) -> float:
    """Milliseconds of a decode step of so many rows: of the fastest tenth, so that what else runs is left out."""
    blocks = -(-(CONTEXT + 1) // BLOCK_SIZE)
    runner.allocate(rows * blocks + 1, BLOCK_SIZE)
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    batch = make_batch([[row] for row in range(rows)], [CONTEXT] * rows, tables, BLOCK_SIZE, runner.device)
    sampler = Sampler(rows, runner.vocab_size, runner.device)
    for row in range(rows):
        sampler.admit(row, SamplingParams(temperature=0.0), (), [0])
    row_set = sampler.row_set(np.arange(rows))
    positions = torch.full((rows,), CONTEXT + 1, device=runner.device)
    times: list[float] = []
    with torch.inference_mode():
        while sum(times) < SECONDS:
            began = perf_counter()
            sampler.sample(runner.forward(batch), row_set, positions).tokens.tolist()
            times.append(perf_counter() - began)
    return 1e3 * sorted(times)[len(times) // 10]


def main() -> None:
    folder, counts = Path(sys.argv[1]), numbers(sys.argv[2])
    runner = ModelRunner.load(Config(model=ModelConfig(folder=str(folder))), lambda phase, fraction: None)
    print(json.dumps({rows: step_ms(runner, rows) for rows in counts}))


if __name__ == "__main__":
    main()
