"""The paged KV cache: one pool of blocks, the same block ids in every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token: `kv_heads` keys of `key_dim` numbers and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, in bytes."""
    numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return numbers * block_size * dtype.itemsize


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens. Block 0 is scratch and never holds live context.

    A slot is `block * block_size + offset`. The layout is private to this package: within a block, keys lie with the
    tokens innermost, so that the scores of a block's tokens fill whole vector registers, and values lie with the head
    dimension innermost, for the same reason in the weighted sum.
    Owner: the device thread.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ValueError where there is not even one block beside the scratch block."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"a KV cache needs at least 2 blocks of at least 1 token, not {num_blocks} of {block_size}"
            )
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, not empty memory: the tail of a block is read (and masked) before it is written, and must be finite.
        self.keys = [
            _zeros((num_blocks, layer.kv_heads, layer.key_dim, block_size), dtype, device) for layer in self.layers
        ]
        self.values = [
            _zeros((num_blocks, layer.kv_heads, block_size, layer.value_dim), dtype, device) for layer in self.layers
        ]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores `key` [T, kv_heads, key_dim] and `value` [T, kv_heads, value_dim] at `slots` [T] int64, rounded to the
        cache's dtype and clipped to its range."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys[layer][block, :, :, offset] = _rounded(key, self.keys[layer].dtype)
        self.values[layer][block, :, offset] = _rounded(value, self.values[layer].dtype)

    def read(self, layer: int, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens of the table `blocks` [n]: keys [kv_heads, length, key_dim], values likewise."""
        shape = self.layers[layer]
        blocks = blocks[: -(-length // self.block_size)].long()
        keys = self.keys[layer][blocks].permute(1, 0, 3, 2).reshape(shape.kv_heads, -1, shape.key_dim)
        values = self.values[layer][blocks].permute(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.value_dim)
        return keys[:, :length], values[:, :length]


def _rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if numbers.dtype is dtype:
        return numbers
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU memory that the kernel zeroes page by page as it is first written: torch.zeros would touch it all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
