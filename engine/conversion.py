"""What has to be written before a model can be loaded: a GGUF file as a folder, a slow tokenizer as a fast one,
compressed weights as plain ones.

A conversion is made in a folder of its own beside its target and renamed at the end, so the target is whole or absent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from common.models import COMPRESSED_TENSORS, ModelError, one_line, quantization_method
from engine.compressed_tensors import Compressed
from engine.gguf_rope import scale_frequencies
from engine.model.memory import free_memory

Progress = Callable[[str, float], None]
T = TypeVar("T")

_PARTIAL = ".partial-"
_ROOM = 1.1  # times the written bytes that must be free on disk
_DEQUANTIZED_BYTES = 4  # float32
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


def convert_gguf(
    file: Path, target: Path, progress: Progress, sampling: Mapping[str, float | bool] | None = None
) -> None:
    """Writes `file` to `target` as safetensors, tokenizer.json, chat template and generation config.

    Weights are float32, or of sixteen bits where that loses none. A GGUF file says nothing about sampling: `sampling`
    goes into the generation config. Raises ModelError, also where the disk or memory is too small.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    progress("converting", 0.0)
    reader = _open(file)
    needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * _DEQUANTIZED_BYTES
    check_room(file, target.parent, needed, needed)
    with whole_folder(target) as folder:
        try:
            _load_tokenizer(file.parent, gguf_file=file.name).save_pretrained(folder)
            progress("converting", 0.25)
            with _tensors_reported(lambda share: progress("converting", 0.3 + 0.5 * share)):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
                )
            model, info = loaded
            if missing := sorted(info["missing_keys"]):
                raise ModelError(f"{file} cannot be converted: it lacks {', '.join(missing[:3])}")
            model.to(_least_dtype(model))
            if rope := getattr(model.config, "rope_parameters", None):
                scale_frequencies(file, reader, rope)
            # What is written is no longer quantized.
            model.hf_quantizer = None
            model.config.__dict__.pop("quantization_config", None)
            for name, value in (sampling or {}).items():
                setattr(model.generation_config, name, value)
            model.save_pretrained(folder)
        except ModelError:
            raise
        except Exception as e:  # an architecture that transformers does not know
            raise ModelError(f"{file} cannot be converted: {one_line(e)}") from e
    progress("converting", 1.0)


def _open(file: Path) -> gguf.GGUFReader:
    """Raises ModelError where the file is damaged or has tensors of types that the installed gguf cannot read."""
    try:
        reader = gguf.GGUFReader(file)
    except Exception as e:  # whatever a damaged file provokes in the reader
        if unknown := _UNKNOWN_TYPE.search(str(e)):
            raise _unreadable(file, unknown[1]) from e
        raise ModelError(f"{file} is damaged: {one_line(e)}") from e
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as e:
            raise _unreadable(file, kind.name) from e
    return reader


def _unreadable(file: Path, kind: str) -> ModelError:
    return ModelError(f"{file} has tensors of type {kind}, which gguf {version('gguf')} cannot read")


def _least_dtype(model: torch.nn.Module) -> torch.dtype:
    """The smallest dtype that holds every parameter as it is."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(parameter, parameter.to(dtype).float()) for parameter in model.parameters()):
            return dtype
    return torch.float32


@contextmanager
def _tensors_reported(report: Callable[[float], None]) -> Iterator[None]:
    """Takes the place of the bar that transformers draws over a GGUF file's tensors."""

    def each(tensors: Sequence[T], **_: object) -> Iterator[T]:
        for index, tensor in enumerate(tensors):
            report(index / len(tensors))
            yield tensor

    reader: Any = modeling_gguf_pytorch_utils
    bar, reader.tqdm = reader.tqdm, each
    try:
        yield
    finally:
        reader.tqdm = bar


def convert_folder(source: Path, target: Path, progress: Progress) -> None:
    """Writes to `target` what `source` lacks, tokenizer.json or plain weights, and links everything else there.

    Raises ModelError, also where the disk is too small.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    progress("converting", 0.0)
    config = json.loads((source / "config.json").read_bytes())
    compressed = Compressed(source, config) if quantization_method(config) == COMPRESSED_TENSORS else None
    if compressed is not None:
        check_room(source, target.parent, compressed.plain_bytes())
    with whole_folder(target) as folder:
        if not (source / "tokenizer.json").is_file():
            tokenizer = _load_tokenizer(source)
            if not tokenizer.is_fast:
                raise ModelError(f"{source}: its {type(tokenizer).__name__} has no fast form (tokenizer.json)")
            tokenizer.save_pretrained(folder)
        if compressed is not None:
            compressed.write(folder, lambda share: progress("converting", 0.1 + 0.9 * share))
        for file in source.iterdir():
            if not (folder / file.name).exists() and not (compressed and file.name in compressed.replaced):
                (folder / file.name).symlink_to(file.resolve())
    progress("converting", 1.0)


def _load_tokenizer(folder: Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            folder, gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:
        raise ModelError(f"{folder / (gguf_file or '')} has no tokenizer that can be read: {one_line(e)}") from e


def check_room(source: Path, folder: Path, written: int, loaded: int = 0) -> None:
    """Raises ModelError, with the figures, where a conversion of `source` that writes to `folder` finds too little disk
    or memory for so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rooms = (
        ("disk", written, shutil.disk_usage(folder).free),
        ("memory", loaded, free_memory(torch.device("cpu"))),
    )
    for what, size, free in rooms:
        if free < (needed := int(size * _ROOM)):
            figures = f"{needed / 2**30:.1f} GiB of {what}, but {free / 2**30:.1f} are free"
            raise ModelError(f"{source}: converting to {folder} needs {figures}")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write in that becomes `target` at the end, or vanishes when the body raises or SIGTERM comes.

    Where another process has made `target` meanwhile, that one stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{os.getpid()}-", dir=target.parent))
    try:
        with _sigterm_raises():
            yield folder
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Partial folders of processes that were killed before they could clean up."""
    for folder in parent.glob(f"{_PARTIAL}*"):
        with suppress(ValueError):
            pid = int(folder.name.removeprefix(_PARTIAL).partition("-")[0])
            if not _alive(pid):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: then somebody else handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
