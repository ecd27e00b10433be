"""`python -m bench` runs the parts that are asked for, in order, and keeps what they found."""

from __future__ import annotations

import pytest

import bench.__main__ as whole
from bench.figures import Figure


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    monkeypatch.setattr(whole, "run", lambda part: [Figure(part, 1.0, "ms")])
    monkeypatch.setattr(whole, "keep", found.extend)
    return found


def test_all_parts_make_one_table(kept: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    whole.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-4:]] == [f"| {part}" for part in whole.PARTS]
    assert [figure.what for figure in kept] == list(whole.PARTS)


def test_some_parts_and_no_history(kept: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    whole.main(["--only", "steps", "--no-history"])
    assert "| steps |" in capsys.readouterr().out
    assert not kept


def test_an_unknown_part_is_refused_by_name(kept: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole.main(["--only", "steps,stairs"])
    assert "--only is stairs, but must be of overhead, steps" in capsys.readouterr().err
