"""Checkpoints of llm-compressor: their compressed weights become plain ones.

The format is compressed-tensors' (https://github.com/vllm-project/compressed-tensors): a layer's `weight` is stored as
integers or eight-bit floats beside a `weight_scale`, or as `weight_packed`, several integers to a word. config.json's
`quantization_config` says how. Activations stay as they are computed here, which is finer than the eight bits that some
checkpoints were made for; layers in the format `dense` hold plain weights and stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.models import ModelError, one_line, quantization_config

_PACKED, _MIXED = "pack-quantized", "mixed-precision"
_FORMATS = (_PACKED, "int-quantized", "naive-quantized", "float-quantized", "dense")
_STRATEGIES = ("tensor", "channel", "group", "block")
_NOT_APPLIED = ("kv_cache_scheme", "transform_config", "moe_sparsity_config")
_STORED = (torch.int8, torch.float8_e4m3fn)
_PARAMETER = re.compile(r"(weight|input|output)_(scale|zero_point|shape|g_idx)")
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a group of layers are stored. `targets` are names, `re:` expressions or classes of layers."""

    targets: tuple[str, ...]
    bits: int
    strategy: str  # what shares a scale: all of the tensor, an output, a group of inputs, a block of both
    group_size: int  # inputs; 0 without groups
    block: tuple[int, int]  # outputs, inputs


