"""Blocks are handed out once and come back once, and what is published is found until it must give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class Sharing(RuleBasedStateMachine):
    """Requests that take, publish, find, share and give, against a plain account of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 4)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # by block, of what was published and not taken since

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        free = self.pool.free
        taken = self.pool.take(count)
        assert (taken is None) == (count > free)
        for block in taken or ():
            assert not any(block in table for table in self.tables)
            self.content.pop(block, None)
        if taken:
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(table=st.integers(0, 99), name=st.integers(0, 4), blocks=st.integers(1, 4))
    def publish(self, table: int, name: int, blocks: int) -> None:
        for index, block in enumerate(self.tables[table % len(self.tables)][:blocks]):
            digest = b"%d %d" % (name, index)
            if block not in self.content and digest not in self.content.values():
                self.content[block] = digest
                self.pool.publish(block, digest)

    @rule(name=st.integers(0, 4))
    def find_and_share(self, name: int) -> None:
        digests = [b"%d %d" % (name, index) for index in range(5)]
        found = self.pool.find(digests)
        assert [self.content[block] for block in found] == digests[: len(found)]
        assert len(found) == 5 or digests[len(found)] not in self.content.values()
        held, free = self.pool.held(found), self.pool.free
        self.pool.share(found)
        assert self.pool.free == free - len(found) + held
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(table=st.integers(0, 99))
    def give(self, table: int) -> None:
        self.pool.give(self.tables.pop(table % len(self.tables)))

    @invariant()
    def what_nobody_holds_is_free(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.pool.free == self.pool.total - len(held)
        assert SCRATCH_BLOCK not in held


TestSharing = Sharing.TestCase


def published(pool: BlockPool, *digests: bytes) -> list[int]:
    blocks = pool.take(len(digests))
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    return blocks


def test_what_was_given_back_first_gives_way_first_and_the_end_of_a_table_before_its_beginning() -> None:
    pool = BlockPool(6, 4)
    old, new = published(pool, b"a", b"b", b"c"), published(pool, b"x", b"y")
    pool.give(old)
    pool.give(new)
    pool.take(1)
    assert (len(pool.find([b"a", b"b", b"c"])), len(pool.find([b"x", b"y"]))) == (2, 2)
    pool.take(3)
    assert (pool.find([b"a"]), len(pool.find([b"x", b"y"]))) == ([], 1)


def test_blocks_that_hold_nothing_worth_keeping_are_taken_first() -> None:
    pool = BlockPool(4, 4)
    kept = published(pool, b"a")
    pool.give(kept)
    assert set(pool.take(2) or ()).isdisjoint(kept)
    assert pool.find([b"a"]) == kept


def test_what_is_found_again_becomes_the_youngest() -> None:
    pool = BlockPool(3, 4)
    a, b = published(pool, b"a"), published(pool, b"b")
    pool.give(a)
    pool.give(b)
    pool.share(pool.find([b"a"]))
    pool.give(a)
    pool.take(1)
    assert (pool.find([b"a"]), pool.find([b"b"])) == (a, [])


def test_of_two_blocks_with_the_same_content_the_first_is_found_and_the_other_is_free() -> None:
    pool = BlockPool(4, 4)
    first, second = published(pool, b"a"), published(pool, b"a")
    assert pool.find([b"a"]) == first
    pool.give(first)
    pool.give(second)
    assert pool.take(2) is not None
    assert pool.find([b"a"]) == first
