"""Where the time of a decode step goes: products, attention, the small operations between, sampling, the rest.

`python -m bench.profile [--formats auto,int8] [--rows 1,8,32] [--context 128]` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.figures import Figure, dump, markdown
from bench.load import numbers
from bench.steps import BLOCK, default_folder, load
from common.sampling import SamplingParams
from engine.devices.torch_device import TorchDevice
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner
from engine.plan import Admission, Chunk, Plan
from engine.sampling.sampler import Sampler

PARTS = {
    "linear layers": ("linear", "gated"),
    "head": ("head",),
    "attention": ("attend", "combine"),
    "small operations": ("embed", "norm", "rotate", "add", "cap"),
}
SAMPLING, REST = "sampling", "laying out the batch, taking results in"
STEPS = 24


class _Timed:
    """A method of an object, with its time added up."""

    def __init__(self, holder: Any, name: str) -> None:
        self.seconds = 0.0
        self._run = getattr(holder, name)

    def __call__(self, *arguments: Any) -> Any:
        began = perf_counter()
        try:
            return self._run(*arguments)
        finally:
            self.seconds += perf_counter() - began


class _TimedSampler:
    """A sampler whose draws are timed."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.sample = _Timed(sampler, "sample")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def profile(runner: ModelRunner, rows: int, context: int, params: SamplingParams) -> dict[str, float]:
    """Milliseconds of one of `STEPS` decode steps, by part. Raises TypeError for a model that is not a tape."""
    if not isinstance(runner.executor, Decoder):
        raise TypeError("only tapes can be profiled")
    blocks = (context + STEPS + 8) // BLOCK + 1
    runner.allocate(1 + rows * blocks, BLOCK)
    sampler: Any = _TimedSampler(Sampler(rows, runner.vocab_size, runner.device))
    device = TorchDevice(runner, sampler, rows, BLOCK, blocks * BLOCK)
    prompts = [(np.arange(context, dtype=np.int32) * 31 + row) % 1000 + 3 for row in range(rows)]
    tables = tuple((row, 0, tuple(range(1 + row * blocks, 1 + (row + 1) * blocks))) for row in range(rows))
    admissions = tuple(Admission(row, params, (), prompts[row], ()) for row in range(rows))
    none = np.empty(0, np.int32)
    chunks = tuple(Chunk(row, prompts[row], 5) for row in range(rows))
    _run(device, Plan(1, 5, none, none, chunks, admissions, tables))
    program = runner.executor.program
    program.measure()
    sampler.sample.seconds = 0.0
    began = perf_counter()
    _run(device, Plan(2, STEPS, np.arange(rows, dtype=np.int32), np.full(rows, STEPS, np.int32)))
    whole = perf_counter() - began
    spent = program.spent()
    parts = {part: sum(spent.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    parts[SAMPLING] = sampler.sample.seconds
    parts[REST] = whole - sum(parts.values())
    return {part: 1e3 * seconds / STEPS for part, seconds in parts.items()}


def _run(device: TorchDevice, plan: Plan) -> None:
    device.begin(plan)
    for index in range(plan.steps):
        device.step(plan, index)


def small_share(parts: Mapping[str, float]) -> float:
    """Of a step: what is neither a product nor attention, as a share of all."""
    small = sum(parts[name] for name in ("small operations", SAMPLING))
    return small / sum(parts.values())


def figures(folder: Path, formats: tuple[str, ...]) -> list[Figure]:
    """The share of the small operations and sampling in a decode step of one row."""
    greedy = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    with torch.inference_mode():
        return [
            Figure(f"{format}: small operations and sampling in a step of 1 row",
                   100 * small_share(profile(load(folder, format), 1, 128, greedy)), "%")
            for format in formats
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder (default: the embedded model)")
    parser.add_argument("--formats", default="auto,int8")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], metavar="N,N,…")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="print the share of the small parts alone, as figures")
    options = parser.parse_args()
    if options.json:
        print(dump(figures(options.model or default_folder(), tuple(options.formats.split(",")))))
        return
    params = SamplingParams(max_tokens=1000, temperature=options.temperature, top_p=0.95, ignore_eos=True, seed=1)
    columns: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for format in options.formats.split(","):
            runner = load(options.model or default_folder(), format)
            for rows in options.rows:
                columns[f"{format}, {rows}"] = profile(runner, rows, options.context, params)
    print(render(columns))


def render(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Parts by lines, milliseconds and percent of each column's sum."""
    lines: list[tuple[str, ...]] = []
    sums = {name: sum(parts.values()) for name, parts in columns.items()}
    for part in next(iter(columns.values())):
        cells = (f"{parts[part]:.2f} ({100 * parts[part] / sums[name]:.0f} %)" for name, parts in columns.items())
        lines.append((part, *cells))
    lines.append(("all", *(f"{total:.2f}" for total in sums.values())))
    return markdown(("ms of a step (format, rows)", *columns), lines)


if __name__ == "__main__":
    main()
