"""Servers that several tests share. A test that harms its server starts one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.server import Server, serving


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[Server]:
    """The tiny model, split in two processes."""
    with serving(tiny_folder, "--served-model-name", "tiny", "--max-num-seqs", "64") as server:
        yield server


@pytest.fixture(scope="session")
def single_server(tiny_folder: Path) -> Iterator[Server]:
    """The tiny model, everything in one process, synchronous."""
    options = ("--single-process", "--steps-ahead", "0", "--async-output", "off")
    with serving(tiny_folder, "--served-model-name", "tiny", *options) as server:
        yield server


@pytest.fixture(scope="session")
def default_server(smollm2_folder: Path) -> Iterator[Server]:
    """The embedded default model, under its own name."""
    with serving("SmolLM2-135M-Instruct") as server:
        yield server
