"""Steps are compared in turn with the reference, and a profile's parts add up to the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import profile, steps
from common.sampling import SamplingParams
from tests.engine.model.driver import load_runner


def test_both_sides_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    ours, theirs = steps.compare(lambda: order.append("a"), lambda: order.append("b"), 0.0)
    assert order[:6] == ["a", "a", "a", "b", "b", "b"]
    assert len(order) == 12
    assert ours > 0
    assert theirs > 0


def test_ours_and_the_reference_take_the_same_steps(tiny_folder: Path) -> None:
    with torch.inference_mode():
        figures = steps.measure(tiny_folder, ("int8",), 0.0)
    assert [(f.what, f.unit) for f in figures] == [
        *((f"int8: step of {n} row{'s' * (n > 1)}", "ms") for n in steps.ROWS),
        *((f"int8: prefill of {n} tokens", "tokens/s") for n in steps.PREFILLS),
    ]
    assert all(f.ratio is not None and f.ratio > 0 for f in figures)


def test_a_profiles_parts_are_a_steps_time(tiny_folder: Path) -> None:
    runner = steps.load(tiny_folder, "auto")
    with torch.inference_mode():
        parts = profile.profile(runner, 3, 40, SamplingParams(temperature=0.0, ignore_eos=True))
    assert set(parts) == {*profile.PARTS, profile.SAMPLING, profile.REST}
    assert all(ms > 0 for ms in parts.values())
    assert 0 < profile.small_share(parts) < 1


def test_a_profile_is_a_table_in_ms_and_percent() -> None:
    columns = {"auto, 1": {"linear layers": 3.0, "sampling": 1.0}, "int8, 1": {"linear layers": 1.0, "sampling": 1.0}}
    assert profile.render(columns).splitlines()[2:] == [
        "| linear layers | 3.00 (75 %) | 1.00 (50 %) |",
        "| sampling | 1.00 (25 %) | 1.00 (50 %) |",
        "| all | 4.00 | 2.00 |",
    ]


def test_only_tapes_are_profiled(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="only tapes"):
        profile.profile(load_runner(tiny_folder, impl="transformers"), 1, 40, SamplingParams())
