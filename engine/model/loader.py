"""From a Hugging Face folder to a transformers model that attends through us."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from common.config import ModelConfig
from common.models import COMPRESSED_TENSORS, ModelError, check_folder, one_line, quantization_method
from engine.attention.interface import NAME
from engine.model.memory import free_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_BYTES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I64": 8}
_MXFP4_BLOCKS = "_proj_blocks"  # two numbers a byte
_SCALED = ("I8", "F8_E4M3", "F8_E5M2")  # what is never a weight without a scale
_MINIMUM_BESIDE_WEIGHTS = 256 << 20  # bytes for activations and the smallest useful KV cache


def resolve_weights(model: ModelConfig, config: PretrainedConfig) -> str:
    """What the weights are stored in. `auto` takes sixteen bits: bfloat16 for a checkpoint of that type, which loses
    nothing, and float16 for every other. Raises ModelError naming `--dtype`.
    """
    if model.dtype not in ("auto", *DTYPES):
        raise ModelError(f"--dtype is {model.dtype!r}, but must be one of auto, {', '.join(DTYPES)}")
    if model.quantization != "none":
        return model.quantization
    if model.dtype == "auto":
        stored = getattr(config.get_text_config(decoder=True), "dtype", None)
        return "bfloat16" if stored is torch.bfloat16 else "float16"
    return model.dtype


def load_config(folder: Path) -> PretrainedConfig:
    """The model's configuration. Raises ModelError where transformers cannot build a causal decoder from it."""
    raw = check_folder(folder)
    family = raw["model_type"]
    if family not in CONFIG_MAPPING:
        reason = "it needs its own Python code, and remote code is not run" if "auto_map" in raw else "it is unknown"
        raise ModelError(f"{folder}: cannot serve model type {family!r}: {reason} (transformers {__version__})")
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{folder}: cannot serve {family!r}: it is an encoder-decoder model")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{folder}: cannot serve {family!r}: it is not a causal language model")
    if quantization_method(raw) == "mxfp4" and family != "gpt_oss":
        raise ModelError(f"{folder}: cannot serve {family!r}: it is quantized with 'mxfp4', which only gpt_oss may be")
    if quantization_method(raw) == COMPRESSED_TENSORS:
        raise ModelError(f"{folder}: its weights are compressed: engine.prepare makes a folder of plain ones")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # transformers raises whatever a malformed field provokes
        raise ModelError(f"{folder}: config.json is not valid for {family!r}: {one_line(e)}") from e
    return config


def load_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in eval mode on `device`, its attention ours. Raises ModelError, also where memory is too small."""
    check_memory(folder, dtype, device)
    quantized = quantization_method(config.to_dict()) == "mxfp4"
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
            folder,
            config=config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({"quantization_config": Mxfp4Config(dequantize=True)} if quantized else {}),
        )
    except Exception as e:  # a truncated file, a wrong shape, a missing optional package: all the user's to read
        if isinstance(e, KeyError) and e.args == (NAME,):
            raise ModelError(
                f"cannot serve model type {config.model_type!r}: it knows only attention of its own"
            ) from e
        raise ModelError(f"{folder}: loading the weights failed: {one_line(e)}") from e
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{folder}: the weights lack {', '.join(missing[:3])}{more}")
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def check_memory(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where the weights, in `dtype`, and a small KV cache do not fit in free memory."""
    needed = weight_bytes(folder, dtype) + _MINIMUM_BESIDE_WEIGHTS
    free = free_memory(device)
    if needed > free:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"{folder}: too little memory: in {name} the model needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f}"
            " are free"
        )


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """What the folder's weights take in memory as `dtype`, by the files' headers; another format's files as stored."""
    total = 0
    files = sorted(folder.glob("*.safetensors"))
    for file in files or folder.glob("pytorch_model*.bin"):
        total += _tensors_bytes(file, dtype.itemsize) if files else file.stat().st_size
    return total


def _tensors_bytes(file: Path, itemsize: int) -> int:
    """Safetensors: eight bytes of header length, the header in JSON, then the tensors."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > file.stat().st_size:
                raise ValueError("header longer than the file")
            header: dict[str, Any] = json.loads(f.read(length))
        header.pop("__metadata__", None)
        total = 0
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if name.endswith(_MXFP4_BLOCKS):
                total += 2 * (end - begin) * itemsize
                continue
            if name.endswith("weight") and entry["dtype"] in _SCALED:
                raise ModelError(f"{file}: {name} is quantized ({entry['dtype']}), but config.json does not say how")
            total += (end - begin) // _STORED_BYTES.get(entry["dtype"], itemsize) * itemsize
    except (ValueError, struct.error, KeyError, TypeError) as e:
        raise ModelError(f"{file} is no valid safetensors file: {one_line(e)}") from e
    return total
