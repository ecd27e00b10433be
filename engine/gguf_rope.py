"""What a GGUF file says of its rotary frequencies and transformers does not read: their scaling for long contexts."""

from __future__ import annotations

from math import pi
from pathlib import Path
from typing import Any

import gguf
import torch

from common.models import ModelError

_FREQUENCIES = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_IGNORED = ("type", "finetuned")
_ORIGINAL_CONTEXTS = (8192, 4096, 16384, 32768)  # Llama 3's is the first
_LOW, _HIGH = 1.0, 4.0  # Llama 3's low_freq_factor and high_freq_factor


def scale_frequencies(file: Path, reader: gguf.GGUFReader, rope_parameters: dict[str, Any]) -> None:
    """Writes the file's scaling into a config's `rope_parameters`, where layers differ into those of full attention.

    Raises ModelError for a scaling that transformers' parameters cannot express: positions would silently be wrong.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    into: dict[str, Any] = rope_parameters.get("full_attention", rope_parameters)
    start = f"{reader.fields['general.architecture'].contents()}.rope.scaling."
    given = {name.removeprefix(start): f.contents() for name, f in reader.fields.items() if name.startswith(start)}
    kind = given.get("type", "none")
    if _LONG in tensors or kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{file} cannot be converted: {'longrope' if _LONG in tensors else kind} RoPE is not supported"
        )
    if kind != "none":
        if unknown := sorted(set(given) - {*_KEYS, *_IGNORED}):
            raise ModelError(f"{file} cannot be converted: {start}{unknown[0]} is not supported")
        found = {hf: given[name] for name, hf in _KEYS.items() if name in given}
        if kind == "linear":
            found = {"factor": found["factor"]}
        into.update(found, rope_type=kind)
    if _FREQUENCIES in tensors:
        divisors = torch.tensor(tensors[_FREQUENCIES].data, dtype=torch.float64).flatten()
        if not torch.equal(divisors, torch.ones_like(divisors)):
            into.update(_llama3(file, divisors, into["rope_theta"]))


def _llama3(file: Path, divisors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's parameters that divide the frequencies by `divisors` [head_dim / 2]."""
    wavelengths = 2 * pi * theta ** (torch.arange(len(divisors), dtype=torch.float64) / len(divisors))
    factor = round(float(divisors.max()), 4)
    for original in _ORIGINAL_CONTEXTS:
        kept = ((original / wavelengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
        if torch.allclose(1 / (kept + (1 - kept) / factor), divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise ModelError(f"{file} cannot be converted: its {_FREQUENCIES} is not Llama 3's")
