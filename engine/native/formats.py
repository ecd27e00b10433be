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
_AT_ONCE = 2**20  # numbers that are quantized at a time
_TOLD_BY = 6  # numbers that tell of nearly every group or row that it lies on no grid
_WHOLE = 1e-3  # as far from a whole number as rounding takes a grid's numbers


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
    """Numbers [out, in] int8 and their scale [out] float32: symmetric, one scale for each output.

    A row that is a whole number of steps everywhere already, at most 127 upwards and 128 downwards, is kept (symmetric
    compressed-tensors with a scale for each output). What comes from Q8_0, with a scale for each 32 inputs, is rounded
    again: by 0.8 % of the weights' root mean square in SmolLM2's layers, where Q8_0 itself is off by 0.55 %.
    """
    weight = weight.float()
    largest = weight.abs().amax(1)
    scale = largest / _steps(weight, largest)
    return (weight / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8), scale


def _steps(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Into how many steps the largest number of each row is to be divided: 127 where no other number is better."""
    found = torch.full_like(largest, 127)
    heights = weight[:, :_TOLD_BY] / largest[:, None]
    for steps in (*range(64, 127), 128, 127):
        rows = _is_whole(heights * steps).all(1).nonzero()[:, 0]
        counts = weight[rows] * (steps / largest[rows, None])
        found[rows[(_is_whole(counts) & (counts < 127.5)).all(1)]] = steps
    return found


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale d and offset m [out, groups] float16, and numbers q [out, groups · 32] uint8 from 0 to 15.

    A weight is d · q + m, as in llama.cpp's Q4_1; d may be negative. A group that lies on such a grid already keeps it:
    to the bit where d and m are float16 (Q4_1; Q4_0, whose m is -8 d; symmetric compressed-tensors), otherwise with
    both rounded to it (Q4_K). Any other group's grid goes from its least number to its largest.
    """
    out, inputs = weight.shape
    rows = torch.split(weight, max(1, _AT_ONCE // inputs))
    parts = [_quantize_groups(pad(some.float(), (0, -inputs % GROUP)).reshape(-1, GROUP)) for some in rows]
    d, m, q = (torch.cat(part).view(out, -1) for part in zip(*parts, strict=True))
    return d, m, q


def _quantize_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `quantize_int4`: `groups` and the numbers are [n, 32], d and m [n]."""
    low, high = groups.aminmax(dim=1)
    m = low.half()
    d = ((high - m.float()) / 15).half()
    q, error = _nearest(groups, d, m)
    inexact = error.nonzero()[:, 0]
    heights = (groups[inexact, :_TOLD_BY] - low[inexact, None]) / (high - low)[inexact, None]
    for steps in range(1, 16):
        where = inexact[_is_whole(heights * steps).all(1)]
        step = (high[where] - low[where]) / steps
        fit = _is_whole((groups[where] - low[where, None]) / step[:, None]).all(1)
        if not fit.any():
            continue
        where, step = where[fit], step[fit]
        found = _place(step, low[where], high[where], 15 - steps)
        found_q, found_error = _nearest(groups[where], *found)
        better = found_error < error[where]
        for all_, some in zip((d, m, q, error), (*found, found_q, found_error), strict=True):
            all_[where[better]] = some[better]
    return d, m, q


def _nearest(groups: torch.Tensor, d: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [n, 32] uint8, and the sum of squares [n] by which each group is off."""
    scale, offset = d.float()[:, None], m.float()[:, None]
    q = ((groups - offset) / torch.where(scale == 0, 1e-12, scale)).round().clamp(0, 15)
    return q.to(torch.uint8), (q * scale + offset - groups).square().sum(1)


def _is_whole(x: torch.Tensor) -> torch.Tensor:
    return (x - x.round()).abs() < _WHOLE


def _place(step: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d and m of grids on which `spare` numbers are not taken: of all places the one where m loses least as float16.
    A grid goes upwards from m or, where d is negative, downwards."""
    beyond = torch.arange(spare + 1) * step[:, None]
    m = torch.cat([low[:, None] - beyond, high[:, None] + beyond], 1)
    best = (m - m.half().float()).abs().argmin(1, keepdim=True)
    d = torch.where(best[:, 0] <= spare, step, -step)
    return d.half(), m.gather(1, best)[:, 0].half()


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
