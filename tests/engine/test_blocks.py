"""Blocks are handed out once and come back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import SCRATCH_BLOCK, BlockPool


@given(st.integers(2, 40), st.lists(st.integers(0, 12), max_size=30), st.randoms(use_true_random=False))
def test_no_block_is_out_twice_and_none_is_lost(num_blocks: int, sizes: list[int], random: object) -> None:
    pool = BlockPool(num_blocks, 4)
    out: list[list[int]] = []
    for index, size in enumerate(sizes):
        taken = pool.take(size)
        if taken is None:
            assert size > pool.free
        else:
            assert len(taken) == size
            out.append(taken)
        if index % 3 == 2 and out:
            pool.give(out.pop(0))
        held = [block for blocks in out for block in blocks]
        assert len(held) == len(set(held))
        assert SCRATCH_BLOCK not in held
        assert len(held) + pool.free == pool.total == num_blocks - 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


def test_usage_is_the_share_that_is_taken() -> None:
    pool = BlockPool(5, 16)
    assert pool.usage == 0.0
    pool.take(3)
    assert pool.usage == 0.75


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        BlockPool(num_blocks, block_size)
