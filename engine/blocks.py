"""The KV cache's blocks, as numbers. The memory itself is the device's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

SCRATCH_BLOCK = 0  # takes the writes of rows that died inside a plan; never part of a block table


class BlockPool:
    """Who holds which block, and which content can be found again. Owner: the loop thread.

    A block is free, or held by one request or several, or published and held by nobody: then it can be found by its
    digest until it is taken for something else, the one that was given back first before the others.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` includes the scratch block. Raises ValueError below two blocks or one token a block."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"a block pool needs at least 2 blocks of at least 1 token, not {num_blocks} of {block_size}"
            )
        self.block_size = block_size
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # of what is published
        self._published: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, oldest first

    @property
    def free(self) -> int:
        """Blocks that can be taken; those that are only kept to be found again count."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, 0 to 1."""
        return 1.0 - self.free / self.total

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None, and then nothing is taken. What is published goes last."""
        if count > self.free:
            return None
        while len(self._free) < count:
            self._free.append(self._evict())
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        for block in taken:
            self._holders[block] = 1
        return taken

    def give(self, blocks: list[int]) -> None:
        """One holder's blocks, in the order of its table, come back. Later ones are evicted before earlier ones, since
        they are of no use without those."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """A held block's content can be found by `digest` from now on; it must not change any more. Where another
        block has that content already, that one stays the one that is found."""
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest published beginning of `digests`. They are not held by that: see `share`."""
        found: list[int] = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: list[int]) -> None:
        """One holder more for blocks that were found."""
        for block in blocks:
            if not self._holders[block]:
                del self._evictable[block]
            self._holders[block] += 1

    def held(self, blocks: list[int]) -> int:
        """How many of them somebody holds; to share those takes nothing from what is free."""
        return sum(self._holders[block] > 0 for block in blocks)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        digest = self._digests[block]
        if digest is not None:
            del self._published[digest]
        self._digests[block] = None
        return block
