"""A load client for the OpenAI API: closed loop, streaming, at given numbers of concurrent streams.

`python -m bench.load --url http://127.0.0.1:8000 --concurrency 1,16,64 --output-len 128`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from urllib.parse import urlsplit

import orjson
import uvloop

from bench.prompts import copying, prompt
from bench.stream import StreamConnection, StreamError, Timing


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    url: str
    model: str
    endpoint: str = "completions"  # or chat
    requests_per_stream: int = 4
    prompt_words: int = 100
    repeats: bool = False  # ask for an answer that repeats the prompt
    output_len: int = 128
    temperature: float = 0.0
    timeout: float = 300.0  # seconds for one answer
    more: str = ""  # fields that requests have beside the others, a JSON object
    share: float = 1.0  # of the requests that have them


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a series: median, 99th percentile and mean, in milliseconds."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        return cls(
            1e3 * ordered[len(ordered) // 2],
            1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            1e3 * sum(ordered) / len(ordered),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What one number of concurrent streams gave."""

    concurrency: int
    requests: int
    output_tokens: int
    seconds: float  # from the first request's start to the last one's end
    tokens_per_second: float
    ttft: Spread
    token_time: Spread  # per request: (last event − first event) / (tokens − 1), also called TPOT
    gap: Spread  # between reads that brought events, also called ITL; what comes together counts once
    end_to_end: Spread
    errors: tuple[str, ...]  # at most ten, each a sentence

    def line(self) -> str:
        return (
            f"{self.concurrency:>4} streams  {self.tokens_per_second:8.0f} tokens/s  "
            f"TTFT {self.ttft.p50:7.1f} / {self.ttft.p99:7.1f} ms  "
            f"per token {self.token_time.p50:6.2f} / {self.token_time.p99:6.2f} ms  "
            f"gap p99 {self.gap.p99:6.2f} ms  {len(self.errors)} errors"
        )


def request_bytes(load: Load, seed: int) -> bytes:
    """One whole HTTP request."""
    text = (copying if load.repeats else prompt)(seed, load.prompt_words)
    body = {
        "model": load.model,
        "max_tokens": load.output_len,
        "temperature": load.temperature,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.more and (seed % 100) < 100 * load.share:
        body |= orjson.loads(load.more)
    if load.endpoint == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    payload = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(load.url).netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class _Run:
    """Closed-loop streams against one server, and what they saw."""

    def __init__(self, load: Load) -> None:
        self._load = load
        target = urlsplit(load.url)
        self._host, self._port = target.hostname or "127.0.0.1", target.port or 80
        self.timings: list[tuple[Timing, float]] = []  # and when the answer was whole
        self.errors: list[str] = []

    async def stream(self, requests: Iterator[bytes]) -> None:
        """One client: takes the next request, which others take from too, when it has the last one's whole answer."""
        connection: StreamConnection | None = None
        for data in requests:
            try:
                if connection is None:
                    connection = await StreamConnection.open(self._host, self._port)
                async with asyncio.timeout(self._load.timeout):
                    timing = await connection.request(data, 1 if self._load.endpoint == "chat" else 0)
            except (StreamError, OSError, TimeoutError) as e:
                self.errors.append(f"{type(e).__name__}: {e}")
                if connection is not None:
                    connection.close()
                connection = None
                continue
            self.timings.append((timing, perf_counter()))
            if timing.tokens != self._load.output_len:
                self.errors.append(f"{timing.tokens} tokens instead of {self._load.output_len}")
        if connection is not None:
            connection.close()


async def measure(load: Load, concurrency: int, first_seed: int = 0) -> Report:
    """Runs `concurrency` streams, all started at once, until `requests_per_stream` requests for each are answered."""
    count = load.requests_per_stream
    requests = [request_bytes(load, first_seed + i) for i in range(concurrency * count)]
    run = _Run(load)
    gc.collect()
    gc.disable()
    try:
        began = perf_counter()
        left = iter(requests)
        await asyncio.gather(*(run.stream(left) for _ in range(concurrency)))
        seconds = perf_counter() - began
    finally:
        gc.enable()
    tokens = sum(timing.tokens for timing, _ in run.timings)
    return Report(
        concurrency=concurrency,
        requests=len(requests),
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ttft=Spread.of([timing.first - timing.sent for timing, _ in run.timings]),
        token_time=Spread.of([(t.last - t.first) / (t.tokens - 1) for t, _ in run.timings if t.tokens > 1]),
        gap=Spread.of([gap for timing, _ in run.timings for gap in timing.gaps]),
        end_to_end=Spread.of([end - timing.sent for timing, end in run.timings]),
        errors=tuple(run.errors[:10]),
    )


def run(load: Load, concurrencies: Sequence[int], first_seed: int = 0) -> list[Report]:
    """`measure` for each number of streams in turn, after a short warm-up of each."""

    async def all_of_them() -> list[Report]:
        reports = []
        for concurrency in concurrencies:
            warm_up = Load(**{**asdict(load), "requests_per_stream": 1, "output_len": min(16, load.output_len)})
            await measure(warm_up, concurrency, first_seed + 1_000_000)
            reports.append(await measure(load, concurrency, first_seed))
        return reports

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(all_of_them())


def served_model(url: str) -> str:
    """The id that the server reports first. Raises OSError where it does not answer."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def numbers(text: str) -> list[int]:
    """`1,16,64` → [1, 16, 64]. Raises ValueError for anything but positive numbers."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError("must be positive")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="default: the one that the server reports")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64, 128], metavar="N,N,…")
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--repeats", action="store_true", help="ask for answers that repeat the prompt")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    load = Load(
        options.url,
        options.model or served_model(options.url),
        options.endpoint,
        options.requests_per_stream,
        options.prompt_words,
        repeats=options.repeats,
        output_len=options.output_len,
        temperature=options.temperature,
    )
    reports = run(load, options.concurrency)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        print("p50 / p99:")
        for report in reports:
            print(report.line())
    errors = [error for report in reports for error in report.errors]
    print(*dict.fromkeys(errors), sep="\n", file=sys.stderr, end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
