"""Fixtures that every test folder may use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything loads torch: several test processes share the cores, and threads that spin would starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from tests.system.server import Server, serving


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model."""
    from tests.models import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """A model whose steps cost next to nothing."""
    from tests.models import tiny

    return tiny()


@pytest.fixture(scope="session")
def zoo_folder() -> Callable[[str], Path]:
    """`zoo_folder(family)`: a small random model; skips, by name, what this transformers release cannot build."""
    from tests.models import zoo

    def folder(family: str) -> Path:
        try:
            return zoo(family)
        except (ValueError, KeyError, TypeError, ImportError) as e:
            pytest.skip(f"transformers cannot build {family}: {e}")

    return folder


# Servers that several tests share. A test that harms its server starts one of its own.


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


@pytest.fixture(scope="session")
def tiny_long_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context of 65,536 tokens and a window of 128, so that a step's cost does not grow."""
    folder = tmp_path_factory.mktemp("tiny-long")
    for file in tiny_folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((tiny_folder / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    config |= {"max_position_embeddings": 65536}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
