"""Formats are compared with the float32 server of their own round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bench import throughput
from bench.figures import Figure
from bench.load import Load, Report, Spread, request_bytes


def report(rate: float, errors: tuple[str, ...] = ()) -> Report:
    spread = Spread(1.0, 2.0, 1.0)
    return Report(1, 4, 256, 256 / rate, rate, spread, spread, spread, spread, errors)


def test_rates_are_medians_and_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10.0, 30.0, 20.0, 80.0, 40.0, 80.0])  # float32, auto; float32, auto; …

    @contextmanager
    def serving(model: str, options: Sequence[str]) -> Iterator[str]:
        yield "http://nowhere"

    monkeypatch.setattr(throughput, "serving", serving)
    monkeypatch.setattr(throughput, "STREAMS", {1: 4})
    monkeypatch.setattr(throughput, "loaded", lambda url, streams, seed: report(next(rates)))
    base, auto = throughput.formats(["float32", "auto"], 3)
    assert base == Figure("float32: server, 1 stream", 20.0, "tokens/s")
    assert auto == Figure("auto: server, 1 stream", 80.0, "tokens/s", 3.0, throughput.PEERS[1])


def test_a_failed_request_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "served_model", lambda url: "m")
    monkeypatch.setattr(throughput, "run", lambda load, streams, first_seed: [report(1.0, ("503", "reset"))])
    with pytest.raises(RuntimeError, match="503; reset"):
        throughput.loaded("http://nowhere", 1, 0)


def test_a_prompt_may_ask_for_itself_back() -> None:
    load = Load("http://host:1", "m", endpoint="chat", prompt_words=5, repeats=True)
    assert b"change nothing else" in request_bytes(load, 3)
