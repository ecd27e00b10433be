"""The tables say what was measured."""

from __future__ import annotations

from bench import overhead
from bench.figures import Figure
from bench.load import Report, Spread


def report(streams: int, rate: float, ms: float) -> Report:
    spread = Spread(ms, 2 * ms, ms)
    return Report(streams, 4, 512, 512 / rate, rate, spread, spread, spread, spread, ())


REPORTS = {
    "split": {1: [report(1, 400, 2.0), report(1, 440, 4.0)], 7: [report(7, 700, 5.0)]},
    "single": {1: [report(1, 210, 4.0)], 7: [report(7, 350, 5.0)]},
}


def test_throughput_is_compared_with_the_baseline_with_one_process_and_with_the_model_alone() -> None:
    first, second = overhead.tables(REPORTS, {1: 1.0}).splitlines()[2:4]
    assert first == "| 1 | 420 | 3.0 × | 210 | 2.00 | 1.00 ms | 42 % |"
    assert second == "| 7 | 700 |  | 350 | 2.00 |  |  |"


def test_latencies_are_means_over_the_rounds() -> None:
    lines = overhead.tables(REPORTS, {}).splitlines()
    assert "| 1 | split | 3.00 ms | 6.00 ms | 3.00 ms | 6.00 ms | 6.00 ms |" in lines


def test_figures_name_what_was_measured_and_what_others_do() -> None:
    rate, ttft, *_ = overhead.figures(REPORTS)
    assert rate == Figure("tiny, split: 1 stream", 420, "tokens/s", peers="vLLM 0.32 CPU 140")
    assert ttft == Figure("tiny, split: 1 stream, TTFT p50", 3.0, "ms")
