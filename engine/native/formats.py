"""How a matrix is stored: its numbers in panels of columns, each panel read from its first byte to its last.

A weight [out, in] is cut into panels of `2 · lanes` outputs. Within a panel the inputs follow each other, each with
its numbers for all of the panel's outputs. The last panel is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of stored number. `llvm` is its type there; arithmetic is in float32."""

    name: str
    llvm: str
    dtype: torch.dtype
    size: int  # bytes


FORMATS = {
    format.name: format
    for format in (
        Format("float32", "float", torch.float32, 4),
        Format("float16", "half", torch.float16, 2),
        Format("bfloat16", "i16", torch.bfloat16, 2),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight in panels. `panels`: [panels, in, width] of the format's dtype."""

    format: Format
    panels: torch.Tensor
    out_features: int
    in_features: int

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return self.panels.shape[-1]

    @property
    def padded(self) -> int:
        """Outputs, those of the last panel's filling included."""
        return self.panels.shape[0] * self.width


def pack(weight: torch.Tensor, name: str, lanes: int) -> Packed:
    """`weight`: [out, in], any float dtype. Raises ValueError where the format cannot hold its numbers."""
    format = FORMATS[name]
    out, inputs = weight.shape
    width = 2 * lanes
    panels = -(-out // width)
    stored = weight.to(format.dtype)
    if not torch.isfinite(stored).all():
        raise ValueError(f"the weight has numbers that {name} cannot hold")
    packed = torch.zeros(panels, inputs, width, dtype=format.dtype)
    whole = out // width
    packed[:whole] = stored[: whole * width].view(whole, width, inputs).transpose(1, 2)
    if whole < panels:
        packed[whole, :, : out - whole * width] = stored[whole * width :].t()
    return Packed(format, packed, out, inputs)


def unpack(packed: Packed) -> torch.Tensor:
    """The weight as it is computed with, [out, in] float32."""
    return packed.panels.float().transpose(1, 2).reshape(packed.padded, -1)[: packed.out_features]
