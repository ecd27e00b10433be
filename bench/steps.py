"""Steps of the real model without a server: every stored format in turn with transformers' float32 model in torch.

`python -m bench.steps [--formats auto,int8]` prints one table: milliseconds of decode steps and of prefills, and how
much faster they are than the reference, which runs before and after each of them in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.figures import Figure, dump, table
from common.config import Config, EngineConfig, ModelConfig
from common.models import DEFAULT_MODEL, resolve
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner
from engine.prepare import prepare

FORMATS = ("float32", "auto", "int8", "int4")
CONTEXT = 128  # tokens before a decode step
ROWS = (1, 8, 32)
PREFILLS = (128, 512)
BLOCK = 16

Run = Callable[[], object]


class Reference:
    """transformers' float32 model with its own cache and attention."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model: Any = model.eval()

    def decode(self, rows: int) -> Run:
        """A step that puts the cache back afterwards."""
        cache = DynamicCache()
        tokens = torch.arange(3, 3 + CONTEXT).repeat(rows, 1)
        self._model(tokens, cache=cache, use_cache=True)
        one = tokens[:, :1]

        def run() -> None:
            self._model(one, cache=cache, use_cache=True)
            cache.crop(-1)

        return run

    def prefill(self, length: int) -> Run:
        tokens = torch.arange(3, 3 + length)[None]
        return lambda: self._model(tokens, use_cache=False, logits_to_keep=1)


def load(folder: Path, format: str) -> ModelRunner:
    """The model in a stored format. Raises ModelError."""
    quantized = format in ("int8", "int4")
    model = ModelConfig(
        folder=str(folder), dtype="auto" if quantized else format, quantization=format if quantized else "none"
    )
    runner = ModelRunner.load(Config(model=model, engine=EngineConfig(device="cpu")), lambda phase, fraction: None)
    runner.allocate(max(ROWS) * (CONTEXT // BLOCK + 1) + max(PREFILLS) // BLOCK + 1, BLOCK)
    return runner


def decode(runner: ModelRunner, rows: int, context: int = CONTEXT) -> Run:
    """One token of each row."""
    blocks = context // BLOCK + 1
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    batch = make_batch([[row + 3] for row in range(rows)], [context] * rows, tables, BLOCK, runner.device)
    return lambda: runner.forward(batch)


def prefill(runner: ModelRunner, length: int) -> Run:
    """One prompt, and the logits of its last token."""
    blocks = list(range(1, length // BLOCK + 1))
    batch = make_batch([list(range(3, 3 + length))], [0], [blocks], BLOCK, runner.device, [length - 1])
    return lambda: runner.forward(batch)


def compare(ours: Run, reference: Run, seconds: float) -> tuple[float, float]:
    """Median seconds of both, taken in turn for so long. In each turn the first run is left out: the other's threads
    may still be busy, and its data in the caches."""
    times: tuple[list[float], list[float]] = ([], [])
    end = perf_counter() + seconds
    while perf_counter() < end or len(times[0]) < 4:
        for run, found in zip((ours, reference), times, strict=True):
            for timed in (False, True, True):
                began = perf_counter()
                run()
                if timed:
                    found.append(perf_counter() - began)
    return median(times[0]), median(times[1])


def measure(folder: Path, formats: tuple[str, ...], seconds: float) -> list[Figure]:
    """Figures of every format, each compared with the reference for `seconds`."""
    figures = []
    with torch.inference_mode():
        reference = Reference(folder)
        references = {f"decode {n}": (reference.decode(n), n) for n in ROWS}
        references |= {f"prefill {n}": (reference.prefill(n), n) for n in PREFILLS}
        for format in formats:
            runner = load(folder, format)
            threads = torch.get_num_threads()
            for what, (other, n) in references.items():
                run = decode(runner, n) if what.startswith("decode") else prefill(runner, n)
                ours, theirs = compare(run, other, seconds)
                if what.startswith("decode"):
                    figure = Figure(f"{format}: step of {n} row{'s' * (n > 1)}", 1e3 * ours, "ms", theirs / ours)
                else:
                    figure = Figure(f"{format}: prefill of {n} tokens", n / ours, "tokens/s", theirs / ours)
                figures.append(figure)
                torch.set_num_threads(threads)
    return figures


def default_folder() -> Path:
    """The embedded model's folder, converted on first use."""
    return prepare(resolve(DEFAULT_MODEL), lambda phase, fraction: None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder (default: the embedded model)")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each comparison (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.model or default_folder(), tuple(options.formats.split(",")), options.seconds)
    print(dump(figures) if options.json else table(figures))


if __name__ == "__main__":
    main()
