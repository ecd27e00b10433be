"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before anything loads torch: several test processes share the cores, and threads that spin would starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest


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
