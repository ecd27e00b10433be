"""The server's version."""

from __future__ import annotations

import importlib.metadata


def _installed() -> str:
    try:
        return importlib.metadata.version("stepahead")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+checkout"


VERSION = _installed()
