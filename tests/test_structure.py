"""Sentences about the repository that its design relies on."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"pyproject.toml", "api_server", "engine", "common", "tests", "deploy", "README.md"}
BESIDE = {"bench", "Makefile", "LICENSE", "CHANGELOG.md", "ARCHITECTURE.md", "constraints.txt", "SECURITY.md"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(top-level package, whole name) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from ((name.partition(".")[0], name) for name in names)


def offences(folder: str, forbidden: set[str], except_in: str = "") -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        if path.name != except_in
        for package, name in imports(path)
        if package in forbidden
    ]


def test_api_server_never_imports_torch_nor_engine_except_in_one_named_place() -> None:
    assert not offences("api_server", {"torch", "transformers", "numba", "engine"}, except_in="single_process.py")
    assert {p for p, _ in imports(ROOT / "api_server/single_process.py")} >= {"engine"}


def test_engine_never_imports_fastapi_nor_api_server() -> None:
    assert not offences("engine", {"fastapi", "starlette", "uvicorn", "api_server"})


def test_common_imports_neither_side() -> None:
    assert not offences("common", {"torch", "transformers", "fastapi", "uvicorn", "api_server", "engine"})


def test_nothing_unpickles() -> None:
    assert not offences("api_server", {"pickle"}) + offences("engine", {"pickle"}) + offences("common", {"pickle"})


def test_the_top_level_is_the_agreed_one() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL | BESIDE


@pytest.mark.parametrize("path", sources("api_server", "engine", "common", "bench"), ids=lambda p: str(p.name))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, f"{path.name}: {node.name} is longer than a screen"
