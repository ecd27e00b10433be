"""What the server itself costs: a model whose steps cost next to nothing, in two processes and in one.

`python -m bench.overhead` runs both kinds of server in turn, each time afresh, and prints the tables that the README
quotes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from bench.figures import Figure, dump, machine, markdown
from bench.load import Load, Report, Spread, numbers, run, served_model
from bench.server import serving
from common.models import cache_root

# vLLM 0.32 on a machine of two cores, the same model, prompts and lengths: tokens/s by concurrent streams.
VLLM = {1: 140, 16: 1320, 64: 2560, 128: 2610}
SPLIT, SINGLE = "split", "single"
MODES = {SPLIT: ("--engine-procs", "1"), SINGLE: ("--engine-procs", "0")}
REQUESTS_PER_STREAM = {1: 10, 16: 6, 64: 4, 128: 3}

# By mode and number of streams, one report for each round.
Reports = Mapping[str, Mapping[int, Sequence[Report]]]


def tiny_folder() -> Path:
    """The model, made once by a process of its own: it takes torch, which must not load here."""
    folder = cache_root() / "bench-models" / "tiny"
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-m", "bench.models", str(folder)], check=True)
    return folder


def model_step_ms(model: Path, rows: Sequence[int]) -> dict[int, float]:
    """What one step of so many rows costs without a server, in milliseconds."""
    command = [sys.executable, "-m", "bench.step_time", str(model), ",".join(map(str, rows))]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {int(count): ms for count, ms in found.items()}


def compare(model: Path, concurrencies: Sequence[int], rounds: int) -> Reports:
    """Split, single, split, single, …: what the machine does meanwhile meets both alike."""
    reports: dict[str, dict[int, list[Report]]] = {mode: {n: [] for n in concurrencies} for mode in MODES}
    for round_number in range(rounds):
        for mode, options in MODES.items():
            with serving(model, (*options, "--log-level", "warning")) as url:
                name = served_model(url)
                for n in concurrencies:
                    load = Load(url, name, requests_per_stream=REQUESTS_PER_STREAM.get(n, 4))
                    [report] = run(load, [n], first_seed=round_number * 100_000)
                    reports[mode][n].append(report)
                    print(f"round {round_number + 1} {mode:6} {report.line()}", file=sys.stderr, flush=True)
    return reports


def tables(reports: Reports, steps_ms: Mapping[int, float]) -> str:
    """Both tables in Markdown: throughput, then latency."""
    return "\n\n".join((_throughput(reports, steps_ms), _latency(reports)))


def _throughput(reports: Reports, steps_ms: Mapping[int, float]) -> str:
    rows = []
    for n in reports[SPLIT]:
        split, single = (fmean(r.tokens_per_second for r in reports[mode][n]) for mode in (SPLIT, SINGLE))
        baseline, step = VLLM.get(n), steps_ms.get(n)
        rows.append(
            (
                n,
                f"{split:,.0f}",
                f"{split / baseline:.1f} ×" if baseline else "",
                f"{single:,.0f}",
                f"{split / single:.2f}",
                f"{step:.2f} ms" if step else "",
                f"{100 * step * split / (1e3 * n):.0f} %" if step else "",
            )
        )
    head = (
        "streams",
        "split, tokens/s",
        "× vLLM 0.32 (elsewhere)",
        "single, tokens/s",
        "split / single",
        "model's step",
        "its share",
    )
    return markdown(head, rows)


def _latency(reports: Reports) -> str:
    head = ("streams", "", "TTFT p50", "TTFT p99", "per token p50", "per token p99", "gap p99")
    rows = []
    for n in reports[SPLIT]:
        for mode in MODES:
            found = reports[mode][n]
            ttft, token, gap = (
                _mean([getattr(report, name) for report in found]) for name in ("ttft", "token_time", "gap")
            )
            times = (ttft.p50, ttft.p99, token.p50, token.p99, gap.p99)
            rows.append((n, mode, *(f"{ms:.2f} ms" for ms in times)))
    return markdown(head, rows)


def _mean(spreads: Sequence[Spread]) -> Spread:
    return Spread(*(fmean(values) for values in zip(*((s.p50, s.p99, s.mean) for s in spreads), strict=True)))


def figures(reports: Reports) -> list[Figure]:
    """Throughput and latency of both, as the history keeps them."""
    found = []
    for mode, by_streams in reports.items():
        for n, several in by_streams.items():
            what = f"tiny, {mode}: {n} stream{'s' * (n > 1)}"
            peers = f"vLLM 0.32 CPU {VLLM[n]:,}" if n in VLLM else ""
            rate = fmean(report.tokens_per_second for report in several)
            found.append(Figure(what, rate, "tokens/s", peers=peers))
            found.append(Figure(f"{what}, TTFT p50", fmean(report.ttft.p50 for report in several), "ms"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the model (default: tiny, made on first use)")
    parser.add_argument("--concurrency", type=numbers, default=list(VLLM), metavar="N,N,…")
    parser.add_argument("--rounds", type=int, default=2, help="fresh servers of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead of tables")
    options = parser.parse_args(argv)
    model = options.model or tiny_folder()
    steps_ms = model_step_ms(model, options.concurrency)
    reports = compare(model, options.concurrency, options.rounds)
    if options.json:
        print(dump(figures(reports)))
    else:
        what = f"{model.name}, 100-word prompts, 128 tokens out, streamed, client on the same machine"
        print(f"{machine()}; {what}\n\n{tables(reports, steps_ms)}")
    errors = {error for by in reports.values() for found in by.values() for report in found for error in report.errors}
    print(*sorted(errors), sep="\n", file=sys.stderr, end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
