"""The real model behind the whole server, with streaming clients on the same machine, and servers in turn.

`python -m bench.throughput [--rounds 2]` prints one table. What each stored format serves is compared with a float32
server that ran just before it; then what prompt lookup gives where answers repeat their prompt, and what a long
context costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from bench.figures import Figure, dump, table
from bench.load import Load, Report, run, served_model
from bench.server import serving
from common.models import DEFAULT_MODEL

FORMATS = {
    "float32": ("--dtype", "float32"),
    "auto": (),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
STREAMS = {1: 6, 8: 3, 32: 2}  # requests of each stream, by how many there are
OUTPUT = 64  # tokens
LONG_WORDS = 7500  # about 8,000 tokens

# Tokens/s by streams on another machine: 2 cores, AVX2, 11 GB/s.
PEERS = {
    1: "vLLM 0.32 CPU float32 13, llama.cpp Q4_1 47",
    8: "vLLM 0.32 CPU float32 48, llama.cpp Q4_1 60",
    32: "vLLM 0.32 CPU float32 77, llama.cpp Q4_1 63",
}


def loaded(url: str, streams: int, seed: int, **changes: object) -> Report:
    """A report of one number of streams. Raises RuntimeError where a request failed."""
    settings: dict[str, object] = {"requests_per_stream": STREAMS.get(streams, 2), "output_len": OUTPUT, **changes}
    [report] = run(Load(url, served_model(url), **settings), [streams], first_seed=seed)  # type: ignore[arg-type]
    if report.errors:
        raise RuntimeError("; ".join(report.errors))
    return report


def formats(names: Sequence[str], rounds: int) -> list[Figure]:
    """Tokens/s of each format, medians over the rounds, and ratios to the float32 server of the same round."""
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for name in names:
            with serving(DEFAULT_MODEL, (*FORMATS[name], "--log-level", "warning")) as url:
                for streams in STREAMS:
                    report = loaded(url, streams, 100_000 * number)
                    rates.setdefault((name, streams), []).append(report.tokens_per_second)
                    print(f"round {number + 1} {name:8} {report.line()}", file=sys.stderr, flush=True)
    figures = []
    for (name, streams), found in rates.items():
        ratio = None
        if name != "float32" and (base := rates.get(("float32", streams))):
            ratio = median(rate / reference for rate, reference in zip(found, base, strict=True))
        what = f"{name}: server, {streams} stream{'s' * (streams > 1)}"
        figures.append(Figure(what, median(found), "tokens/s", ratio, PEERS[streams] if name != "float32" else ""))
    return figures


def drafts() -> list[Figure]:
    """One stream whose answers repeat their prompts, without prompt lookup and with it."""
    figures = []
    for what, count in (("no drafts", "0"), ("prompt lookup", "5")):
        options = (*FORMATS["int4"], "--num-speculative-tokens", count, "--log-level", "warning")
        with serving(DEFAULT_MODEL, options) as url:
            report = loaded(url, 1, 0, endpoint="chat", repeats=True, requests_per_stream=8)
        figures.append(Figure(f"int4: answers that repeat the prompt, {what}", report.tokens_per_second, "tokens/s"))
    return figures


def contexts() -> list[Figure]:
    """Time per token of one stream after a short prompt and after one of 8,000 tokens."""
    figures = []
    with serving(DEFAULT_MODEL, ("--log-level", "warning")) as url:
        for what, words in (("100 words", 100), (f"{LONG_WORDS:,} words", LONG_WORDS)):
            report = loaded(url, 1, 0, prompt_words=words, requests_per_stream=2)
            figures.append(Figure(f"auto: time per token after {what}", report.token_time.p50, "ms"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=2, help="fresh servers of each kind (default: %(default)s)")
    parser.add_argument("--only-formats", action="store_true", help="leave prompt lookup and long contexts out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = formats(options.formats.split(","), options.rounds)
    if not options.only_formats:
        figures += [*drafts(), *contexts()]
    print(dump(figures) if options.json else table(figures))


if __name__ == "__main__":
    main()
