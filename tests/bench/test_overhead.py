"""The tables say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import overhead
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


def test_everything_measured_is_kept_with_the_machine_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "RESULTS", tmp_path / "results")
    content = json.loads(overhead.save(REPORTS, {1: 1.0}, "the tables").read_text())
    assert content["machine"] == overhead.machine()
    assert content["reports"]["split"]["1"][1]["tokens_per_second"] == 440
    assert content["reports"]["single"]["7"][0]["ttft"]["p99"] == 10.0
