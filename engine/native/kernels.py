"""The matrix tiles of this machine, compiled once per process, and the tables through which a tape finds them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

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