class Compressed:
    """A folder of compressed weights. Raises ModelError for what cannot be read, by name."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._schemes = read_schemes(folder, config)
        self._names = _where(folder)
        self.replaced = {_INDEX, "config.json", *(file.name for file in folder.glob("*.safetensors"))}

    def plain_bytes(self) -> int:
        """About what `write` writes, in bytes; rather too much."""
        total = 0
        for file in sorted(set(self._names.values())):
            total += file.stat().st_size
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    module, _, leaf = name.rpartition(".")
                    numbers = prod(tensors.get_slice(name).get_shape())
                    if leaf == "weight_packed":
                        total += 4 * numbers * 32 // self._scheme(module).bits
                    elif leaf == "weight" and self._is_quantized(module):
                        total += 4 * numbers
        return total

    def write(self, folder: Path, report: Callable[[float], None]) -> None:
        """Writes config.json and safetensors to `folder`: what was compressed in float32, which keeps it to the bit,
        everything else as it is. `report` hears the share that is done."""
        shards = _Shards(folder)
        with ExitStack() as opened:
            files = {file: opened.enter_context(safe_open(file, "pt")) for file in sorted(set(self._names.values()))}

            def read(name: str) -> torch.Tensor | None:
                tensor: torch.Tensor | None = files[self._names[name]].get_tensor(name) if name in self._names else None
                return tensor

            for done, name in enumerate(self._names):
                report(done / len(self._names))
                module, _, leaf = name.rpartition(".")
                if leaf == "weight_packed" or (leaf == "weight" and self._is_quantized(module)):
                    try:
                        shards.add(f"{module}.weight", _plain(module, read, self._scheme(module)))
                    except (RuntimeError, IndexError, ValueError, AttributeError) as e:
                        raise ModelError(f"{self._folder}: {name} cannot be unpacked: {one_line(e)}") from e
                elif not (_PARAMETER.fullmatch(leaf) and self._is_quantized(module)):
                    shards.add(name, files[self._names[name]].get_tensor(name))
        shards.close()
        removed = ("quantization_config", "compression_config", "sparsity_config", "torch_dtype")
        plain = {key: value for key, value in self._config.items() if key not in removed}
        (folder / "config.json").write_text(json.dumps({**plain, "dtype": "float32"}, indent=2) + "\n")

    def _is_quantized(self, module: str) -> bool:
        return f"{module}.weight_scale" in self._names

    def _scheme(self, module: str) -> Scheme:
        """Of several groups the first that names the layer, else the first that names a class."""
        if len(self._schemes) == 1:
            return self._schemes[0]
        for named in (True, False):
            for scheme in self._schemes:
                for target in scheme.targets:
                    matches = re.match(target[3:], module) if target.startswith("re:") else target == module
                    if matches if named else target == "Linear":
                        return scheme
        raise ModelError(f"{self._folder}: no group of its quantization_config names {module}")


def read_schemes(folder: Path, config: Mapping[str, Any]) -> list[Scheme]:
    """The groups of config.json's `quantization_config`. Raises ModelError for what is not supported, by name."""
    found = quantization_config(config) or {}
    start = f"{folder}: cannot serve this checkpoint: compressed-tensors with"
    for name in _NOT_APPLIED:
        if found.get(name):
            raise ModelError(f"{start} a {name} is not supported")
    for part in (found, config):
        sparsity = (part.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ModelError(f"{start} sparse weights ({sparsity}) is not supported")
    schemes = []
    try:
        for name, group in found["config_groups"].items():
            weights = group.get("weights")
            if weights is None:
                continue
            format = group.get("format") or found.get("format")
            strategy = weights.get("strategy") or _implied_strategy(weights.get("group_size"))
            bits = int(weights.get("num_bits", 8))
            packs = format == _PACKED
            if format not in _FORMATS:
                raise ModelError(f"{start} the format {format!r} ({name}) is not supported")
            if strategy not in _STRATEGIES:
                raise ModelError(f"{start} the strategy {strategy!r} ({name}) is not supported")
            if packs and (32 % bits or bits > 8 or weights.get("type", "int") != "int"):
                raise ModelError(f"{start} {bits}-bit packed {weights.get('type', 'int')}s ({name}) is not supported")
            block = tuple(weights.get("block_structure") or (1, 1))
            group_size = int(weights.get("group_size") or 0)
            schemes.append(Scheme(tuple(group["targets"]), bits, strategy, group_size, (int(block[0]), int(block[1]))))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise ModelError(f"{folder}: its quantization_config is not valid: {type(e).__name__} {one_line(e)}") from e
    if not schemes:
        raise ModelError(f"{folder}: its quantization_config names no weights")
    return schemes


def _implied_strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"


def _where(folder: Path) -> dict[str, Path]:
    """The file that each tensor lies in."""
    try:
        if (folder / _INDEX).is_file():
            names: dict[str, str] = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
    except Exception as e:  # safetensors has an error class of its own, which is private
        raise ModelError(f"{folder}: its safetensors cannot be read: {one_line(e)}") from e
    if not found:
        raise ModelError(f"{folder}: compressed weights can be read from safetensors only")
    return found


def _plain(module: str, read: Callable[[str], torch.Tensor | None], scheme: Scheme) -> torch.Tensor:
    """The weight [out, in] float32 of a layer. Raises ValueError where its tensors do not fit together."""
    scale, zero, order = (read(f"{module}.weight_{part}") for part in ("scale", "zero_point", "g_idx"))
    packed = read(f"{module}.weight_packed")
    if packed is not None:
        shape = read(f"{module}.weight_shape")
        if packed.dim() != 2 or packed.dtype is not torch.int32 or shape is None:
            raise ValueError(f"{tuple(packed.shape)} {packed.dtype} with weight_shape {shape}")
        numbers = unpack(packed, scheme.bits, int(shape[1]))
    else:
        stored = read(f"{module}.weight")
        assert stored is not None
        if stored.dtype.is_floating_point and stored.dtype.itemsize > 1:  # dense
            return stored
        if stored.dim() != 2 or stored.dtype not in _STORED:
            raise ValueError(f"{tuple(stored.shape)} {stored.dtype}")
        numbers = stored
    if scale is None:
        raise ValueError("it has no weight_scale")
    weight = numbers.float()
    if zero is not None:
        if zero.dtype is torch.int32:  # packed as well, along the outputs
            zero = unpack(zero.t(), scheme.bits, weight.shape[0]).t()
        weight -= spread(zero.float(), weight.shape, scheme, order)
    return weight.mul_(spread(scale.float(), weight.shape, scheme, order))


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Signed numbers [rows, columns] int8 from words [rows, n] int32: the first lies in the lowest bits, and each is
    stored 2^(bits-1) higher than it is."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = words[..., None].bitwise_right_shift(shifts).bitwise_and_(2**bits - 1).sub_(2 ** (bits - 1))
    return numbers.to(torch.int8).flatten(1)[:, :columns]


def spread(values: torch.Tensor, shape: torch.Size, scheme: Scheme, order: torch.Tensor | None) -> torch.Tensor:
    """Scales or zero points of groups as ones that can be broadcast to a weight of `shape` [out, in].

    `order` [in] is the group of each input, where they do not follow each other.
    """
    if scheme.strategy in ("tensor", "channel"):
        return values.reshape(1 if scheme.strategy == "tensor" else shape[0], 1)
    rows, columns = scheme.block if scheme.strategy == "block" else (1, scheme.group_size)
    if order is None or (order < 0).any():
        order = torch.arange(shape[1]) // columns
    if rows > 1:
        values = values[torch.arange(shape[0]) // rows]
    return values[:, order.long()]


class _Shards:
    """Writes tensors to files of about a GiB, and their index. Owner: who fills it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = self._count = 0
        self._map: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._waiting[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        if self._bytes >= _SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        total = sum((self._folder / file).stat().st_size for file in set(self._map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": self._map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._count += 1
        file = f"model-{self._count:05}.safetensors"
        save_file(self._waiting, self._folder / file, metadata={"format": "pt"})
        self._map.update(dict.fromkeys(self._waiting, file))
        self._waiting, self._bytes = {}, 0
