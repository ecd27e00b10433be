"""The README is true: its tables are the program's, its examples run and print what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.options import GROUPS, OPTIONS
from tests.models import ZOO
from tests.system.server import Server

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[tuple[str, str]]:
    """Every code block of a language, with the block that follows it: what it prints."""
    return re.findall(rf"```{language}\n(.*?)```\n```(?:json)?\n(.*?)```", README, re.DOTALL)


def options_table() -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for section, title in GROUPS.items():
        rows.append(f"| **{title}** | | |")
        for option in (option for option in OPTIONS if option.section is section):
            default = "" if option.default is None or option.default == () else f"{option.default}"
            rows.append(f"| `{option.flag}` {option.metavar.replace('|', ' or ')} | {default} | {option.help} |")
    return "\n".join(rows)


def test_the_option_table_is_the_programs_own() -> None:
    assert options_table() in README


def test_the_families_named_are_the_ones_compared() -> None:
    assert f"in the tests: {', '.join(sorted(ZOO))}." in README


def test_every_path_of_the_program_in_the_readme_exists() -> None:
    for name in re.findall(r"\]\(([A-Z]+(?:\.md)?)\)", README):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize(("command", "printed"), blocks("bash"))
def test_a_shell_example_prints_what_it_says(command: str, printed: str, default_server: Server) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, default_server.url)], capture_output=True, text=True, timeout=120
    )
    found, expected = json.loads(done.stdout), json.loads(printed)
    assert found.keys() == expected.keys()
    if "choices" in expected:
        for changing in ("id", "created"):
            found[changing] = expected[changing]
        # Another example may have asked the same server the same before.
        found["usage"]["prompt_tokens_details"] = expected["usage"]["prompt_tokens_details"]
        assert found == expected


@pytest.mark.parametrize(("program", "printed"), blocks("python"))
def test_a_python_example_prints_what_it_says(program: str, printed: str, default_server: Server) -> None:
    program = program.replace(ADDRESS, default_server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == printed.strip(), done.stderr
