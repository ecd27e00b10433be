"""The KV cache's blocks, as numbers. The memory itself is the device's."""

from __future__ import annotations

SCRATCH_BLOCK = 0  # takes the writes of rows that died inside a plan; never part of a block table


class BlockPool:
    """Owner: the loop thread."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` includes the scratch block. Raises ValueError below two blocks or one token a block."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"a block pool needs at least 2 blocks of at least 1 token, not {num_blocks} of {block_size}"
            )
        self.block_size = block_size
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that is taken, 0 to 1."""
        return 1.0 - len(self._free) / self.total

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None, and then nothing is taken."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, blocks: list[int]) -> None:
        """Takes blocks back."""
        self._free.extend(blocks)
