"""Logging as every process sets it up."""

from __future__ import annotations

import logging


def set_up(level: str, process: str) -> None:
    """To stderr, one line a record, with the process's name. Raises ValueError on an unknown level."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname).1s {process} | %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for name in ("httpx", "httpcore", "asyncio", "numba", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
