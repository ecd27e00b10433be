"""Compiled code is kept where it can be, and a read-only home does not keep a child from starting."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.child import compiled_code


def test_compiled_code_is_kept_beside_converted_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(compiled_code()["NUMBA_CACHE_DIR"])
    assert folder == tmp_path / "stepahead" / "compiled"
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_where_nothing_can_be_kept_it_lives_as_long_as_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stepahead").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(compiled_code()["NUMBA_CACHE_DIR"])
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    assert compiled_code()["NUMBA_CACHE_DIR"] == str(folder)
