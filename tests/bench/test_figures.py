"""Figures become one table, and a line of history that says where they come from."""

from __future__ import annotations

import json
from pathlib import Path

from bench.figures import Figure, dump, keep, machine, parse, table

FIGURES = [Figure("auto: step of 1 row", 9.487, "ms", 5.816), Figure("server", 1234.5, "tokens/s", peers="vLLM 13")]


def test_a_table_has_a_line_for_each() -> None:
    assert table(FIGURES).splitlines()[2:] == [
        "| auto: step of 1 row | 9.49 ms | 5.82 × |  |",
        "| server | 1,234 tokens/s |  | vLLM 13 |",
    ]


def test_the_history_grows_by_a_line_that_names_machine_and_commit(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    keep(FIGURES, file)
    keep(FIGURES[:1], file)
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["machine"] == machine()
    assert {"date", "python", "torch", "commit"} < set(first)
    assert first["figures"][1] == {
        "what": "server",
        "value": 1234.5,
        "unit": "tokens/s",
        "ratio": None,
        "peers": "vLLM 13",
    }
    assert len(second["figures"]) == 1


def test_figures_cross_from_one_process_to_another() -> None:
    assert parse(dump(FIGURES)) == FIGURES
