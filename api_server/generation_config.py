"""What sampling fields are when a request leaves them out: the model's own generation_config.json, or neutral."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults as in vLLM: `do_sample` is not looked at, and `max_new_tokens` bounds every request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def load(cls, choice: str, model_folder: Path) -> SamplingDefaults:
        """`choice` is that of --generation-config: `auto`, `vllm`, or a folder. Raises ValueError naming the flag."""
        if choice == "vllm":
            log.info("sampling defaults: neutral (--generation-config vllm)")
            return cls()
        path = (model_folder if choice == "auto" else Path(choice)) / "generation_config.json"
        if not path.is_file():
            if choice == "auto":
                log.info("sampling defaults: neutral (the model has no generation_config.json)")
                return cls()
            raise ValueError(f"--generation-config: {path} does not exist")
        usable = _usable(_read(path))
        named = ", ".join(f"{name} {value}" for name, value in usable.items()) or "all neutral"
        log.info("sampling defaults from %s: %s", path, named)
        return cls(**usable)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"--generation-config: {path} is not valid JSON: {e}") from e
    if not isinstance(tree, dict):
        raise ValueError(f"--generation-config: {path} is not a JSON object")
    return tree


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
_INTEGERS = frozenset({"top_k", "max_new_tokens"})


def _usable(tree: dict[str, Any]) -> dict[str, Any]:
    """The fields that are set, of the right kind and in range; others are named in the log and left alone."""
    usable: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = tree.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            log.warning("generation_config.json: %s %r is not within %s and %s; left out", name, value, low, high)
            continue
        usable[name] = int(value) if name in _INTEGERS else float(value)
    return usable
