"""What is written to a slot is read back from its block table, in every layer's own shape."""

from __future__ import annotations

import pytest
import torch

from engine.attention.cache import KVCache, LayerShape, bytes_per_block

LAYERS = (LayerShape(2, 16, 16), LayerShape(1, 24, 8))
CPU = torch.device("cpu")


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_what_is_written_is_read_back_in_the_order_of_the_table(layer: int) -> None:
    cache, shape = KVCache(LAYERS, 5, 4, torch.float32, CPU), LAYERS[layer]
    table = torch.tensor([3, 1, 4, 0], dtype=torch.int32)
    slots = torch.tensor([int(table[p // 4]) * 4 + p % 4 for p in range(10)])
    key, value = torch.randn(10, shape.kv_heads, shape.key_dim), torch.randn(10, shape.kv_heads, shape.value_dim)
    cache.write(layer, slots, key, value)
    keys, values = cache.read(layer, table, 10)
    assert torch.equal(keys, key.transpose(0, 1))
    assert torch.equal(values, value.transpose(0, 1))


def test_writing_one_layer_leaves_the_others_alone() -> None:
    cache = KVCache(LAYERS, 3, 4, torch.float32, CPU)
    cache.write(0, torch.tensor([5]), torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    assert cache.keys[1].count_nonzero() == 0
    assert cache.values[1].count_nonzero() == 0


def test_bytes_per_block_is_what_a_block_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(LAYERS, 7, 4, dtype, CPU)
        taken = sum(t.numel() * t.element_size() for t in cache.keys + cache.values)
        assert bytes_per_block(LAYERS, 4, dtype) * 7 == taken


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (1, 16), (4, 0)])
def test_a_cache_without_room_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        KVCache(LAYERS, blocks, size, torch.float32, CPU)
