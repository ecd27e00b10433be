"""How a matrix is stored: its numbers in panels of columns, each panel read from its first byte to its last.

A weight [out, in] is cut into panels of `2 · lanes` outputs. Within a panel the inputs follow each other, each with
its numbers for all of the panel's outputs. The last panel is filled up with zeros, and with integer formats the
inputs are filled up to a multiple of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

GROUP = 32  # inputs that share a scale in int4, and a sum of activations
_SUM = 2**31 - 1  # what an integer sum may come to
_ACTIVATION = 2**15 - 1  # the largest activation


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of stored number. `llvm` is its type there. Float formats are computed with in float32."""

    name: str
    llvm: str
    dtype: torch.dtype
    size: int  # bytes
    is_integer: bool = False


FORMATS = {
    format.name: format
    for format in (
        Format("float32", "float", torch.float32, 4),
        Format("float16", "half", torch.float16, 2),
        Format("bfloat16", "i16", torch.bfloat16, 2),
        Format("int8", "i8", torch.uint8, 1, is_integer=True),
        Format("int4", "i8", torch.uint8, 1, is_integer=True),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight in panels: `panels` [panels, …], each panel's bytes together, of the format's dtype."""

    format: Format
    panels: torch.Tensor
    width: int  # outputs of a panel
    out_features: int
    in_features: int
    limit: int = 0  # integer formats: the largest activation with which no sum overflows

    @property
    def padded(self) -> int:
        """Outputs, those of the last panel's filling included."""
        return self.panels.shape[0] * self.width

    @property
    def inputs(self) -> int:
        """Inputs as the tiles count them."""
        return -(-self.in_features // GROUP) * GROUP if self.format.is_integer else self.in_features

    @property
    def panel_bytes(self) -> int:
        return self.panels[0].numel() * self.format.size


def head_format(name: str) -> str:
    """What the head is stored in where the other layers are in `name`: four bits cost it too much quality."""
    return "int8" if name == "int4" else name


def pack(weight: torch.Tensor, name: str, lanes: int) -> Packed:
    """`weight`: [out, in], any float dtype. Raises ValueError where the format cannot hold its numbers."""
    format, width = FORMATS[name], 2 * lanes
    out, inputs = weight.shape
    filling = (0, -inputs % GROUP if format.is_integer else 0, 0, -out % width)
    if name == "int8":
        q, scale = quantize_int8(weight)
        q = pad(q, filling).view(-1, width, (inputs + filling[1]) // 2, 2)  # panel, column, pair, which
        scales = pad(scale, (0, filling[3])).view(-1, width).contiguous().view(torch.uint8)
        panels = torch.cat([scales, q.transpose(1, 2).flatten(1).view(torch.uint8)], 1)
        limit = min(_ACTIVATION, _SUM // max(1, int(q.int().abs().sum((2, 3)).max())))
        return Packed(format, panels, width, out, inputs, limit)
    if name == "int4":
        d, m, q = quantize_int4(weight)
        groups = d.shape[1]
        shape = (-1, width, groups)
        parts = [pad(x, (0, 0, 0, filling[3])).view(shape).transpose(1, 2).contiguous() for x in (d, m)]
        codes = pad(q, (0, 0, 0, filling[3])).view(-1, width, groups, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
        numbers = (codes[..., 0] | codes[..., 1] << 4).flatten(2)
        return Packed(
            format, torch.cat([x.view(torch.uint8) for x in parts] + [numbers], 2).flatten(1), width, out, inputs,
            _ACTIVATION,
        )  # fmt: skip
    stored = weight.to(format.dtype)
    if not torch.isfinite(stored).all():
        raise ValueError(f"the weight has numbers that {name} cannot hold")
    panels = pad(stored, filling).view(-1, width, inputs).transpose(1, 2).contiguous()
    return Packed(format, panels, width, out, inputs)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [out, in] int8 and their scale [out] float32: symmetric, one scale for each output."""
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    return (weight / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8), scale


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale d and least value m [out, groups] float16, and numbers q [out, groups · 32] uint8 from 0 to 15.

    A weight is d · q + m, as in llama.cpp's Q4_1 (and Q4_0, whose m is -8 d): what comes from there is kept as it is.
    """
    out, inputs = weight.shape
    groups = pad(weight.float(), (0, -inputs % GROUP)).view(out, -1, GROUP)
    low, high = groups.aminmax(dim=2)
    m = low.half()
    d = ((high - m.float()) / 15).half()
    q = ((groups - m.float()[..., None]) / d.float().clamp_min(1e-12)[..., None]).round().clamp(0, 15)
    return d, m, q.to(torch.uint8).flatten(1)


def round_to(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight [out, in] as the format `name` holds it, in float32."""
    if name == "int8":
        q, scale = quantize_int8(weight)
        return q.float() * scale[:, None]
    if name == "int4":
        d, m, q = quantize_int4(weight)
        groups = q.view(*d.shape, GROUP).float() * d.float()[..., None] + m.float()[..., None]
        return groups.flatten(1)[:, : weight.shape[1]].contiguous()
    return weight.to(FORMATS[name].dtype).float()
