"""A model that has to be converted is served like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_conversion import write_gguf
from tests.system.server import serving


def test_a_gguf_file_is_converted_and_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "small.Q4.gguf")
    for _ in range(2):  # the second time it lies in the cache
        with serving(tmp_path / "small.Q4.gguf") as server:
            assert server.complete([5, 6, 7], max_tokens=3, ignore_eos=True)["model"] == "small.Q4"
