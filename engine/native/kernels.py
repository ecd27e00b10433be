"""The matrix tiles of this machine, compiled once per process, and the tables through which a tape finds them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from engine.native.block_tiles import CACHE_FORMATS, LEVELS, MAX_ROWS, block_text, levels, product_name
from engine.native.formats import FORMATS, Format
from engine.native.machine import Library, host
from engine.native.tiles import library_text, tile_name, tile_shapes


class Kernels:
    """Addresses of compiled tiles. `table[format]`: [rows + 1, 3] int64; line 0 is (panel width, most rows, 0), line
    r is (panels of the wide tile, address of the tile of one panel, address of the wide one)."""

    def __init__(self) -> None:
        machine = host()
        self.lanes = machine.lanes
        self._library = Library(library_text(machine), machine)
        shapes = tile_shapes(machine)
        self.table: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        for format in FORMATS.values():
            lines = [(2 * machine.lanes, max(shapes), 0)]
            for rows, panels in sorted(shapes.items()):
                lines.append((panels, self._tile(format, rows, 1), self._tile(format, rows, panels)))
            self.table[format.name] = np.array(lines, np.int64)

    def _tile(self, format: Format, rows: int, panels: int) -> int:
        return self._library.address(tile_name(format, rows, panels))

    def reader(self, format: Format, of_panel: bool) -> int:
        """Address of the function that reads a panel's column, or a plain row."""
        return self._library.address(f"{'column' if of_panel else 'row'}_{format.name}")


@functools.cache
def kernels() -> Kernels:
    return Kernels()


class BlockKernels:
    """What attention calls for a KV cache of one dtype. `table`: [2, MAX_ROWS + 1, LEVELS, 2] int64, for products that
    begin with zero and those that add, by rows: the columns of a tile, from the widest to one, and its address.
    [0, 0, 0]: bytes of a number, and the address of what stores entries."""

    def __init__(self, dtype: torch.dtype) -> None:
        machine = host()
        format = next((f for f in CACHE_FORMATS if f.dtype is dtype), None)
        if format is None:
            raise ValueError(f"a KV cache of {dtype} is not known")
        self._library = Library(block_text(machine, format), machine)
        self.table = np.zeros((2, MAX_ROWS + 1, LEVELS, 2), np.int64)
        self.table[0, 0, 0] = format.size, self._library.address(f"store_{format.name}")
        for add in (False, True):
            for rows in range(1, MAX_ROWS + 1):
                for level, (lanes, vectors) in enumerate(levels(machine, rows, add)):
                    name = product_name(format, rows, lanes, vectors, add)
                    self.table[int(add), rows, level] = lanes * vectors, self._library.address(name)


@functools.cache
def block_kernels(dtype: torch.dtype) -> BlockKernels:
    """Raises ValueError for a dtype that no cache has."""
    return BlockKernels(dtype)
